"""The parts that all kernels share: the table of a bucket on the device, the pieces of its tensors, and x. The vector
that a step compresses is called x: the gradient plus the residual of earlier steps.

A table has an int64 row for each field of `FIELDS`, with one number for each tensor. Addresses are numbers, and 0 means
that there is no address. Arrays are also passed to kernels as addresses. A program works on one piece of a tensor, or
on one tensor.
"""

from hvdcomp.kernels import limits, tables
from hvdcomp.kernels.cuda.language import tl, triton

FIELDS = (
    "size",
    "gradient",
    "result",
    "source",
    "kept",
    "x",
    "velocity",
    "next_velocity",
    "count",
    "values",
    "indices",
    "block_counts",
    "index_bytes",
    "key",
    "sent_rule",
    "kept_sent",
    "x_sent",
    "first_task",
    "tasks",
    "total",
    "narrowed",
    "rounded",
    "squares",
    "next_squares",
)
"""The names of the rows of a table. Most rows are fields of `hvd_segment` in `src/bucket.h`; a union has the name of
its first member. There are also the following rows:

- `kept_sent`: the address of three float32 numbers, which describe the part of the kept x that was sent: a rule, the
  value that was sent for elements above zero, and the value that was sent for elements below zero.
- `x_sent`: the address of the same three numbers for the current x.
- `first_task`, `tasks`: the number of the tensor's first piece, and the number of its pieces.
"""

SIZE = tl.constexpr(0)
GRADIENT = tl.constexpr(1)
RESULT = tl.constexpr(2)
SOURCE = tl.constexpr(3)
KEPT = tl.constexpr(4)
X = tl.constexpr(5)
VELOCITY = tl.constexpr(6)
NEXT_VELOCITY = tl.constexpr(7)
COUNT = tl.constexpr(8)
VALUES = CODES = SIGNS = P_FACTOR = BLOCKS = tl.constexpr(9)
INDICES = SCALES = EXPONENTS = ROW_VOTES = Q_FACTOR = ENDS = CHOSEN = tl.constexpr(10)
BLOCK_COUNTS = SENT_OF_CHUNK = COLUMNS = SHIFT = VOTES = TAKEN = tl.constexpr(11)
INDEX_BYTES = FOUND = LENGTH = tl.constexpr(12)
KEY = tl.constexpr(13)
SENT_RULE = tl.constexpr(14)
KEPT_SENT = tl.constexpr(15)
X_SENT = tl.constexpr(16)
FIRST_TASK = tl.constexpr(17)
TASKS = tl.constexpr(18)
TOTAL = tl.constexpr(19)
NARROWED = tl.constexpr(20)
ROUNDED = tl.constexpr(21)
SQUARES = tl.constexpr(22)
NEXT_SQUARES = tl.constexpr(23)

# Where the numbers to compress come from: a gradient of one of these element types, or a source (SOURCED).
FLOAT = tl.constexpr(tables.NARROW["float32"])
HALF = tl.constexpr(tables.NARROW["float16"])
BFLOAT16 = tl.constexpr(tables.NARROW["bfloat16"])
SOURCED = tl.constexpr(len(tables.NARROW))

# Rules that say which values of x were sent. No kernel on a device uses the rule PRODUCT.
NOTHING = tl.constexpr(tables.NOTHING)
NOT_NEGATIVE = tl.constexpr(tables.NOT_NEGATIVE)
EVERYTHING = tl.constexpr(tables.EVERYTHING)

LARGEST_HALF = tl.constexpr(limits.LARGEST["float16"])
LARGEST_BFLOAT16 = tl.constexpr(limits.LARGEST["bfloat16"])

INFINITE = tl.constexpr(0x7F800000)  # the magnitude bits of inf; the bits of NaN are higher
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def pointer(address, TYPE: tl.constexpr):
    """An address as a pointer to elements of a type."""
    return address.to(tl.int64).to(tl.pointer_type(TYPE))


@triton.jit
def payload_of(payloads, rank, row):
    """The address of a rank's payload, computed in 64 bits. row: distance in bytes between the payloads of consecutive
    ranks."""
    return payloads + rank * row.to(tl.int64)


@triton.jit
def entry(table, segments, segment, FIELD: tl.constexpr):
    """Reads a field of a tensor from the table."""
    return tl.load(pointer(table, tl.int64) + FIELD * segments + segment)


@triton.jit
def floats(table, segments, segment, FIELD: tl.constexpr):
    """Reads a field that is the address of float32 numbers."""
    return pointer(entry(table, segments, segment, FIELD), tl.float32)


@triton.jit
def size_of(table, segments, segment):
    """The number of elements of a tensor, int32, at most `MOST_ELEMENTS`."""
    return entry(table, segments, segment, SIZE).to(tl.int32)


