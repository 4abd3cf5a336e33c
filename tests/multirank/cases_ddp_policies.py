"""Policies in DistributedDataParallel: steps that only cast go bucket by bucket, and nothing else changes by it."""

from __future__ import annotations

import itertools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import hvdcomp
from hvdcomp.tools.report.replay import replay
from hvdcomp.torch.ddp.binding import DDPBinding
from tests.decision_lines import whole_lines
from tests.multirank.calibrations import made_up_calibration
from tests.multirank.models import batch, weights
from tests.multirank.training_ddp import (
    assert_same_everywhere,
    distribute,
    gathered,
    large_model,
    own_generator,
    plain_loss,
)
from tests.multirank.worker import thorough

_EPOCH = 4  # steps
_POWERSGD = "powersgd:rank=2"
_BOTH_WAYS = [  # what a rank of 500 would not make smaller goes dense
    (_POWERSGD, "accordion:low=500,high=1,interval=1,eta=100"),
    (_POWERSGD, "accordion:low=500,high=1,steps=3,eta=100,statistic=aggregated,lag=0"),
    ("topk:ratio=0.05", "gravac:min=2,max=64,window=6,every=3,omega=0,epsilon=0.8,smoothing=0.3"),
]


@dataclass
class Trained:
    """What came of a training.

    Attributes:
        weights: at the end.
        plans: of each step.
        casts: whether each step went past the engine.
        sent: bytes of each step.
        decisions: the lines of the log, of rank 0.
    """

    weights: torch.Tensor
    plans: list[dict[str, str]] = field(default_factory=list)
    casts: list[bool] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def compresses(self) -> list[bool]:
        """Whether the plan of each step has more than casts."""
        return [not set(plan.values()) <= {"none", "fp16"} for plan in self.plans]


@contextmanager
def through_the_engine() -> Iterator[None]:
    """Lets all steps go through the engine."""
    with patch.object(DDPBinding, "_wire_of_plan", lambda self: None):
        yield


def trained(
    spec: str,
    policy: str,
    steps: int = 20,
    prepare: Callable[[DDPBinding], None] = lambda binding: None,
) -> Trained:
    """Trains the large model, with a learning rate that falls in the middle. After the first step the binding can be
    prepared for the rest."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        model = large_model()
        how = hvdcomp.Compression.from_spec(spec, policy=policy, steps_per_epoch=_EPOCH, decision_log=log)
        distributed, optimizer, _ = distribute(model, how)
        generator, found = own_generator(), Trained(weights(model))
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.02 if step < 2 * _EPOCH + 2 else 0.01
            optimizer.zero_grad()
            plain_loss(distributed, *batch(generator), step).backward()
            binding = how._binding
            assert isinstance(binding, DDPBinding)
            assert how.ledger.last is not None
            assert len(binding._step) > 1 or step < 2  # DDP makes its buckets anew
            found.casts.append(all(one.whole for one in binding._step))
            found.plans.append({name: str(one) for name, one in binding.engine.plan.items()})
            found.sent.append(how.ledger.last.bytes_sent)
            if step == 0:
                prepare(binding)
            optimizer.step()
        found.weights = weights(model)
        assert_same_everywhere(found.weights)
        for other in gathered((found.plans, found.casts)):
            assert other == (found.plans, found.casts), policy
        if dist.get_rank() == 0:
            assert replay(log).difference is None, policy
            found.decisions = whole_lines(log)
        return found


def check_same(with_casts: Trained, engine: Trained, policy: str) -> None:
    """That steps past the engine have changed nothing but their way."""
    assert with_casts.plans == engine.plans, policy
    assert not any(engine.casts), policy
    if dist.get_world_size() > 2:  # sums of more ranks are made in an order
        torch.testing.assert_close(with_casts.weights, engine.weights, rtol=1e-3, atol=1e-4)
        return
    assert with_casts.decisions == engine.decisions, policy
    if any("fp16" in plan.values() for plan in engine.plans):  # of which either way rounds the smallest its own way
        torch.testing.assert_close(with_casts.weights, engine.weights, rtol=1e-3, atol=1e-4)
    else:
        assert torch.equal(with_casts.weights, engine.weights), policy


def made_up_clock(binding: DDPBinding, seconds: Callable[[set[str]], float] = lambda methods: 1.0) -> None:
    """By the policy's clock a step takes what its methods say: the machine does not matter to what is decided."""
    coordinator, engine = binding.coordinator, binding.engine
    assert coordinator is not None
    times = (seconds({str(one) for one in engine.plan.values()}) for _ in itertools.count())
    coordinator.clock._clock, coordinator.clock._ended = itertools.accumulate(times).__next__, 0.0


def without_times(one: Trained) -> Trained:
    """Without what the log says of the time that measuring took."""
    for line in one.decisions:
        line.get("statistics", {}).pop("timing", None)
        line.get("state", {}).pop("throughput", None)
    return one


@thorough
def case_steps_that_only_cast_go_past_the_engine_and_change_nothing() -> None:
    for spec, policy in _BOTH_WAYS:
        casts = without_times(trained(spec, policy, prepare=made_up_clock))
        with through_the_engine():
            engine = without_times(trained(spec, policy, prepare=made_up_clock))
        check_same(casts, engine, policy)
        # What the engine has kept back it sends too, before anything goes past it again.
        assert not any(cast and compresses for cast, compresses in zip(casts.casts, casts.compresses, strict=True))
        assert any(casts.casts), policy
        assert not all(casts.casts), policy


