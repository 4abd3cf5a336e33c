"""The ledger: the bytes, floats and time of each step, and of each tensor over all steps.

Bytes are the bytes that one rank passes to collectives, with indices, scales, padding and the engine's own flags. The
bytes that a collective then moves over each link may be more or fewer, for example in a ring.

Times are measured between marks on the gradients' device (`clock`). On an accelerator, a mark is an event. The ledger
reads events only after they have passed, so no step waits for the device.

On a device, the times of a bucket are measured on the stream of the step, during the turns of the bucket:

- Kernels on a second stream (`kernels/cuda/aside.py`) are not counted. If a later turn waits for these kernels, its
  waiting time is counted.
- The end of a step is not counted.
- If the device waits for a slower host during a turn, this time is counted.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from hvdcomp.exchange.clock import Clock, Span, Spans


@dataclass
class Cost:
    """Bytes, floats and seconds of one step, of one tensor, or of a whole run.

    Attributes:
        bytes_sent: bytes that this rank passed to collectives.
        dense_bytes: bytes of the same gradients uncompressed.
        floats_sent: number of values that were sent, counted as 32-bit floats, without indices and padding. Papers use
            this unit.
        encode_seconds: seconds of computation before and between the collectives; None while unknown.
        communicate_seconds: seconds of waiting for collectives. A tensor has a share of this time in proportion to its
            bytes.
        decode_seconds: seconds of computation after the last collective.
        bytes_in_node: the part of `bytes_sent` that went to collectives among the ranks of a node, if there are several
            nodes. All other bytes may leave the node. On a single node, this is 0.
    """

    bytes_sent: int = 0
    dense_bytes: int = 0
    floats_sent: float = 0.0
    encode_seconds: float | None = None
    communicate_seconds: float | None = None
    decode_seconds: float | None = None
    bytes_in_node: int = 0

    @property
    def compression_factor(self) -> float | None:
        """The compression factor of this cost, computed by the function `compression_factor`."""
        return compression_factor(self.dense_bytes, self.bytes_sent, self.bytes_in_node)

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds another cost, with its bytes and floats multiplied by `times`. Unknown times add nothing."""
        # No loop over the fields, because this runs for each tensor in each step.
        self.bytes_sent += times * other.bytes_sent
        self.bytes_in_node += times * other.bytes_in_node
        self.dense_bytes += times * other.dense_bytes
        self.floats_sent += times * other.floats_sent
        if other.encode_seconds is not None:
            self.encode_seconds = (self.encode_seconds or 0) + other.encode_seconds
        if other.communicate_seconds is not None:
            self.communicate_seconds = (self.communicate_seconds or 0) + other.communicate_seconds
        if other.decode_seconds is not None:
            self.decode_seconds = (self.decode_seconds or 0) + other.decode_seconds

    def without(self, other: Cost) -> Cost:
        """This cost minus another cost. Unknown times of the other cost are 0."""
        differences = {}
        for field in fields(Cost):
            value, taken = getattr(self, field.name), getattr(other, field.name)
            differences[field.name] = value if taken is None else (value or 0) - taken
        return Cost(**differences)


def compression_factor(dense_bytes: float, bytes_sent: float, bytes_in_node: float = 0) -> float | None:
    """Uncompressed bytes divided by the sent bytes that may leave the node, because only these cross a slow link; None
    if there are no such bytes.

    Args:
        dense_bytes, bytes_sent, bytes_in_node: as in `Cost`. The numbers may be those of a step, a tensor or a run, or
            means of several such numbers.

    Example:
        >>> compression_factor(4000, 5050, 5000)
        80.0
    """
    leaving = bytes_sent - bytes_in_node
    return dense_bytes / leaving if dense_bytes and leaving else None


class Sent(NamedTuple):
    """The bytes that a rank passed to all collectives, and the part that it passed to collectives within its node."""

    bytes: int = 0
    in_node: int = 0

    def __add__(self, other: Sent) -> Sent:  # type: ignore[override]
        return Sent(self.bytes + other.bytes, self.in_node + other.in_node)


Part = Mapping[str, Cost]
"""The costs of tensors that are compressed together, by tensor name. They have bytes and floats, but no times. Do not
change them."""


@dataclass
class StepCost(Cost):
    """The cost of one step, together with the costs of its tensors.

    Attributes:
        step: number of the step, from 0.
        parts: the costs of the tensors, with one mapping for each part. A part is a bucket or a tensor group, and has
            times of its own. The other fields of the step are not computed from `parts`: add the costs with `add`.
        seconds: for each part, the seconds of encoding and of decoding; None while unknown.
    """

    step: int = 0
    parts: tuple[Part, ...] = ()
    seconds: Sequence[tuple[float, float]] | None = None

    @property
    def tensors(self) -> dict[str, Cost]:
        """The cost of each tensor, by name. Each tensor gets a share of its part's times in proportion to its size."""
        return self.tensors_with(self.seconds, self.communicate_seconds)

    def tensors_with(
        self, seconds: Sequence[tuple[float, float]] | None, communicate: float | None, times: int = 1
    ) -> dict[str, Cost]:
        """The cost of each tensor as in `tensors`, with the given times, and with bytes and floats multiplied by
        `times`."""
        costs = {}
        for place, part in enumerate(self.parts):
            dense = sum(cost.dense_bytes for cost in part.values()) or 1
            for name, cost in part.items():
                costs[name] = tensor_cost = Cost()
                tensor_cost.add(cost, times)
                if seconds is not None and communicate is not None:
                    share = cost.dense_bytes / dense if len(part) > 1 else 1.0
                    tensor_cost.encode_seconds, tensor_cost.decode_seconds = (share * spent for spent in seconds[place])
                    tensor_cost.communicate_seconds = communicate * cost.bytes_sent / max(1, self.bytes_sent)
        return costs


