"""Policies in TensorFlow on real ranks: one decision for all, nothing traced again, checkpoints that lose nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvdcomp.tensorflow
from hvdcomp.policies import POLICIES, parse_policy
from hvdcomp.tools.report.replay import replay
from tests.decision_lines import whole_lines
from tests.multirank.calibrations import made_up_calibration
from tests.multirank.training_tensorflow import (
    Network,
    TapeTraining,
    assert_same_everywhere,
    batch,
    gathered,
    raised,
    sgd,
)
from tests.multirank.worker import thorough
from tests.pairs import compressor_for, lags_of

_EPOCH = 4  # steps
_STEPS = 17
# Compressor and policy. Nothing here depends on how long a step takes: GraVAC's search ends by throughput only where
# two throughputs differ by no more than omega.
_LEVELS = [
    ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1,eta=0.3"),
    ("powersgd:rank=2", "accordion:low=4,high=1,steps=4,statistic=aggregated,eta=0.8"),
    ("qsgd:bits=4", "adaqs:start=8,fall=0.05,steps=3"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=4,omega=0,epsilon=0.6,smoothing=0.3"),
    ("powersgd:rank=2", "gravac:min=2,max=64,window=4,omega=0,epsilon=0.2,smoothing=0.3"),
    ("topk:ratio=0.1", "lgreco:interval=4,last=3,alpha=1.1"),
    ("topk:ratio=0.1", "budget:factor=4,interval=4,last=3"),
]
_BATCHES = [
    ("none", "accordion_batch_size:low=16,high=32,interval=1,eta=0.9"),
    ("topk:ratio=0.1", "increase_batch_size:low=16,high=64"),
]
_SCHEDULES = [
    ("topk:ratio=0.02", "warmup:levels=0.5|0.2,steps=5"),
    ("topk:ratio=0.02", "constant:level=0.3"),
]


class Training(TapeTraining):
    """A training whose every step can be looked at, and that can be stopped and gone on with.

    The learning rate falls by half at the beginning of every third epoch, as a callback of the user would do it. With a
    policy of the batch size it takes `Compression.accumulation` batches at once.
    """

    def __init__(self, spec: str, policy: str, **options: Any) -> None:
        super().__init__(
            spec, optimizer=sgd(0.02), tell_optimizer=True, policy=policy, steps_per_epoch=_EPOCH, **options
        )
        self.plans: list[str] = []
        self.epoch, self.left = 0, _EPOCH

    def step(self, rows: int = 16) -> float:
        self.optimizer.learning_rate.assign(0.02 * 0.5 ** (self.epoch // 3))
        passes = self.compression.accumulation
        if passes > self.left:
            self.epoch, self.left = self.epoch + 1, _EPOCH
        loss = super().step(rows * passes)
        self.left -= passes
        if self.left < passes:
            self.epoch, self.left = self.epoch + 1, _EPOCH
        self.plans.append(json.dumps([self.plan, passes]))
        assert float(self.optimizer.learning_rate) in (np.float32(0.02), np.float32(0.01), np.float32(0.005))
        return loss

    def state(self) -> dict[str, Any]:
        """What a user saves: everything is copied, so that it shares nothing with this training."""
        arrays = [variable.numpy() for variable in [*self.variables, *self.optimizer.variables]]
        generator, place = json.dumps(self.generator.bit_generator.state), (self.epoch, self.left)
        return {"arrays": arrays, "generator": generator, "place": place, "ours": self.serialized()}

    def serialized(self) -> bytes:
        return hvdcomp.tensorflow.CompressionState(self.compression).serialize()

    def load(self, state: dict[str, Any]) -> Training:
        for variable, array in zip([*self.variables, *self.optimizer.variables], state["arrays"], strict=True):
            variable.assign(array)
        self.generator.bit_generator.state = json.loads(state["generator"])
        self.epoch, self.left = state["place"]
        hvdcomp.tensorflow.CompressionState(self.compression).deserialize(state["ours"])
        return self


def _settings() -> Iterator[tuple[str, str]]:
    """Each policy with one of its lags: on four ranks with the one that it has not on two."""
    for place, (spec, policy) in enumerate(_LEVELS + _BATCHES):
        lags = lags_of(policy)
        yield spec, f"{policy},lag={lags[(place + hvd.size() // 2) % len(lags)]}"


def case_all_ranks_obey_one_decision_in_the_same_step_without_a_new_trace() -> None:
    """Which policy decides, TensorFlow does not see: some that change levels, the batch size, or follow a schedule."""
    _check_obeyed([*list(_settings())[::3], _SCHEDULES[0]])


@thorough
def case_every_policy_is_obeyed_without_a_new_trace() -> None:
    """As set above, so that each changes something in so short a training; any other as its example says."""
    _check_obeyed([*_settings(), *_SCHEDULES])
    # Not `auto`, whose example names a calibration that is of no network: it has a case of its own.
    tried = {"auto"} | {parse_policy(policy).name for _, policy in _LEVELS + _BATCHES + _SCHEDULES}
    examples = [kind.examples[0] for name, kind in POLICIES.items() if name not in tried]
    _check_obeyed([(compressor_for(policy), policy) for policy in examples], changing=False)


def _check_obeyed(settings: Sequence[tuple[str, str]], changing: bool = True) -> None:
    for spec, policy in settings:
        training = Training(spec, policy).run(1)
        traces = training.traces  # two, where a variable for the learning rate was made in the first
        training.run(_STEPS - 1)
        assert training.traces == traces <= 1 + ("batch" in policy), policy
        everyone = hvd.allgather_object(training.plans)
        for step in range(_STEPS):
            assert len({plans[step] for plans in everyone}) == 1, (policy, step, [plans[step] for plans in everyone])
        changed = len(set(training.plans)) > 1
        assert not changing or changed != policy.startswith("constant"), f"{policy}: {training.plans}"
        assert_same_everywhere(training.variables)


def case_auto_changes_methods_on_all_ranks_in_the_same_step_without_a_new_trace() -> None:
    """With a margin and a budget that let it try everything. What is fastest here is up to the machine."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "cluster.json"
        if hvd.rank() == 0:  # nobody else has it
            shapes = {one.name: tuple(one.shape) for one in Network().variables_in_order}
            calibration.write_text(json.dumps(made_up_calibration("powersgd:rank=2", shapes)))
        path = hvd.broadcast_object(str(calibration))
        training = Training("powersgd:rank=2", f"auto:calibration={path},window=3,every=6,margin=1000,budget=0.9")
        training.run(34)
        assert training.traces == 1
        everyone = hvd.allgather_object(training.plans)
        assert all(plans == training.plans for plans in everyone)
        assert len(set(training.plans)) > 1
        assert_same_everywhere(training.variables)


