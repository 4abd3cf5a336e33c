"""Fusion: one collective sends the arrays of several requests of a round.

Requests are fused if they have the same kind, operation, element type, group of ranks and device. Their arrays are
copied into one buffer:

- All-reduce: the arrays follow each other in one vector.
- All-gather: the parts of all requests follow each other in a vector of bytes, with the largest element type first. So
  every part is aligned, without padding between parts.
- All-to-all and reduce-scatter: the buffer has one row for each rank. In each row, the parts of all requests for this
  rank follow each other.

If a request is not fused with others, and has storage with room for a flag (`with_room`), this storage is sent without
a copy.

The requests of buckets on the host contain NumPy arrays, and so do the answers to them. A communicator always sends
arrays of the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import DTYPE_BYTES, AllFunctions, AnyArray, Array, number_of_elements
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.bucket import ROW_ALIGNMENT
from hvdcomp.compressors.packing import cut
from hvdcomp.compressors.protocol import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from hvdcomp.exchange.finiteness import InRoom, has_room, with_flag
from hvdcomp.exchange.ledger import Sent


class _Collective(NamedTuple):
    """A collective that sends the arrays of one or more requests.

    Attributes:
        members: the indices of the requests in the round.
        requests: the requests.
        inside: the array functions that fuse the requests. If all requests are in NumPy, NumPy fuses them, because it
            needs only a tenth of the framework's time to make a slice.
        part: the communicator of the ranks that take part.
        name: the name of the collective.
        as_it_is: if there is a single request, and it has room for a flag: its storage, which is sent without a copy.
            None otherwise.
    """

    members: list[int]
    requests: list[Request]
    inside: AllFunctions
    part: Communicator
    name: str
    as_it_is: AnyArray


class Round:
    """The collectives of one round. The constructor starts all of them, and waits for none.

    Args:
        xp: the array functions of the framework.
        communicator: the communicator of the ranks that exchange.
        requests: the requests of the round. Their arrays belong to the framework or to NumPy.
        name: the name of the round. Two rounds that run at the same time need different names.
        like: an array of the framework, on the device where collectives run.
        flag: the flag that is sent with the requests, as returned by `flag_of`; None for no flag.

    Attributes:
        sent: number of bytes that this rank sent, including padding.
        is_fixed: whether a later step may call `again`.
        flag: after `wait`, the combined flag of all ranks, float32 (1,).
    """

    def __init__(
        self,
        xp: AllFunctions,
        communicator: Communicator,
        requests: Sequence[Request],
        name: str,
        like: Array,
        flag: Array | None = None,
    ) -> None:
        self._xp = xp
        self._asked = requests
        self._in_room: tuple[int, InRoom] | None = None
        self._take_flag: Callable[[list[Any]], Array] | None = None
        self.flag = flag
        self.is_fixed = all(isinstance(one, AllGather | AllReduce) and one.is_fixed for one in requests)
        if flag is not None:
            requests = self._with_flag(requests, flag, like)
        self._count = len(requests)
        by_kind: dict[tuple[str, ...], list[int]] = {}
        for number, request in enumerate(requests):
            by_kind.setdefault(_kind_of(request), []).append(number)
        self._collectives = []
        for position, (kind, members) in enumerate(by_kind.items()):
            fused = [requests[number] for number in members]
            inside = numpy_arrays if all(map(_is_numpy, fused)) else xp
            part = communicator.part(fused[0].group)
            collective_name = f"{name}.{position}.{'.'.join(kind[:-1])}"
            as_it_is = fused[0].arrays[0] if len(fused) == 1 and fused[0].with_room is not None else None
            self._collectives.append(_Collective(members, fused, inside, part, collective_name, as_it_is))
        self._started: list[tuple[_Collective, list[Any], list[list[int]] | None, Any]] = []
        handed = in_node = 0
        for collective, buffer in zip(self._collectives, self._start(like), strict=True):
            nbytes = part_bytes(collective.inside, buffer)
            has_others = collective.part.world_size < communicator.world_size
            handed += nbytes
            in_node += nbytes if collective.requests[0].group == "node" and has_others else 0
        self.sent = Sent(handed, in_node)

    def again(self, requests: Sequence[Request], like: Array, flag: AnyArray | None = None) -> bool:
        """Starts the collectives again in a later step, if its requests are the same objects as in this round. Returns
        whether they are the same objects. All other arguments are as in the constructor."""
        if requests != self._asked:  # requests are equal only if they are the same objects
            return False
        if self._in_room is not None:
            self._in_room[1].put(self._xp, flag, like)
        self._start(like)
        return True

    def wait(self) -> list[Any]:
        """Waits for all collectives, and returns the answers in the order of the requests. Call it once."""
        xp = self._xp
        answers: list[Any] = [None] * self._count
        started, self._started = self._started, []
        for (members, requests, inside, part, _, as_it_is), fused, offsets, handle in started:
            result = part.wait(handle)
            if inside is not xp:
                result = xp.to_numpy(result)
            if as_it_is is not None:
                answers[members[0]] = result
                continue
            split = _split(inside, result, fused) if offsets is None else _unpack(inside, result, fused, offsets)
            for number, request, answer in zip(members, requests, split, strict=True):
                wanted = inside is not numpy_arrays and _is_numpy(request)
                answers[number] = _in_numpy(xp, answer) if wanted else answer
        if self._in_room is not None:
            place, in_room = self._in_room
            answers[place], self.flag = in_room.take(answers[place])
        elif self._take_flag is not None:
            self.flag = self._take_flag(answers)
        return answers

    def _with_flag(self, requests: Sequence[Request], flag: Array, like: Array) -> list[Request]:
        """The requests, together with the flag. The flag is appended to the array of the first request that has room
        for it. If no request has room, the flag becomes a request of its own."""
        for place, request in enumerate(requests):
            if has_room(request):
                in_room = InRoom(request)
                in_room.put(self._xp, flag, like)
                self._in_room = place, in_room
                return [*requests[:place], in_room.request, *requests[place + 1 :]]
        self.is_fixed = False
        requests, self._take_flag = with_flag(self._xp, requests, flag, like)
        return requests

    def _start(self, like: Array) -> list[AnyArray]:
        """Starts the collectives; returns the buffer of each."""
        buffers: list[AnyArray] = []
        self._started = []
        for collective in self._collectives:
            _, fused, inside, part, name, buffer = collective
            offsets = None
            if buffer is None:
                if inside is not numpy_arrays:
                    fused = [_of_framework(self._xp, request, like) for request in fused]
                buffer, offsets = _together(inside, fused)
            buffers.append(buffer)
            if inside is not self._xp:
                buffer = self._xp.from_numpy(buffer, like=like)
            self._started.append((collective, fused, offsets, _start(part, fused[0], buffer, name)))
        return buffers


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
    """Fuses requests into one buffer. Returns the buffer, and the offset of each part of each request, in bytes from
    the beginning of a row. For an all-reduce or a reduce-scatter, None is returned instead of offsets."""
    if isinstance(fused[0], AllReduce):
        return xp.concatenate([xp.flatten(request.array) for request in fused]), None
    if isinstance(fused[0], ReduceScatter):
        return _joined(xp, [_rows(xp, request.array, request.array.shape[0]) for request in fused]), None
    return _pack(xp, fused)


def _is_numpy(request: Request) -> bool:
    return isinstance(request.arrays[0], (np.ndarray, np.generic))  # NumPy's sums of shape () have type np.generic


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
        # Payloads with room come first. They may contain numbers of any size, and their lengths are multiples of eight
        # bytes. So all numbers are aligned.
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
    missing = -end % ROW_ALIGNMENT  # padding, so that the parts of every row can be viewed without a copy
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
