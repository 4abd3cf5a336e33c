"""The default bucket form of a method: `aggregate` of each tensor, side by side.

Kernels make x of all tensors in one pass, as in any bucket, and the requests of all tensors travel together. A small
tensor goes through `aggregate` in NumPy, which has the smaller overhead per operation; a large tensor goes through it
in the framework, which has threads. `step_of` prefers a method's own bucket form where there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import checked
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.inside import LARGE, numbers_may_overflow
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllReduce,
    Context,
    Request,
    SparseVector,
)
from hvdcomp.compressors.sizes import bytes_of
from hvdcomp.kernels.tables import NOTHING, PRODUCT


def step_of(bucket: Bucket) -> Generator[Request | list[Request], Any, bool | Array]:
    """The generator of a bucket's step (`BucketAggregation`). A list of requests that it yields gets a list of
    answers."""
    method = bucket.compressors[0]
    form = method.aggregate_bucket if bucket.has_form else _aggregate_each
    found_inf: bool | Array = yield from form(bucket)
    if bucket.widens and bucket.device is not None:  # on the host, decoding has narrowed them
        found_inf = found_inf + bucket.call("narrow_results")
    if bucket.widens:
        rules = bucket.segments["sent_rule"]
        rules[rules != PRODUCT] = NOTHING
    return found_inf


def preview_of(bucket: Bucket) -> None:
    """Runs a bucket's step, which has begun, as if this rank were the only one that sends: its results are C(x)."""
    method = bucket.compressors[0]
    form = method.preview_bucket if bucket.has_form else _preview_each
    form(bucket)


def _aggregate_each(bucket: Bucket) -> Generator[list[Request], Any, bool]:
    tensors = _TensorByTensor(bucket)
    with numbers_may_overflow():
        tensors.start()
        requests = tensors.advance(dict.fromkeys(range(len(bucket.tensors))))
    bucket.found_inf |= _cast_too_large(requests.values())
    while requests:
        answers = yield list(requests.values())
        with numbers_may_overflow():
            requests = tensors.advance(dict(zip(requests, answers, strict=True)))
    with numbers_may_overflow():
        return tensors.end()


def _preview_each(bucket: Bucket) -> None:
    tensors = _TensorByTensor(bucket)
    with numbers_may_overflow():
        for place, (compressor, *arguments) in enumerate(tensors.arguments()):
            sent = compressor.preview(*arguments)
            tensors.put(place, sent)
            tensors.take_off(place, sent)


class _TensorByTensor:
    """The tensors of a bucket whose step has begun, as NumPy arrays in the storage that the table names.

    Making one makes x of all tensors and sets the bucket's `found_inf`.
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
        """For each tensor its compressor and the arguments of `aggregate`, with the state to start from."""
        bucket = self._bucket
        inputs: list[Array] = compressed(bucket)
        framework, arguments = arrays_for(bucket.like), []
        for tensor, compressor, x, kept in zip(bucket.tensors, bucket.compressors, inputs, bucket.states, strict=True):
            context = dataclasses.replace(bucket.context, name=tensor.name)
            xp = framework if tensor.size > LARGE else numpy_arrays
            x, *state = (xp.from_numpy(array, like=bucket.like) for array in (x, *kept))
            arguments.append((compressor, xp, x, checked.prepare(compressor, xp, x, tuple(state), context), context))
        return arguments

    def start(self) -> None:
        """Makes the generators of the tensors."""
        self._generators = [checked.aggregate(*arguments) for arguments in self.arguments()]
        self._bucket.handed = np.zeros((len(self._generators), 2), np.int64)

    def advance(self, answers: Mapping[int, Any]) -> dict[int, Request]:
        """Sends answers to the generators and collects their next requests.

        Args:
            answers: by the tensor's place in the bucket, the answer to its last request; None to start.

        Returns:
            The next request of each generator that has not ended, by place.
        """
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
        """Writes means, residuals and states to their storage; whether a mean or a state holds an inf or NaN."""
        bucket, outcomes = self._bucket, self._outcomes
        for place, outcome in enumerate(outcomes):
            self.put(place, outcome.mean)  # first, as it may share the storage of x
            if bucket.keeps:
                self.take_off(place, outcome.sent)
        bucket.states = [tuple(np.array(_numpy(array), order="C") for array in outcome.state) for outcome in outcomes]
        if bucket.keeps and bucket.holds_inf("x"):
            for x in self._x:
                x[...] = numpy_arrays.finite_or_zero(x)  # as in `without`
        states = [array for state in bucket.states for array in state]
        return bucket.holds_inf("result") or bool(numpy_arrays.found_inf(states)[0] != 0)

    def put(self, place: int, values: Array | SparseVector) -> None:
        """Writes the result of a tensor."""
        result = self._results[place]
        if isinstance(values, SparseVector):
            result[...] = 0
            result.reshape(-1)[_numpy(values.indices)] = _numpy(values.values)
        else:
            np.copyto(result, _numpy(values).reshape(result.shape), casting="unsafe")

    def take_off(self, place: int, sent: Array | SparseVector) -> None:
        """Subtracts what was sent from x; with masking, clears the momentum at the places sent."""
        x = self._x[place]
        if not isinstance(sent, SparseVector):
            np.subtract(x, _numpy(sent), out=x, casting="unsafe")
            return
        places, values = map(_numpy, sent)
        x.reshape(-1)[places] -= values.astype(np.float32, copy=False)
        if self._velocities:
            self._velocities[place].reshape(-1)[places] = 0


def compressed(bucket: Bucket) -> list[np.ndarray]:
    """The arrays that are compressed, once x is made, as views of the storage that the table names."""
    sourced = bucket.segments["source"].all()
    return _arrays(bucket, "source" if sourced else bucket.x)


def _arrays(bucket: Bucket, name: str) -> list[np.ndarray]:
    vectors = bucket.table.vectors(name)
    return [vector.reshape(tensor.shape) for vector, tensor in zip(vectors, bucket.tensors, strict=True)]


def _numpy(array: Array) -> np.ndarray:
    converted: np.ndarray = arrays_for(array).to_numpy(array)
    return converted


def _cast_too_large(requests: Iterable[Request]) -> bool:
    """Whether the cast to half precision for the wire made numbers infinite."""
    sums = [_numpy(request.array) for request in requests if isinstance(request, AllReduce)]
    return bool(numpy_arrays.found_inf([array for array in sums if array.dtype == np.float16])[0] != 0)
