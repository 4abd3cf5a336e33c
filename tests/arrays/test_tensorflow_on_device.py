"""TensorFlow's tensors as PyTorch's, and back: which of them share storage, and how long what is shared is held."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
torch = pytest.importorskip("torch", reason="needs PyTorch")

from hvdcomp.arrays import tensorflow_on_device  # noqa: E402
from hvdcomp.arrays.tensorflow_on_device import DeviceTensors  # noqa: E402
from hvdcomp.kernels import cuda  # noqa: E402
from hvdcomp.tensorflow.placement import device_of  # noqa: E402


@pytest.fixture
def between() -> DeviceTensors:
    return DeviceTensors(tf.ones(3))


def address(tensor: Any) -> int:
    return int(np.asarray(tensor).__array_interface__["data"][0])


def test_the_device_is_the_tensor_s(between: DeviceTensors) -> None:
    assert between.device == torch.device("cpu")
    assert between.name.endswith("CPU:0")


def test_what_passes_shares_its_storage(between: DeviceTensors) -> None:
    for dtype in ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        for shape in ((5,), (0,), (), (3, 1), (1, 5), (2, 0)):
            array = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
            (tensor,) = between.tensors([array])
            assert (tensor.dtype.name, tuple(tensor.shape)) == (dtype, shape)
            (back,) = between.arrays([tensor])
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert torch.equal(back, array)
            if array.numel():
                assert back.data_ptr() == array.data_ptr()


def test_tensorflow_gets_no_array_that_it_could_not_work_on(between: DeviceTensors) -> None:
    """It ends the process when an operation meets storage that begins at no multiple of 64 bytes."""
    whole = torch.arange(200.0)
    odd, turned = whole[1:65], whole[:64].reshape(8, 8).t()
    for array, tensor in zip((odd, turned), between.tensors([odd, turned]), strict=True):
        np.testing.assert_array_equal(tensor, array)
        np.testing.assert_array_equal(tensor + 1, array + 1)
        assert address(tensor) % 64 == 0


def test_results_of_a_bucket_pass_without_a_copy(between: DeviceTensors) -> None:
    """They are parts of one storage, each where TensorFlow can work on it."""
    parts, addresses = cuda.split_like([torch.zeros(shape) for shape in ((3,), (5, 7), (1,), (64,))])
    assert [part.data_ptr() for part in parts] == addresses
    tensors = between.tensors(parts)
    assert [address(tensor) for tensor in tensors] == addresses
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_call_in_a_graph(between: DeviceTensors) -> None:
    def function(*arrays: Any) -> list[Any]:
        assert all(isinstance(array, torch.Tensor) for array in arrays)
        return [array * 2 for array in arrays]

    given = [tf.reshape(tf.range(6.0), (3, 2)), tf.constant(2.0), tf.zeros((0, 4)), tf.ones((3,), tf.bfloat16)]
    results = tf.function(lambda *inside: between.in_graph(function, inside, "call"), autograph=False)(*given)
    for result, tensor in zip(results, given, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(result, tensor * 2)


def test_what_tensorflow_reads_is_held_until_it_has_let_go_and_was_waited_for(between: DeviceTensors) -> None:
    array = torch.arange(64.0)
    where = array.data_ptr()
    (tensor,) = between.tensors([array])
    del array

    def held() -> list[int]:
        return [storage.data_ptr() for storage in between._of_torch.values()]

    assert held() == [where]
    between.arrays([tf.ones(1)])
    assert held() == [where]  # TensorFlow has it still: kernels may yet be queued that read it
    del tensor
    gc.collect()
    assert held() == [where]  # queued kernels may still have to read it
    between.arrays([tf.ones(1)])
    assert held() == []


def test_what_pytorch_reads_is_held_until_the_step_ends(between: DeviceTensors) -> None:
    def function(array: Any) -> list[Any]:
        between.arrays([tf.ones(7)])
        assert [one.numel() for one in between._of_tensorflow] == [3, 7]
        return [array + 1]

    def call() -> Any:
        return tf.function(lambda inside: between.in_graph(function, [inside], "call"), autograph=False)(tf.ones(3))

    call()
    assert between._of_tensorflow == []


def test_copies_on_the_host_and_back(between: DeviceTensors) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        on_host = tf.cast([1.5, -2.0, float("inf")], dtype).numpy()
        there = between.from_host(on_host)
        assert str(there.dtype) == f"torch.{dtype}"
        back = between.to_host(there)
        there += 1
        assert back.dtype == on_host.dtype
        np.testing.assert_array_equal(back, on_host)


class _Managed(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor, as its specification has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
    )


def test_the_number_of_a_gpu_is_written_where_the_other_looks_for_it() -> None:
    """TensorFlow's GPU:0 is CUDA's third where it was shown that one alone."""
    array = torch.zeros(2, 3)
    capsule = torch.utils.dlpack.to_dlpack(array)
    managed = _Managed.from_address(tensorflow_on_device._pointer_of(capsule, b"dltensor"))
    assert (managed.data, managed.device_type, managed.ndim, managed.bits) == (array.data_ptr(), 1, 2, 32)
    tensorflow_on_device._numbered(capsule, 2)
    assert managed.device_id == 0  # the host has one number
    managed.device_type = 2
    tensorflow_on_device._numbered(capsule, 2)
    assert (managed.device_type, managed.device_id, managed.ndim) == (2, 2, 2)
    managed.device_type = 1


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Variables that say so."""
    variable = tf.Variable(tf.ones(3))
    monkeypatch.setattr(type(variable), "device", property(lambda self: "/job:localhost/device:GPU:0"))
    return [variable]


def test_without_pytorch_one_line_says_that_the_host_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = _on_a_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.warns(UserWarning, match="copied to the host and compressed there: .*PyTorch, which cannot be im"):
        assert device_of(variables, warns=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_of(variables, warns=False) is None  # on the other ranks
        assert device_of(variables, warns=True) is None  # where warnings are errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_pytorch_that_finds_no_gpu_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"needs PyTorch for CUDA, but PyTorch \S+ finds no CUDA device"):
        assert device_of(_on_a_gpu(monkeypatch), warns=True) is None


def test_so_is_that_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_KERNELS", "off")
    with cuda.serving_host(), pytest.warns(UserWarning, match="HVDCOMP_KERNELS=off is set in the environment"):
        assert device_of([tf.Variable(tf.ones(3))], warns=True) is None


def test_on_the_host_nobody_asks_for_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_of([tf.Variable(tf.ones(3))], warns=True) is None


_IN_ONE_PROCESS = """
import sys
for name in sys.argv[1:]:
    __import__(name)
import tensorflow as tf
from tests.cuda_kernels import assembly_for, launches
before = tf.function(lambda x: tf.sin(x) + 1, jit_compile=True)(tf.ones(4)).numpy()
assembly = assembly_for(launches("fp16", [(64, 1100)])[0], 70)
after = tf.function(lambda x: tf.sin(x) + 1, jit_compile=True)(tf.ones(4)).numpy()
assert ".target sm_70" in assembly
assert (before == after).all()
"""


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "order",
    [("tensorflow", "hvdcomp.kernels.cuda.language"), ("hvdcomp.kernels.cuda.language",), ("triton", "tensorflow")],
    ids=["tensorflow first", "hvdcomp first", "triton first"],
)
def test_the_compilers_of_tensorflow_and_triton_work_in_one_process(order: tuple[str, ...], tmp_path: Path) -> None:
    """Each has an LLVM of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_ONE_PROCESS, *order],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env={**_environment(), "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
