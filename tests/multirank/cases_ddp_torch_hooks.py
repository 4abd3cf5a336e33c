"""What PyTorch's own tests ask of its communication hooks, asked of hvdcomp's: gradients whose means are known."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from tests.multirank.models import weights
from tests.multirank.training_ddp import assert_same_everywhere, distribute, large_model, train


class Product(torch.nn.Module):
    """One matrix times what it is given: its gradient is that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = torch.nn.Parameter(torch.randn(64, 40))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.matrix * given).sum()


def _means(how: hvdcomp.Compression, steps: int = 5) -> list[torch.Tensor]:
    """The mean gradient of each step in which rank r has a gradient of r + 1 everywhere."""
    model = DistributedDataParallel(Product())
    hvdcomp.ddp.register(model, how)
    found = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((64, 40), dist.get_rank() + 1.0)).backward()
        found.append(model.module.matrix.grad.clone())
    return found


def _expected() -> torch.Tensor:
    return torch.full((64, 40), (dist.get_world_size() + 1) / 2)


def case_casts_of_small_whole_numbers_are_exact() -> None:
    for spec in ("fp16", "bf16", "none"):
        for mean in _means(hvdcomp.Compression.from_spec(spec)):
            assert torch.equal(mean, _expected()), spec


def case_powersgd_is_exact_where_the_gradient_has_rank_1() -> None:
    """With and without error feedback, warm start in force, after dense steps too."""
    for rank in (1, 2):
        for memory in (None, hvdcomp.NoMemory()):
            for dense_steps in (0, 2):
                policy = hvdcomp.WarmUp(dense_steps=dense_steps) if dense_steps else None
                how = hvdcomp.Compression(hvdcomp.PowerSGD(rank=rank), memory=memory, policy=policy)
                for step, mean in enumerate(_means(how)):
                    torch.testing.assert_close(mean, _expected(), rtol=1e-5, atol=1e-5)
                    assert_same_everywhere(mean)
                    if step < dense_steps:
                        assert torch.equal(mean, _expected())
                assert how.ledger.totals.compression_factor > 1


def case_powersgd_that_has_not_begun_is_ddp_without_a_hook() -> None:
    results = []
    for how in (None, hvdcomp.Compression(hvdcomp.PowerSGD(rank=2), policy=hvdcomp.WarmUp(dense_steps=100))):
        model = large_model()
        train(*distribute(model, how)[:2])
        results.append(weights(model))
    assert torch.equal(*results)


def case_powersgd_of_whole_rank_is_the_mean_gradient() -> None:
    """Nothing is left out where the rank of the factors is that of the matrices."""
    results = []
    for how in (None, hvdcomp.Compression(hvdcomp.PowerSGD(rank=40, min_rate=0.1))):
        model = torch.nn.Sequential(torch.nn.Linear(64, 40))
        torch.manual_seed(7)
        torch.nn.init.normal_(model[0].weight, std=0.1)
        torch.nn.init.zeros_(model[0].bias)
        train(*distribute(model, how)[:2])
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-3, atol=3e-4)  # factors are float32
