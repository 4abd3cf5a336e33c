"""Kernels for CUDA devices, in Triton's interpreter, where payloads and tensors are larger than 32 bits can count."""

from __future__ import annotations

import ast
import contextlib
import inspect
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.sparsification import Selection, SparsePlaces
from hvdcomp.kernels import cuda
from tests.harness import as_numpy
from tests.interpreted import needs_triton
from tests.kernels.test_kernels_cuda_bits import assert_same_bits

torch = pytest.importorskip("torch")
from hvdcomp.arrays import torch_arrays  # noqa: E402
from hvdcomp.kernels.cuda import x as table  # noqa: E402
from hvdcomp.kernels.cuda.device import PIECE, DeviceKernels  # noqa: E402
from hvdcomp.kernels.cuda.language import tl  # noqa: E402
from hvdcomp.kernels.tables import BISECT, KTH_LARGEST  # noqa: E402
from tests.cuda_kernels import SPECS, kernels_in_source  # noqa: E402
from tests.gpu.ranks import Ranks  # noqa: E402

interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = [needs_triton, pytest.mark.usefixtures("in_interpreter")]

RANKS = 3
ROW = 2**30 + 2**12  # bytes: below 2**31 itself, but not two of them
DECODED = {
    "bf16": "bfloat16_decode", "fp16:exchange=gather": "half_decode",
    "efsignsgd": "two_values_decode", "onebit": "two_values_decode",
    "signsgd": "votes_decode", "qsgd:bits=4": "multiples_decode", "qsgd:bits=7": "multiples_decode",
    "fp8": "float8_decode", "natural": "natural_decode", "eden": "eden_decode",
    "topk:ratio=0.02": "sparse_decode", "chunkedtopk:chunk=50,k=5": "chunks_decode",
    "chunkedtopk:chunk=8,k=1,values=sign": "chunks_decode",
}  # fmt: skip


@pytest.fixture
def far_apart() -> Iterator[Any]:
    """Memory of zeros for payloads `ROW` bytes apart. Only what is written takes any.

    Before it lies as much as a sum may be too small that was made in 32 bits: what such a kernel reads is wrong, and
    not somebody else's.
    """
    with tempfile.TemporaryFile() as file:
        file.truncate(2**31 + RANKS * ROW)
        yield torch.from_numpy(np.memmap(file, np.uint8, "r+"))[2**31 :]


