"""Overlap: a bucket starts as soon as its own gradients are ready, while the backward pass computes other gradients.

To start a bucket means to encode it and to start its first collective. Nothing waits for a collective during the
backward pass. Further collectives of the bucket, and decoding, follow when all gradients of the step are ready.

All ranks start the same buckets in the same order, because `Buckets` makes the buckets from the plan, and from the
order in which gradients became ready on rank 0. But ranks may start a bucket at different times: one rank in a hook of
the backward pass, another rank at the end of the step.

In this file, "bucket" also means a tensor group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AllFunctions, Array, dtype_bytes
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
"""After this number of steps without a bucket that started early, overlap ends, and all buckets start together."""

_MOST = np.iinfo(np.int32).max


class _Expected(NamedTuple):
    """The arguments of `Overlap.begin` for the present step, and the streams that have computed gradients so far."""

    context: Context
    in_place: bool
    sums: Sums | None
    agreed: Callable[[], bool]
    streams: set[Any]


class Overlap:
    """Starts buckets during the backward pass, in every step.

    Args:
        communicator: the communicator of the ranks that exchange gradients.
        tensors: all tensors of the training, by name; the same on all ranks.
        buckets: the object that makes the buckets of the training.
        clock: the clock of the engine.
        least_bytes: least bytes of gradients in a bucket that starts early; None if no bucket is to start early.

    Attributes:
        started: the waves that have started early in this step.
        least_bytes: the argument, or the number that rank 0 chose; None after `review` has ended overlap.
        from_rank_0: whether rank 0 chooses `least_bytes` before the first step, and broadcasts it with the order. In
            this case `least_bytes` must be at least `LEAST_BYTES`. `from_rank_0` has the same value on all ranks.
        era: number of the present order, chosen by rank 0; 0 while no order is known. The names of early collectives
            contain this number, because other trainings in the same process may run early collectives at the same time.
    """

    _eras: ClassVar[Iterator[int]] = itertools.count(1)  # one counter for all trainings in this process

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
        self._early: Sequence[BucketOrGroup] = ()  # the buckets that may start early, in the order in which they start
        self._expected: _Expected
        self._places: dict[str, int] = {}
        self._missing: list[int] = []  # for each bucket of `_early`, the number of gradients that are not ready yet
        self._gradients: dict[str, Array] = {}
        self._streams: set[Any] = set()  # the streams on which early buckets of this step were started
        # Three counts since the present order is in use: the steps, the steps in which this rank had buckets that could
        # start early, and the buckets that this rank started early.
        self._steps = self._tries = self._starts = 0
        self._due = TRIES

    def begin(
        self, plan: Plan, context: Context, in_place: bool, sums: Sums | None, agreed: Callable[[], bool]
    ) -> None:
        """Begins a step.

        Args:
            plan: the compressor of each tensor in the step, by name.
            context: the context of the step.
            in_place, sums: the arguments that `Engine.step` will get.
            agreed: function that returns whether this rank knows that all ranks make this step with the same plan. No
                bucket starts before this function returns True.
        """
        early = self._buckets.early(plan)
        if early != self._early:
            self._early = early
            self._places = {name: place for place, bucket in enumerate(early) for name in bucket.names}
        self._expected = _Expected(context, in_place, sums, agreed, set())
        self._missing = [len(bucket.names) for bucket in early]
        self._tries += bool(early)

    def ready(self, gradients: Mapping[str, Array]) -> None:
        """Call this when gradients are ready, after `begin`, on the stream that computed them. It may start
        collectives, and waits for none.

        On a device, the kernels of a bucket run on this stream, so they run after the gradients are computed. If
        gradients are on several streams, no more buckets start early: the kernels on one stream would not wait for
        gradients on another stream.

        Args:
            gradients: some gradients of the step, by name. All are on one device.
        """
        early = self._places.keys() & gradients.keys() if self._missing else ()
        for name in early:
            self._gradients[name] = gradient = gradients[name]
            self._missing[self._places[name]] -= 1
        if early:
            self._expected.streams.add(arrays_for(gradient).stream(gradient))
            if len(self._expected.streams) > 1:
                self._missing = []
        while (next_one := len(self.started)) < len(self._missing) and not self._missing[next_one]:
            if not self._expected.agreed():
                break
            self._start(self._early[next_one])

    def _start(self, bucket: BucketOrGroup) -> None:
        """Starts a bucket. If kernels cannot use its gradients, the bucket does not start early, and neither do the
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
        """Ends the backward pass; returns the waves that have started early.

        Args:
            like: an array of the step, on the device of the gradients. The present stream of its device then waits for
                the kernels of these waves.
        """
        if self.started and like is not None:
            now = arrays_for(like).stream(like)
            for stream in self._expected.streams - {now}:
                now.wait_stream(stream)
        self._streams = self._expected.streams if self.started else set()
        started, self.started, self._missing, self._gradients = self.started, [], [], {}
        return started

    def free(self, like: Array) -> None:
        """Ends a step on a device: the streams of early buckets wait for the present stream of `like`'s device.

        The buckets allocated memory on their streams, and the present stream used it. The allocator may now give this
        memory to new work on the streams of the buckets.
        """
        if self._streams:
            now = arrays_for(like).stream(like)
            for stream in self._streams - {now}:
                stream.wait_stream(now)
            self._streams = set()

    def new_wave(
        self, xp: AllFunctions, buckets: Sequence[BucketOrGroup], number: int | None, alone: bool = False, part: int = 0
    ) -> Wave:
        """A wave of this step, which is a set of buckets that exchange their payloads together. A wave has either a
        single bucket that may start early, or buckets that may not start early.

        Args:
            xp: the array functions of the gradients.
            buckets: the buckets of the wave.
            number: the number of the bucket that may start early; None for other buckets.
            alone: whether this rank does nothing else between two rounds, as in `Wave`.
            part: number of the wave among the waves of buckets that may not start early, from 0.
        """
        name = "round" if number is None else f"order{self.era}.early{number}.round"
        if part:
            name = f"part{part}.{name}"
        kept: dict[str, Wave] = self._buckets.waves
        wave = kept.get(name)
        if wave is None or wave.buckets != buckets or (wave.xp, wave.alone) != (xp, alone):
            wave = kept[name] = Wave(xp, self._communicator, self._clock, name, buckets, alone)
        wave.begin()
        return wave

    def _learn_order(self, gradients: Mapping[str, Array]) -> None:
        """After the first step: rank 0 broadcasts the order in which its gradients became ready, and all ranks use it.

        Nothing is broadcast if all gradients together are too small for one bucket that starts early. If only rank 0
        knows that the gradients are too small (`from_rank_0`), rank 0 broadcasts that no bucket starts early.

        Args:
            gradients: the gradients of this rank by name, in the order in which they became ready.
        """
        assert self.least_bytes is not None
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

    def review(self, gradients: Mapping[str, Array]) -> None:
        """After a step: learns the order of gradients, or ends overlap if it does not work. All ranks make the same
        decision.

        Overlap does not work if gradients are on several streams, or if ranks learn only after the backward pass that
        all ranks make the step. In these cases each bucket still has collectives of its own, but only at the end of the
        step. They take longer than common collectives of all buckets, and nothing overlaps.

        After `TRIES` steps, the ranks add up how often they started a bucket early. In this step, the ranks wait for
        each other. If no rank has started any bucket early, overlap ends. But the decision needs enough steps that had
        buckets that could start early. If there were fewer than `TRIES / 2` such steps on average over the ranks, the
        ranks decide later, when the number of steps has doubled.

        Args:
            gradients: the gradients of this rank by name, in the order in which they became ready.
        """
        if self.least_bytes is not None and not self._learnt:
            self._learn_order(gradients)
        if not self.era:
            return
        self._steps += 1
        if self._steps != self._due:
            return
        like = next(iter(gradients.values()))
        xp = arrays_for(like)
        counts = xp.from_numpy(np.array([self._tries, self._starts], np.float32), like=like)
        started = self._communicator.start_allreduce(counts, "sum", "hvdcomp.early")
        tries, starts = xp.to_numpy(self._communicator.wait(started)).tolist()
        if starts:
            return
        if tries < TRIES / 2 * self._communicator.world_size:
            # Few steps had buckets that could start, because a policy looked at x, or the plan was new. In these few
            # steps, a rank may have learned too late by chance that all ranks make the step.
            self._due *= 2
            return
        if self._communicator.rank == 0:
            warn_alone(
                f"in {self._due} steps, no gradients could be sent before the end of the backward pass. From now on, "
                "all gradients are sent together after the backward pass, as with overlap=False"
            )
        self.follow([], 0)
        self.least_bytes = None  # from now on, no bucket starts early any more

    def follow(self, batches: Sequence[Sequence[str]], least_bytes: int) -> None:
        """Uses a given order from the next step on, instead of the order of rank 0. Both arguments must be the
        same on all ranks.

        Args:
            batches: the names of all gradients in the order in which they become ready. The gradients of a batch become
                ready at the same time.
            least_bytes: least bytes of gradients in a bucket that starts early.
        """
        self._learnt = True
        if self.least_bytes is not None:
            self.era = next(self._eras) if batches else 0
            self._follow(batches, least_bytes)

    def _follow(self, batches: Sequence[Sequence[str]], least_bytes: int) -> None:
        self._steps = self._tries = self._starts = 0
        self._due = TRIES
        self._buckets.start_early(batches, least_bytes)
