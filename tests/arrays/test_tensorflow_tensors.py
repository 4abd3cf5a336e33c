"""TensorFlow's tensors as arrays, and back: which of them share storage, and what nobody may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from hvdcomp.arrays.tensorflow_tensors import array_of, in_graph, tensor_of  # noqa: E402
from hvdcomp.exchange.recycled import Recycled  # noqa: E402


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def called(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> list[Any]:
    """What comes of a call in a graph."""
    return tf.function(lambda *inside: in_graph(function, inside, "call"), autograph=False)(*tensors)


def test_gradients_come_without_a_copy_and_cannot_be_changed() -> None:
    tensors = [tf.random.normal((64, 32)), tf.random.normal((7,))]
    seen: list[np.ndarray] = []

    def look(*arrays: np.ndarray) -> list[np.ndarray]:
        seen.extend(arrays)
        with pytest.raises(ValueError, match="read-only"):
            arrays[0][0] = 0
        return [np.array(array) for array in arrays]

    called(look, tensors)
    assert [address(array) for array in seen] == [address(np.asarray(tensor)) for tensor in tensors]


def test_results_of_the_engine_become_tensors_without_a_copy() -> None:
    tensors = [tf.ones((64, 32)), tf.ones((7,)), tf.ones(()), tf.ones((5, 3))]
    made: list[np.ndarray] = []

    def work(*arrays: np.ndarray) -> list[np.ndarray]:
        made.extend(Recycled([array.shape for array in arrays]).arrays()[0])
        for array, new in zip(arrays, made, strict=True):
            new[...] = array * 2
        return made

    results = called(work, tensors)
    for result, array, tensor in zip(results, made, tensors, strict=True):
        assert result.shape == tensor.shape
        np.testing.assert_array_equal(result, tensor * 2)
        if array.ndim:  # a number is copied
            assert address(np.asarray(result)) == address(array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_element_type_goes_there_and_back(dtype: str) -> None:
    tensors = [tf.cast(tf.constant(values), dtype) for values in ([1.5, -2.0, float("inf")], 3.0, [], [[1.0], [2.0]])]
    results = called(lambda *arrays: [array + array for array in arrays], tensors)
    for result, tensor in zip(results, tensors, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(np.asarray(result, np.float32), np.asarray(tensor + tensor, np.float32))


def test_memory_is_used_again_when_its_tensors_are_gone() -> None:
    memory = Recycled([(100_000,)])
    addresses: list[int] = []

    def work(array: np.ndarray) -> list[np.ndarray]:
        (new,), (at,) = memory.arrays()
        assert at == address(new)
        new[...] = array
        addresses.append(address(new))
        return [new]

    tensor = tf.range(100_000, dtype=tf.float32)
    call = tf.function(lambda inside: in_graph(work, [inside], "call")[0], autograph=False)
    kept = [call(tensor + place) for place in range(5)]
    for place, result in enumerate(kept):
        np.testing.assert_array_equal(result, tensor + place)
    assert len(set(addresses)) == 5
    kept.clear()
    addresses.clear()
    for place in range(20):
        np.testing.assert_array_equal(call(tensor - place), tensor - place)
    assert len(set(addresses)) <= 3


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_what_a_collective_takes_and_gives_shares_its_storage(dtype: str, length: int) -> None:
    whole = np.arange(length + 1).astype(dtype)
    array = whole[1:]  # at no multiple of a cache line
    tensor = tensor_of(array)
    assert tensor.dtype.name == dtype
    back = array_of(tensor)
    np.testing.assert_array_equal(back, array, strict=True)
    if length:
        assert address(back) == address(array)


def test_an_array_that_may_not_be_changed_is_copied() -> None:
    message = np.frombuffer(b"abc", np.uint8)
    tensor = tensor_of(message)
    assert bytes(array_of(tensor)) == b"abc"
    assert address(array_of(tensor)) != address(message)