Settle = Callable[[], bool]


class Ledger:
    """Collects the costs of all steps on one rank.

    Attributes:
        clock: the clock that measures the times of steps.
        last: the cost of the newest step; None before the first step.
        totals: the sum of the costs of all steps.
        steps: number of all steps.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.last: StepCost | None = None
        self.totals = Cost()
        self.steps = 0
        # Four values from the time when the latest checkpoint was loaded: the cost and the number of steps of this
        # process, and the cost and the number of steps in the checkpoint.
        self._continued = (Cost(), 0, Cost(), 0)
        self._tensors: dict[str, Cost] = {}
        self._unsettled: deque[Settle] = deque()
        self._timed: StepCost | None = None
        # Steps with the same parts are added up by tensor only when `tensors` is read. If Horovod exchanges the
        # gradients, adding them up in each step would be most of hvdcomp's work.
        self._same: StepCost | None = None
        self._same_steps = 0
        self._same_seconds: list[tuple[float, float]] | None = None
        self._same_communicate = 0.0

    @property
    def tensors(self) -> dict[str, Cost]:
        """The sums by parameter name."""
        self._add_same()
        return self._tensors

    @property
    def timed(self) -> StepCost | None:
        """The newest step with known times; None if the times of the last step will never be known."""
        return self._timed if self._unsettled or self._timed is self.last else None

    def of_this_process(self) -> tuple[Cost, int]:
        """The sum of the costs of all steps that this process made, and the number of these steps. Unlike `totals` and
        `steps`, these two results are not reset when a checkpoint is loaded."""
        made, number, totals, steps = self._continued
        cost = self.totals.without(totals)
        cost.add(made)
        return cost, number + self.steps - steps

    def continue_from(self, totals: Cost, steps: int) -> None:
        """Continues from the sums and the number of steps of a checkpoint."""
        self._continued = (*self.of_this_process(), replace(totals), steps)
        self.totals, self.steps = totals, steps

    def record(self, step: StepCost, settle: Settle | None = None) -> None:
        """Enters a step whose bytes and floats are known.

        Args:
            step: the cost of the step.
            settle: function that calls `enter_times` and returns True if the times are known. It is called now and in
                later steps, until it returns True. None if the step has no times.
        """
        self.last = step
        self.steps += 1
        self.totals.add(step)
        if self._same is None or step.parts is not self._same.parts:
            self._add_same()
            self._same = step
        self._same_steps += 1
        if settle is not None:
            self._unsettled.append(settle)
        self.settle()

    def settle(self) -> None:
        """Enters the times that have become known. It waits for nothing."""
        while self._unsettled and self._unsettled[0]():
            self._unsettled.popleft()

    def step_cost(self, step: int, parts: Sequence[Part], sent: Sent) -> StepCost:
        """Creates the cost of a step, as `record` needs it.

        Args:
            step: number of the step.
            parts: the costs of the tensors, with one mapping for each part.
            sent: all bytes that this rank sent, including bytes that belong to no tensor.
        """
        same = self._same
        if same is None or tuple(parts) != same.parts:
            sums = Cost()
            for part in parts:
                for cost in part.values():
                    sums.add(cost)
            step_cost = StepCost(sent.bytes, sums.dense_bytes, sums.floats_sent, step=step, parts=tuple(parts))
        else:
            step_cost = StepCost(sent.bytes, same.dense_bytes, same.floats_sent, step=step, parts=same.parts)
        step_cost.bytes_in_node = sent.in_node
        return step_cost

    def record_timed(self, step: StepCost, spans: Sequence[Spans], communicate: Sequence[Span]) -> None:
        """Enters a step now, and its times as soon as they are known.

        Args:
            step: the cost of the step.
            spans: the time spans of encoding and decoding, for each part.
            communicate: the time spans in which this rank waited for collectives.
        """
        read = self.clock.end()
        lists = [communicate, *itertools.chain.from_iterable(spans)]

        def settle() -> bool:
            seconds = read(lists)
            if seconds is None:
                return False
            waiting, *each = seconds
            self.enter_times(step, list(zip(each[::2], each[1::2], strict=True)), waiting)
            return True

        self.record(step, settle)

    def enter_times(self, step: StepCost, seconds: Sequence[tuple[float, float]], communicate: float) -> None:
        """Enters the times of a recorded step.

        Args:
            step: the recorded step.
            seconds: for each part, the seconds of encoding and of decoding.
            communicate: seconds of waiting for all collectives.
        """
        encode = decode = 0.0
        for of_encoding, of_decoding in seconds:
            encode += of_encoding
            decode += of_decoding
        times = Cost(encode_seconds=encode, communicate_seconds=communicate, decode_seconds=decode)
        step.add(times)
        step.seconds = seconds
        self._timed = step
        self.totals.add(times)
        if self._same is None or step.parts is not self._same.parts:
            self._add_tensors(step.tensors_with(seconds, communicate, times=0))
            return
        known = self._same_seconds or [(0.0, 0.0)] * len(seconds)
        self._same_seconds = [(a + c, b + d) for (a, b), (c, d) in zip(known, seconds, strict=True)]
        self._same_communicate += communicate

    def _add_same(self) -> None:
        if self._same is not None:
            seconds, communicate = self._same_seconds, self._same_communicate
            self._add_tensors(self._same.tensors_with(seconds, communicate, self._same_steps))
        self._same, self._same_steps = None, 0
        self._same_seconds, self._same_communicate = None, 0.0

    def _add_tensors(self, tensors: Mapping[str, Cost]) -> None:
        for name, cost in tensors.items():
            if name not in self._tensors:
                self._tensors[name] = Cost()
            self._tensors[name].add(cost)
