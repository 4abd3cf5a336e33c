"""Fusion: one collective carries many requests of a round.

Requests are fused if they have the same kind, operation, element type, group of ranks and device. Their arrays are
copied into one buffer:

- All-reduce: the arrays follow each other in one vector.
- All-gather: the parts of all requests follow each other in a vector of bytes, with the largest element type first. So
  every part is aligned, without padding between parts.
- All-to-all and reduce-scatter: the buffer has one row for each rank. Each row is filled in the same way.

If a request is not fused with others, and has `with_room`, its own storage is sent without a copy.

The requests of buckets on the host contain NumPy arrays, and so do the answers to them. A communicator always sends
arrays of the framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import DTYPE_BYTES, AllFunctions, AnyArray, Array, number_of_elements
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.bucket import ROW_ALIGNMENT
from hvdcomp.compressors.packing import cut
from hvdcomp.compressors.protocol import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from hvdcomp.exchange.ledger import Sent


class Round:
    """The collectives of one round. The constructor starts all of them, and waits for none.

    Args:
        xp: the array functions of the framework.
        communicator: the communicator of the ranks that exchange.
        requests: the requests of the round. Their arrays belong to the framework or to NumPy.
        name: the name of the round. Two rounds that run at the same time need different names.
        like: an array of the framework, on the device where collectives run.

    Attributes:
        sent: number of bytes that this rank sent, including padding.
    """

    def __init__(
        self, xp: AllFunctions, communicator: Communicator, requests: Sequence[Request], name: str, like: Array
    ) -> None:
        self._xp = xp
        self._requests = requests
        self.sent = Sent()
        by_kind: dict[tuple[str, ...], list[int]] = {}
        for number, request in enumerate(requests):
            by_kind.setdefault(_kind_of(request), []).append(number)
        self._started = []
        for position, (kind, members) in enumerate(by_kind.items()):
            fused: list[Any] = [requests[number] for number in members]
            # If all requests are in NumPy, NumPy fuses them: it needs a tenth of the framework's time for a slice.
            inside = numpy_arrays if all(map(_is_numpy, fused)) else xp
            if inside is not numpy_arrays:
                fused = [_of_framework(xp, request, like) for request in fused]
            buffer: AnyArray
            buffer, offsets = _together(inside, fused)
            handed = part_bytes(inside, buffer)
            if inside is not xp:
                buffer = xp.from_numpy(buffer, like=like)
            collective_name = f"{name}.{position}.{'.'.join(kind[:-1])}"
            part = communicator.part(fused[0].group)
            has_others = part.world_size < communicator.world_size
            self.sent += Sent(handed, handed if fused[0].group == "node" and has_others else 0)
            handle = _start(part, fused[0], buffer, collective_name)
            self._started.append((inside, members, fused, offsets, part, handle))

    def wait(self) -> list[Any]:
        """Waits for all collectives, and returns the answers in the order of the requests. Call it once."""
        xp = self._xp
        answers: list[Any] = [None] * len(self._requests)
        for inside, members, fused, offsets, part, handle in self._started:
            result = part.wait(handle)
            if inside is not xp:
                result = xp.to_numpy(result)
            split = _apart(inside, result, fused, offsets)
            for number, answer in zip(members, split, strict=True):
                wanted = inside is not numpy_arrays and _is_numpy(self._requests[number])
                answers[number] = _in_numpy(xp, answer) if wanted else answer
        self._started.clear()
        return answers


def _start(communicator: Communicator, request: Request, buffer: Array, name: str) -> Any:
    """Starts the collective that a request asks for, over a fused buffer."""
    if isinstance(request, AllReduce):
        return communicator.start_allreduce(buffer, request.op, name)
    if isinstance(request, ReduceScatter):
        return communicator.start_reducescatter(buffer, request.op, name)
    if isinstance(request, AllToAll):
        return communicator.start_alltoall(buffer, name)
    return communicator.start_allgather(buffer, name)


def _together(xp: AllFunctions, fused: Sequence[Any]) -> tuple[Array, list[list[int]] | None]:
    """The buffer of a collective; and for an all-gather or an all-to-all the offsets of each request's parts, in bytes
    from the beginning of a row, else None."""
    if _travels_as_it_is(fused):
        return fused[0].arrays[0], None
    if isinstance(fused[0], AllReduce):
        return xp.concatenate([xp.flatten(request.array) for request in fused]), None
    if isinstance(fused[0], ReduceScatter):
        return _joined(xp, [_rows(xp, request.array, request.array.shape[0]) for request in fused]), None
    return _pack(xp, fused)


def _apart(xp: AllFunctions, result: Array, fused: Sequence[Any], offsets: list[list[int]] | None) -> list[Any]:
    """The answer to each request of a collective."""
    if _travels_as_it_is(fused):
        return [result]
    return _split(xp, result, fused) if offsets is None else _unpack(xp, result, fused, offsets)


def _travels_as_it_is(fused: Sequence[Request]) -> bool:
    return len(fused) == 1 and fused[0].with_room is not None


def _is_numpy(request: Request) -> bool:
    return isinstance(request.arrays[0], (np.ndarray, np.generic))  # NumPy's sums of shape () are generic


def _of_framework(xp: AllFunctions, request: Request, like: Array) -> Request:
    if not _is_numpy(request):
        return request
    if isinstance(request, AllReduce | ReduceScatter):
        return type(request)(xp.from_numpy(np.asarray(request.array), like=like), request.op, group=request.group)
    parts = tuple(xp.from_numpy(np.asarray(part), like=like) for part in request.parts)
    if isinstance(request, AllToAll):
        return AllToAll(parts, group=request.group, in_rows=request.in_rows)
    room = None if request.with_room is None else xp.from_numpy(request.with_room, like=like)
    return AllGather(parts, room, request.group, request.in_rows)


def _in_numpy(xp: AllFunctions, answer: Any) -> Any:
    if isinstance(answer, list):
        return [tuple(map(xp.to_numpy, parts)) for parts in answer]
    return xp.to_numpy(answer)


def _kind_of(request: Request) -> tuple[str, ...]:
    first = request.arrays[0]
    xp = arrays_for(first)
    kind = [type(request).__name__.lower()]
    if isinstance(request, AllReduce | ReduceScatter):
        kind += [request.op, xp.dtype_name(first)]
    if request.group != "all":
        kind.append(request.group)
    return *kind, xp.device(first)


def _split(xp: AllFunctions, vector: Array, fused: Sequence[AllReduce | ReduceScatter]) -> list[Any]:
    return cut(xp, vector, [tuple(request.array.shape[isinstance(request, ReduceScatter) :]) for request in fused])


def _rows(xp: AllFunctions, array: Array, rows: int) -> Array:
    return xp.reshape(array, (rows, number_of_elements(tuple(array.shape)) // rows))


def _joined(xp: AllFunctions, pieces: Sequence[Array]) -> Array:
    """Joins the rows of matrices that have the same number of rows, or joins vectors; returns one vector."""
    return xp.flatten(xp.concatenate(pieces, axis=len(pieces[0].shape) - 1))


def _pack(xp: AllFunctions, fused: Sequence[AllGather | AllToAll]) -> tuple[Array, list[list[int]]]:
    """The parts of all requests in one vector of bytes, and the offset of each part of each request.

    For an all-to-all, the vector has a row for each rank. The offsets are then the same in each row.
    """
    rows = fused[0].parts[0].shape[0] if isinstance(fused[0], AllToAll) else 0
    offsets = [[0] * len(gather.parts) for gather in fused]
    pieces = []
    end = 0
    parts = []
    for number, gather in enumerate(fused):
        if gather.with_room is None:
            parts += [(number, place, part) for place, part in enumerate(gather.parts)]
            continue
        # A payload with room has a multiple of eight bytes, and contains numbers of any size. So it comes first.
        offsets[number][0] = end
        end += gather.with_room.shape[0]
        pieces.append(gather.with_room)
    parts.sort(key=lambda entry: -DTYPE_BYTES[xp.dtype_name(entry[2])])
    for number, place, part in parts:
        piece = xp.as_bytes(part)
        if rows:
            piece = _rows(xp, piece, rows)
        offsets[number][place] = end
        end += piece.shape[-1]
        pieces.append(piece)
    missing = -end % ROW_ALIGNMENT  # so that the parts of every row can be viewed in place
    if missing:
        pieces.append(xp.zeros((rows, missing) if rows else (missing,), like=pieces[0]))
    return _joined(xp, pieces), offsets


def _unpack(
    xp: AllFunctions, gathered: Array, fused: Sequence[AllGather | AllToAll], offsets: list[list[int]]
) -> list[Any]:
    """The answer to each request: a tuple of parts for each rank, as views of the gathered buffer (ranks, bytes)."""
    answers: list[Any] = []
    for request, starts in zip(fused, offsets, strict=True):
        parts = [part[0] for part in request.parts] if isinstance(request, AllToAll) else request.parts
        lengths = [part_bytes(xp, part) for part in parts]
        if request.in_rows:
            rows = gathered[:, starts[0] : starts[0] + lengths[0]]
            answers.append(xp.bitcast(rows, xp.dtype_name(parts[0])))
            continue
        answers.append(
            [
                tuple(
                    xp.from_bytes(gathered[rank, start : start + length], like=part)
                    for part, start, length in zip(parts, starts, lengths, strict=True)
                )
                for rank in range(gathered.shape[0])
            ]
        )
    return answers


def part_bytes(xp: AllFunctions, part: Array) -> int:
    """Bytes of an array."""
    if isinstance(part, (np.ndarray, np.generic)):
        return part.nbytes
    return number_of_elements(tuple(part.shape)) * DTYPE_BYTES[xp.dtype_name(part)]