@thorough
def case_levels_change_several_times_without_a_new_trace() -> None:
    for spec, policy in (
        ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,steps=2,eta=0.15"),
        ("topk:ratio=0.1", "gravac:min=2,max=1024,window=2,omega=0,epsilon=0.2,smoothing=0.3"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "decisions.jsonl"
            training = Training(spec, policy, decision_log=path)
            variables = None
            for step in range(30):
                training.step()
                if step == 1:
                    variables = len(training.optimizer.variables)
            changes = sum(one != other for one, other in zip(training.plans, training.plans[1:], strict=False))
            assert changes >= 3, (policy, changes)
            assert training.traces == 1
            assert len(training.optimizer.variables) == variables
            if hvd.rank() == 0:
                lines = whole_lines(path)
                decisions = {json.dumps(line["decision"]) for line in lines if line["kind"] == "decision"}
                assert len(decisions) >= 2, decisions
                result = replay(path)
                assert result.difference is None, (policy, result)


@thorough
def case_resumed_at_any_step_is_as_if_never_stopped() -> None:
    stops = np.random.default_rng(7)
    some = [_LEVELS[0], _LEVELS[3], _BATCHES[0]]
    settings = [_SCHEDULES[0]] + [
        (spec, f"{policy},lag={lag}")
        for spec, policy in some
        for lag in (lags_of(policy) if hvd.size() == 2 else lags_of(policy)[:1])
    ]
    for spec, policy in settings:
        whole = Training(spec, policy)
        states = []
        for _ in range(_STEPS):
            states.append(whole.state() if whole.plans else {})
            whole.step()
        for stop in sorted(stops.choice(np.arange(1, _STEPS), 2, replace=False).tolist()):
            resumed = Training(spec, policy).load(states[stop]).run(_STEPS - stop)
            assert resumed.plans == whole.plans[stop:], (policy, stop)
            assert np.array_equal(resumed.weights, whole.weights), (policy, stop)
            assert resumed.compression.ledger.steps == _STEPS


def case_tensorflows_own_checkpoint() -> None:
    spec, policy = "topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=1,eta=0.3"
    with tempfile.TemporaryDirectory() as folder:  # of this rank
        whole, resumed = Training(spec, policy), Training(spec, policy)

        def checkpoint(training: Training) -> tf.train.Checkpoint:
            state = hvdcomp.tensorflow.CompressionState(training.compression)
            return tf.train.Checkpoint(model=training.model, optimizer=training.optimizer, compression=state)

        whole.run(9)
        path = checkpoint(whole).save(f"{folder}/saved")
        read, now = hvdcomp.tensorflow.saved_state(path), whole.compression.state_dict()
        assert read["shared"]["coordinator"] == json.loads(json.dumps(now["shared"]["coordinator"]))
        for name, kept in now["own"]["residuals"].items():
            assert np.array_equal(read["own"]["residuals"][name]["arrays"][0], kept["arrays"][0])
        for wrong in ((path, "other"), (f"{folder}/none", "compression")):
            told = raised(hvdcomp.ConfigurationError, lambda wrong=wrong: hvdcomp.tensorflow.saved_state(*wrong))
            assert f"{wrong[0]} contains no state of hvdcomp.Compression with the name {wrong[1]!r}" in told
        resumed.generator.bit_generator.state = whole.generator.bit_generator.state
        resumed.epoch, resumed.left = whole.epoch, whole.left
        checkpoint(resumed).restore(path).assert_consumed()
        assert np.array_equal(whole.run(6).weights, resumed.run(6).weights)
        assert whole.plans[9:] == resumed.plans
        assert_same_everywhere(resumed.variables)


def case_a_step_after_the_batch_grew_is_plain_sgd_by_hand() -> None:
    """Twice the rate that the user set, and the mean over both batches and all ranks."""
    training = Training("none", "accordion_batch_size:low=16,high=32,interval=1,eta=0.9").run(20)
    assert training.compression.accumulation == 2
    before, generator = [variable.numpy() for variable in training.variables], np.random.default_rng()
    momenta = [variable.numpy() for variable in training.optimizer.variables[-4:]]
    generator.bit_generator.state = training.generator.bit_generator.state
    inputs, classes = batch(generator, 32)
    gradients = _gradients_by_hand(before, inputs, classes)
    rate = 0.02 * 0.5 ** (training.epoch // 3)
    training.step()
    for place, (old, momentum) in enumerate(zip(before, momenta, strict=True)):
        mean = gathered(gradients[place]).mean(0)
        expected = old + 0.9 * momentum - 2 * rate * mean
        np.testing.assert_allclose(training.variables[place].numpy(), expected, rtol=1e-4, atol=1e-6)


def case_a_policy_that_follows_no_learning_rate_needs_no_optimizer() -> None:
    for policy in ("gravac:every=1,min=2,max=64", "adaqs:start=8,fall=0.05,steps=2,lag=0"):
        training = TapeTraining("topk:ratio=0.1", optimizer=sgd(0.02), policy=policy)
        for _ in range(4):
            training.step()
        assert training.compression.levels
        assert_same_everywhere(training.variables)


def case_a_checkpoint_of_one_rank_in_the_middle_of_a_step_leaves_the_step_as_it_is() -> None:
    """Its state holds the decision that is on its way, which the other ranks take up before their next step."""
    training = Training(*_BATCHES[1], graph=False)
    apply = training.optimizer.apply_gradients

    def look_and_apply(gradients: Any) -> Any:
        if hvd.rank() == 0:
            training.serialized()
        return apply(gradients)

    training.optimizer.apply_gradients = look_and_apply
    for _ in range(20):
        training.step()
        assert_same_everywhere(training.variables)
    assert len(set(training.plans)) > 1, "the batch never grew"


def _gradients_by_hand(variables: list[np.ndarray], inputs: np.ndarray, classes: np.ndarray) -> list[np.ndarray]:
    """Of mean cross-entropy, for the network of the cases."""
    first, first_bias, second, second_bias = variables
    hidden = np.maximum(inputs @ first + first_bias, 0)
    outputs = hidden @ second + second_bias
    exponents = np.exp(outputs - outputs.max(1, keepdims=True))
    errors = exponents / exponents.sum(1, keepdims=True)
    errors[np.arange(len(classes)), classes] -= 1
    errors /= len(classes)
    back = (errors @ second.T) * (hidden > 0)
    return [inputs.T @ back, back.sum(0), hidden.T @ errors, errors.sum(0)]
