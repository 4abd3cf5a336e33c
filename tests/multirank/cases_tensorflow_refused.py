"""What TensorFlow users are told when something cannot work: on every rank, in the first step, and never by a hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from tests.multirank.everywhere import halves
from tests.multirank.training_tensorflow import (
    IN_GRAPH,
    Network,
    TapeTraining,
    batch,
    compression,
    raised,
    sgd,
)


def refused_in_graph(work: Callable[[], Any], kind: str) -> str:
    """The message of an error of ours that is raised while a graph runs, of which TensorFlow keeps only the text."""
    message = raised(IN_GRAPH, work)
    assert kind in message, message
    return message


def case_different_settings_are_named_on_every_rank() -> None:
    for specs in (("topk:ratio=0.01", "topk:ratio=0.02"), ("none", "powersgd:rank=2"), ("fp16", "none")):
        for graph in (True, False):
            training = TapeTraining(specs[min(hvd.rank(), 1)], graph=graph)
            start = training.weights
            message = refused_in_graph(training.step, "RankMismatchError")
            assert all(spec in message for spec in specs), message
            assert "on rank 0" in message, message
            assert np.array_equal(training.weights, start)
    training = TapeTraining("topk:ratio=0.01", seed=hvd.rank())
    assert "seed" in refused_in_graph(training.step, "RankMismatchError")


def case_other_levels_on_one_rank_stop_all_in_that_step() -> None:
    training = TapeTraining("topk:ratio=0.1").run(3)
    if hvd.rank() == 1:
        training.compression.set_level(0.25)
    start = training.weights
    message = refused_in_graph(training.step, "RankMismatchError")
    assert "levels" in message, message
    assert f"{training.binding.engine.planner.digest:012x}" in message, message
    assert np.array_equal(training.weights, start)


def case_another_policy_on_one_rank_stops_all_with_both_specs() -> None:
    first, other = "accordion:low=4,high=1,interval=2", "accordion:low=4,high=2,interval=2"
    policy = other if hvd.rank() == 1 else first
    training = TapeTraining("powersgd:rank=2", policy=policy, steps_per_epoch=4, tell_optimizer=True)
    message = refused_in_graph(training.step, "RankMismatchError")
    assert "low=4,high=1" in message, message
    assert "low=4,high=2" in message, message


def case_momentum_twice() -> None:
    optimizer = sgd(momentum=0.9)
    training = TapeTraining("dgc:ratio=0.05", optimizer=optimizer, tell_optimizer=True)
    assert "momentum=0.9" in refused_in_graph(training.step, "ConfigurationError")


def case_a_policy_that_follows_learning_rates_needs_the_optimizer() -> None:
    for policy in ("accordion:low=0.5,high=0.02", "increase_batch_size:low=16,high=64"):
        training = TapeTraining("topk:ratio=0.1", policy=policy, steps_per_epoch=4)
        message = raised((ConfigurationError, IN_GRAPH), training.step)
        assert "optimizer=" in message, message


def case_compilation_with_xla() -> None:
    training = TapeTraining("topk:ratio=0.1", graph=False)
    compiled = tf.function(training._train, jit_compile=True)
    message = raised(ConfigurationError, lambda: compiled(*map(tf.constant, batch(training.generator))))
    assert "jit_compile=True" in message, message


def case_a_gradient_of_an_unknown_variable() -> None:
    model = Network()
    how = compression("topk:ratio=0.1", model.variables_in_order[:3])
    training = TapeTraining(how, model=model)
    assert "second_bias" in raised(ConfigurationError, training.step)


def case_a_pattern_that_matches_no_tensor() -> None:
    wrong, right = (json.dumps({pattern: "topk:ratio=0.05", "*": "none"}) for pattern in ("blocks/*", "first*"))
    for graph in (True, False):
        training = TapeTraining(wrong, graph=graph)
        message = raised(SpecError, training.step)
        assert "none of the 4 tensors has a name that matches 'blocks/*' (the nearest names are " in message, message
        training = TapeTraining(wrong if hvd.rank() == 1 else right, graph=graph)
        message = raised((RankMismatchError, IN_GRAPH), training.step)
        assert "no error" in message, message
        assert "'blocks/*'" in message, message


def case_another_process_set() -> None:
    sets = halves(hvd)
    mine = sets[0] if sets[0].included() else sets[1]
    if mine.size() > 1:  # with one rank Horovod exchanges nothing
        training = TapeTraining("topk:ratio=0.1", tape={"process_set": mine})
        assert "process_set=" in raised(ConfigurationError, training.step)
    training = TapeTraining("topk:ratio=0.1", process_set=mine)
    message = raised(ConfigurationError, training.step) if mine.size() > 1 else ""
    assert mine.size() == 1 or "process set" in message
    for process_set in sets:
        hvd.remove_process_set(process_set)


def case_predivision() -> None:
    training = TapeTraining("topk:ratio=0.1", tape={"gradient_predivide_factor": 2.0})
    assert "gradient_predivide_factor=2.0" in raised(ConfigurationError, training.step)


def case_adasum() -> None:
    for spec in ("topk:ratio=0.1", "none"):
        training = TapeTraining(spec, tape={"op": hvd.Adasum})
        message = raised(ConfigurationError, training.step)
        assert "op=hvd.Average" in message, message
        assert "Adasum" in message, message


def case_tensors_outside_of_a_tape() -> None:
    how = compression("topk:ratio=0.1", Network().variables_in_order)
    message = raised(ConfigurationError, lambda: hvd.allreduce(tf.ones((64, 32)), compression=how))
    assert "DistributedGradientTape" in message, message


def case_a_state_that_comes_too_late() -> None:
    training = TapeTraining("topk:ratio=0.1").run(2)
    state = training.compression.state_dict()
    assert "before the first step" in raised(ConfigurationError, lambda: training.compression.load_state_dict(state))


def case_a_damaged_state() -> None:
    training = TapeTraining("topk:ratio=0.1").run(1)
    state = training.compression.state_dict()
    name, kept = next(iter(state["own"]["residuals"].items()))
    (whole,) = kept["arrays"]
    for wrong, named in ((whole[1:], "has the shape"), (whole * np.inf, "contains an inf or NaN")):
        kept["arrays"] = [wrong]
        again = TapeTraining("topk:ratio=0.1")
        message = raised(ConfigurationError, lambda again=again: again.compression.load_state_dict(state))
        assert f"the residual of {name} {named}" in message, message
        begun = again.compression.state_dict()  # empty where the state was refused before anything was made
        assert not begun or (begun["shared"]["step"], begun["own"]["residuals"]) == (0, {})


def case_a_larger_batch_needs_a_loop_that_follows() -> None:
    policy = "increase_batch_size:low=16,high=64"
    optimizer = sgd(Halving())
    training = TapeTraining("none", policy=policy, steps_per_epoch=4, optimizer=optimizer, tell_optimizer=True)
    message = refused_in_graph(lambda: training.run(16), "ConfigurationError")
    assert "compression.accumulation" in message, message


class Halving(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Half the learning rate every fourth step."""

    def __call__(self, step: Any) -> tf.Tensor:
        return 0.05 * 0.5 ** tf.floor(tf.cast(step, tf.float32) / 4)


def case_a_complex_variable() -> None:
    variable = tf.Variable(tf.ones((64, 64), tf.complex64), name="phases")
    how = compression("topk:ratio=0.1", [variable])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.math.real(tf.reduce_sum(variable))
        hvd.DistributedGradientTape(tape, compression=how).gradient(loss, [variable])

    assert "'phases' has type complex64" in raised(ConfigurationError, step)
