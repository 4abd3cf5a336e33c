"""DGC through stock horovod.torch: momentum is applied once, by the memory, and an optimizer that has its own is
refused on every rank."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import torch

import hvdcomp
from tests.multirank.training import assert_same_everywhere, compression, raised, small_model, train, weights
from tests.multirank.worker import thorough


def distributed(
    make: Callable[..., torch.optim.Optimizer], model: torch.nn.Module, how: hvdcomp.Compression, **settings: object
) -> torch.optim.Optimizer:
    optimizer = make(model.parameters(), lr=0.05, **settings)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=how)


def case_optimizers_with_momentum_are_refused() -> None:
    makers: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, object], str]] = [
        (torch.optim.SGD, {"momentum": 0.9}, "momentum=0.9"),
        (torch.optim.Adam, {}, "betas=(0.9, 0.999)"),
        (torch.optim.SGD, {"momentum": 0.5 if hvd.rank() == 1 else 0.0}, "rank 1: the optimizer has momentum=0.5"),
    ]
    for make, settings, found in makers:
        model = small_model()
        optimizer = distributed(make, model, compression("dgc:ratio=0.01", model), **settings)
        text = raised(Exception, lambda model=model, optimizer=optimizer: train(model, optimizer, steps=1))
        assert found in text, text


def case_other_memories_leave_momentum_to_the_optimizer() -> None:
    model = small_model()
    how = compression("dgc:ratio=0.1", model, memory="error_feedback")
    train(model, distributed(torch.optim.SGD, model, how, momentum=0.9), steps=5)
    assert how.ledger.steps == 5
    assert_same_everywhere(model)


@thorough
def case_momentum_is_that_of_sgd() -> None:
    """Everything sent, nothing masked: as SGD with momentum, for compressed and for dense tensors."""
    for nesterov in (False, True):
        ours, theirs = small_model(), small_model()
        memory = hvdcomp.MomentumCorrection(0.9, nesterov=nesterov, masking=False)
        how = compression("dgc:ratio=1", ours, memory=memory)
        train(ours, distributed(torch.optim.SGD, ours, how), steps=20)
        plain = distributed(torch.optim.SGD, theirs, hvd.Compression.none, momentum=0.9, nesterov=nesterov)
        train(theirs, plain, steps=20)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-4)
        assert_same_everywhere(ours)
