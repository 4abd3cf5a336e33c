"""The ledger: what each step, and each tensor over all steps, cost in bytes, floats and time.

Bytes are what one rank hands to the collectives (indices, scales, padding and the engine's own flags included),
not what a ring then moves over each link. Times are taken between marks on the gradient's own device; on an
accelerator a mark is an event, read when it has passed, so that no step waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cost:
    """Bytes, floats and seconds of one step, of one tensor, or of a whole run.

    Attributes:
        bytes_sent: bytes that this rank handed to collectives.
        dense_bytes: bytes of the same gradients uncompressed.
        floats_sent: values sent, as 32-bit floats, without indices and padding: the papers' unit.
        encode_seconds: maths before and between the collectives; None while not known.
        communicate_seconds: waiting for collectives. For a tensor it is its share by bytes.
        decode_seconds: maths after the last collective.
    """

    bytes_sent: int = 0
    dense_bytes: int = 0
    floats_sent: float = 0.0
    encode_seconds: float | None = None
    communicate_seconds: float | None = None
    decode_seconds: float | None = None

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds another cost, its bytes and floats `times` times; a time that is not known adds nothing."""
        # Written out, as it is done for each tensor of each step.
        self.bytes_sent += times * other.bytes_sent
        self.dense_bytes += times * other.dense_bytes
        self.floats_sent += times * other.floats_sent
        if other.encode_seconds is not None:
            self.encode_seconds = (self.encode_seconds or 0) + other.encode_seconds
        if other.communicate_seconds is not None:
            self.communicate_seconds = (self.communicate_seconds or 0) + other.communicate_seconds
        if other.decode_seconds is not None:
            self.decode_seconds = (self.decode_seconds or 0) + other.decode_seconds


@dataclass
class StepCost(Cost):
    """The cost of one step. `step` counts from 0; `tensors` holds the part of each tensor, by parameter name."""

    step: int = 0
    tensors: dict[str, Cost] = field(default_factory=dict)


Settle = Callable[[], bool]
Marks = Sequence[tuple[Any, Any]]  # where spans of time begin and end


class Ledger:
    """Collects costs. `last` is the newest step, `totals` the sum of all, `tensors` the sums by parameter name."""

    def __init__(self) -> None:
        self.last: StepCost | None = None
        self.totals = Cost()
        self.steps = 0
        self._tensors: dict[str, Cost] = {}
        self._unsettled: deque[Settle] = deque()
        # Steps without times that cost the same are added up by tensor only when `tensors` is read: doing so in each
        # step would be most of hvdcomp's work where Horovod carries the gradients.
        self._same: dict[str, Cost] = {}
        self._same_steps = 0

    @property
    def tensors(self) -> dict[str, Cost]:
        """The sums by parameter name."""
        self._add_same()
        return self._tensors

    def record(self, step: StepCost, settle: Settle | None = None) -> None:
        """Enters a step whose bytes and floats are known.

        Args:
            settle: called until it returns True, now and at later steps; it calls `enter_times` once the times are
                known. None if there are no times; then nothing may change `step.tensors` any more.
        """
        self.last = step
        self.steps += 1
        self.totals.add(step)
        if settle is not None:
            self._add_tensors(step.tensors)
            self._unsettled.append(settle)
        else:
            if step.tensors is not self._same:
                self._add_same()
                self._same = step.tensors
            self._same_steps += 1
        while self._unsettled and self._unsettled[0]():
            self._unsettled.popleft()

    def record_timed(
        self,
        step: StepCost,
        encode: Mapping[str, Marks],
        communicate: Marks,
        decode: Mapping[str, Marks],
        seconds_between: Callable[[Any, Any], float | None],
    ) -> None:
        """Enters a step with its times, as soon as these are known.

        Args:
            encode, decode: by tensor.
            seconds_between: of two marks; None if they have not passed yet.
        """

        def seconds_of(marks: Marks) -> float | None:
            spans = [seconds_between(start, end) for start, end in marks]
            return None if None in spans else sum(spans)  # type: ignore[arg-type]

        def settle() -> bool:
            encoding = {name: seconds_of(marks) for name, marks in encode.items()}
            decoding = {name: seconds_of(marks) for name, marks in decode.items()}
            waiting = seconds_of(communicate)
            if any(seconds is None for seconds in (*encoding.values(), *decoding.values(), waiting)):
                return False
            self.enter_times(step, encoding, waiting, decoding)  # type: ignore[arg-type]
            return True

        self.record(step, settle)

    def enter_times(
        self, step: StepCost, encode: dict[str, float], communicate: float, decode: dict[str, float]
    ) -> None:
        """Enters the times, in seconds, of a step recorded before; by tensor for encode and decode."""
        times = Cost(
            encode_seconds=sum(encode.values()),
            communicate_seconds=communicate,
            decode_seconds=sum(decode.values()),
        )
        step.add(times)
        self.totals.add(times)
        for name, cost in step.tensors.items():
            share = communicate * cost.bytes_sent / max(1, step.bytes_sent)
            tensor_times = Cost(
                encode_seconds=encode[name], communicate_seconds=share, decode_seconds=decode[name]
            )
            cost.add(tensor_times)
            self._tensors[name].add(tensor_times)

    def _add_same(self) -> None:
        if self._same_steps:
            self._add_tensors(self._same, self._same_steps)
            self._same_steps = 0

    def _add_tensors(self, tensors: dict[str, Cost], times: int = 1) -> None:
        for name, cost in tensors.items():
            if name not in self._tensors:
                self._tensors[name] = Cost()
            self._tensors[name].add(cost, times)
