"""What Horovod's own tests exercise of its PyTorch optimizer, written anew with our compression in place of none."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import torch

import hvdcomp
from tests.multirank.training import (
    assert_same_everywhere,
    batch,
    compression,
    distribute,
    own_generator,
    raised,
    small_model,
    train,
)

SPECS = ["none", "topk:ratio=0.05", "powersgd:rank=2"]
OPTIMIZERS = [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
]
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS.append(lambda model: hvdcomp.torch.MuonWithAdamW(model, lr=0.01))


def case_every_optimizer_and_broadcast_of_its_state() -> None:
    for make in OPTIMIZERS:
        model = small_model()
        optimizer = hvd.DistributedOptimizer(
            make(model),
            named_parameters=model.named_parameters(),
            compression=compression("topk:ratio=0.05", model),
        )
        train(model, optimizer, steps=3)
        if hvd.rank() != 0 and optimizer.state:
            for group in optimizer.param_groups:
                group["lr"] = 123.0
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # does nothing for an optimizer without state
        assert optimizer.param_groups[0]["lr"] < 1
        train(model, optimizer, steps=2)
        assert_same_everywhere(model)


def case_parameters_whose_gradient_is_switched_on_and_off() -> None:
    for spec in SPECS:
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        first = next(model.parameters())
        for step in range(6):
            first.requires_grad_(step % 2 == 0)
            train(model, optimizer, steps=1)
        assert_same_everywhere(model)


def case_step_without_backward_still_exchanges() -> None:
    for spec in SPECS:
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        for step in range(4):
            optimizer.zero_grad()
            if step != 1:
                inputs, classes = batch(own_generator())
                torch.nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
        assert_same_everywhere(model)


def case_early_step_of_an_accumulation() -> None:
    """`step()` before backward_passes_per_step passes are done exchanges what there is."""
    for spec in SPECS:
        model = small_model()
        optimizer = distribute(model, compression(spec, model), 0.01, backward_passes_per_step=4)
        train(model, optimizer, steps=4, passes=2)
        assert_same_everywhere(model)


def case_synchronize_twice_warns_as_horovod_does() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    inputs, classes = batch(own_generator())
    torch.nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("optimizer.step() called without" in str(warning.message) for warning in caught)
    assert_same_everywhere(model)


def case_too_many_backward_passes_raise_as_in_horovod() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    inputs, classes = batch(own_generator())

    def backward() -> None:
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()

    backward()
    assert "backward_passes_per_step" in raised(AssertionError, backward)
    optimizer.step()
    train(model, optimizer, steps=2)
    assert_same_everywhere(model)


def case_zero_grad_between_backward_and_step_raises_as_in_horovod() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    inputs, classes = batch(own_generator())
    torch.nn.functional.cross_entropy(model(inputs), classes).backward()
    raised(AssertionError, optimizer.zero_grad)
    optimizer.step()
    assert_same_everywhere(model)


def case_horovod_needs_names_for_all_parameters() -> None:
    model = small_model()
    some = list(model.named_parameters())[:2]
    how = hvdcomp.Compression.from_spec("topk:ratio=0.05", named_parameters=some)

    def wrap() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(optimizer, named_parameters=some, compression=how)

    raised(ValueError, wrap)
    optimizer = distribute(model, how)  # Horovod knows all names, the compression only some
    assert "named_parameters" in raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))


def case_horovod_without_names_works_with_ours() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression("topk:ratio=0.05", model))
    train(model, optimizer, steps=4)
    assert_same_everywhere(model)


def case_load_state_dict_of_the_optimizer() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    train(model, optimizer, steps=3)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, steps=3)
    assert_same_everywhere(model)


def case_two_parameter_groups() -> None:
    model = small_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression("powersgd:rank=1", model)
    )
    train(model, optimizer, steps=5)
    assert_same_everywhere(model)


def case_tied_weights() -> None:
    for spec in SPECS:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        model[2].weight = model[0].weight
        optimizer = distribute(model, compression(spec, model))
        train(model, optimizer, steps=5)
        assert_same_everywhere(model)


def case_learning_rate_schedule() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(4):
        train(model, optimizer, steps=1)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 4
    assert_same_everywhere(model)


def case_a_mean_that_overflows_is_skipped_everywhere_and_leaves_no_trace() -> None:
    """All gradients are finite; half-precision sums over the ranks are not."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)).half()
    how = compression("topk:ratio=0.1", model)
    optimizer = distribute(model, how)

    def exchange(bias: float) -> bool:
        """A step whose gradients are all finite; returns whether the results are."""
        optimizer.zero_grad()
        weight = torch.randn(64, 64, generator=own_generator()).half()
        ((model[0].weight * weight).sum() + (model[1].bias * bias).sum()).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert exchange(1.0)
    kept = how._binding.engine.states["0.weight"].memory[0].clone()
    assert kept.any()
    assert not exchange(60000.0)
    assert torch.equal(kept, how._binding.engine.states["0.weight"].memory[0])


def case_compression_that_saves_nothing_is_said_once_by_rank_0() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.99", model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, steps=3)
    texts = [str(warning.message) for warning in caught if "tensors larger: a rank sends" in str(warning.message)]
    assert len(texts) == (1 if hvd.rank() == 0 else 0), texts
