"""The page to read first, `examples/simple.py`, against the engine."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from tests.multirank.models import weights

_PAGE = Path(__file__).parents[2] / "examples" / "simple.py"


def _model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def case_the_page_has_the_weights_and_residuals_of_the_engine() -> None:
    """Bit for bit. Only on two ranks, where a sum has one order."""
    page = runpy.run_path(str(_PAGE), run_name="page")
    plain, optimizer = _model_and_optimizer()
    residuals: dict[str, torch.Tensor] = {}
    loss = page["train"](plain, optimizer, lambda model: page["average_gradients"](model, residuals), steps=30)

    model, optimizer = _model_and_optimizer()
    distributed = DistributedDataParallel(model)
    compression = hvdcomp.Compression(hvdcomp.TopK(ratio=page["RATIO"]))
    hvdcomp.ddp.register(distributed, compression, optimizer)
    assert page["train"](distributed, optimizer, lambda model: None, steps=30) == loss

    assert torch.equal(weights(model), weights(plain))
    assert residuals.keys() == {"0.weight", "2.weight"}
    kept = compression.state_dict()["own"]["residuals"]
    for name, residual in residuals.items():
        assert residual.any()
        assert torch.equal(torch.as_tensor(kept[name]["arrays"][-1]).flatten(), residual), name
