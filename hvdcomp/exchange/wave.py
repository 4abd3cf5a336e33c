"""A wave: buckets and tensor groups that make their rounds together.

In a round, a wave gets one request from each bucket and from each tensor of a tensor group. It fuses the requests into
a few collectives, and returns the answers. In this file, "bucket" also means a tensor group.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdcomp.arrays.types import AllFunctions, Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.protocol import Request
from hvdcomp.exchange.buckets import BucketOrGroup
from hvdcomp.exchange.clock import Clock, Span
from hvdcomp.exchange.finiteness import flag_of, flag_with, with_flag
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Sent

_Turn = tuple[BucketOrGroup, list[Request]]  # a bucket, and its requests in this round


class Wave:
    """Buckets that make their rounds together.

    Args:
        xp: the array functions of the gradients.
        communicator: the communicator of the ranks that exchange.
        clock: the clock of the engine.
        name: beginning of the names of the wave's collectives. Two waves that run at the same time need different
            names.
        buckets: the buckets and tensor groups of the wave, at least one. `open` was called on each.
        alone: whether this rank does nothing else between two rounds.

    Attributes:
        has_started: whether `start` was called.
        rounds: the times during which this rank worked on collectives or waited for them.
        sent: number of bytes that this rank sent.
    """

    def __init__(
        self,
        xp: AllFunctions,
        communicator: Communicator,
        clock: Clock,
        name: str,
        buckets: Sequence[BucketOrGroup],
        alone: bool = False,
    ) -> None:
        self._xp = xp
        self._communicator = communicator
        self._clock = clock
        self._name = name
        self.buckets = buckets
        self._alone = alone
        self._waiting: list[_Turn] = []
        self._round: Round | None = None
        self._number = 0  # number of the present round
        self._flag: Array
        self.has_started = False
        self._take_flag: Callable[[list[Any]], Array] | None = None
        self.rounds: list[Span] = []
        self.sent = Sent()

    def start(self) -> None:
        """Starts the collectives of the first round. Waits for none."""
        self.has_started = True
        self._clock.start()
        turns = [(bucket, bucket.advance(())) for bucket in self.buckets]
        self._flag = flag_of([bucket.found_inf for bucket in self.buckets])
        self._send(turns)

    def advance(self) -> bool:
        """Waits for the collectives of this round, and starts the next round; returns whether there is a next round."""
        if self._round is None:
            return False
        if not self._alone:
            self._clock.start()
        answers = self._round.wait()
        if self._take_flag is not None:
            self._flag, self._take_flag = self._take_flag(answers), None
        self._clock.lap(self.rounds)
        self._number += 1
        each = iter(answers)
        self._send(
            [(bucket, bucket.advance(list(itertools.islice(each, len(asked))))) for bucket, asked in self._waiting]
        )
        return self._round is not None

    def found_inf(self) -> Array:
        """After the last round: one element, NaN if any rank sent or received an inf or NaN, else 0."""
        return flag_with(self._xp, self._flag, [bucket.found_inf_after for bucket in self.buckets], self._like)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [name for bucket in self.buckets for name in bucket.names]

    @property
    def _like(self) -> Array:
        return self.buckets[0].like

    def _send(self, turns: Sequence[_Turn]) -> None:
        self._round = None
        self._waiting = [(bucket, asked) for bucket, asked in turns if asked]
        if not self._waiting:
            return
        requests = [request for _, asked in self._waiting for request in asked]
        if self._number == 0:
            requests, self._take_flag = with_flag(self._xp, requests, self._flag, self._like)
        if not self._clock.marks_only_turns:
            self._clock.start()
        name = f"hvdcomp.{self._name}{self._number}"
        self._round = Round(self._xp, self._communicator, requests, name, self._like)
        self.sent += self._round.sent
        if not self._alone:
            self._clock.lap(self.rounds)


def run_to_the_end(waves: Sequence[Wave]) -> None:
    """Makes all rounds of several waves: first of the waves that have started, whose collectives run at the same time,
    and then of the other waves, one after the other."""
    waiting = deque(wave for wave in waves if wave.has_started)
    while waiting:
        wave = waiting.popleft()
        if wave.advance():
            waiting.append(wave)
    for wave in waves:
        if not wave.has_started:
            wave.start()
            run_to_the_end([wave])
