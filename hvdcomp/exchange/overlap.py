"""Overlap: a bucket is encoded, and starts its first collective, as soon as its own gradients are ready, while the
backward pass computes the other gradients.

Nothing waits during the backward pass. A bucket does all that follows its first collective when all gradients of the
step are ready. Ranks may start a bucket at different times, in a hook or at the end. But all ranks start the same
buckets in the same order: `Buckets` makes them from the plan, and from the order in which gradients became ready on
rank 0.
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
from hvdcomp.exchange.buckets import BucketOrGroup, Buckets
from hvdcomp.exchange.clock import Clock
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.exchange.wave import Wave

TRIES = 20
"""After this number of steps in which no bucket has started early, all buckets go together."""

_MOST = np.iinfo(np.int32).max


class _Expected(NamedTuple):
    """Arguments of `Overlap.begin` for the present step, and the streams on which gradients have come."""

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
        least_bytes: least bytes of gradients in a bucket that starts early; None for no such buckets.

    Attributes:
        started: the waves that have started early in this step.
        least_bytes: as given, or as rank 0 chose; None after `review` has ended overlap.
        from_rank_0: whether rank 0 may choose `least_bytes`, `LEAST_BYTES` or more, before the first step. The other
            ranks get it with the order. The same on all ranks.
        era: number of the present order, chosen by rank 0; 0 while no order is known. Names of early collectives
            contain it, because other trainings of the process may have such collectives at the same time.
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
        self.started: list[Wave] = []
        self.era = 0
        self.from_rank_0 = False
        self._learnt = False
        self._communicator = communicator
        self._tensors = tensors
        self._buckets = buckets
        self._clock = clock
        self.least_bytes = least_bytes
        self._early: Sequence[BucketOrGroup] = ()  # in the order in which they may start
        self._expected: _Expected
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
            agreed: function that returns whether this rank knows that all ranks make this step, at the same levels.
                Nothing starts before.
        """
        early = self._buckets.early(plan)
        if early != self._early:
            self._early = early
            self._places = {name: place for place, bucket in enumerate(early) for name in bucket.names}
        self._expected = _Expected(context, in_place, sums, agreed, set())
        self._missing = [len(bucket.names) for bucket in early]
        self._tries += bool(early)

    def ready(self, name: str, gradient: Array) -> None:
        """Call this when a gradient is ready, after `begin`, on the stream that computed it. It may start collectives,
        and waits for none.

        On a device, a bucket runs on this stream, after the gradient. If gradients come on several streams, no more
        buckets start: a bucket on one stream would not run after its gradients on the others.
        """
        place = self._places.get(name)
        if place is not None and self._missing:
            self._gradients[name] = gradient
            self._missing[place] -= 1
            self._expected.streams.add(arrays_for(gradient).stream(gradient))
            if len(self._expected.streams) > 1:
                self._missing = []
        while (next_one := len(self.started)) < len(self._missing) and not self._missing[next_one]:
            if not self._expected.agreed():
                break
            self._start(self._early[next_one])

    def _start(self, bucket: BucketOrGroup) -> None:
        """Starts a bucket or group. If a bucket cannot take its gradients, it waits for all gradients, and so do the
        buckets after it."""
        like, clock, expected = self._gradients[bucket.names[0]], self._clock, self._expected
        xp = arrays_for(like)
        if not self.started:
            clock.begin(xp, like)
        if not self._buckets.take(xp, bucket, self._gradients):
            self._missing = []
            return
        clock.marks_only_turns &= bucket.on_device
        bucket.begin(xp, self._gradients, expected.context, None, clock)
        bucket.open(expected.in_place, expected.sums)
        wave = self.new_wave(xp, [bucket], bucket.number)
        wave.start()
        self.started.append(wave)
        self._starts += 1

    def end(self, like: Array | None = None) -> list[Wave]:
        """Ends a step; returns the waves that have started. The present stream of `like`'s device waits for them."""
        if self.started and like is not None:
            now = arrays_for(like).stream(like)
            for stream in self._expected.streams - {now}:
                now.wait_stream(stream)
        self._streams = self._expected.streams if self.started else set()
        started, self.started, self._missing, self._gradients = self.started, [], [], {}
        return started

    def free(self, like: Array) -> None:
        """After a step: lets its memory be used again. The streams that allocated memory wait for the present stream of
        `like`'s device, which has used that memory."""
        if self._streams:
            now = arrays_for(like).stream(like)
            for stream in self._streams - {now}:
                stream.wait_stream(now)
            self._streams = set()

    def new_wave(
        self, xp: ModuleType, buckets: Sequence[BucketOrGroup], number: int | None, alone: bool = False, part: int = 0
    ) -> Wave:
        """The wave of a bucket that may start early, or of all others.

        Args:
            number: of the bucket; None for all others.
            alone: as of `Wave`.
            part: number of the wave, if all others are several waves.
        """
        name = "round" if number is None else f"order{self.era}.early{number}.round"
        if part:
            name = f"part{part}.{name}"
        return Wave(xp, self._communicator, self._clock, name, buckets, alone)

    def learn_order(self, gradients: Mapping[str, Array]) -> None:
        """After the first step: all ranks take the order in which gradients became ready on rank 0.

        Waits for all ranks, unless all gradients together are too small for a bucket that starts early. If only rank 0
        finds them too small, it tells the other ranks, and nothing starts early.

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
        """After a step: ends overlap if no rank has started a bucket early in `TRIES` steps. If ranks have tried less
        than `TRIES / 2` times, it waits for twice as many steps, and so on.

        Without early starts, each bucket is still a wave of its own at the end of the step, which costs rounds and
        hides nothing. This happens if gradients come on several streams, or if a rank learns only after the backward
        pass that all ranks make the step. All ranks wait for each other in the last of these steps, and then make the
        same decision.

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
        """Uses an order that all ranks know, from the next step on; instead of `learn_order`.

        Args:
            batches: names of gradients that become ready at once, in their order.
            least_bytes: least bytes of gradients in a bucket. The same on all ranks.
        """
        self._learnt = True
        if self.least_bytes is not None:
            self.era = next(self._eras) if batches else 0
            self._follow(batches, least_bytes)

    def _follow(self, batches: Sequence[Sequence[str]], least_bytes: int) -> None:
        self._steps = self._tries = self._starts = 0
        self._due = TRIES
        self._buckets.start_early(batches, least_bytes)