def case_from_casts_to_a_compressor_and_back() -> None:
    """Accordion compresses when it has compared norms, and not while a learning rate has just fallen."""
    spec, policy = _BOTH_WAYS[0]
    found = trained(spec, policy, steps=24)
    dense = 4 * weights(large_model()).numel()
    changes = [
        (kind, len(list(steps))) for kind, steps in itertools.groupby(zip(found.casts, found.compresses, strict=True))
    ]
    (cast, engine, sends_rest) = ((True, False), (False, True), (False, False))
    assert [kind for kind, _ in changes] == [cast, engine, sends_rest, cast, engine], changes
    assert dict(changes)[sends_rest] == 1, changes
    for sent, is_cast, compresses in zip(found.sent, found.casts, found.compresses, strict=True):
        assert sent == dense + 8 if is_cast else sent < dense / 10 if compresses else sent > dense + 8, (sent, is_cast)


def case_auto_past_the_engine() -> None:
    """Auto goes through all of its candidates, in steps of made-up times."""
    spec = _POWERSGD
    shapes = {name: tuple(one.shape) for name, one in large_model().named_parameters()}
    seconds = {"none": 20.0, "fp16": 9.0, spec: 10.0}
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "cluster.json"
        if dist.get_rank() == 0:
            calibration.write_text(json.dumps(made_up_calibration(spec, shapes)))
        file = gathered(str(calibration))[0]
        policy = f"auto:calibration={file},window=3,every=5,margin=1000,budget=0.99"

        def train_once() -> Trained:
            clock = lambda binding: made_up_clock(binding, lambda methods: sum(map(seconds.get, methods)))  # noqa: E731
            return trained(spec, policy, 70, clock)

        casts = train_once()
        with through_the_engine():
            check_same(casts, train_once(), policy)
        dist.barrier()  # rank 0 takes the file away
    for step, (cast, plan) in enumerate(zip(casts.casts, casts.plans, strict=True)):
        if step:  # in the first, candidates are told to all in the middle
            assert not cast or set(plan.values()) in ({"none"}, {"fp16"}), (step, plan)
    of_casts = [plan for cast, plan in zip(casts.casts, casts.plans, strict=True) if cast]
    assert {"none"} in [set(plan.values()) for plan in of_casts]
    assert {"fp16"} in [set(plan.values()) for plan in of_casts]
    assert any(casts.compresses)


def case_auto_proposes_what_no_rank_was_told() -> None:
    """Rank 0 reads in its calibration what the others never named, and all of them send so in the same step."""
    spec = "terngrad"
    proposed = spec if dist.get_world_size() < 4 else f"{spec}:exchange=scatter"  # which sends less there
    shapes = {name: tuple(one.shape) for name, one in large_model().named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "cluster.json"
        if dist.get_rank() == 0:  # no other rank can read it
            calibration.write_text(json.dumps(made_up_calibration(spec, shapes, ["topk:ratio=0.01"])))
        policy = f"auto:calibration={gathered(str(calibration))[0]},loss=0.02,window=3,every=5,margin=1000,budget=0.99"

        def clock(binding: DDPBinding) -> None:
            made_up_clock(binding, lambda methods: 1.0 if proposed in methods else 5.0)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the policy auto leaves out")
            found = trained("none", policy, 24, clock)
        dist.barrier()  # rank 0 takes the file away
    assert any(proposed in plan.values() for plan in found.plans)
    assert not any("topk:ratio=0.01" in plan.values() for plan in found.plans), "it does harm with SGD"
    if dist.get_rank() == 0:
        assert proposed in found.decisions[1]["state"]["candidates"]


def _sends_the_rest_next(how: hvdcomp.Compression) -> bool:
    """Whether the next step casts, and has to send what compression has kept back."""
    how.state_dict()  # takes up what was decided
    assert how._binding is not None
    engine = how._binding.engine
    return engine.has_residuals and set(map(str, engine.planner._next_plan.values())) == {"none"}


def case_residuals_of_rank_0_alone_do_not_part_the_ranks() -> None:
    """All begin with the checkpoint of rank 0, in a step that casts, and that has to send what rank 0 kept back."""
    spec, policy = _BOTH_WAYS[0]

    def training(state: Any = None) -> tuple[Any, Any, hvdcomp.Compression]:
        how = hvdcomp.Compression.from_spec(spec, policy=policy, steps_per_epoch=_EPOCH)
        if state is not None:
            how.load_state_dict(state)
        return *distribute(large_model(), how)[:2], how

    generator = own_generator()
    distributed, optimizer, how = training()
    for step in range(5 * _EPOCH):
        optimizer.param_groups[0]["lr"] = 0.02 if step < 2 * _EPOCH + 2 else 0.01
        if step and _sends_the_rest_next(how):
            break
        optimizer.zero_grad()
        plain_loss(distributed, *batch(generator), step).backward()
        optimizer.step()
    else:
        raise AssertionError("no step had to send the rest of what was compressed")
    shared: list[Any] = [how.state_dict()]
    dist.broadcast_object_list(shared)
    distributed, optimizer, how = training(shared[0])
    for _ in range(2):
        optimizer.zero_grad()
        plain_loss(distributed, *batch(generator), 0).backward()
        optimizer.step()
        assert_same_everywhere(distributed.module)
    binding = how._binding
    assert isinstance(binding, DDPBinding)
    assert all(one.whole for one in binding._step)
