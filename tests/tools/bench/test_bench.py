"""`hvdcomp bench encode`: how one method is measured, on a small model's shapes."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel.shapes import MODELS, tensors_of
from hvdcomp.tools.bench.encode import measurement
from hvdcomp.tools.bench.encode.gradients import FRAMEWORKS
from hvdcomp.tools.bench.encode.measurement import MeasurementError, Request, Spread, measure
from hvdcomp.tools.bench.encode.peers import PEERS, POWERSGD

# Tensors and parameters as the models' own publications and implementations count them.
COUNTS = {
    "resnet50": (161, 25_557_032),
    "resnet101": (314, 44_549_160),
    "vgg16": (32, 138_357_544),
    "bert-base": (199, 109_482_240),
    "bert-large": (391, 335_141_888),
    "roberta-base": (199, 124_645_632),
    "gpt2": (148, 124_439_808),
    "gpt2-xl": (580, 1_557_611_200),
    "llama-1b": (146, 1_235_814_400),
    "llama-7b": (291, 6_738_415_616),
    "dlrm": (16, 2_368_897),
    "vit-l-16": (296, 304_326_632),
    "gravac-lstm": (11, 66_034_000),
    "resnet20": (59, 269_722),
    "small-tensors": (200, 819_200),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_published_sizes(model: str) -> None:
    tensors = tensors_of(model)
    assert (len(tensors), sum(tensor.size for tensor in tensors)) == COUNTS[model]


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"])
def test_loopback_is_what_ranks_with_equal_gradients_get(spec: str) -> None:
    gradients = {"w": np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)}
    tensors = [TensorInfo("w", (64, 32))]

    def work(communicator) -> np.ndarray:
        return Engine(communicator, tensors, parse_compressor(spec)).step(gradients)["w"]

    np.testing.assert_allclose(work(LoopbackCommunicator(3)), run_ranks(3, work)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_memory_of_decoding_does_not_grow_with_the_ranks_beyond_the_payload() -> None:
    """TopK of the largest model here: 64 ranks may take the memory of their payloads more than one rank, no more."""
    pytest.importorskip("torch")
    one, many = (
        measure(Request("topk:ratio=0.001", "resnet50", repeats=1, ranks=ranks, threads=2)) for ranks in (1, 64)
    )
    assert one.bytes_sent is not None
    payloads = 64 * one.bytes_sent / 2**20
    dense = 97.5  # MiB
    assert many.peak_mb - one.peak_mb < 3 * payloads + dense / 2


# One method in a process of its own.


@pytest.mark.parametrize(
    ("method", "memory", "expected"),
    [
        ("none", None, 0.0), ("int8", None, 0.0), ("int8", "error_feedback", 8.0), ("dgc:ratio=0.01", None, 16.0),
        ("powersgd:rank=4", None, 8.67), ("topk:ratio=0.01", "error_feedback:dtype=bf16", 1.98),
        ("topk:ratio=0.01", "none", 0.0),
    ],
)  # fmt: skip
def test_what_is_kept_is_counted(method: str, memory: str | None, expected: float) -> None:
    """Residuals, the momentum's velocities, and factors: each twice, for steps that may come to nothing; in 16 bits the
    second place is taken anew in each step."""
    one = measure(Request(method, "resnet20", "numpy", repeats=1, memory=memory))
    if one.native_kernels is None:
        pytest.skip("needs hvdcomp's kernels")
    assert one.kept_bytes == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=[pytest.mark.thorough] * (one == "tensorflow")) for one in FRAMEWORKS]
)
def test_a_method_is_measured_in_each_framework(framework: str) -> None:
    if framework != "numpy":
        pytest.importorskip(framework)
    one = measure(Request("topk:ratio=0.01", "resnet20", framework, repeats=3))
    assert one.turns == 3
    for spread in (one.step_ms, one.copy_ms, one.ratio_to_copy, one.cpu_ms):
        assert 0 < spread.low <= spread.median <= spread.high
    assert one.compression_factor is not None
    assert one.compression_factor > 40
    assert one.kept_bytes is not None
    # In buckets, a step fills one place and reads the other; without kernels a residual is one array.
    assert 8 <= one.kept_bytes < 8.01 or (one.native_kernels is None and one.kept_bytes < 4.01)
    assert (one.operations is None) == (framework != "torch")
    assert one.operations is None or one.operations > 0
    assert one.kernel_launches is None


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[pytest.mark.thorough] * (one != POWERSGD)) for one in PEERS]
)
def test_the_peers_run_and_all_their_operations_are_counted(method: str) -> None:
    """More of the PowerSGD hook's operations come after its first collective than before."""
    pytest.importorskip("torch")
    one = measure(Request(method, "resnet20", threads=2, repeats=1))
    assert one.step_ms.median > 0
    assert one.operations is not None
    assert one.operations > (300 if method == POWERSGD else 2)
    assert one.bytes_sent is None


def test_turns_are_added_until_the_seconds_are_over() -> None:
    one = measure(Request("none", "resnet20", "numpy", repeats=2, seconds=0.3))
    turns_ms = one.turns * (one.step_ms.median + one.copy_ms.median)
    assert one.turns > 2
    assert turns_ms < 1000


def die(request: Request) -> None:
    """Takes the place of a measurement, in its process."""
    os._exit(9)


def test_what_fails_in_the_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="topq: SpecError: unknown compressor 'topq'"):
        measure(Request("topq", "resnet20", "numpy"))
    monkeypatch.setattr(measurement, "measure_here", die)
    with pytest.raises(MeasurementError, match="measured topk was killed, perhaps because memory ran out"):
        measure(Request("topk", "resnet20", "numpy"))


def test_the_processs_libraries_get_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(measurement, "measure_here", variables)
    assert measure(Request("none", "resnet20", "numpy", threads=3)) == ("3", "3")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


def variables(request: Request) -> tuple[str, str]:
    """Takes the place of a measurement, in its process."""
    return os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]


# Gradients.

SHAPES = [TensorInfo("bias", (3,)), TensorInfo("weight", (5, 7)), TensorInfo("scalar", ())]


@pytest.fixture
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process chooses its number of threads once; tests share one."""
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda count: None)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", lambda count: None)


@pytest.mark.usefixtures("threads_stay")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_are_the_same_in_each_framework_and_what_they_were_after_a_step(framework: str) -> None:
    pytest.importorskip("torch")
    plain = FRAMEWORKS["numpy"](SHAPES, 1, "cpu").arrays
    gradients = FRAMEWORKS[framework](SHAPES, 1, "cpu")
    for _ in range(2):
        for tensor in SHAPES:
            array = np.asarray(gradients.arrays[tensor.name])
            assert array.shape == tensor.shape
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, plain[tensor.name])
        for name in gradients.arrays:
            if framework == "tensorflow":
                gradients.arrays[name] = gradients.arrays[name] * 0
            else:
                gradients.arrays[name][...] = 0
        gradients.copy()
        gradients.restore()
    assert 0 < np.abs(plain["weight"]).max() < 0.1


@pytest.mark.usefixtures("threads_stay")
@pytest.mark.parametrize(("framework", "operations"), [("torch", 3), ("tensorflow", None), ("numpy", None)])
def test_operations_are_counted(framework: str, operations: int | None) -> None:
    gradients = FRAMEWORKS[framework](SHAPES, 1, "cpu")
    weight = gradients.arrays["weight"]
    assert gradients.operations(lambda: abs(weight * 2) + weight) == operations
    assert gradients.operations(lambda: None) == (None if operations is None else 0)


def test_quartiles_are_of_the_values_themselves() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
