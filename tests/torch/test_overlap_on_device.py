"""Overlap where gradients are on a device: on which streams, and when."""

from __future__ import annotations

from typing import Any

import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import infos
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from hvdcomp.torch.presence import PresenceCheck  # noqa: E402
from hvdcomp.torch.training import early_bytes  # noqa: E402
from tests.device_streams import Stream, Streams, streams  # noqa: E402

BYTES = 9_000  # which two matrices fill
SPECS = (
    *("none", "fp16", "efsignsgd", "int8", "topk:ratio=0.1", "dgc:ratio=0.1", "powersgd:rank=2"),
    *("int8:exchange=scatter", "two_level(int8)"),
)


def _steps(later: bool, spec: str, noted: Streams) -> list[int]:
    """The number of buckets that start early in each of four steps. The first step shows the order, the second has
    buckets that need not wait. Gradients come on a stream of hooks, `later` ones on a third stream; steps end on the
    stream that works now."""
    main, hooks, third = noted.now, Stream("hooks"), Stream("third")
    shapes = dict.fromkeys("abcd", (40, 50))
    engine = Engine(
        LoopbackCommunicator(2), infos(shapes), parse_compressor(spec), ErrorFeedback(), min_numel=0, min_ndim=0,
        overlap_bytes=BYTES,
    )  # fmt: skip
    started, alive = [], []
    for _ in range(4):
        engine.begin()
        engine.expect()
        gradients = {}
        for number, name in enumerate("dcba"):
            noted.now = third if later and number >= 2 else hooks
            gradients[name] = torch.ones(shapes[name])
            alive.append(gradients[name])  # PyTorch's own backward pass frees them safely
            engine.overlap.ready({name: gradients[name]})
        started.append(len(engine.overlap.started))
        noted.now = main
        engine.step(gradients)
        for stream in (hooks, third)[: 1 + later]:
            assert (main.behind.get(stream) == stream.launched) == (started[-1] > 0)
    return started


@needs_triton
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_memory_goes_back_behind_the_work_of_all_streams(
    spec: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come on one stream, and the step ends on another, behind it. Where the later gradients come on a third,
    nothing more starts."""
    with streams(monkeypatch, Stream("main")) as noted:
        assert _steps(later, spec, noted) == ([0, 0, 1, 1] if later else [0, 0, 2, 2])
    assert noted.freed > 10
    assert noted.wrong == []


@pytest.mark.parametrize(
    ("size", "least", "on_host", "on_cuda"),
    [(1_000_000, 600_000, 600_000, 1_000_000), (1_000, 600_000, 600_000, 600_000)],
)
def test_a_device_is_given_few_buckets_early(size: int, least: int, on_host: int, on_cuda: int) -> None:
    """A parameter of so many float32 numbers: a quarter of them, or the usual number of bytes if that is more."""

    class Parameter:
        is_cuda = False

        def numel(self) -> int:
            return size

        def element_size(self) -> int:
            return 4

    class OnDevice(Parameter):
        is_cuda = True

    assert early_bytes(least, [Parameter()]) == on_host
    assert early_bytes(least, [OnDevice()]) == on_cuda


def test_where_all_ranks_must_start_at_the_same_place_they_wait_for_the_answer() -> None:
    """It says that the other rank makes the step as well; the second time, that it has other levels."""

    class Slow:
        world_size = 2

        def __init__(self) -> None:
            self.answers = [14, 12]

        def start_allreduce(self, array: Any, op: str, name: str) -> str:
            return name

        def is_done(self, started: Any) -> bool:
            return False

        def wait(self, started: Any) -> Any:
            return self.answers.pop(0)

    for waits in (False, True):
        presence_check = PresenceCheck(Slow(), waits)  # type: ignore[arg-type]
        found = []
        for _ in range(2):
            presence_check.start(7, "asked")
            found.append(presence_check.agrees())
        assert found == [waits, False]
