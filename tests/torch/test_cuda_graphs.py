"""Nothing is exchanged while a CUDA graph is captured. There is no GPU here: what says so is replaced. FSDP and Horovod
are in `multirank`, as they exchange between several ranks only."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import hvdcomp  # noqa: E402
import hvdcomp.ddp  # noqa: E402
from hvdcomp.communicators import LoopbackCommunicator  # noqa: E402
from hvdcomp.errors import ConfigurationError  # noqa: E402
from hvdcomp.torch import RowExchange  # noqa: E402
from tests.captured import REFUSED, as_captured  # noqa: E402


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("captures", [True, False])
def test_a_step_is_refused_while_a_graph_is_captured(captures: bool) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    hvdcomp.ddp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), min_numel=0))
    loss = model(torch.ones(2, 64)).sum()
    with as_captured(captures):
        if captures:
            with pytest.raises(ConfigurationError, match=REFUSED):
                loss.backward()
        else:
            loss.backward()
            assert torch.count_nonzero(model.module.weight.grad) < 64 * 64 / 2


@pytest.mark.parametrize("captures", [True, False])
def test_rows_are_refused_while_a_graph_is_captured(captures: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True))
    rows = RowExchange(model, communicator=LoopbackCommunicator())
    model(torch.tensor([1])).sum().backward()
    with as_captured(captures):
        if captures:
            with pytest.raises(ConfigurationError, match=REFUSED):
                rows.exchange()
        else:
            rows.exchange()
    assert rows.ledger.steps == (not captures)
