"""Kernels for sending the same blocks on all ranks. A single sort over the blocks of all tensors chooses the blocks,
and a program copies each chosen block.

A block has `length` elements. The last block of a tensor may have fewer elements and is padded with zeros. If blocks
are chosen by their norms, the norms of a tensor begin at byte `scales`. Sketches are matrix products, which are
computed as in PowerSGD (`lowrank`).
"""

import numpy as np
import torch

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.lowrank import multiplied
from hvdcomp.kernels.cuda.quant import find_runs
from hvdcomp.kernels.cuda.random import zero_results
from hvdcomp.kernels.cuda.x import (
    FLOAT,
    HALF,
    LENGTH,
    RESULT,
    X,
    entry,
    floats,
    held,
    left_of,
    load_as,
    made,
    magnitude,
    pointer,
    report,
    size_of,
)

_MOST_AT_A_TIME = 1024  # number of elements of a block


@triton.jit
def _slot(table, segments, slots, chosen):
    """Returns this program's tensor; the start of the program's block on the wire, and in the tensor; the block's
    length; and the number of the block's elements that are inside the tensor. A slot is a tensor and a start on the
    wire."""
    slot = pointer(slots, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(slot)
    length = entry(table, segments, segment, LENGTH)
    start = tl.load(pointer(chosen, tl.int64) + tl.program_id(0)) * length
    inside = tl.minimum(size_of(table, segments, segment) - start, length)
    return segment, tl.load(slot + 1), start.to(tl.int32), length.to(tl.int32), inside.to(tl.int32)


@triton.jit
def together_take(
    table, segments, slots, chosen, wire,
    KEEPS: tl.constexpr, FROM: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a block of x to the wire, and subtracts the sent values from x. An earlier kernel has computed x. TYPE:
    the element type on the wire."""
    segment, place, start, length, inside = _slot(table, segments, slots, chosen)
    for block in range(0, length, BLOCK):
        j = block + tl.arange(0, BLOCK)
        valid = j < inside
        x = made(table, segments, segment, start + j, valid, KEEPS, FROM)
        if TYPE == HALF:
            half = held(x, TYPE).to(tl.float16)
            tl.store(pointer(wire, tl.float16) + place + j, half, mask=j < length)
            x = half.to(tl.float32)
        else:
            tl.store(pointer(wire, tl.float32) + place + j, x, mask=j < length)
        if KEEPS:
            kept = floats(table, segments, segment, X) + start + j
            tl.store(kept, left_of(tl.load(kept, mask=valid, other=0.0), x + 0.0), mask=valid)


@triton.jit
def together_put(table, segments, flag, slots, chosen, mean, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the means of a block, which have type TYPE, to the results, which contain zeros."""
    segment, place, start, _, inside = _slot(table, segments, slots, chosen)
    result = floats(table, segments, segment, RESULT) + start
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, inside, BLOCK):
        j = block + tl.arange(0, BLOCK)
        value = load_as(mean, place + j, j < inside, TYPE)
        largest = tl.maximum(largest, magnitude(value))
        tl.store(result + j, value + 0.0, mask=j < inside)  # adding zero turns -0.0 into 0.0
    report(flag, largest)


class _Plan:
    """Index arrays that depend only on the tensors and levels.

    Args:
        counts: the number of sent blocks of each tensor.
        numbers: how many numbers describe a block when the best blocks are chosen.

    Attributes:
        slots: the tensor and the start on the wire, for each sent block.
        keys: for each block, a sort key of 64 bits. The upper half is the number of the block's tensor. The lower half
            is the largest number of 31 bits, from which `choose` subtracts the bits of the block's score.
        places: positions of the sent blocks in the order of the keys.
        begins: for each sent block, the number of its tensor's first block.
        judged: the positions of the numbers that describe each block.
    """

    def __init__(self, on, counts, numbers):
        lengths, tensors = on.segments["length"], np.arange(len(counts))
        blocks = -(-on.segments["size"] // lengths)
        firsts, tensor = np.cumsum(blocks) - blocks, np.repeat(tensors, counts)
        number = np.arange(counts.sum()) - (np.cumsum(counts) - counts)[tensor]
        wire = (np.cumsum(counts * lengths) - counts * lengths)[tensor] + number * lengths[tensor]
        of_block = np.repeat(tensors, blocks)
        block = np.arange(blocks.sum()) - firsts[of_block]
        columns = np.arange(numbers) * blocks[of_block][:, None]
        self.slots = on.static("slots", lambda: np.stack([tensor, wire], axis=1))
        self.keys = on.static("keys", lambda: of_block << 32 | 0x7FFFFFFF)
        self.places = on.static("places", lambda: firsts[tensor] + number)
        self.begins = on.static("begins", lambda: firsts[tensor])
        self.judged = on.static("judged", lambda: (numbers * firsts[of_block] + block)[:, None] + columns)

    def choose(self, judged):
        """The indices of each tensor's best blocks, in ascending order. Among equal blocks, the first is chosen."""
        scores = judged if self.judged.shape[1] == 1 else _norms(judged[self.judged])
        bits = scores.view(torch.int32) & 0x7FFFFFFF
        order = torch.sort(self.keys - bits, stable=True).indices
        return torch.sort(order[self.places]).values - self.begins


def _norms(rows):
    """The norms of rows. Squares are added in the same order as in `row_norms` of the NumPy arrays."""
    squares = rows.double().square()
    squares = torch.nn.functional.pad(squares, (0, -rows.shape[1] % 16)).view(len(rows), -1, 16)
    lanes = squares[:, 0]
    for number in range(1, squares.shape[1]):
        lanes = lanes + squares[:, number]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0].sqrt().float()


def _launch(on, kernel, *arguments, **constants):
    longest = int(on.segments["length"].max())
    block = min(_MOST_AT_A_TIME, triton.next_power_of_2(longest))
    programs = on.plans["together"].slots.shape[0]
    on.launch(kernel, programs, on.rows, len(on.segments), *arguments, BLOCK=block, **constants)


def _judge(on, norms):
    find_runs(on, int(on.segments["length"].max()), norms, True)
    norms.mul_(norms)


def _encode(on, judged, numbers, counts, chosen, wire, half):
    if "together" not in on.plans:
        on.plans["together"] = _Plan(on, counts, numbers)
    plan = on.plans["together"]
    chosen.copy_(plan.choose(judged))
    _launch(on, together_take, plan.slots, chosen, wire, TYPE=_type(half), **on.constants_of_made())


def _decode(on, mean, chosen, half):
    on.pieces(zero_results)
    _launch(on, together_put, on.flag, on.plans["together"].slots, chosen, mean, TYPE=_type(half))


def _type(half):
    return (HALF if half else FLOAT).value


KERNELS = {
    "together_judge": _judge,
    "together_sketch": lambda on, columns, sketches: multiplied(on, columns, sketches, True, False),
    "together_encode": _encode,
    "together_decode": _decode,
}
"""For each operation, by name, the function that launches its kernels. The arguments differ from those of the kernels
in C."""
