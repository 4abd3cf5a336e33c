"""The TensorFlow and Keras cases of `tests.multirank`, on 2 to 4 real ranks, with MPI and with Gloo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launched import run_ranks
from tests.multirank.outcomes import EACH_ONCE, asked_for, cases, check, run_once

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here: run `hvdcomp build-horovod`")

# The first case of a setting waits for all cases of that setting.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(3600)]

_BOTH = "cases_tensorflow_and_torch"  # starts a second Horovod, which wants a fresh process
# On two ranks only, and with Gloo, where nothing depends on the number of ranks or on the controller, or
# `cases_tensorflow` has it.
_MODULES = {
    "cases_tensorflow": EACH_ONCE,
    "cases_tensorflow_precision": ((2, "gloo"),),
    "cases_tensorflow_refused": EACH_ONCE,
    "cases_tensorflow_policies": EACH_ONCE,
    "cases_tensorflow_collectives": ((2, "gloo"), (2, "mpi"), (3, "gloo")),
    "cases_tensorflow_process_sets": ((3, "gloo"),),
    "cases_tensorflow_variables": ((2, "gloo"),),
    "cases_tensorflow_rows": ((2, "gloo"), (3, "mpi")),
    "cases_keras": ((2, "gloo"),),
    "cases_keras_callback": ((2, "gloo"),),
}
if find_spec("torch") is not None:
    _MODULES[_BOTH] = EACH_ONCE
    _MODULES["cases_tensorflow_on_device"] = ((2, "gloo"),)


@pytest.mark.parametrize(("module", "case", "count", "controller"), cases(_MODULES))
def test_on_real_ranks(request: pytest.FixtureRequest, module: str, case: str, count: int, controller: str) -> None:
    check(run_once(asked_for(request, apart=(_BOTH,)), count, controller), module, case)


# What a process decides when it starts needs processes of its own.

# Keras 3, and then a step where TensorFlow has only one thread.
_REFUSED = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
import horovod.tensorflow as hvd
hvd.init()
import hvdcomp
assert tf.keras.__version__.startswith("3")
from horovod.tensorflow.keras import DistributedOptimizer
model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(40)])
try:
    hvdcomp.Compression.from_spec("topk:ratio=0.1", variables=model.trainable_variables)
except hvdcomp.ConfigurationError as error:
    print("refused:", error, flush=True)
weights = [variable.value for variable in model.trainable_variables]
compression = hvdcomp.Compression.from_spec("topk:ratio=0.1", variables=weights)
try:
    optimizer = DistributedOptimizer(tf.keras.optimizers.SGD(), compression=compression)
    model.compile(optimizer, "mse")
    model.fit(tf.zeros((16, 64)), tf.zeros((16, 40)), callbacks=[hvdcomp.tensorflow.keras.PolicyCallback(compression)])
except hvdcomp.ConfigurationError as error:
    print("refused:", error, flush=True)
from tests.multirank.training_tensorflow import TapeTraining
try:
    TapeTraining("topk:ratio=0.1").step()
except hvdcomp.ConfigurationError as error:
    print("refused:", error, flush=True)
"""

_ONE_RANK = """
import horovod.tensorflow as hvd
hvd.init()
import numpy as np
from tests.multirank.training_tensorflow import TapeTraining
assert hvd.size() == 1
ours = TapeTraining("topk:ratio=0.01").run(5)
theirs = TapeTraining(hvd.Compression.none).run(5)
assert np.array_equal(ours.weights, theirs.weights)
assert ours.compression.ledger.steps == 0
print("same weights", flush=True)
"""


def _output(program: str, folder: Path, count: int, **environment: str) -> str:
    path = folder / "program.py"
    path.write_text(program)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return run_ranks(count, "gloo", [str(path)], environment, timeout=120).stdout


@pytest.mark.thorough
def test_keras_3_and_one_inter_op_thread_are_refused_on_every_rank(tmp_path: Path) -> None:
    output = _output(_REFUSED, tmp_path, 2, TF_USE_LEGACY_KERAS="0")
    assert output.count("refused: ") == 6, output[-3000:]
    assert output.count("TF_USE_LEGACY_KERAS=1") >= 4, output[-3000:]
    assert output.count("refused: TensorFlow runs with 1 inter-op thread") == 2, output[-3000:]


@pytest.mark.thorough
def test_one_rank_trains_as_without_compression(tmp_path: Path) -> None:
    output = _output(_ONE_RANK, tmp_path, 1)
    assert "same weights" in output, output[-3000:]
