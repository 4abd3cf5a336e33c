"""Calls `prepare` and `aggregate`, and checks compressors that are not part of hvdcomp.

Without these checks, a mistake in such a compressor might go unnoticed, cause an error elsewhere, or make ranks wait
for payloads of different sizes. Every error names the method and the tensor. hvdcomp's built-in compressors are called
without these checks, because the test suite already covers them.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays, shapes
from hvdcomp.arrays.types import DTYPE_BYTES, Array, ArrayFunctions
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllGather,
    AllReduce,
    AllToAll,
    Context,
    Outcome,
    ReduceScatter,
    Request,
    SparseVector,
    TensorInfo,
)
from hvdcomp.errors import ConfigurationError, SpecError

_REQUESTS = (AllReduce, AllGather, AllToAll, ReduceScatter)
_ASK = "yield AllReduce(array), AllGather((array, ...)), AllToAll((array, ...)) or ReduceScatter(array)"
_RETURN = "return Outcome(mean=..., sent=...) with two arrays in the shape of x"
_GUIDE = "docs/your-own-compressor.md"

State = tuple[Array, ...]


def is_ours(method: Any) -> bool:
    """Whether a compressor is part of hvdcomp and therefore needs no checks."""
    return type(method).__module__.startswith("hvdcomp.")


def prepare(method: Any, xp: ArrayFunctions, x: Array, state: State, context: Context) -> State:
    """Calls `Compressor.prepare`, and checks the result unless the method is part of hvdcomp."""
    if is_ours(method):
        return tuple(method.prepare(xp, x, state, context))
    call = _Call(method, "prepare", x, context.name)
    try:
        prepared = method.prepare(xp, call.protected(), state, context)
    except Exception as error:
        raise call.failed(error) from error
    call.require_unchanged()
    if not isinstance(prepared, tuple) or not all(map(_is_array, prepared)):
        raise call.error(f"returns {_described(prepared)}; return a tuple of arrays, or () for no arrays")
    return prepared


def aggregate(method: Any, xp: ArrayFunctions, x: Array, state: State, context: Context) -> Aggregation:
    """Runs `Compressor.aggregate`, and checks its requests and result unless the method is part of hvdcomp."""
    if is_ours(method):
        generator: Aggregation = method.aggregate(xp, x, state, context)
        return generator
    return _checked(method, xp, x, state, context)


def require_named(method: Any) -> None:
    """Raises SpecError if the class of a compressor has no name or is not hashable. Call this before training
    begins."""
    kind = type(method)
    if is_ours(method):
        return
    if not isinstance(getattr(kind, "name", None), str):
        raise SpecError(
            f"the class of the compressor {kind.__qualname__} has no name, which hvdcomp needs to save states and to "
            f'compare ranks: write name = "{kind.__name__.lower()}" in the class ({_GUIDE})'
        )
    try:
        hash(method)
    except TypeError as error:
        raise SpecError(
            f"{method}: {kind.__qualname__} cannot be hashed ({error}): make it a frozen dataclass whose fields are "
            f"numbers, strings, and tuples of these ({_GUIDE})"
        ) from None


def require_sound(method: Any, tensor: TensorInfo, rank: int, ranks: int) -> None:
    """Runs a compressor that is not part of hvdcomp on the shape of a tensor. Call this before ranks wait for each
    other.

    Raises:
        ConfigurationError: if the compressor fails, or if payloads differ between ranks or between steps of a period.
    """
    if is_ours(method) or not tensor.size:
        return

    def asked(step: int, of_rank: int) -> tuple[_Asked, ...]:
        context = Context(tensor.name, step, seed=0, rank=of_rank, world_size=ranks)
        return _asked(method, tensor.shape, tensor.dtype, context)

    call = _Call(method, "aggregate", shapes.ShapeArray(tensor.shape, tensor.dtype), tensor.name)
    period, first = method.period, asked(0, 0)
    if (own := asked(0, rank)) != first:
        raise call.error(
            f"asks for {_in_words(own)} on rank {rank}, but for {_in_words(first)} on rank 0; sizes and types must be "
            "the same on all ranks"
        )
    for step in (period, period + 1):
        if (later := asked(step, 0)) != (earlier := asked(step - period, 0)):
            raise call.error(
                f"asks for {_in_words(later)} in step {step}, but for {_in_words(earlier)} in step {step - period}; "
                f"sizes must repeat after `period` steps, and `period` is {period} in this class"
            )


class _Asked(NamedTuple):
    """A description of a request: its kind, operation and ranks, and the shape and element type of each array."""

    kind: str
    arrays: tuple[tuple[tuple[int, ...], str], ...]


def _asked_by(request: Request) -> _Asked:
    arrays = request.arrays
    kind = " ".join(word for word in (type(request).__name__, getattr(request, "op", ""), request.group) if word)
    return _Asked(kind, tuple((tuple(array.shape), _dtype_of(array)) for array in arrays))


def _in_words(requests: tuple[_Asked, ...]) -> str:
    return (
        ", then ".join(
            f"{kind} of {' and '.join(f'{dtype} {list(shape)}' for shape, dtype in arrays) or 'nothing'}"
            for kind, arrays in requests
        )
        or "nothing"
    )


def _asked(method: Any, shape: tuple[int, ...], dtype: str, context: Context) -> tuple[_Asked, ...]:
    """The requests that a method makes in a step. They are found by running the method on arrays without values."""
    requests: list[_Asked] = []
    x = shapes.ShapeArray(shape, dtype)
    generator = _checked(method, shapes, x, prepare(method, shapes, x, (), context), context)
    answer: Any = None
    while True:
        try:
            request = generator.send(answer)
        except StopIteration:
            return tuple(requests)
        requests.append(_asked_by(request))
        answer = _answer_of_shapes(request, context.world_size)


@functools.lru_cache(maxsize=1 << 12)
def _expected(method: Any, shape: tuple[int, ...], dtype: str, step: int, ranks: int) -> tuple[_Asked, ...]:
    return _asked(method, shape, dtype, Context("", step, 0, 0, ranks))


def _answer_of_shapes(request: Request, ranks: int) -> Any:
    if isinstance(request, AllGather):
        return [request.parts] * ranks
    if isinstance(request, AllToAll):
        return [tuple(part[0] for part in request.parts)] * ranks
    return request.array if isinstance(request, AllReduce) else request.array[0]


def _checked(method: Any, xp: ArrayFunctions, x: Array, state: State, context: Context) -> Aggregation:
    call = _Call(method, "aggregate", x, context.name)
    try:
        generator = method.aggregate(xp, call.protected(), state, context)
    except Exception as error:
        raise call.failed(error) from error
    if not isinstance(generator, Generator):
        raise call.error(
            f"is not a generator: it has no yield, and returns {_described(generator)} at once; {_ASK}, then {_RETURN}"
        )
    expected: tuple[_Asked, ...] | None = None
    if xp is not shapes:
        step = context.step % method.period
        expected = _expected(method, tuple(x.shape), xp.dtype_name(x), step, context.world_size)
    answer: Any = None
    number = 0
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as stop:
            call.require_unchanged()
            return _finished(call, xp, stop.value, state)
        except Exception as error:
            raise call.failed(error) from error
        call.require_unchanged()
        _check_request(call, request)
        asked = _asked_by(request)
        if expected is not None and expected[number : number + 1] != (asked,):
            raise call.error(
                f"asks for {_in_words((asked,))} as request {number + 1} of step {context.step}, but asked for "
                f"{_in_words(expected[number : number + 1])} when hvdcomp called it with shapes only. Sizes and types "
                "must not depend on the values of the gradient, because the values differ between ranks. Use xp.where "
                "instead of an if, numbers of elements that follow from the shape, and xp.astype for the type"
            )
        number += 1
        answer = _apart(xp, (yield request), request)


def _apart(xp: ArrayFunctions, answer: Any, request: Request) -> Any:
    """Copies the answer of a request to new storage. With a single rank, the answer is the array of this rank, which
    may share storage with x. With several ranks, an answer never shares storage with x."""
    if xp is shapes:
        return answer
    sent = request.arrays
    if isinstance(answer, list):
        return [tuple(without_sharing(part, sent) for part in parts) for parts in answer]
    return without_sharing(answer, sent)


def without_sharing(array: Array, others: tuple[Array, ...]) -> Array:
    """The array, or a row-major copy of the array if it shares storage with other arrays."""
    xp = arrays_for(array)
    if any(arrays_for(other) is xp and xp.share_storage(array, other) for other in others):
        return xp.reshape(xp.concatenate([xp.flatten(array)]), tuple(array.shape))
    return array


def _check_request(call: _Call, request: Any) -> None:
    if not isinstance(request, _REQUESTS):
        raise call.error(f"yields {_described(request)}; {_ASK}")
    arrays = request.arrays
    if not isinstance(arrays, tuple) or not arrays or not all(map(_is_array, arrays)):
        given = getattr(request, "parts", None) if isinstance(request, AllGather | AllToAll) else request.array
        raise call.error(f"yields {type(request).__name__} of {_described(given)}; {_ASK}")
    for array in arrays:
        if _dtype_of(array) not in DTYPE_BYTES:
            raise call.error(
                f"sends an array of type {_dtype_of(array)}; convert it with xp.astype to one of "
                f"{', '.join(DTYPE_BYTES)}"
            )


def _finished(call: _Call, xp: ArrayFunctions, outcome: Any, state: State) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise call.error(f"returns {_described(outcome)}; {_RETURN}")
    shape = tuple(call.x.shape)
    for field, array in (("mean", outcome.mean), ("sent", outcome.sent)):
        if field == "sent" and isinstance(array, SparseVector):
            places, values = tuple(array.indices.shape), tuple(array.values.shape)
            if len(places) != 1 or places != values:
                raise call.error(
                    f"returns a SparseVector with indices of the shape {list(places)} and values of the shape "
                    f"{list(values)}; both must be vectors of the same length"
                )
            continue
        if isinstance(array, SparseVector) or not _is_array(array) or tuple(array.shape) != shape:
            raise call.error(
                f"returns {_described(array)} as {field}, but x has the shape {list(shape)}; give {field} the shape of "
                f"x, such as with xp.reshape({field}, x.shape)"
            )
    if not isinstance(outcome.state, tuple) or not all(map(_is_array, outcome.state)):
        raise call.error(f"returns {_described(outcome.state)} as state; return a tuple of arrays, or () for no arrays")
    if (made := [tuple(a.shape) for a in outcome.state]) != (kept := [tuple(a.shape) for a in state]):
        raise call.error(
            f"returns a state of the shapes {list(map(list, made))}, but was given a state of the shapes "
            f"{list(map(list, kept))}; return the same number of arrays, with the same shapes, as `prepare` does"
        )
    if xp is numpy_arrays and not np.asarray(outcome.mean).flags.writeable:  # a read-only mean may be x itself
        return outcome._replace(mean=np.array(outcome.mean))
    return outcome


class _Call:
    """One call of a compressor's method for one tensor.

    Args:
        method: the compressor whose method is called.
        function: name of the method that is called.
        x: the array that the method gets. The method must not change it.
        name: the tensor's name; empty if it is unknown.
    """

    def __init__(self, method: Any, function: str, x: Array, name: str) -> None:
        self.x = x
        self._method, self._function, self._name = method, function, name
        self._xp = None if isinstance(x, shapes.ShapeArray) else arrays_for(x)
        self._changes = None if self._xp is None else self._xp.changes(x)

    def protected(self) -> Array:
        """x, made read-only if its framework supports this."""
        return self.x if self._xp is None else self._xp.protected(self.x)

    def require_unchanged(self) -> None:
        """Raises ConfigurationError if x was changed. A change is noticed only if the framework counts changes."""
        if self._xp is not None and self._xp.changes(self.x) != self._changes:
            raise self.error(_CHANGES)

    def failed(self, error: Exception) -> ConfigurationError:
        """The error to raise in place of an error of the compressor."""
        if isinstance(error, ValueError) and "read-only" in str(error):
            return self.error(_CHANGES)
        if isinstance(error, NotImplementedError):
            return self.error(f"is not implemented; write it as a generator: {_ASK}, then {_RETURN}")
        counted = ""
        if isinstance(self.x, shapes.ShapeArray):
            counted = (
                " on an array that has a shape but no values. hvdcomp uses such arrays to count bytes before there are "
                "gradients. Use functions of xp instead of functions of a framework, and do not read values in Python"
            )
        return self.error(f"raised {type(error).__name__}: {error}{counted}")

    def error(self, problem: str) -> ConfigurationError:
        """The error that names this problem, the method and the tensor."""
        kind, shape = type(self._method), list(self.x.shape)
        tensor = f"tensor {self._name!r} of shape {shape}" if self._name else f"a tensor of shape {shape}"
        where = f"{kind.__module__}.{kind.__qualname__}.{self._function}"
        return ConfigurationError(f"{self._method}, {tensor}: {where} {problem} ({_GUIDE})")


_CHANGES = (
    "changes x in place, but error feedback still needs x. Make a new array, such as y = x * 2 instead of x *= 2, or "
    "work on a copy, such as x + 0"
)


def _is_array(value: Any) -> bool:
    if isinstance(value, shapes.ShapeArray | np.ndarray | np.generic):
        return True
    try:
        arrays_for(value)
    except TypeError:
        return False
    return True


def _dtype_of(array: Array) -> str:
    name: str = array.dtype if isinstance(array, shapes.ShapeArray) else arrays_for(array).dtype_name(array)
    return name


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    if _is_array(value):
        return f"an array of {_dtype_of(value)} {list(value.shape)}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if type(value) in (tuple, list) else f"{'an' if kind[0] in 'AO' else 'a'} {kind}"
