"""Steps the generators of buckets and tensors in lockstep: every round takes the requests of each, fuses them into few
collectives, and hands the answers back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.protocol import Request
from hvdcomp.exchange.bucket_step import BucketStep
from hvdcomp.exchange.clock import Clock, Span
from hvdcomp.exchange.finiteness import flag_of, flag_of_outcomes, of_framework, with_flag
from hvdcomp.exchange.fusion import Round
from hvdcomp.exchange.ledger import Sent
from hvdcomp.exchange.tensor_step import TensorStep

_Turn = tuple[BucketStep | TensorStep, list[Request]]  # which of them, and what it asks for


class Lockstep:
    """Buckets and tensors that go from round to round together.

    Args:
        xp: the array functions of the gradients.
        communicator: the ranks.
        clock: of the engine.
        name: under which their collectives travel; no others that are under way at the same time have it.
        buckets, tensors: with generators that are ready to start; at least one.
        alone: whether nothing else goes on between two of their rounds.

    Attributes:
        rounds: when this rank worked on a round of collectives, or waited for it.
        sent: what this rank handed to collectives.
    """

    def __init__(
        self,
        xp: ModuleType,
        communicator: Communicator,
        clock: Clock,
        name: str,
        buckets: Sequence[BucketStep],
        tensors: Sequence[TensorStep] = (),
        alone: bool = False,
    ) -> None:
        self._xp = xp
        self._communicator = communicator
        self._clock = clock
        self._name = name
        self.buckets = buckets
        self._tensors = tensors
        self._alone = alone
        self._steps: list[BucketStep | TensorStep] = [*buckets, *tensors]
        self._waiting: list[_Turn] = []
        self._round: Round | None = None
        self._number = 0  # of the round
        self._flag: Array
        self._take_flag: Callable[[list[Any]], Array] | None = None
        self.rounds: list[Span] = []
        self.sent = Sent()

    def start(self) -> None:
        """Starts the collectives that come first, and waits for nothing."""
        self._clock.start()
        turns = [self._turn(one, ()) for one in self._steps]
        of_tensors = [
            (one.x, asked) for one, (_, asked) in zip(self._tensors, turns[len(self.buckets) :], strict=True)
        ]
        self._flag = flag_of(self._xp, of_tensors, [one.found_inf for one in self.buckets])
        self._send(turns)

    def advance(self) -> bool:
        """Waits for the collectives under way, and starts those that come next; whether there are any."""
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
        self._send([self._turn(one, list(itertools.islice(each, len(asked)))) for one, asked in self._waiting])
        return self._round is not None

    def found_inf(self) -> Array:
        """The element that is NaN if what any rank would send, or what came of it, is not finite; after the end."""
        xp, found = self._xp, self._flag
        after = [one.found_inf_after for one in self.buckets]
        if any(one for one in after if isinstance(one, bool)):
            found = found + float("nan")
        found = sum((one for one in after if not isinstance(one, bool)), of_framework(xp, found, self._like))
        if self._tensors:
            found = found + flag_of_outcomes(xp, [one.made for one in self._tensors])
        return found

    @property
    def _like(self) -> Array:
        return self._steps[0].like

    def _turn(self, one: BucketStep | TensorStep, answers: Sequence[Any]) -> _Turn:
        requests = one.advance(answers)
        self._clock.lap(one.spans.encoding if requests else one.spans.decoding)
        return one, requests

    def _send(self, turns: Sequence[_Turn]) -> None:
        self._round = None
        self._waiting = [(one, asked) for one, asked in turns if asked]
        if not self._waiting:
            return
        requests = [request for _, asked in self._waiting for request in asked]
        if self._number == 0:
            requests, self._take_flag = with_flag(self._xp, requests, self._flag, self._like)
        if not self._clock.turns_only:
            self._clock.start()
        name = f"hvdcomp.{self._name}{self._number}"
        self._round = Round(self._xp, self._communicator, requests, name, self._like)
        self.sent += self._round.sent
        if not self._alone:
            self._clock.lap(self.rounds)


def run_to_the_end(started: Iterable[Lockstep]) -> None:
    """Goes through all rounds. While one waits for its collectives, those of the others are under way."""
    waiting = deque(started)
    while waiting:
        one = waiting.popleft()
        if one.advance():
            waiting.append(one)
