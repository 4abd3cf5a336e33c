"""One rank: Horovod runs no hooks, and training goes on as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import run_forked_ranks

pytest.importorskip("horovod", reason="Horovod is not built here: run `hvdcomp build-horovod`")

pytestmark = [pytest.mark.alone, pytest.mark.thorough]

PROGRAM = """
import torch
import horovod.torch as hvd
from tests.multirank.training import compression, distribute, small_model, train, weights
hvd.init()
assert hvd.size() == 1
trained = []
for how in ("topk:ratio=0.01", None):
    model = small_model()
    chosen = compression(how, model) if how else hvd.Compression.none
    train(model, distribute(model, chosen), steps=5)
    trained.append(weights(model))
    if how:
        assert chosen.ledger.steps == 0
        assert chosen.ledger.last is None
assert torch.equal(*trained)
print("same weights")
"""


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_one_rank_trains_as_without_compression(controller: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    finished = run_forked_ranks(1, controller, [str(program)], {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert "same weights" in finished.stdout
