"""A step is refused while a CUDA graph is captured. There is no GPU here: what says so is replaced."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import hvdcomp  # noqa: E402
import hvdcomp.ddp  # noqa: E402
from hvdcomp.errors import ConfigurationError  # noqa: E402


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("captures", [True, False])
def test_a_step_is_refused_while_a_graph_is_captured(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    hvdcomp.ddp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), min_numel=0))
    loss = model(torch.ones(2, 64)).sum()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    if captures:
        with pytest.raises(ConfigurationError, match="no gradients while a CUDA graph is captured"):
            loss.backward()
    else:
        loss.backward()
        assert torch.count_nonzero(model.module.weight.grad) < 64 * 64 / 2
