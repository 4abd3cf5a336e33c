"""The bucket form of a method that has none of its own: `aggregate` of each tensor, side by side.

Kernels make x of all tensors in one pass, as in any bucket, and the requests of all tensors travel together. What is
small goes through `aggregate` in NumPy, which takes less time for an operation; what is large in the framework, which
has threads. A method that has a form of its own gets that one (`step_of`).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Generator, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllReduce,
    Context,
    Request,
    SparseVector,
    TensorInfo,
)
from hvdcomp.compressors.sizes import bytes_of
from hvdcomp.kernels.tables import NOTHING

LARGE = 1 << 16
"""Elements up to which `aggregate` of a tensor takes less time in NumPy than in the framework."""


def step_of(bucket: Bucket) -> Generator[Request | list[Request], Any, bool | Array]:
    """The generator of a bucket's step, as of `BucketAggregation`. Where it yields a list of requests, it is answered
    with a list."""
    method = bucket.compressors[0]
    form = method.aggregate_bucket if method.has_bucket_form else _aggregate_each
    found: bool | Array = yield from form(bucket)
    if bucket.widens and bucket.device is not None:  # on the host, what decodes has done so
        found = found + bucket.call("narrow_results")
    if bucket.widens:
        bucket.segments["sent_rule"] = NOTHING
    return found


def preview_of(bucket: Bucket) -> None:
    """Runs a bucket's step, which has begun, as if this rank were the only one that sends: its results are C(x)."""
    method = bucket.compressors[0]
    form = method.preview_bucket if method.has_bucket_form else _preview_each
    form(bucket)


def _aggregate_each(bucket: Bucket) -> Generator[list[Request], Any, bool]:
    each = _Each(bucket)
    with numbers_may_overflow():
        each.start()
        requests = each.advance(dict.fromkeys(range(len(bucket.tensors))))
    bucket.found_inf |= _cast_too_large(requests.values())
    while requests:
        answers = yield list(requests.values())
        with numbers_may_overflow():
            requests = each.advance(dict(zip(requests, answers, strict=True)))
    with numbers_may_overflow():
        return each.end()


def _preview_each(bucket: Bucket) -> None:
    each = _Each(bucket)
    with numbers_may_overflow():
        for place, (compressor, *given) in enumerate(each.arguments()):
            sent = compressor.preview(*given)
            each.put(place, sent)
            each.take_off(place, sent)


def numbers_may_overflow() -> Any:
    """Where a step holds an inf or NaN, its flag says so."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


class _Each:
    """The tensors of a bucket's step that has begun, as arrays of NumPy in the storage that the table names.

    Makes x of them, and sets the bucket's `found_inf`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._generators: list[Aggregation] = []
        self._outcomes: list[Any] = [None] * len(bucket.tensors)
        bucket.found_inf = bucket.call("make_x")
        self._x = _arrays(bucket, bucket.x)
        self._results = _arrays(bucket, "result")
        self._velocities = _arrays(bucket, "next_velocity") if bucket.masks else []

    def arguments(self) -> list[tuple[Any, ModuleType, Array, tuple[Array, ...], Context]]:
        """The compressor of each tensor, and what its `aggregate` gets, with states to start from."""
        bucket = self._bucket
        given: list[Array] = compressed(bucket)
        framework, found = arrays_for(bucket.like), []
        for tensor, compressor, x, kept in zip(bucket.tensors, bucket.compressors, given, bucket.states, strict=True):
            context = dataclasses.replace(bucket.context, name=tensor.name)
            xp = framework if tensor.size > LARGE else numpy_arrays
            x, *state = (xp.from_numpy(one, like=bucket.like) for one in (x, *kept))
            found.append((compressor, xp, x, compressor.prepare(xp, x, tuple(state), context), context))
        return found

    def start(self) -> None:
        """Makes the generators of the tensors."""
        self._generators = [compressor.aggregate(*given) for compressor, *given in self.arguments()]
        self._bucket.handed = np.zeros((len(self._generators), 2), np.int64)

    def advance(self, answers: Mapping[int, Any]) -> dict[int, Request]:
        """Gives generators, by their places, the answers to their last requests, at first None; their next requests,
        none of those that have ended."""
        handed = self._bucket.handed
        assert handed is not None
        requests: dict[int, Request] = {}
        for place, answer in answers.items():
            try:
                requests[place] = self._generators[place].send(answer)
            except StopIteration as stop:
                self._outcomes[place] = stop.value
            else:
                sent = bytes_of(requests[place])
                handed[place] += sent, sent if requests[place].group == "node" else 0
        return requests

    def end(self) -> bool:
        """Puts means and what is left of x where they belong, and states in their place; whether a mean or a state
        holds an inf or NaN."""
        bucket, outcomes = self._bucket, self._outcomes
        for place, outcome in enumerate(outcomes):
            self.put(place, outcome.mean)  # first, as it may lie where x does
            if bucket.keeps:
                self.take_off(place, outcome.sent)
        bucket.states = [tuple(np.array(_numpy(one), order="C") for one in outcome.state) for outcome in outcomes]
        if bucket.keeps and bucket.holds_inf("x"):
            for x in self._x:
                x[...] = numpy_arrays.finite_or_zero(x)  # as in `without`
        states = [one for state in bucket.states for one in state]
        return bucket.holds_inf("result") or bool(numpy_arrays.found_inf(states)[0] != 0)

    def put(self, place: int, found: Array | SparseVector) -> None:
        """Writes the result of a tensor."""
        result = self._results[place]
        if isinstance(found, SparseVector):
            result[...] = 0
            result.reshape(-1)[_numpy(found.indices)] = _numpy(found.values)
        else:
            np.copyto(result, _numpy(found).reshape(result.shape), casting="unsafe")

    def take_off(self, place: int, sent: Array | SparseVector) -> None:
        """Takes what was sent off x, and of the momentum too if that ends there."""
        x = self._x[place]
        if not isinstance(sent, SparseVector):
            np.subtract(x, _numpy(sent), out=x, casting="unsafe")
            return
        places, values = map(_numpy, sent)
        x.reshape(-1)[places] -= values.astype(np.float32, copy=False)
        if self._velocities:
            self._velocities[place].reshape(-1)[places] = 0


def compressed(bucket: Bucket) -> list[np.ndarray]:
    """What is compressed of the tensors, once x is made, in the storage that the table names."""
    sourced = bucket.segments["source"].all()
    return _arrays(bucket, "source" if sourced else "x" if bucket.keeps else "gradient")


def _arrays(bucket: Bucket, name: str) -> list[np.ndarray]:
    addresses = bucket.segments[name].tolist()
    return [_floats(address, tensor) for address, tensor in zip(addresses, bucket.tensors, strict=True)]


def _floats(address: int, tensor: TensorInfo) -> np.ndarray:
    storage = memoryview((ctypes.c_float * tensor.size).from_address(address))
    return np.frombuffer(storage, np.float32).reshape(tensor.shape)


def _numpy(array: Array) -> np.ndarray:
    found: np.ndarray = arrays_for(array).to_numpy(array)
    return found


def _cast_too_large(requests: Iterable[Request]) -> bool:
    """Whether a cast to half precision, for the wire, has made numbers infinite."""
    sums = [_numpy(request.array) for request in requests if isinstance(request, AllReduce)]
    return bool(numpy_arrays.found_inf([one for one in sums if one.dtype == np.float16])[0] != 0)
