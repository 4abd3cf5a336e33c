"""The sparsifiers' kernels for CUDA devices, in Triton's interpreter: the bytes that those in C send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import DGC, ErrorFeedback, MomentumCorrection, MSTopK, NoMemory, RedSync, TopK, kernels
from hvdcomp.arrays import torch_arrays
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.sparsification import Sparsifier
from tests.interpreted import needs_triton
from tests.kernels.test_kernels_sparse import KINDS, vector

torch = pytest.importorskip("torch")
pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("in_interpreter"),
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
]


class Rank:
    """One rank's step of a bucket, with kernels in C or, if `on_device`, with those for devices.

    Args:
        sourced: whether something else is compressed in place of x, which is there already.

    Attributes:
        arrays: of each tensor, the gradient and what the step starts from and fills.
    """

    def __init__(
        self,
        gradients: list[np.ndarray],
        compressor: Sparsifier,
        memory: Memory,
        factor: float,
        sourced: bool,
        on_device: bool,
    ) -> None:
        infos = [TensorInfo(str(number), one.shape) for number, one in enumerate(gradients)]
        place = {"device": torch.device("cpu"), "xp": torch_arrays} if on_device else {}
        self.bucket = Bucket(infos, [compressor] * len(infos), memory, **place)
        self.bucket.context = Context("", 0, 0, 0, 1)
        random = np.random.default_rng(len(gradients))
        self.arrays = {
            "gradient": [one.copy() for one in gradients],
            "result": [np.full_like(one, np.nan) for one in gradients],
        }
        if self.bucket.keeps:
            self.arrays["kept"] = [(one * (random.random(one.shape) < 0.3)).astype(np.float32) / 4 for one in gradients]
            self.arrays["x"] = [np.full_like(one, np.nan) for one in gradients]
        if memory.is_momentum:
            self.arrays["velocity"] = [one[::-1] * np.float32(0.5) for one in gradients]
            self.arrays["next_velocity"] = [np.full_like(one, np.nan) for one in gradients]
        if sourced:
            self.arrays["x"] = [one * np.float32(3) for one in gradients]
            self.arrays["source"] = [one[::-1] + np.float32(1) for one in gradients]
        for name, ones in self.arrays.items():
            self.bucket.segments[name] = [one.ctypes.data for one in ones]
        settings = self.bucket.table.bucket
        settings.decay, settings.threads = memory.keeps, 2
        if isinstance(memory, MomentumCorrection):
            settings.momentum, settings.nesterov = memory.momentum, memory.nesterov
        if on_device:
            self.rules = np.zeros((len(infos), 4), np.float32)
            self.bucket.kernels.sent[:] = self.rules.ctypes.data
            self.bucket.kernels.begin(torch.full((1,), factor), memory.is_momentum)
        else:
            settings.factor = factor
        self.generator = compressor.aggregate_bucket(self.bucket)
        (self.payload,) = next(self.generator).parts
        self.found_inf = self.says(self.bucket.found_inf)

    def decode(self, payloads: list[Any]) -> bool:
        """Whether a mean is not finite."""
        rows = torch.stack(payloads) if self.bucket.device is not None else np.stack(payloads)
        with pytest.raises(StopIteration) as stop:
            self.generator.send(rows)
        return self.says(stop.value.value)

    def says(self, answer: Any) -> bool:
        return bool(answer) if self.bucket.device is None else bool(torch.isnan(answer))


def compare(
    compressor: Sparsifier,
    gradients: list[list[np.ndarray]],
    memory: Memory,
    factor: float = 1.0,
    sourced: bool = False,
) -> list[Rank]:
    """A step of ranks with gradients: kernels in C, and for devices, do the same, bit by bit. Returns the latter.

    Of a step that does not count, because of an inf or NaN, only that is compared.
    """
    settings = compressor, memory, factor, sourced
    both = [[Rank(one, *settings, on_device) for one in gradients] for on_device in (False, True)]
    for plain, device in zip(*both, strict=True):
        assert device.found_inf == plain.found_inf
        if plain.found_inf:
            return both[1]
        np.testing.assert_array_equal(np.asarray(device.payload), plain.payload)
    answers = [[rank.decode([one.payload for one in ranks]) for rank in ranks] for ranks in both]
    assert answers[0] == answers[1]
    for plain, device in zip(*both, strict=True):
        for name, ones in plain.arrays.items():
            for number, (expected, found) in enumerate(zip(ones, device.arrays[name], strict=True)):
                where = f"{name} of tensor {number}"
                np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32), err_msg=where)
    return both[1]


def eighths(kind: str, size: int, seed: int) -> np.ndarray:
    """Numbers whose magnitudes have the same sum in any order."""
    return (np.round(vector(kind, size, seed) * 8) / 8).astype(np.float32)


def check_indices(rank: Rank) -> None:
    """Exactly k elements of each tensor are sent, in their order."""
    for one in rank.bucket.segments:
        at, width = int(one["indices"]), int(one["index_bytes"])
        part = np.asarray(rank.payload)[at : at + width * one["count"]]
        places = part.view(f"u{width}").astype(np.int64)
        assert (np.diff(places) > 0).all()
        assert places[-1] < one["size"]


METHODS = [TopK(0.01), TopK(0.3, values="fp16"), MSTopK(0.01), RedSync(0.01), DGC(0.01)]
MEMORIES = [NoMemory(), ErrorFeedback(0.5), MomentumCorrection(0.9), MomentumCorrection(0.5, True, masking=False)]


@pytest.mark.parametrize("compressor", METHODS, ids=str)
def test_ranks(compressor: Sparsifier) -> None:
    """Of a tensor of two pieces; momentum ends where an element is sent."""
    gradients = [[eighths("normal", 8_400, rank)] for rank in range(2)]
    compare(compressor, gradients, MomentumCorrection(0.5), 0.25)


@pytest.mark.parametrize(
    ("compressor", "kind"),
    [
        (TopK(0.2), "zeros"), (TopK(0.2), "constant"), (MSTopK(0.1), "signs"), (MSTopK(0.1, rounds=1), "normal"),
        (RedSync(0.1), "ties"), (RedSync(0.01), "few"), (RedSync(0.4), "constant"), (RedSync(0.45), "sorted"),
        (DGC(0.1), "signs"), (DGC(0.02), "few"), (DGC(0.001), "sorted"),
    ],
    ids=str,
)  # fmt: skip
def test_where_no_threshold_is_good(compressor: Sparsifier, kind: str) -> None:
    """Many equal elements, or too few rounds: then it depends on the order of elements which of them are sent."""
    (rank,) = compare(compressor, [[eighths(kind, 1_500, 5)]], NoMemory())
    check_indices(rank)


@pytest.mark.parametrize(("sampled", "value"), [(slice(0, None, 3), 1 / 1024), (slice(0, 33, 3), 32.0)])
def test_a_sample_of_dgc_that_is_far_off(sampled: slice, value: float) -> None:
    """Its threshold is so low, or so high, that ten steps do not lead to a good one."""
    x = eighths("normal", 3_100, 5)
    x[sampled] = value
    (rank,) = compare(DGC(0.01), [[x]], NoMemory())
    sent = np.asarray(rank.payload)[: 4 * 31].view(np.float32)
    assert np.sort(abs(sent))[0] < np.sort(abs(x))[-31]


def test_something_else_in_place_of_x() -> None:
    """It is what is sent, and x loses it."""
    compare(RedSync(0.1), [[eighths("normal", 900, 5)]], ErrorFeedback(), sourced=True)


@pytest.mark.parametrize("compressor", [TopK(0.01), RedSync(0.01), DGC(0.01)], ids=str)
def test_a_sample_that_misleads_changes_nothing(compressor: Sparsifier, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdcomp.kernels.cuda import sparse

    choices = sparse._choices

    def misled(on: Any, asked: Any) -> np.ndarray:
        found = choices(on, asked)
        assert found[5, 0] > 1
        found[5, 0] = 1  # so that the floor is the largest of the sample
        return found

    monkeypatch.setattr(sparse, "_choices", misled)
    compare(compressor, [[eighths("normal", 5_000, 5), eighths("normal", 9, 5)]], ErrorFeedback())


@pytest.mark.parametrize("compressor", [TopK(0.01), pytest.param(DGC(0.5), marks=pytest.mark.thorough)], ids=str)
def test_indices_in_blocks(compressor: Sparsifier) -> None:
    """Of a tensor of more than one block of 2**16 elements."""
    (rank,) = compare(compressor, [[eighths("normal", 65_700, 0)]], ErrorFeedback())
    assert rank.bucket.segments["block_counts"][0] >= 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("compressor", METHODS, ids=str)
@pytest.mark.parametrize("bad", [[np.inf], [-np.nan] * 300 + [3e38], [np.float32(0).view(np.float32)]])
def test_what_is_not_finite(compressor: Sparsifier, bad: list[float]) -> None:
    """It is found, and exactly k elements are sent all the same."""
    x = eighths("normal", 1_000, 1)
    x[300 : 300 + len(bad)] = bad
    (rank,) = compare(compressor, [[x]], NoMemory())
    assert rank.found_inf == (not np.isfinite(x).all())
    check_indices(rank)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("compressor", METHODS, ids=str)
def test_memories(compressor: Sparsifier, memory: Memory) -> None:
    compare(compressor, [[eighths("normal", 9_000, 1), eighths("heavy", 10, 1)]], memory, 0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [1e-3, 0.2, 1.0])
@pytest.mark.parametrize("method", [TopK, MSTopK, RedSync, DGC])
def test_any_numbers(method: type[Sparsifier], ratio: float, kind: str) -> None:
    sizes = [1, 65, 513, 9_000]
    # The mean magnitude is added up in another order.
    make = eighths if method in (MSTopK, RedSync) and kind not in ("denormal", "heavy", "block") else vector
    ranks = compare(method(ratio), [[make(kind, size, size) for size in sizes]], NoMemory())
    check_indices(ranks[0])