@pytest.mark.parametrize("spec", [pytest.param(one, marks=[pytest.mark.thorough] * ("topk" in one)) for one in DECODED])
def test_payloads_of_more_than_two_gigabytes(spec: str, far_apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"matrix": (70, 1000) if spec.startswith("topk") else (3, 40)}  # whose places count from blocks on
    call = DeviceKernels.call
    seen = set()

    def moved(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name in DECODED.values():
            seen.add(name)
            place = max(place for place, one in enumerate(arguments) if isinstance(one, torch.Tensor))
            rows, ranks, row, *rest = arguments[place:]
            assert ranks == RANKS
            first = rows[0]
            size = first.numel() * first.element_size()
            near = first.view(torch.uint8).as_strided((ranks, size), (row, 1))
            far = far_apart.as_strided((ranks, size), (ROW, 1))
            far[:] = near
            arguments = (*arguments[:place], far[0].view(first.dtype), ranks, ROW, *rest)
        return call(self, name, *arguments, **options)

    def results() -> dict[tuple[str, int], np.ndarray]:
        ranks = Ranks(spec, shapes, "cpu", RANKS, ErrorFeedback, min_numel=0, min_ndim=0)
        rng = np.random.default_rng(1)
        given = [{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(RANKS)]
        found = ranks.step(given)
        return {(name, rank): as_numpy(one) for rank, of_rank in enumerate(found) for name, one in of_rank.items()}

    near = results()
    assert not seen
    monkeypatch.setattr(DeviceKernels, "call", moved)
    assert_same_bits(results(), near)
    assert seen == {DECODED[spec]}


FAR = 2**31 + 2**12  # of whatever a place counts; a multiple of all alignments
FROM_PLACES = {
    "dense_encode": {"wire": 4}, "dense_decode": {"mean": 4}, "dense_keep": {"residuals": 4},
    "cast_encode": {"wire": 2}, "cast_decode": {"payloads": 2},
    "two_values_encode": {"payload": 1}, "two_values": {"payload": 1}, "two_values_decode": {"payloads": 1},
    "votes_encode": {"payload": 1, "votes": 1}, "votes_close": {"payload": 1, "votes": 1},
    "votes_decode": {"payloads": 1}, "votes_keep": {"payload": 1},
    "find_scales": {"payload": 1}, "terngrad_scale": {"payload": 1}, "codes_encode": {"payload": 1},
    "codes_decode": {"payloads": 1}, "plane_decode": {"payloads": 1},
    "natural_encode": {"payload": 1}, "natural_decode": {"payloads": 1},
    "eden_encode": {"payload": 1}, "eden_decode": {"payloads": 1},
    "global_encode": {"digits": 4}, "global_decode": {"digits": 4},
    "pack_chosen": {"payload": 1}, "sparse_decode": {"payload": 1},
    "chunks_choose": {"values": 4, "places": 2}, "chunks_choose_short": {"values": 4, "places": 2},
    "chunks_means": {"values": 4, "bins": 1, "payload": 1},
    "chunks_signs": {"values": 4, "signs": 1}, "chunks_magnitude": {"payload": 1},
    "chunks_pack": {"values": 4, "places": 2, "bins": 1, "payload": 1}, "chunks_decode": {"payloads": 1},
    "random_take": {"wire": 4, "sent": 4}, "random_put": {"mean": 4}, "random_keep": {"sent": 4},
    "multiply": {"unit": 4, "partial": 4}, "add_tiles": {"product": 4, "partial": 4},
    "gram": {"factors": 4}, "orthogonalize": {"factors": 4, "unit": 4, "grams": 8},
    "lowrank_keep": {"fresh": 4, "old": 4, "following": 4, "grams": 8}, "lowrank_decode": {"p": 4, "q": 4},
    "together_take": {"wire": 4}, "together_put": {"mean": 4},
}  # fmt: skip
"""By kernel, the arrays that hold something of all tensors, one behind the other, and the bytes that a place in them
counts. Places come from the table, or from a list of what programs do: `LISTED`."""

LISTED = {
    "multiply": ("tiles", 3), "add_tiles": ("strips", 2), "orthogonalize": ("tiles", 3), "lowrank_keep": ("tiles", 3),
    "together_take": ("slots", 1), "together_put": ("slots", 1),
}  # fmt: skip
"""The list, and its column of places."""

PIECES = 2**18  # as many pieces have 2**31 elements
_NOTED = {"places": 2 * PIECE, "counts": 4}
_CHOSEN = _NOTED | {"between": 8, "chosen": 8}
OF_PIECES = {
    "make_and_measure": {"parts": 8}, "measure_left": {"parts": 8}, "add_parts": {"parts": 8},
    "two_values_encode": {"sums": 16, "counts": 4}, "two_values": {"sums": 16, "counts": 4},
    "terngrad_measure": {"squares": 8, "maxima": 4}, "terngrad_scale": {"squares": 8, "maxima": 4},
    "global_measure": {"maxima": 4}, "global_maxima": {"maxima": 4},
    "note_candidates": _NOTED | {"sums": 8, "largest": 4}, "decide": {"sums": 8, "largest": 4},
    "count_digits": _NOTED, "count_eligible_digits": _NOTED | {"between": 8}, "count_chosen": _CHOSEN,
    "pack_chosen": _CHOSEN,
}  # fmt: skip
"""By kernel, the arrays that hold something of all pieces, one behind the other, and the bytes of a piece."""

OF_TENSORS = {"take_off", "narrow_results", "settle", "draw_floors", "zero_results"}
"""Kernels whose arrays are of one tensor, whose elements are no more than 32 bits can count (`MOST_ELEMENTS`), or have
a few numbers for each tensor."""

PLACES = {
    "votes": ("signs", "row_votes", "votes"), "sparse": ("values", "indices", "block_counts"),
    "chunks": ("values", "indices", "found"),
}  # fmt: skip
"""By the first word of a call, the fields that are places; those of others lie where `values` and `indices` do."""


def is_of_pieces(kernel: Any) -> bool:
    """Whether each program of a kernel works on a piece."""
    return "tasks" in list(inspect.signature(kernel.fn).parameters)[:3]


def programs_before(kernel: Any, constants: dict[str, Any]) -> int:
    """The number of programs that come before those of a launch."""
    if kernel.__name__ == "gram":
        return 2**31 // constants["RANK"] ** 2
    return PIECES if is_of_pieces(kernel) else 0


@contextlib.contextmanager
def numbered_from(first: int) -> Iterator[None]:
    """Numbers programs from a number on."""

    def program(builder: Any, axis: int) -> Any:
        return interpreter.TensorHandle(np.array([builder.grid_idx[axis] + first], np.int32), tl.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", program)
        yield


def far_from_its_begin(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a launch, but arrays begin so far before what is used of them."""
    names = list(inspect.signature(kernel.fn).parameters)
    named = dict(zip(names, arguments, strict=False))
    listed, column = LISTED.get(kernel.__name__, ("", 0))
    before = programs_before(kernel, constants)
    if kernel.__name__ == "gram":
        offsets = {"tiles": before * 40, "grams": before * 8 * constants["RANK"] ** 2}
    else:
        offsets = {"tasks": before * 16} if before else {}
    offsets |= {name: PIECES * size for name, size in OF_PIECES.get(kernel.__name__, {}).items()}
    for name, offset in offsets.items():
        if isinstance(named[name], torch.Tensor):
            named[name] = named[name].data_ptr() - offset
    for name, size in FROM_PLACES.get(kernel.__name__, {}).items():
        if kernel.__name__.startswith("random") and name != "sent" and constants["HALF"]:
            size = 2
        if name == "grams":
            size *= constants["RANK"] ** 2
        if isinstance(named[name], torch.Tensor):
            named[name] = named[name].data_ptr() - FAR * size
    if listed:
        named[listed] = named[listed].clone()
        named[listed][:, column] += FAR
    return tuple(named.values())


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(one, marks=[pytest.mark.thorough] * (one not in ("bf16", "efsignsgd", "int8")))
        for one in (*SPECS, "qsgd:bits=7")
    ],
)
def test_places_further_than_32_bits_can_count(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of buckets whose payloads are larger. A kernel that adds places in 32 bits ends the process: it reads what is not
    there."""
    call, launch = DeviceKernels.call, DeviceKernels.launch
    seen = set()

    def far_call(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        fields = PLACES.get(name.partition("_")[0], ("values", "indices"))
        before = {field: self.segments[field].copy() for field in fields}
        for field in fields:
            self.segments[field] += np.where(before[field] >= 0, FAR, 0)
        self._on_device._columns[table.FIELDS.index("first_task")] |= PIECES
        found = call(self, name, *arguments, **options)
        for field in fields:
            self.segments[field] = before[field]
        return found

    def far_launch(self: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        seen.add(kernel.__name__)
        with numbered_from(programs_before(kernel, constants)):
            launch(self, kernel, programs, *far_from_its_begin(kernel, arguments, constants), **constants)

    def results() -> dict[tuple[str, int], np.ndarray]:
        shapes = {"matrix": (30, 40), "other": (7, 11)}
        if spec == "topk:ratio=0.01":
            shapes["of two blocks"] = (70, 1000)
        ranks = Ranks(spec, shapes, "cpu", 1, ErrorFeedback, min_numel=0, min_ndim=0)
        rng = np.random.default_rng(1)
        found = {}
        for step in range(2):
            given = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
            found |= {(name, step): as_numpy(one) for name, one in ranks.step([given])[0].items()}
        kept = ranks.memories()[0].items()
        return found | {(f"kept {name}", place): one for name, all in kept for place, one in enumerate(all)}

    near = results()
    monkeypatch.setattr(DeviceKernels, "call", far_call)
    monkeypatch.setattr(DeviceKernels, "launch", far_launch)
    assert_same_bits(results(), near)
    assert seen & FROM_PLACES.keys()
    assert seen <= FROM_PLACES.keys() | OF_PIECES.keys() | OF_TENSORS


def test_every_kernel_is_said_to_have_places_or_not() -> None:
    assert not (FROM_PLACES.keys() | OF_PIECES.keys()) & OF_TENSORS
    assert kernels_in_source().keys() == FROM_PLACES.keys() | OF_PIECES.keys() | OF_TENSORS


def test_distances_between_payloads_have_64_bits_whatever_they_are() -> None:
    """Else a kernel would be compiled twice, and the first time multiply them by ranks in 32 bits."""
    rows = [
        (name, ast.unparse(parameter))
        for name, function in kernels_in_source().items()
        for parameter in function.args.args
        if parameter.arg == "row"
    ]
    assert {"cast_decode", "chunks_decode", "sparse_decode"} <= {name for name, _ in rows}
    assert [name for name, row in rows if row != "row: tl.int64"] == []


@pytest.fixture
def long() -> Iterator[Any]:
    """Makes vectors of zeros, of which only what is written takes any memory."""
    with contextlib.ExitStack() as files:

        def make(size: int, dtype: type) -> Any:
            file = files.enter_context(tempfile.TemporaryFile())
            file.truncate(size * np.dtype(dtype).itemsize)
            return torch.from_numpy(np.memmap(file, dtype, "r+"))

        yield make


def last_piece_of(spec: str, size: int, memory: Memory | None = None, dtype: str = "float32") -> Bucket:
    """A bucket of a vector, of which kernels work on the last piece alone."""
    tensor, widens = TensorInfo("long", (size,), dtype), dtype != "float32"
    compressors = [parse_compressor(spec)]
    bucket = Bucket([tensor], compressors, memory or NoMemory(), torch.device("cpu"), widens=widens)
    bucket.table.tasks = bucket.table.tasks[-1:].copy()
    bucket.kernels._pieces, bucket.kernels.tasks = bucket.kernels._pieces[-1:], 1
    bucket.kernels._on_device._columns[[table.FIELDS.index(name) for name in ("first_task", "tasks")]] = [[0], [1]]
    bucket.begin(Context("", 0, 0, 0, 1))
    return bucket


def test_the_largest_tensor_is_taken_to_its_end(long: Any) -> None:
    """And nothing behind it is written, although programs number more places than there are."""
    size = cuda.MOST_ELEMENTS
    assert cuda.takes(parse_compressor("bf16"), size)
    assert not cuda.takes(parse_compressor("bf16"), size + 1)
    bucket = last_piece_of("bf16", size - 3)
    x, result, wire = long(size, np.float32), long(size, np.float32), long(size, np.uint16)
    x[-8:] = torch.arange(1.0, 9.0)
    bucket.segments["gradient"], bucket.segments["result"] = x.data_ptr(), result.data_ptr()
    bucket.call("bfloat16_encode", wire, True)
    bucket.call("bfloat16_decode", wire, 1, 0)
    assert result[-8:].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_a_run_that_ends_behind_the_largest_tensor(long: Any) -> None:
    size, length = cuda.MOST_ELEMENTS, 1_000_000  # the last run would end behind 2**31
    bucket = last_piece_of("int8", size)
    x, payload = long(size, np.float32), long(size + 4 * (size // length + 1), np.uint8)
    x[-1] = -3.0
    bucket.segments["gradient"], bucket.segments["count"], bucket.segments["scales"] = x.data_ptr(), 8, size
    bucket.kernels.static(f"runs of {length}", lambda: np.array([[0, size // length, 1]]))
    bucket.call("blocks_encode", length, 0, True, payload)
    assert payload[size:].view(torch.float32)[-1] == 3.0
    assert payload[size - 1] == 0


def test_what_is_measured_at_the_end_of_the_largest_tensor(long: Any) -> None:
    size = cuda.MOST_ELEMENTS
    x, payload, scales = long(size, np.float32), long(size // 4 + 4, np.uint8), torch.zeros(1)
    x[-1] = -3.0
    bucket = last_piece_of("globalqsgd", size)
    bucket.segments["gradient"] = x.data_ptr()
    bucket.call("globalqsgd_measure", scales)
    assert scales.tolist() == [3.0]
    bucket = last_piece_of("terngrad:clip=0", size)
    bucket.segments["gradient"], bucket.segments["count"], bucket.segments["scales"] = x.data_ptr(), 2, size // 4
    bucket.call("terngrad_encode", 0.0, payload)
    assert payload[-4:].view(torch.float32).tolist() == [3.0]
    assert payload[-6:-4].tolist() == [0b01010101, 0b00010101]  # codes of 0, and one of -3


@pytest.mark.thorough
@pytest.mark.parametrize("method", [KTH_LARGEST, BISECT])
def test_the_largest_elements_at_the_end_of_the_largest_tensor(
    method: int, long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all programs that work on a piece, the first and the last alone run."""
    launch = DeviceKernels.launch

    def launch_two(self: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        for program in (0, programs - 1) if is_of_pieces(kernel) else range(programs):
            with numbered_from(program):
                launch(self, kernel, 1, *arguments, **constants)

    monkeypatch.setattr(DeviceKernels, "launch", launch_two)
    size = cuda.MOST_ELEMENTS
    tensors, compressors = [TensorInfo("long", (size,))], [parse_compressor(f"topk:ratio={2.5 / size}")]  # of three
    bucket = Bucket(tensors, compressors, NoMemory(), torch.device("cpu"), torch_arrays)
    x = long(size, np.float32)
    x[-5:] = torch.tensor([5.0, 1.0, -7.0, 0.0, 6.0])
    bucket.begin(Context("", 0, 0, 0, 1))
    bucket.segments["gradient"] = x.data_ptr()
    places = SparsePlaces(bucket, "same")
    bucket.call("sparse_encode", Selection(bucket, places.type, method, 1, 10), places.payload.vector)
    values, indices = places.payload.vector.split(12)
    assert values.view(torch.float32).tolist() == [5, -7, 6]
    assert indices.view(torch.int32).tolist() == [size - 5, size - 3, size - 1]


def test_values_numbered_beyond_the_half_of_32_bits(long: Any) -> None:
    """Of a sparse payload: places in it are halved by what is searched."""
    size, before = cuda.MOST_ELEMENTS, 2**30 + 5
    count = before + 3
    blocks = -(-size // 2**16)
    bucket = last_piece_of("topk:ratio=0.6", size)
    result = long(size, np.float32)
    values, counts, indices = (long(number, dtype) for number, dtype in ((count, "f4"), (blocks, "i4"), (count, "i2")))
    counts[0], counts[-1] = before, 3
    values[-3:] = torch.tensor([5.0, 6.0, 7.0])
    indices[-3:] = torch.tensor([2**16 - 3, 2**16 - 2, 2**16 - 1]).to(torch.int16)
    bucket.segments["result"], bucket.segments["count"] = result.data_ptr(), count
    bucket.segments["block_counts"] = counts.data_ptr() - values.data_ptr()
    bucket.segments["indices"], bucket.segments["index_bytes"] = indices.data_ptr() - values.data_ptr(), 2
    bucket.call("sparse_decode", values, 1, 0, False)
    assert result[-4:].tolist() == [0, 5, 6, 7]


def test_what_is_kept_of_the_end_of_the_largest_tensor(long: Any) -> None:
    bucket = last_piece_of("none", cuda.MOST_ELEMENTS, ErrorFeedback())
    arrays = {name: long(cuda.MOST_ELEMENTS, np.float32) for name in ("gradient", "kept", "x", "result")}
    for name, array in arrays.items():
        bucket.segments[name] = array.data_ptr()
    arrays["gradient"][-2:] = torch.tensor([1.0, 2.0])
    arrays["kept"][-2:] = 0.5
    assert bucket.sums_of("make_x").tolist() == [1.5**2 + 2.5**2]
    assert arrays["x"][-3:].tolist() == [0.0, 1.5, 2.5]
    assert bucket.sums_of("measure_left").tolist() == [1.5**2 + 2.5**2]
    bucket.call("settle", torch.zeros(1), False, False)
    assert arrays["x"][-3:].tolist() == [0.0, 1.5, 2.5]
    bucket.call("settle", torch.tensor([float("nan")]), False, True)
    assert arrays["x"][-3:].tolist() == [0.0, 0.5, 0.5]
    assert arrays["gradient"][-3:].tolist() == [0.0, 0.0, 0.0]


def test_what_was_sent_of_the_end_of_the_largest_tensor_is_taken_off(long: Any) -> None:
    bucket, x = last_piece_of("efsignsgd", cuda.MOST_ELEMENTS, ErrorFeedback()), long(cuda.MOST_ELEMENTS, np.float32)
    x[-2:] = torch.tensor([1.0, -2.0])
    sent = torch.tensor([0.0, 0.5, -0.5])  # the rule of what was kept, and the values of what is sent of x
    bucket.segments["x"], bucket.segments["sent_rule"], bucket.kernels.sent[1] = x.data_ptr(), 1, sent.data_ptr()
    bucket.call("take_off")
    assert x[-3:].tolist() == [-0.5, 0.5, -1.5]


def test_means_of_the_end_of_the_largest_tensor_are_rounded(long: Any) -> None:
    bucket = last_piece_of("none", cuda.MOST_ELEMENTS, ErrorFeedback(), "float16")
    types = {"result": np.float32, "x": np.float32, "narrowed": np.float16}
    arrays = {name: long(cuda.MOST_ELEMENTS, dtype) for name, dtype in types.items()}
    for name, array in arrays.items():
        bucket.segments[name] = array.data_ptr()
    arrays["result"][-2:] = torch.tensor([1.0, 1.0 + 2**-12])
    arrays["x"][-2:] = 0.5
    bucket.call("narrow_results")
    assert arrays["narrowed"][-3:].tolist() == [0, 1, 1]
    assert arrays["x"][-3:].tolist() == [0, 0.5, 0.5 + 2**-12]
