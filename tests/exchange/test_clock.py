"""Times of steps on a device: how many events they take, and what is counted as whose."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.kernels import cuda
from tests.harness import infos
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
if cuda.available():
    from hvdcomp.kernels.cuda import device
from hvdcomp.arrays import torch_arrays  # noqa: E402


class Event:
    at: int


class Device:
    """In place of a device, which takes a second for each kernel and 100 for each collective.

    Attributes:
        now: seconds that it has been busy with all that it was given.
        passed: seconds after which it has not come yet.
        events: that were made.
        recorded: how often one was recorded.
    """

    def __init__(self) -> None:
        self.now = 0
        self.passed = 10**9
        self.events: list[Event] = []
        self.recorded = 0

    def mark(self, like: Any, spare: Event | None = None) -> Event:
        if spare is None:
            self.events.append(spare := Event())
        spare.at = self.now
        self.recorded += 1
        return spare

    def seconds_between(self, start: Event, end: Event) -> float | None:
        return end.at - start.at if end.at <= self.passed else None

    def launch(self, kernels: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        self.now += 1


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Gradients on the CPU are served as if they were on this device."""
    found = Device()
    monkeypatch.setattr(torch_arrays, "mark", found.mark)
    monkeypatch.setattr(torch_arrays, "seconds_between", found.seconds_between)
    monkeypatch.setattr(device.DeviceKernels, "launch", lambda *given, **constants: found.launch(*given, **constants))
    for name in ("start_allgather", "start_allreduce"):
        start = getattr(InProcessCommunicator, name)

        def begin(*given: Any, start: Any = start) -> Any:
            found.now += 100
            return start(*given)

        monkeypatch.setattr(InProcessCommunicator, name, begin)
    with cuda.serving_host():
        yield found


def run(methods: dict[str, str], steps: int = 1, before: Any = lambda step: None) -> Ledger:
    """Steps of one rank. methods: by the names of tensors."""
    shapes = dict.fromkeys(methods, (8, 40))
    ledgers = []

    def work(communicator: Any) -> None:
        engine = Engine(communicator, infos(shapes), parse_compressor("none"), ErrorFeedback(), 0, 0, 0)
        ledgers.append(engine.ledger)
        engine.set_plan({name: parse_compressor(spec) for name, spec in methods.items()})
        for step in range(steps):
            before(step)
            engine.begin()
            engine.step({name: torch.zeros(shape) for name, shape in shapes.items()}, in_place=True)
        assert len(engine.buckets.with_kernels) == len(set(methods.values()))

    run_ranks(1, work)
    return ledgers[0]


@needs_triton
@pytest.mark.parametrize(
    ("methods", "rounds"),
    [(["efsignsgd"], 1), (["none", "topk:ratio=0.1", "natural"], 1), (["powersgd:rank=2"], 2), (["globalqsgd"], 2)],
)
@pytest.mark.parametrize("tensors", [1, 10])
def test_two_events_for_each_bucket_and_two_for_each_step(
    methods: list[str], rounds: int, tensors: int, busy: Device
) -> None:
    """One more and one more for each further round."""
    run({f"{spec} {number}": spec for spec in methods for number in range(tensors)}, steps=3)
    assert busy.recorded == 3 * (1 + rounds + (1 + rounds) * len(methods))


@needs_triton
def test_events_are_used_again_when_they_have_been_read(busy: Device) -> None:
    """The device is a step behind the host."""
    before: list[int] = []

    def behind(step: int) -> None:
        busy.passed = before[-1] if before else 0
        before.append(busy.now)

    ledger = run({"a": "efsignsgd"}, 10, behind)
    assert busy.recorded == 40
    assert len(busy.events) == 12  # of the step under way, the one that the device is at, and the one read before
    assert ledger.last is not None
    assert ledger.last.encode_seconds is None
    assert ledger.totals.encode_seconds == 8 * 2


@needs_triton
def test_whose_kernels_are_whose(busy: Device) -> None:
    """Each bucket's own kernels, but for the one that ends the step."""
    ledger = run({"a": "efsignsgd", "b": "topk:ratio=0.1", "c": "topk:ratio=0.1"}, 2)
    last = ledger.last
    assert last is not None
    assert {name: 2 * cost.encode_seconds for name, cost in last.tensors.items()} == {"a": 4, "b": 9, "c": 9}
    assert {name: 2 * cost.decode_seconds for name, cost in last.tensors.items()} == {"a": 2, "b": 1, "c": 1}
    assert last.communicate_seconds == 100


def test_an_event_is_recorded_again_on_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        device = "none"

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            self.device = stream

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    first, other = (SimpleNamespace(is_cuda=True, device=name) for name in ("first", "other"))
    event = torch_arrays.mark(first)
    assert torch_arrays.mark(first, event) is event
    assert torch_arrays.mark(other, event) is not event
