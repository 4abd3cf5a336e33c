"""Policies on real ranks, each with gradients of its own: one decision, obeyed by all in the same step."""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import SkipTest

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdcomp
from hvdcomp.communicators import horovod_ranks
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.tools.report.replay import replay
from hvdcomp.torch.horovod.binding import TorchBinding
from tests.decision_lines import whole_lines
from tests.multirank.calibrations import made_up_calibration
from tests.multirank.collectives import nodes_of
from tests.multirank.training import (
    assert_same_everywhere,
    batch,
    compression,
    distribute,
    own_generator,
    raised,
    small_model,
    weights,
)
from tests.multirank.worker import thorough
from tests.pairs import lags_of

_EPOCH = 4  # steps
_STEPS = 17
# Compressor and policy. Nothing here depends on how long a step takes: GraVAC's search ends by throughput only where
# two throughputs differ by no more than omega.
_LEVELS = [
    ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1,eta=0.3"),
    ("powersgd:rank=2", "accordion:low=4,high=1,interval=1,eta=0.5"),
    ("powersgd:rank=2", "accordion:low=4,high=1,steps=4,statistic=aggregated,eta=0.8"),
    ("topk:ratio=0.1", "adaqs:start=64,fall=0.1,steps=3"),
    ("qsgd:bits=4", "adaqs:start=8,fall=0.05,steps=3"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=4,omega=0,epsilon=0.6,smoothing=0.3"),
    ("powersgd:rank=2", "gravac:min=2,max=64,window=4,omega=0,epsilon=0.2,smoothing=0.3"),
    ("topk:ratio=0.1", "lgreco:interval=4,last=3,alpha=1.1"),
    ("topk:ratio=0.1", "budget:factor=4,interval=4,last=3"),
    ("topk:ratio=0.1", "budget:factor=16,critical=4,interval=4,last=3,eta=0.3"),
]
_BATCHES = [
    ("none", "accordion_batch_size:low=16,high=32,interval=1,eta=0.9"),
    ("topk:ratio=0.1", "accordion_batch_size:low=16,high=32,steps=3,eta=0.9"),
    ("topk:ratio=0.1", "increase_batch_size:low=16,high=64"),
]


class Training:
    """A training whose every step can be looked at, and that can be stopped and gone on with.

    The learning rate falls by half at the beginning of every third epoch, as a scheduler of the user would do it.
    """

    def __init__(self, spec: str, policy: str, state: dict[str, Any] | None = None, **options: Any) -> None:
        self.model = small_model()
        self.compression = compression(spec, self.model, policy=policy, steps_per_epoch=_EPOCH, **options)
        self.optimizer = distribute(self.model, self.compression, 0.02)
        self.generator = own_generator()
        self.plans: list[str] = []
        self.epoch, self.left = 0, _EPOCH
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"])
            self.epoch, self.left = state["place"]
            self.compression.load_state_dict(state["compression"], optimizer=self.optimizer)

    @property
    def binding(self) -> TorchBinding:
        binding = self.compression._binding
        assert isinstance(binding, TorchBinding)
        return binding

    def step(self, before: Callable[[], None] = lambda: None, synchronized: bool = False) -> None:
        """One step; `before` is called after the backward passes, and has waited for the exchange if `synchronized`."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 * 0.5 ** (self.epoch // 3)
        passes = self.compression.accumulation
        if passes > self.left:
            self.epoch, self.left = self.epoch + 1, _EPOCH
        self.optimizer.zero_grad()
        for _ in range(passes):
            inputs, classes = batch(self.generator)
            loss = torch.nn.functional.cross_entropy(self.model(inputs), classes)
            (loss / passes).backward()
        before()
        with self.optimizer.skip_synchronize() if synchronized else nullcontext():
            self.optimizer.step()
        self.left -= passes
        if self.left < passes:
            self.epoch, self.left = self.epoch + 1, _EPOCH
        plan = {name: str(compressor) for name, compressor in self.binding.engine.plan.items()}
        self.plans.append(json.dumps([plan, passes]))

    def state(self) -> dict[str, Any]:
        state = {
            "compression": self.compression.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "place": (self.epoch, self.left),
        }
        with tempfile.TemporaryFile() as file:  # what is read again shares nothing with this training
            torch.save(state, file)
            file.seek(0)
            return torch.load(file, weights_only=True)


def _settings() -> Iterator[tuple[str, str]]:
    """Each policy with one of its lags: on four ranks with the one that it has not on two."""
    for place, (spec, policy) in enumerate(_LEVELS + _BATCHES):
        lags = lags_of(policy)
        yield spec, f"{policy},lag={lags[(place + hvd.size() // 2) % len(lags)]}"


def case_all_ranks_obey_one_decision_in_the_same_step_and_log_what_caused_it() -> None:
    """Every other policy."""
    _check_obeyed(list(_settings())[::2])


@thorough
def case_all_ranks_obey_the_other_policies() -> None:
    _check_obeyed(list(_settings())[1::2])


def _check_obeyed(settings: Sequence[tuple[str, str]]) -> None:
    for spec, policy in settings:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "decisions.jsonl"
            training = Training(spec, policy, decision_log=path, decision_log_bytes=3000, decision_log_files=100)
            for _ in range(_STEPS):
                training.step()
            everyone = hvd.allgather_object(training.plans)
            for step in range(_STEPS):
                assert len({plans[step] for plans in everyone}) == 1, (policy, step, [one[step] for one in everyone])
            assert len(set(training.plans)) > 1, f"{policy} never changed anything"
            assert_same_everywhere(training.model)
            if hvd.rank() == 0:
                lines = whole_lines(path)
                assert [line["kind"] for line in lines[:2]] == ["start", "decision"], policy
                result = replay(path)
                assert result.difference is None, (policy, result)
            else:
                assert not path.exists()


def case_resumed_in_the_middle_is_as_if_never_stopped() -> None:
    _check_resumed(list(_settings())[1::5], stops=1)


@thorough
def case_resumed_at_any_step_is_as_if_never_stopped() -> None:
    schedules = [
        ("topk:ratio=0.02", "warmup:levels=0.5|0.2,steps=5"),
        ("topk:ratio=0.02", "schedule:levels=0.2|0.5,epochs=1|3"),
        ("topk:ratio=0.02", "legacy:levels=0.5|0.1,sizes=2000"),
        ("topk:ratio=0.02", "constant:level=0.3"),
    ]
    _check_resumed([*schedules, *_settings()], stops=5)


def _check_resumed(settings: Sequence[tuple[str, str]], stops: int) -> None:
    random = np.random.default_rng(7)
    for spec, policy in settings:
        whole = Training(spec, policy)
        states = []
        for _ in range(_STEPS):
            states.append(whole.state() if whole.plans else None)
            whole.step()
        for stop in sorted(random.choice(np.arange(1, _STEPS), stops, replace=False).tolist()):
            resumed = Training(spec, policy, states[stop])
            for _ in range(_STEPS - stop):
                resumed.step()
            assert resumed.plans == whole.plans[stop:], (policy, stop)
            if spec == "none" and hvd.size() > 2:  # which Horovod adds in an order of its timing
                torch.testing.assert_close(weights(resumed.model), weights(whole.model), rtol=1e-3, atol=1e-5)
            else:
                assert torch.equal(weights(resumed.model), weights(whole.model)), (policy, stop)


def case_another_policy_on_one_rank_stops_all_with_both_specs() -> None:
    first, other = "accordion:low=4,high=1,interval=2", "accordion:low=4,high=2,interval=2"
    training = Training("powersgd:rank=2", other if hvd.rank() == 1 else first)
    message = raised(RankMismatchError, training.step)
    assert "low=4,high=1" in message, message
    assert "low=4,high=2" in message, message
    assert not training.plans


def case_mpi4py_on_some_hosts_only_stops_all() -> None:
    """The others would wait for the decisions of a rank that sends them another way."""
    if not hvd.mpi_enabled():
        raise SkipTest("needs MPI")
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(horovod_ranks, "find_spec", lambda name: None)
        training = Training("powersgd:rank=2", "accordion:low=4,high=1,interval=1")
        assert "install it on all hosts or on none): True on rank 0" in raised(RankMismatchError, training.step)


def case_other_levels_on_one_rank_stop_all_in_that_step() -> None:
    training = Training("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1")
    for _ in range(3):
        training.step()
    if hvd.rank() == 1:
        engine = training.binding.engine
        engine.set_plan(engine.planner.plan_for(hvdcomp.TopK(ratio=0.25)))
    before = weights(training.model)
    message = raised(RankMismatchError, training.step)
    assert "levels" in message, message
    assert f"{training.binding.engine.planner.digest:012x}" in message, message
    assert torch.equal(weights(training.model), before)


def case_a_decision_understood_otherwise_stops_all_in_that_step() -> None:
    training = Training("topk:ratio=0.1", "gravac:min=2,max=64,window=4,epsilon=0.6")
    training.step()
    training.step()
    if hvd.rank() == 1:
        _mishear(training)
    before = weights(training.model)
    message = raised(RankMismatchError, training.step)
    assert "levels" in message, message
    assert torch.equal(weights(training.model), before)


def _mishear(training: Training) -> None:
    """Makes this rank read another level off the next state that it receives."""
    coordinator = training.binding.coordinator
    assert coordinator is not None
    policy = coordinator.policy

    class Mistaken(type(policy)):  # type: ignore[misc]
        def from_json(self, data: Any) -> Any:
            return super().from_json({**data, "minimum": 33.0, "send": "minimum"})

    coordinator.channel.policy = Mistaken(**vars(policy))


def case_auto_changes_methods_on_all_ranks_in_the_same_step() -> None:
    """With a margin and a budget that let it try everything. What is fastest here is up to the machine."""
    with tempfile.TemporaryDirectory() as folder:
        calibration, path = Path(folder) / "cluster.json", Path(folder) / "decisions.jsonl"
        if hvd.rank() == 0:  # nobody else has it
            calibration.write_text(json.dumps(_calibration("powersgd:rank=2")))
        policy = f"auto:calibration={hvd.broadcast_object(str(calibration))},window=3,every=6,margin=1000,budget=0.9"
        training = Training("powersgd:rank=2", policy, decision_log=path)
        for _ in range(60):
            training.step()
        everyone = hvd.allgather_object(training.plans)
        for step in range(60):
            assert len({plans[step] for plans in everyone}) == 1, (step, [plans[step] for plans in everyone])
        assert_same_everywhere(training.model)
        if hvd.rank() == 0:
            lines = whole_lines(path)
            assert replay(path).difference is None, replay(path)
            chosen = {line["from_step"]: line["state"]["chosen"] for line in lines[1:]}
            assert len(set(chosen.values())) > 1, chosen  # which ones, and how many, is up to what steps take
            for step, plan in enumerate(training.plans):
                name = chosen[max(begin for begin in chosen if begin <= step)]
                methods = set(json.loads(plan)[0].values())
                right = {"dense": {"none"}, "fp16": {"fp16"}, "compressed": {"none", "powersgd:rank=2"}}
                assert name not in right or methods == right[name], (step, name, methods)
            assert all(seconds > 0 for line in lines[3:] for seconds in line["statistics"]["step_times"])


_SEVERAL = ("topk:ratio=0.1", "two_level(topk:ratio=0.1)")


@thorough
def case_auto_takes_turns_with_several_compressors_and_goes_on_after_a_restart() -> None:
    with tempfile.TemporaryDirectory() as folder, nodes_of(max(1, hvd.size() // 2)):
        calibration, path = Path(folder) / "cluster.json", Path(folder) / "decisions.jsonl"
        spec = "powersgd:rank=2"
        if hvd.rank() == 0:
            calibration.write_text(json.dumps(_calibration(spec, _SEVERAL[:1], ranks_per_node=2)))
        file = hvd.broadcast_object(str(calibration))
        policy = f"auto:calibration={file},compressors=({'|'.join(_SEVERAL)}),window=3,every=5,margin=1000,budget=0.99"
        training = Training(spec, policy, decision_log=path)
        _steps_of_made_up_times(training, 72)
        resumed = Training(spec, policy, training.state(), decision_log=path)
        _steps_of_made_up_times(resumed, 54)
        plans = [*training.plans, *resumed.plans]
        for step, one in enumerate(zip(*hvd.allgather_object(plans), strict=True)):
            assert len(set(one)) == 1, (step, one)
        assert_same_everywhere(training.model)
        assert_same_everywhere(resumed.model)
        used = {method for plan in plans for method in json.loads(plan)[0].values()}
        assert {"none", "fp16", spec, *_SEVERAL} == used, used
        if hvd.rank() == 0:
            assert replay(path).difference is None, replay(path)


def _steps_of_made_up_times(training: Training, steps: int) -> None:
    """By the policy's clock a step takes what its methods say, so that the machine does not matter to what is tried."""
    training.step()
    coordinator, engine = training.binding.coordinator, training.binding.engine
    assert coordinator is not None
    seconds = {"none": 27.0, "fp16": 20.0, _SEVERAL[1]: 9.0, "powersgd:rank=2": 3.0, _SEVERAL[0]: 1.0}
    matrices = [name for name in engine.plan if "weight" in name]
    times = (sum(seconds[str(engine.plan[name])] for name in matrices) for _ in itertools.count())
    coordinator.clock._clock = itertools.accumulate(times).__next__
    for _ in range(steps - 1):
        training.step()


def case_two_levels_that_cannot_be_stop_all_before_auto_first_tries_them() -> None:
    with tempfile.TemporaryDirectory() as folder, nodes_of(0):
        calibration = Path(folder) / "cluster.json"
        if hvd.rank() == 0:
            known = _calibration("powersgd:rank=2", _SEVERAL[:1], ranks_per_node=2)
            known["models"]["small"]["encode"]["topk:ratio=0.1"]["encode_s"] = 100.0  # which would never be tried
            calibration.write_text(json.dumps(known))
        policy = f"auto:calibration={hvd.broadcast_object(str(calibration))},compressors=({_SEVERAL[1]})"
        training = Training("powersgd:rank=2", policy)
        before = weights(training.model)
        message = raised(ConfigurationError, training.step)
        assert "HVDCOMP_RANKS_PER_NODE='0' is not allowed" in message, message
        assert torch.equal(weights(training.model), before)


def case_auto_with_a_calibration_that_will_not_do_stops_all_before_the_first_exchange() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "cluster.json"
        policy = f"auto:calibration={hvd.broadcast_object(str(calibration))}"
        if hvd.rank() == 0:
            options = {"policy": policy, "decision_log": calibration.parent / "decisions.jsonl"}
            _refused_when_made(options, "cluster.json cannot be read: No such file")
            calibration.write_text(json.dumps(_calibration("topk:ratio=0.1")))
            _refused_when_made({**options, "decision_log": calibration}, "is not a decision log")
        for there, words in ((True, "no encode time of 'powersgd:rank=2'"), (False, "cannot be read: No such file")):
            training = Training("powersgd:rank=2", policy)
            before = weights(training.model)
            if hvd.rank() == 0 and not there:
                calibration.unlink()
            message = raised(RankMismatchError, training.step)
            told = "some ranks cannot take part in the training. rank 0: the policy's calibration="
            assert message.startswith(told), message
            assert words in message, message
            assert torch.equal(weights(training.model), before)


def case_a_budget_of_milliseconds_is_spent_by_what_rank_0_predicts() -> None:
    """Rank 0 alone has the calibration. The network is so slow that each byte takes a microsecond."""
    spec, ms = "topk:ratio=0.1", 8
    with tempfile.TemporaryDirectory() as folder:
        calibration, path = Path(folder) / "cluster.json", Path(folder) / "decisions.jsonl"
        if hvd.rank() == 0:
            known = _calibration(spec)
            for cost in known["network"].values():
                cost["bytes_per_s"] = 1e6
            calibration.write_text(json.dumps(known))
        settings = f"calibration={hvd.broadcast_object(str(calibration))},interval=4,last=3"
        policy = f"budget:ms={ms},{settings}"
        whole = Training(spec, policy, decision_log=path)
        sent, state = [0], None
        for step in range(_STEPS):
            state = whole.state() if step == 9 else state
            whole.step()
            sent.append(whole.compression.ledger.totals.bytes_sent)
        plans = hvd.allgather_object(whole.plans)
        assert all(one == plans[0] for one in plans), plans
        assert len(set(whole.plans)) > 1
        assert_same_everywhere(whole.model)
        resumed = Training(spec, policy, state)
        for _ in range(_STEPS - 9):
            resumed.step()
        assert resumed.plans == whole.plans[9:]
        assert torch.equal(weights(resumed.model), weights(whole.model))
        biases = 4 * sum(one.numel() for one in whole.model.parameters() if one.dim() == 1)
        ranks = hvd.size()
        beside = 1e-3 + 1e-5 * (2 * (ranks - 1) + 2) + biases * 2 * (ranks - 1) / ranks / 1e6
        allowed = (ms / 1000 - beside) * 1e6 / (ranks - 1) + biases
        for before, after in itertools.pairwise(sent[5:]):
            of_engine = 8 * len(whole.binding.engine.tensors) + 8  # a number for each tensor, the flag and padding
            assert 0.9 * allowed < after - before - of_engine <= allowed, (before, after, allowed)
        if hvd.rank() == 0:
            assert replay(path).difference is None, replay(path)
        training = Training(spec, f"budget:ms=1.01,{settings}")
        before = weights(training.model)
        message = raised(RankMismatchError, training.step)
        assert message.startswith("some ranks cannot take part in the training. rank 0: budget:"), message
        assert "cannot be reached: according to" in message, message
        assert torch.equal(weights(training.model), before)


def _refused_when_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        hvdcomp.Compression.from_spec("powersgd:rank=2", **options)


def _calibration(spec: str, others: Sequence[str] = (), ranks_per_node: int | None = None) -> dict[str, Any]:
    """A made-up calibration of the small model."""
    shapes = {name: tuple(one.shape) for name, one in small_model().named_parameters()}
    return made_up_calibration(spec, shapes, others, ranks_per_node)


def case_logged_norms_are_those_of_rank_zeros_own_gradients() -> None:
    for source in ("local", "aggregated"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "decisions.jsonl"
            policy = f"accordion:low=0.5,high=0.02,steps=4,statistic={source}"
            training = Training("topk:ratio=0.1", policy, decision_log=path)
            names = [name for name, _ in training.model.named_parameters()]
            sums = {name: np.zeros(1) for name in names}

            def add(sums: dict[str, np.ndarray] = sums, model: torch.nn.Module = training.model) -> None:
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    sums[name] = sums[name] + parameter.grad.double().numpy()

            for _ in range(4):
                training.step(add if source == "local" else lambda: None)
                if source == "aggregated":
                    add()
            training.step()
            training.step()
            if hvd.rank() == 0:
                logged = whole_lines(path)[1]["statistics"]["norms"]
                assert len(logged) == 3
                for name, norm in logged.items():
                    np.testing.assert_allclose(norm, np.linalg.norm(sums[name]), rtol=1e-5)


def case_a_larger_batch_needs_a_loop_that_follows() -> None:
    training = Training("none", "accordion_batch_size:low=16,high=32,interval=1,eta=0.9")
    ignored = property(lambda self: 1)
    training.compression.__class__ = type("Ignored", (hvdcomp.Compression,), {"accumulation": ignored})

    def go() -> None:
        for _ in range(20):
            training.step()

    message = raised(ConfigurationError, go)
    assert "compression.accumulation" in message, message


def case_the_learning_rate_grows_with_the_batch_and_only_during_steps() -> None:
    training = Training("none", "accordion_batch_size:low=16,high=32,interval=1,eta=0.9")
    rates = []
    training.optimizer.register_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(20):
        before = weights(training.model)
        training.step()
        assert training.optimizer.param_groups[0]["lr"] in (0.02, 0.01, 0.005)
        assert not torch.equal(before, weights(training.model))
    assert training.compression.accumulation == 2
    # One step of plain SGD by hand: twice the scheduled rate, the mean over both batches and all ranks.
    training.optimizer.state.clear()
    for group in training.optimizer.param_groups:
        group["momentum"] = 0.0
    generator = torch.Generator()
    generator.set_state(training.generator.get_state())
    model = small_model()
    model.load_state_dict(training.model.state_dict())
    for _ in range(2):
        inputs, classes = batch(generator)
        (torch.nn.functional.cross_entropy(model(inputs), classes) / 2).backward()
    expected = []
    rate = 0.02 * 0.5 ** (training.epoch // 3)
    for name, parameter in model.named_parameters():
        mean = hvd.allreduce(parameter.grad, name=f"test.mean.{name}")
        expected.append((parameter.detach() - 2 * rate * mean).reshape(-1).double())
    training.step()
    torch.testing.assert_close(weights(training.model), torch.cat(expected), rtol=1e-5, atol=1e-6)


def case_a_checkpoint_of_one_rank_in_the_middle_of_a_step_leaves_the_step_as_it_is() -> None:
    """Its state holds the decision that is on its way, which the other ranks take up before their next step."""
    training = Training(*_BATCHES[1])

    def look() -> None:
        training.optimizer.synchronize()
        if hvd.rank() == 0:
            training.compression.state_dict()

    for _ in range(20):
        training.step(look, synchronized=True)
        assert_same_everywhere(training.model)
    assert len(set(training.plans)) > 1, "the batch never grew"


def case_residuals_weigh_the_same_when_the_learning_rate_grows() -> None:
    training = Training(*_BATCHES[-1])
    engine, grown = None, False
    for _ in range(20):
        if engine is not None:
            before = {name: [array.clone() for array in state.memory] for name, state in engine.states.items()}
            batch_size = training.binding._batch.current
            factor = training.compression.accumulation / batch_size.accumulation
            grown |= factor != 1
            for name, state in engine.states.items():
                for old, new in zip(before[name], state.memory, strict=True):
                    torch.testing.assert_close(new * factor, old, rtol=0, atol=0)
        training.step()
        engine = training.binding.engine
    assert grown


def case_a_checkpoint_of_other_ranks_loses_residuals_with_a_warning() -> None:
    spec, policy = "topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1"
    training = Training(spec, policy)
    for _ in range(9):
        training.step()
    of_rank_zero = hvd.broadcast_object(training.state(), root_rank=0)
    of_another_run = copy.deepcopy(of_rank_zero)
    of_another_run["compression"]["own"]["size"] = 1024
    for state, expected in ((of_another_run, "1024 ranks"), (of_rank_zero, "rank 0")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = Training(spec, policy, state)
        texts = [str(warning.message) for warning in caught if "residuals" in str(warning.message)]
        warns = hvd.rank() == 0 if expected == "1024 ranks" else hvd.rank() != 0
        assert len(texts) == warns, texts
        assert all(expected in text for text in texts), texts
        zeroed = expected == "1024 ranks" or hvd.rank() != 0
        engine = resumed.binding.engine
        assert any(array.any() for state in engine.states.values() for array in state.memory) != zeroed
        assert engine.has_residuals == (expected == "rank 0")  # on all ranks: steps go by it
        resumed.step()
        assert resumed.binding.engine.step_number == 10
        assert resumed.plans[0] == hvd.broadcast_object(resumed.plans[0], root_rank=0)


def case_a_checkpoint_of_something_else_is_refused() -> None:
    right = "topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1"
    training = Training(*right)
    training.step()
    state = training.state()
    for spec, policy, named in (
        ("powersgd:rank=2", "accordion:low=4,high=1", "topk:ratio=0.1"),
        ("topk:ratio=0.1", "adaqs:start=64,fall=0.1,steps=3", "accordion:"),
    ):
        message = raised(ConfigurationError, lambda spec=spec, policy=policy: Training(spec, policy, state))
        assert named in message, message
    name, kept = next(iter(state["compression"]["own"]["residuals"].items()))
    whole = kept["arrays"]
    for wrong, named in ((whole[0][1:], "has the shape"), (whole[0] / 0, "contains an inf or NaN")):
        kept["arrays"] = [wrong]
        message = raised(ConfigurationError, lambda: Training(*right, state))
        assert f"the residual of {name} {named}" in message, message
    kept["arrays"] = whole
    assert "before the first step" in raised(
        ConfigurationError, lambda: training.compression.load_state_dict(state["compression"])
    )
