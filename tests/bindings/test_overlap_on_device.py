"""Overlap where gradients are on a device: on which streams, and when."""

from __future__ import annotations

from typing import Any

import pytest

from hvdcomp.arrays import torch_arrays
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import infos
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from hvdcomp.torch.presence import PresenceCheck  # noqa: E402
from hvdcomp.torch.training import early_bytes  # noqa: E402
from tests.cuda_kernels import recorded  # noqa: E402
from tests.device_waits import on_device  # noqa: E402

BYTES = 9_000  # which two matrices fill


class Stream:
    """In place of a device's."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


@needs_triton
@pytest.mark.parametrize("later", [False, True])
def test_buckets_start_behind_their_gradients_and_steps_end_behind_them(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come on one stream, and the step ends on another. Where the later ones come on a third, nothing more
    starts."""
    hooks, main, third = Stream(), Stream(), Stream()
    now = [main]
    monkeypatch.setattr(torch_arrays, "stream", lambda x: now[0])
    shapes = dict.fromkeys("abcd", (40, 50))
    with on_device(monkeypatch), recorded():
        engine = Engine(
            LoopbackCommunicator(2), infos(shapes), parse_compressor("efsignsgd"), min_numel=0, min_ndim=0,
            overlap_bytes=BYTES,
        )  # fmt: skip
        started = []
        for _ in range(4):  # the first one shows the order, the second one has buckets that need not wait
            engine.begin()
            engine.expect()
            gradients = {name: torch.ones(shapes[name]) for name in "dcba"}
            for number, name in enumerate("dcba"):
                now[0] = third if later and number >= 2 else hooks
                engine.overlap.ready(name, gradients[name])
            started.append(len(engine.overlap.started))
            now[0] = main
            engine.step(gradients)
    assert started == ([0, 0, 1, 1] if later else [0, 0, 2, 2])
    assert set(main.waited) == ({hooks, third} if later else {hooks})
    assert not hooks.waited


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
