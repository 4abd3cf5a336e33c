"""TensorFlow with a process set that leaves out the last rank, where Horovod traces the compression all the same."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np

from hvdcomp.errors import ConfigurationError
from tests.multirank.cases_keras import fitted
from tests.multirank.training_tensorflow import TapeTraining, gathered, raised, weights
from tests.multirank.worker import thorough

LAST = hvd.size() - 1
INSIDE = hvd.add_process_set(list(range(LAST)))


def alone(training: TapeTraining) -> TapeTraining:
    """The same training without Horovod."""
    training.gradients = lambda tape, loss: tape.gradient(loss, training.variables)  # type: ignore[method-assign]
    return training


def assert_trained_apart(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Asserts the same weights inside the set, others outside, and everywhere those of Horovod without compression."""
    everyone = gathered(ours)
    assert all(np.array_equal(everyone[0], row) for row in everyone[1:LAST])
    assert not np.array_equal(everyone[0], everyone[LAST])
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@thorough
def case_a_tape() -> None:
    for spec, graph in (("topk:ratio=1.0", True), ("topk:ratio=1.0", False), ("none", True)):
        options: dict[str, Any] = {"graph": graph, "tape": {"process_set": INSIDE}}
        ours = TapeTraining(spec, process_set=INSIDE, **options).run(5)
        theirs = TapeTraining(hvd.Compression.none, **options).run(5)
        assert_trained_apart(ours.weights, theirs.weights)
        assert ours.compression.ledger.steps == (0 if hvd.rank() == LAST else 5)
        if hvd.rank() == LAST:
            assert np.array_equal(ours.weights, alone(TapeTraining(spec, graph=graph)).run(5).weights)


@thorough
def case_keras_fit() -> None:
    options: dict[str, Any] = {"steps": 4, "epochs": 2, "process_set": INSIDE}
    ours = fitted("topk:ratio=1.0", options={"process_set": INSIDE}, **options)
    theirs = fitted(hvd_keras.Compression.none, **options)
    assert_trained_apart(weights(ours.trainable_variables), weights(theirs.trainable_variables))


@thorough
def case_a_policy_and_its_state() -> None:
    options: dict[str, Any] = {"tape": {"process_set": INSIDE}, "process_set": INSIDE, "steps_per_epoch": 2}
    options |= {"policy": "accordion:low=0.5,high=0.02,interval=1", "tell_optimizer": True}
    whole = TapeTraining("topk:ratio=0.1", **options).run(6)
    resumed = TapeTraining("topk:ratio=0.1", **options)
    resumed.compression.load_state_dict(whole.compression.state_dict())
    assert resumed.compression.accumulation == 1
    everyone = gathered(resumed.run(2).weights)
    assert all(np.array_equal(everyone[0], row) for row in everyone[1:LAST])


@thorough
def case_another_process_set_is_refused_on_every_rank() -> None:
    other = hvd.add_process_set(list(range(1, hvd.size())))
    training = TapeTraining("topk:ratio=0.1", process_set=INSIDE, tape={"process_set": other})
    assert "give both the same" in raised(ConfigurationError, training.step)
    training = TapeTraining("topk:ratio=0.1", tape={"process_set": INSIDE})
    assert "process_set=" in raised(ConfigurationError, training.step)
    hvd.remove_process_set(other)