@triton.jit
def piece(table, segments, tasks, PIECE: tl.constexpr):
    """Returns this program's tensor, and the start and the end of the program's piece in the tensor, as int32."""
    task = pointer(tasks, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(task)
    start = tl.load(task + 1).to(tl.int32)
    return segment, start, tl.minimum(start + PIECE, size_of(table, segments, segment))


@triton.jit
def magnitude(x):
    """The bits of magnitudes, as integers, which have the same order as the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def report(flag, largest):
    """Sets the flag to NaN if the largest magnitude is inf or NaN. The magnitude is given as bits."""
    if tl.max(largest, 0) >= INFINITE:
        tl.store(pointer(flag, tl.int32), NAN_BITS)


@triton.jit
def is_address(address, i):
    """Whether the address is not 0, for each element."""
    # `i * 0` makes an array, because Triton's interpreter does not broadcast booleans
    return i.to(tl.int64) * 0 + address != 0


@triton.jit
def unsent(x, rule, sent, inside):
    """x minus the values that were sent according to a rule; zero beyond a tensor's end. sent: the address of the rule
    and of two values: the value sent for elements above zero, and the value for elements below zero."""
    upper = (x > 0) | ((x == 0) & (rule == NOT_NEGATIVE))
    left = x - tl.where(upper, tl.load(sent + 1), tl.load(sent + 2))
    return tl.where(inside & (rule != EVERYTHING), tl.where(rule == NOTHING, x, left), 0.0)


@triton.jit
def to_bits(x, TYPE: tl.constexpr):
    """Rounds numbers to the nearest number of a 16-bit type, with ties to even. Returns the bits as int32."""
    if TYPE == HALF:
        return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:  # noqa: RET505 - Triton compiles one branch of the two
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(magnitude(x) > INFINITE, (bits >> 16) | 0x40, rounded).to(tl.int32)


@triton.jit
def from_bits(bits, TYPE: tl.constexpr):
    """The numbers that 16-bit patterns stand for."""
    if TYPE == HALF:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # noqa: RET505
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def held(x, TYPE: tl.constexpr):
    """Clips numbers to the largest magnitude of a type."""
    bound = LARGEST_HALF if TYPE == HALF else LARGEST_BFLOAT16
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def load_as(address, i, mask, TYPE: tl.constexpr):
    """Reads numbers of a type as float32; zero outside the mask."""
    if TYPE == FLOAT:
        return tl.load(pointer(address, tl.float32) + i, mask=mask, other=0.0)
    else:  # noqa: RET505
        return from_bits(tl.load(pointer(address, tl.uint16) + i, mask=mask, other=0).to(tl.int32), TYPE)


@triton.jit
def residual(table, segments, segment, i, inside, KEEPS: tl.constexpr):
    """Returns the residual, which is the part of the kept x that was not sent, and whether the tensor has a residual.
    The residual is zero beyond the tensor's end. KEEPS: 1 plus the number of the residual's type. A 16-bit residual is
    stored without the sent values, so nothing is subtracted."""
    address = entry(table, segments, segment, KEPT)
    holds = is_address(address, i)
    kept = load_as(address, i, inside & holds, KEEPS - 1)
    if KEEPS == 1:
        sent = floats(table, segments, segment, KEPT_SENT)
        kept = unsent(kept, i * 0 + tl.load(sent).to(tl.int32), sent, inside)
    return kept, holds


@triton.jit
def make_x(
    table, segments, segment, i, inside, factor, decay, momentum,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Computes elements i of x and writes them to x. If a source is compressed instead of x, reads elements i of the
    source."""
    if FROM == SOURCED:
        x = tl.load(floats(table, segments, segment, SOURCE) + i, mask=inside, other=0.0)
    else:
        x = load_as(entry(table, segments, segment, GRADIENT), i, inside, FROM)
        if KEEPS:
            gradient = x * tl.load(pointer(factor, tl.float32))
            left, holds = residual(table, segments, segment, i, inside, KEEPS)
            left *= decay
            if MOMENTUM:
                address = entry(table, segments, segment, VELOCITY)
                moving = is_address(address, i)
                velocity = tl.load(pointer(address, tl.float32) + i, mask=inside & moving, other=0.0)
                velocity = tl.where(moving, velocity * momentum + gradient, gradient)
                tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, velocity, mask=inside)
                x = velocity * momentum + (left + gradient) if NESTEROV else left + velocity
            else:
                x = tl.where(holds, left + gradient, gradient)
        if KEEPS or FROM != FLOAT:
            tl.store(floats(table, segments, segment, X) + i, x, mask=inside)
    return x


@triton.jit
def made(table, segments, segment, i, inside, KEEPS: tl.constexpr, FROM: tl.constexpr):
    """Reads elements i of the vector to compress, after `make_x` has computed them."""
    if FROM == SOURCED:
        return tl.load(floats(table, segments, segment, SOURCE) + i, mask=inside, other=0.0)
    elif KEEPS or FROM != FLOAT:  # noqa: RET505
        return tl.load(floats(table, segments, segment, X) + i, mask=inside, other=0.0)
    else:
        return tl.load(floats(table, segments, segment, GRADIENT) + i, mask=inside, other=0.0)


@triton.jit
def left_of(x, sent):
    """x minus the sent values; zero where the difference overflows."""
    left = x - sent
    return tl.where(magnitude(left) < INFINITE, left, 0.0)


@triton.jit
def no_sum(BLOCK: tl.constexpr):
    """The initial value of a sum over ranks: -0.0, because adding any number to -0.0 gives exactly that number."""
    return tl.full((BLOCK,), -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def word(index, key):
    """Random words for a key and indices, as in `src/randomness.h`."""
    weyl = index.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
    mixed = (weyl ^ (weyl >> 16)) * 0x21F0AAAD
    return (mixed ^ (mixed >> 15) ^ (key.to(tl.uint64) >> 32).to(tl.uint32)) * 0xD35A2D97
