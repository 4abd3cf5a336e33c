"""DistributedDataParallel with what torch.compile makes of the model, of the model in DDP, or of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdcomp
from hvdcomp.torch import CompressedAdam, LocalSteps, RowExchange
from tests.multirank.models import batch, weights
from tests.multirank.training_ddp import assert_same_everywhere, distribute, large_model, own_generator, raised
from tests.multirank.worker import thorough

STEPS = 6
COMPILED = ("model", "model in DDP", "step")


def as_it_is(given: Any) -> Any:
    return given


def by(**options: Any) -> Callable[[Any], Any]:
    """`torch.compile` with these options."""
    torch._dynamo.reset()
    return lambda given: torch.compile(given, **options)


def after_training(step: Callable[[torch.Tensor, torch.Tensor], None], model: Any) -> torch.Tensor:
    """Weights after `STEPS` steps, the same on all ranks."""
    generator = own_generator()
    for _ in range(STEPS):
        step(*batch(generator))
    assert_same_everywhere(model)
    return weights(model)


def trained(
    how: hvdcomp.Compression | str | None, what: str = "", compile: Callable[[Any], Any] = as_it_is, **options: Any
) -> torch.Tensor:
    """Weights after a training in DDP, of which something is compiled, or nothing."""
    model = large_model()
    distributed, optimizer, ours = distribute(compile(model) if what == "model" else model, how, **options)
    called = compile(distributed) if what == "model in DDP" else distributed

    def step(inputs: torch.Tensor, classes: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(called(inputs), classes).backward()
        optimizer.step()

    result = after_training(compile(step) if what == "step" else step, model)
    assert ours is None or ours.ledger.steps == STEPS
    return result


def case_a_step_that_dynamo_traces() -> None:
    """Dynamo traces the hooks of the backward pass too, if nobody forbids it."""
    assert torch.equal(trained("topk:ratio=0.05", "step", by(backend="eager")), trained("topk:ratio=0.05"))


@thorough
def case_whatever_is_compiled() -> None:
    """By Inductor, which rounds otherwise than PyTorch does without it, with and without hvdcomp."""
    for mode in ("default", "reduce-overhead"):
        for what in COMPILED:
            compile = by(mode=mode)
            assert torch.equal(trained("none", what, compile), trained(None, what, compile)), (mode, what)
            for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
                torch.testing.assert_close(
                    trained(spec, what, compile), trained(spec), rtol=0.02, atol=0.002, msg=f"{mode} {what} {spec}"
                )


@thorough
def case_settings_of_ddp_in_a_compiled_step() -> None:
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        for spec in ("none", "topk:ratio=0.05"):
            traced = trained(spec, "step", by(backend="eager"), **options)
            assert torch.equal(traced, trained(spec, **options)), (spec, options)


@thorough
def case_optimizers_of_ours_in_a_compiled_step() -> None:
    """And rows of embeddings, a policy that scales learning rates, and a loss scaler."""

    def after(kind: str, compile: Callable[[Any], Any]) -> torch.Tensor:
        model, settings = large_model(), {}
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaler")
        if kind == "momenta":
            optimizer = CompressedAdam(model.parameters(), 1e-4, freeze_after=3, warm_up="int8", local_steps=2)
        if kind == "policy":
            settings = {"policy": "increase_batch_size:low=16,high=32", "steps_per_epoch": 4}
        if kind == "scaler":
            settings = {"grad_scaler": scaler}
        rows = None
        if kind == "rows":
            model.insert(0, torch.nn.Embedding(100, 64, sparse=True))
            optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.02), RowExchange(model)
        if kind == "local steps":
            called, optimizer = model, LocalSteps(optimizer, every=3)
        else:
            how = hvdcomp.Compression.from_spec("efsignsgd" if kind == "momenta" else "topk:ratio=0.05", **settings)
            called = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1.5)
            hvdcomp.ddp.register(called, how, optimizer)

        @compile
        def step(inputs: torch.Tensor, classes: torch.Tensor) -> None:
            optimizer.zero_grad()
            given = inputs if rows is None else inputs[:, 0].abs().long()
            scaler.scale(torch.nn.functional.cross_entropy(called(given), classes)).backward()
            if rows is not None:
                rows.exchange()
            scaler.step(optimizer)
            scaler.update()

        return after_training(step, model)

    for kind in ("momenta", "policy", "scaler", "rows", "local steps"):
        assert torch.equal(after(kind, by(backend="eager")), after(kind, as_it_is)), kind


@thorough
def case_what_is_unfrozen_later_is_refused_in_a_compiled_step() -> None:
    model = large_model()
    model[0].requires_grad_(False)
    distributed, optimizer, _ = distribute(model, "topk:ratio=0.05")

    @by(backend="eager")
    def step(inputs: torch.Tensor, classes: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(distributed(inputs), classes).backward()
        optimizer.step()

    after_training(step, model)
    model.requires_grad_(False)
    model[0].requires_grad_(True)  # for which alone DDP calls no hook
    message = raised(hvdcomp.ConfigurationError, lambda: after_training(step, model))
    assert "0.weight, 0.bias" in message, message
