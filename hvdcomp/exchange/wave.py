"""A wave: buckets and tensor groups that make their rounds together.

In a round, each bucket and each tensor of a tensor group asks the wave for one collective. The wave fuses these
requests into a few collectives, runs them, and returns the results. In this file, "bucket" also means a tensor group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdcomp.arrays.types import AllFunctions, AnyArray, Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.protocol import Request
from hvdcomp.exchange.buckets import BucketOrGroup
from hvdcomp.exchange.clock import Clock, Span
from hvdcomp.exchange.finiteness import flag_of, flag_with
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Sent


class Wave:
    """Buckets that make their rounds together.

    Args:
        xp: the array functions of the gradients.
        communicator: the communicator of the ranks that exchange.
        clock: the clock of the engine.
        name: beginning of the names of the wave's collectives. Two waves that run at the same time need different
            names.
        buckets: the buckets and tensor groups of the wave, at least one. The engine has called `open` of each bucket.
        alone: whether this rank does nothing else between two rounds.

    Attributes:
        has_started: whether `start` was called.
        rounds: the times during which this rank worked on collectives or waited for them.
        sent: the bytes that this rank sent in each round.
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
        self.xp = xp
        self._communicator = communicator
        self._clock = clock
        self.name = name
        self.buckets = buckets
        self.alone = alone
        self._waiting: list[tuple[BucketOrGroup, int]] = []  # buckets, each with its number of requests in this round
        self._round: Round | None = None
        self._fixed: dict[int, Round] = {}  # rounds that later steps start again, by their numbers
        self._number = 0  # number of the present round
        self._flag: AnyArray = None  # this rank's flag; after the first round, the combined flag of all ranks
        self.has_started = False
        self.rounds: list[Span] = []
        self.sent: list[Sent] = []

    def begin(self) -> None:
        """Begins a step. Later steps use the same wave again, as long as they have the same buckets."""
        self.has_started, self._number, self.rounds, self.sent = False, 0, [], []

    def start(self) -> None:
        """Starts the collectives of the first round. Waits for none."""
        self.has_started = True
        if self._clock.marks_only_turns:
            self._clock.start()
        self._send([(bucket, ()) for bucket in self.buckets])

    def advance(self) -> bool:
        """Waits for the collectives of this round, and starts the next round; returns whether there is a next round."""
        if self._round is None:
            return False
        if not self.alone:
            self._clock.start()
        answers = self._round.wait()
        if self._number == 0:
            self._flag = self._round.flag
        self._clock.lap(self.rounds)
        self._number += 1
        turns, end = [], 0
        for bucket, count in self._waiting:
            turns.append((bucket, answers[end : end + count]))
            end += count
        self._send(turns)
        return self._round is not None

    def found_inf(self) -> Array:
        """One element: NaN if any rank sent or received an inf or NaN, else 0. Call this once, after the last round."""
        flag, self._flag = self._flag, None  # the flag may be a view of an answer, which should not stay in memory
        return flag_with(self.xp, flag, [bucket.found_inf_after for bucket in self.buckets], self.buckets[0].like)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [name for bucket in self.buckets for name in bucket.names]

    def _send(self, turns: Sequence[tuple[BucketOrGroup, Sequence[Any]]]) -> None:
        """Gives buckets the answers to their requests, and starts the collectives of their next requests."""
        self._round, self._waiting = None, []
        requests: list[Request] = []
        for bucket, answers in turns:
            if asked := bucket.advance(answers):
                self._waiting.append((bucket, len(asked)))
                requests += asked
        if self._number == 0:
            self._flag = flag_of([bucket.found_inf for bucket in self.buckets])
        if not requests:
            return
        number, like = self._number, self.buckets[0].like
        flag = None if number else self._flag
        made = self._fixed.pop(number, None)
        if made is None or not made.again(requests, like, flag):
            made = Round(self.xp, self._communicator, requests, f"hvdcomp.{self.name}{number}", like, flag)
        if made.is_fixed:
            self._fixed[number] = made
        self._round = made
        self.sent.append(made.sent)
        if not self.alone:
            self._clock.lap(self.rounds)


def run_to_the_end(waves: Sequence[Wave]) -> None:
    """Makes all rounds of several waves. First, the collectives of all waves that have started run at the same time.
    Then the other waves run one after the other."""
    waiting = deque([wave for wave in waves if wave.has_started])
    while waiting:
        wave = waiting.popleft()
        if wave.advance():
            waiting.append(wave)
    for wave in waves:
        if not wave.has_started:
            wave.start()
            run_to_the_end([wave])
