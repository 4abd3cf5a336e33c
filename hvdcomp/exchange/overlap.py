"""Overlap: a bucket is encoded, and starts its first collective, as soon as its own gradients are there, while the
backward pass makes those of others.

Nothing waits there. What a bucket needs after its first collective, it does when all gradients of the step have come.
The ranks may start a bucket at different times, in a hook or at the end, but all of them start the same buckets, in the
same order: `Buckets` makes them from the plan and from the order in which gradients became ready on rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.bucket import LEAST_BYTES
from hvdcomp.compressors.choice import Plan
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.bucket_step import Sums
from hvdcomp.exchange.buckets import Buckets, Together
from hvdcomp.exchange.clock import Clock
from hvdcomp.exchange.group_step import Step, step_of
from hvdcomp.exchange.lockstep import Lockstep

TRIES = 20
"""After this number of steps in which no bucket has started by itself, all buckets go together."""

_MOST = np.iinfo(np.int32).max


class _Step(NamedTuple):
    """Arguments of `Overlap.begin`, and the streams on which gradients have come."""

    context: Context
    in_place: bool
    sums: Sums | None
    agreed: Callable[[], bool]
    streams: set[Any]


class Overlap:
    """Starts buckets of one step after another.

    Args:
        communicator: the ranks.
        tensors: of the training, by name; the same on all ranks.
        buckets: of the training.
        clock: of the engine.
        least_bytes: of the gradients of a bucket that starts by itself; None for no such buckets.

    Attributes:
        started: what is under way in this step.
        least_bytes: as given, or as rank 0 chose; None where `review` has ended overlap.
        from_rank_0: whether rank 0 may choose `least_bytes`, `LEAST_BYTES` or more, before the first step; the others
            learn it with the order. The same on all ranks.
        era: the number of the order that holds, which rank 0 gives; 0 while none is known. It is a part of the names of
            what starts early: other trainings may have buckets under way at the same time.
    """

    _eras: ClassVar[Iterator[int]] = itertools.count(1)  # of all trainings of this process

    def __init__(
        self,
        communicator: Communicator,
        tensors: Mapping[str, TensorInfo],
        buckets: Buckets,
        clock: Clock,
        least_bytes: int | None,
    ) -> None:
        self.started: list[Lockstep] = []
        self.era = 0
        self.from_rank_0 = False
        self._learnt = False
        self._communicator = communicator
        self._tensors = tensors
        self._buckets = buckets
        self._clock = clock
        self.least_bytes = least_bytes
        self._early: Sequence[Together] = ()  # in the order in which they may start
        self._step: _Step
        self._places: dict[str, int] = {}
        self._missing: list[int] = []  # gradients of each
        self._gradients: dict[str, Array] = {}
        self._streams: set[Any] = set()  # on which buckets of the step under way have started
        # Since the order that holds: steps, steps of this rank with buckets that may start, and buckets that did.
        self._steps = self._tries = self._starts = 0
        self._due = TRIES

    def begin(
        self, plan: Plan, context: Context, in_place: bool, sums: Sums | None, agreed: Callable[[], bool]
    ) -> None:
        """Begins a step.

        Args:
            context: of the step.
            in_place, sums: as of `Engine.step`.
            agreed: whether all ranks are known to make this step, at the same levels; nothing starts before.
        """
        early = self._buckets.early(plan)
        if early != self._early:
            self._early = early
            self._places = {name: place for place, together in enumerate(early) for name in together.names}
        self._step = _Step(context, in_place, sums, agreed, set())
        self._missing = [len(together.names) for together in early]
        self._tries += bool(early)

    def ready(self, name: str, gradient: Array) -> None:
        """To be called when a gradient is there, after `begin`, on the stream that has made it. It may start
        collectives, and waits for none.

        On a device, what starts runs on that stream, behind the gradient. Where gradients come on several streams,
        nothing more starts: a bucket would not be behind all of its own.
        """
        place = self._places.get(name)
        if place is not None and self._missing:
            self._gradients[name] = gradient
            self._missing[place] -= 1
            self._step.streams.add(arrays_for(gradient).stream(gradient))
            if len(self._step.streams) > 1:
                self._missing = []
        while len(self.started) < len(self._missing) and not self._missing[len(self.started)] and self._step.agreed():
            self._start(self._early[len(self.started)])

    def _start(self, together: Together) -> None:
        """Starts a bucket or group. If it is a bucket that cannot take the gradients that have come, this bucket and
        those behind it wait for all gradients."""
        like, clock, step = self._gradients[together.names[0]], self._clock, self._step
        xp = arrays_for(like)
        if not self.started:
            clock.begin(xp, like)
        if not self._buckets.take(xp, together, self._gradients):
            self._missing = []
            return
        clock.turns_only &= together.on_device
        started = step_of(xp, together, self._gradients, step.context, None, clock)
        started.open(self._gradients, step.in_place, step.sums)
        wave = self.wave(xp, [started], together.number)
        wave.start()
        self.started.append(wave)
        self._starts += 1

    def end(self, like: Array | None = None) -> list[Lockstep]:
        """Ends a step; what it has started. The stream that now works where `like` is goes on behind that."""
        if self.started and like is not None:
            now = arrays_for(like).stream(like)
            for stream in self._step.streams - {now}:
                now.wait_stream(stream)
        self._streams = self._step.streams if self.started else set()
        started, self.started, self._missing, self._gradients = self.started, [], [], {}
        return started

    def free(self, like: Array) -> None:
        """Lets memory of a step that has ended be used again: the streams that have taken some go on behind the step,
        which has used it on the stream that now works where `like` is."""
        if self._streams:
            now = arrays_for(like).stream(like)
            for stream in self._streams - {now}:
                stream.wait_stream(now)
            self._streams = set()

    def wave(
        self, xp: ModuleType, steps: Sequence[Step], number: int | None, alone: bool = False, part: int = 0
    ) -> Lockstep:
        """Steps that go from round to round together: that of a bucket that may start early, or all others.

        Args:
            number: of the bucket; None for all others.
            alone: as of `Lockstep`.
            part: of all others, which may go one after the other.
        """
        name = "round" if number is None else f"order{self.era}.early{number}.round"
        if part:
            name = f"part{part}.{name}"
        return Lockstep(xp, self._communicator, self._clock, name, steps, alone)

    def learn_order(self, gradients: Mapping[str, Array]) -> None:
        """After a step: takes the order in which gradients became ready, of the first step on rank 0, for that of all.

        Waits for all ranks in that step, unless all gradients are too small for a bucket that starts by itself. Where
        rank 0 finds so alone, all know then that there are none.

        Args:
            gradients: by name, in their order.
        """
        if self.least_bytes is None or self._learnt:
            return
        everything = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor in self._tensors.values())
        if everything <= (LEAST_BYTES if self.from_rank_0 else self.least_bytes):
            return
        names = list(self._tensors)
        numbers = {name: number for number, name in enumerate(names)}
        order = [numbers[name] for name in gradients if name in numbers]
        sends = np.full(2 + len(names), -1, np.int32)
        sends[:2] = next(self._eras) if everything > self.least_bytes else 0, min(self.least_bytes, _MOST)
        sends[2 : 2 + len(order)] = order
        like = next(iter(gradients.values()))
        xp = arrays_for(like)
        sent = self._communicator.start_broadcast(xp.from_numpy(sends, like=like), "hvdcomp.order")
        self.era, self.least_bytes, *order = xp.to_numpy(self._communicator.wait(sent)).tolist()
        self._learnt = True
        if self.era:
            self._follow([[names[number]] for number in order if number >= 0], self.least_bytes)

    def review(self, like: Array) -> None:
        """After a step: ends overlap if no rank has started a bucket by itself in `TRIES` steps, or in twice as many,
        and so on, where ranks have tried it less than `TRIES / 2` times.

        Each bucket then goes by itself at the end of the step, which costs rounds and hides nothing: as where gradients
        come on several streams, or where it is known only after the backward pass that all ranks make the step. In
        the last of these steps all ranks wait for each other, and then all make the same decision.

        Args:
            like: an array of the step.
        """
        if not self.era:
            return
        self._steps += 1
        if self._steps != self._due:
            return
        xp = arrays_for(like)
        counts = xp.from_numpy(np.array([self._tries, self._starts], np.float32), like=like)
        started = self._communicator.start_allreduce(counts, "sum", "hvdcomp.early")
        tries, starts = xp.to_numpy(self._communicator.wait(started)).tolist()
        if starts:
            return
        if tries < TRIES / 2 * self._communicator.world_size:
            # In most steps somebody looked at x before it was compressed, or the plan was new. In the few others, the
            # ranks' agreement may have come late by chance.
            self._due *= 2
            return
        if self._communicator.rank == 0:
            warn_alone(
                f"in {self._due} steps no gradients could be sent before the end of the backward pass. From now on all "
                "gradients are sent together after the backward pass, as with overlap=False"
            )
        self.follow([], 0)
        self.least_bytes = None  # for good

    def follow(self, batches: Sequence[Sequence[str]], least_bytes: int) -> None:
        """Takes an order that all ranks know, from the next step on: instead of `learn_order`.

        Args:
            batches: names of gradients that become ready at once, in their order.
            least_bytes: of the gradients of a bucket; what is smaller goes with the next ones. The same on all ranks.
        """
        self._learnt = True
        if self.least_bytes is not None:
            self.era = next(self._eras) if batches else 0
            self._follow(batches, least_bytes)

    def _follow(self, batches: Sequence[Sequence[str]], least_bytes: int) -> None:
        self._steps = self._tries = self._starts = 0
        self._due = TRIES
        self._buckets.start_early(batches, least_bytes)
