"""How kernels for CUDA devices are launched: how many, and in which order on two streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from tests.cuda_kernels import SPECS, launches, watch
from tests.harness import infos
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
if cuda.available():
    from hvdcomp.kernels.cuda import aside, device
pytestmark = needs_triton


class Stream:
    """Knows what has been launched on it, and on others before it waited for them."""

    device_index = 0

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen


class Event:
    seen: set[int]

    def record(self, stream: Stream) -> None:
        self.seen = set(stream.seen)


class Streams:
    """A stream of a step and one beside it.

    Attributes:
        launched: name of each kernel, whether it was launched on the other stream, and what it waited for, by number.
        sent: what each collective waited for.
    """

    def __init__(self) -> None:
        self.main, self.side = Stream(), Stream()
        self.launched: list[tuple[str, bool, set[int]]] = []
        self.sent: list[set[int]] = []

        self.current = self.main

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, kernel: Any) -> None:
        self.current.seen.add(len(self.launched))
        self.launched.append((kernel.__name__, self.current is self.side, set(self.current.seen)))


class Kernel:
    """In place of a kernel."""

    def __init__(self, kernel: Any, streams: Streams) -> None:
        self.kernel, self.streams = kernel, streams

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **constants: self.streams.launch(self.kernel)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """In place of a device's: kernels are not launched, but noted."""
    found = Streams()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(aside, "_side_stream", lambda device: found.side)
    start = InProcessCommunicator.start_allgather, InProcessCommunicator.start_allreduce

    def noted(which: int) -> Any:
        def begin(self: Any, *given: Any) -> Any:
            found.sent.append(set(found.main.seen))
            return start[which](self, *given)

        return begin

    for which, name in enumerate(("start_allgather", "start_allreduce")):
        monkeypatch.setattr(InProcessCommunicator, name, noted(which))
    before, launch = device.DeviceKernels.__init__, device.DeviceKernels.launch

    def with_a_side(self: Any, *given: Any) -> None:
        before(self, *given)
        self._aside = aside.Aside(self.device)

    def launched(self: Any, kernel: Any, *given: Any, **constants: Any) -> None:
        launch(self, Kernel(kernel, found), *given, **constants)

    monkeypatch.setattr(device.DeviceKernels, "__init__", with_a_side)
    monkeypatch.setattr(device.DeviceKernels, "launch", launched)
    with cuda.serving_host():
        yield found


@pytest.mark.parametrize(
    ("spec", "taken_off"),
    [("randomk:ratio=0.1", "random_keep"), ("signsgd", "votes_keep")],
)
@pytest.mark.parametrize("watched", [False, True])
def test_the_network_does_not_wait_for_what_is_taken_off(
    spec: str, taken_off: str, watched: bool, streams: Streams
) -> None:
    """It has all that encodes behind it, and whatever comes after the collective has what is aside behind it: also what
    measures, and what is compressed to be measured."""

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos({"w": (8, 8)}), parse_compressor(spec), ErrorFeedback(), 0, 0, 0)
        if watched:
            watch(engine)
        for _ in range(3):
            engine.begin()
            engine.step({"w": torch.ones(8, 8)})

    run_ranks(1, work)
    numbers = [number for number, (name, _, _) in enumerate(streams.launched) if name == taken_off]
    compressed = 3 if watched else 1  # times in a step, at last to be sent
    assert len(numbers) == 3 * compressed
    for number, (_, on_side, seen) in enumerate(streams.launched):
        assert on_side == (number in numbers)
        assert seen == set(range(number + 1))
    assert streams.sent == [set(range(number)) for number in numbers[compressed - 1 :: compressed]]


def test_without_anything_aside_there_is_one_stream(streams: Streams) -> None:
    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos({"w": (8, 8)}), parse_compressor("efsignsgd"), ErrorFeedback(), 0, 0, 0)
        engine.begin()
        engine.step({"w": torch.ones(8, 8)})

    run_ranks(1, work)
    assert not any(on_side for _, on_side, _ in streams.launched)
    assert not streams.side.seen


def test_the_manual_says_how_many_kernels_a_step_launches() -> None:
    """In the third step, with error feedback, of a bucket whose tensors all go with the method."""
    text = (Path(__file__).parents[2] / "hvdcomp" / "kernels" / "README.md").read_text()
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| (\d+) \|$", text, re.MULTILINE)
    said = {spec: int(count) for specs, count in rows for spec in re.findall("`([^`]+)`", specs)}
    assert said.keys() == set(SPECS)

    def count(spec: str, steps: int) -> int:
        return len(launches(spec, [(64, 1100), (70, 90)], ErrorFeedback(), steps))

    assert said == {spec: count(spec, 3) - count(spec, 2) for spec in SPECS}
