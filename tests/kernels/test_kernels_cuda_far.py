"""Kernels for CUDA devices, in Triton's interpreter, where payloads and tensors are larger than 32 bits can count."""

from __future__ import annotations

import contextlib
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
from hvdcomp.kernels import cuda
from tests.harness import as_numpy
from tests.interpreted import needs_triton
from tests.kernels.test_kernels_cuda_bits import assert_same_bits

torch = pytest.importorskip("torch")
from hvdcomp.kernels.cuda.device import DeviceKernels  # noqa: E402
from tests.gpu.ranks import Ranks  # noqa: E402

pytestmark = [needs_triton, pytest.mark.usefixtures("in_interpreter")]

RANKS = 3
ROW = 2**30 + 2**12  # bytes: below 2**31 itself, but not two of them
DECODED = {
    "bf16": "bfloat16_decode", "fp16:exchange=gather": "half_decode",
    "efsignsgd": "two_values_decode", "onebit": "two_values_decode",
    "signsgd": "votes_decode", "qsgd:bits=4": "multiples_decode", "qsgd:bits=7": "multiples_decode",
    "fp8": "float8_decode", "natural": "natural_decode",
    "topk:ratio=0.3": "sparse_decode", "chunkedtopk:chunk=50,k=5": "chunks_decode",
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


@pytest.mark.parametrize(
    "spec", [pytest.param(one, marks=[pytest.mark.thorough] * ("topk" in one)) for one in DECODED]
)
def test_payloads_of_more_than_two_gigabytes(spec: str, far_apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"matrix": (3, 40)}
    call = DeviceKernels.call
    seen = set()

    def moved(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name in DECODED.values():
            seen.add(name)
            place = next(place for place, one in enumerate(arguments) if isinstance(one, torch.Tensor))
            first, ranks, row, *rest = arguments[place:]
            assert ranks == RANKS
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


@pytest.fixture
def long() -> Iterator[Any]:
    """Makes vectors of zeros, of which only what is written takes any memory."""
    with contextlib.ExitStack() as files:

        def make(size: int, dtype: type) -> Any:
            file = files.enter_context(tempfile.TemporaryFile())
            file.truncate(size * np.dtype(dtype).itemsize)
            return torch.from_numpy(np.memmap(file, dtype, "r+"))

        yield make


def last_piece_of(spec: str, size: int, memory: Memory | None = None) -> Bucket:
    """A bucket of a vector, of which kernels work on the last piece alone."""
    bucket = Bucket([TensorInfo("long", (size,))], [parse_compressor(spec)], memory or NoMemory(), torch.device("cpu"))
    bucket.table.tasks = bucket.table.tasks[-1:].copy()
    bucket.kernels._pieces = bucket.kernels._pieces[-1:]
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
    bucket.segments["gradient"], bucket.segments["count"], bucket.segments["place"][:, 1] = x.data_ptr(), 8, size
    bucket.kernels.static(f"runs of {length}", lambda: np.array([[0, size // length, 1]]))
    bucket.call("blocks_encode", length, 0, True, payload)
    assert payload[size:].view(torch.float32)[-1] == 3.0
    assert payload[size - 1] == 0


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
    places = (0, *(one.data_ptr() - values.data_ptr() for one in (counts, indices)), 2)
    bucket.segments["place"] = [places]
    bucket.call("sparse_decode", values, 1, 0, False)
    assert result[-4:].tolist() == [0, 5, 6, 7]
