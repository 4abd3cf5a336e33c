"""Measures the share of the gradients' energy (sum of squares) that compression keeps or would keep.

x is the gradient plus the residual, and C(x) is x after compression and decompression. The energy of x is measured for
every tensor before compression. If the C(x) that is sent depends only on this rank's x, its error is read from the
residual at the end of the step. All other compressions are made only for the measurement. These compressions run as if
this rank were the only rank, so that no other rank takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from hvdcomp.adaptation.energies import Energies, densified
from hvdcomp.adaptation.look import Look
from hvdcomp.adaptation.observer import Observer
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.previews import Kept
from hvdcomp.adaptation.step_counter import StepClock
from hvdcomp.arrays.types import Array
from hvdcomp.compressors import Compressor
from hvdcomp.policies.decisions import MultiLevel
from hvdcomp.policies.gravac import error_gain, raw_gain
from hvdcomp.policies.request import GravacGains, Request, Statistic, Timing


class CompressionGains(Observer):
    """The two compressions of GraVAC (Tyagi and Swany 2023, arXiv:2305.12201, algorithm 1).

    Args:
        plans: object that creates the plans of the training run.
        decision: the policy's decision: the factors of the two compressions, and which of the two results is sent.
        measuring: whether this rank measures the gains.
        clock: the clock that times steps.

    Attributes:
        due: whether the gains of the next step will be measured, if this rank measures.
    """

    measures: ClassVar[frozenset[Statistic]] = frozenset({Statistic.GAINS, Statistic.TIMING})

    def __init__(self, plans: Plans, decision: MultiLevel, measuring: bool, clock: StepClock | None = None) -> None:
        self._plans = plans
        self._engine = plans.engine
        self._decision = decision
        self._measuring = measuring
        self._clock = clock or StepClock(time.perf_counter)
        self.due = True
        self._minimum = plans.at_factor(decision.minimum, decision.factor)
        self._candidate = decision.candidate and plans.at_factor(decision.candidate, decision.factor)
        self._energies: list[Energies] = []  # the energies of x, and of the error of each level
        self._of_gradient = Energies()  # the energy of g, for raw gains
        self._spent: Callable[[], float | None] = lambda: None  # the seconds that were spent only on measuring gains

    def begin_step(self, period_ends: bool) -> None:
        self.due = period_ends

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        self._energies, self._of_gradient, self._spent = [], Energies(), lambda: None
        measures, sends_twice = self._measuring and self.due, self._decision.send == "candidate"
        if not measures and not sends_twice:
            return {}
        names = [name for name in self._plans.names if name in look]
        if measures and names:
            sources, start, between, end = self._measure(look, names)
            self._spent = partial(look.xp.seconds_between, between if sends_twice else start, end)
            return sources if sends_twice else {}
        # If the result that is sent has been compressed twice, every rank must make the first compression. A tensor is
        # left out if the result is the same without its first compression.
        return self._once(look, self._kept(look, self._twice(names))) if sends_twice else {}

    def _twice(self, names: Sequence[str]) -> list[str]:
        """The tensors whose second compression needs the result of the first compression. All other tensors have a
        nested method: it gives the same result if x is compressed only once."""
        if not self._candidate:
            return []
        pairs = {name: (self._minimum[name], self._candidate[name]) for name in names}
        return [name for name, (first, second) in pairs.items() if not first.nested or type(first) is not type(second)]

    def _kept(self, look: Look, names: Sequence[str], lost: Energies | None = None) -> Kept:
        return self._plans.previews.kept(look, self._minimum, names, lost)

    @staticmethod
    def _once(look: Look, kept: Kept) -> dict[str, Array]:
        """The result of the first compression, which is the input of the second."""
        return {name: densified(look.xp, look[name], vector) for name, vector in kept.items()}

    def _measure(self, look: Look, names: Sequence[str]) -> tuple[dict[str, Array], Any, Any, Any]:
        """Measures the errors of both compressions of some tensors.

        Returns:
            The inputs of the second compression, except for tensors whose input is x; and three time marks. The marks
            were taken before the first compression, between the two compressions, and after the second compression.
        """
        like, sends = look.like, self._decision.send
        start = look.xp.mark(like)
        minimum, candidate, twice = self._minimum, self._candidate, self._twice(names)
        compressed_once = [name for name in names if name not in set(twice)]
        self._energies = [look.energies(names), self._lost(look, minimum, compressed_once, {}, sends == "minimum")]
        sources = self._once(look, self._kept(look, twice, self._energies[1]))
        between = look.xp.mark(like)
        if self._decision.gain == "raw":
            self._of_gradient = look.gradient_energies(names)
        if candidate:
            self._energies.append(self._lost(look, candidate, names, sources, sends == "candidate"))
        return sources, start, between, look.xp.mark(like)

    def _lost(
        self, look: Look, plan: Mapping[str, Compressor], names: Sequence[str], sources: Mapping[str, Array], sent: bool
    ) -> Energies:
        """The errors of compression. If the step itself shows the error of a tensor, the error is measured at the end
        of the step."""
        energies, known = look.lost_when_sent(names) if sent else (Energies(), set())
        if len(known) < len(names):
            others = [name for name in names if name not in known]
            energies.extend(self._plans.previews.lost(look, plan, others, sources))
        return energies

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if Statistic.GAINS in request.statistics:
            # gains are read first, because reading them waits for the device; after this wait, times are also known
            values["gains"] = self.gains()
        if Statistic.TIMING in request.statistics:
            samples = batches * self._engine.communicator.world_size
            values["timing"] = Timing(samples, self._clock.lap(), self.seconds())
        return values

    def gains(self) -> GravacGains:
        """The gains of the whole model in the last step in which gains were `due`; 1.0 if nothing was compressed.

        Waits for the device.
        """
        energy, *lost = [energies.total() for energies in self._energies] or [0.0] * (3 if self._candidate else 2)
        if self._decision.gain == "raw":
            of_gradient = self._of_gradient.total()
            first, *second = (raw_gain(energy, error, of_gradient) for error in lost)
        else:
            first, *second = (error_gain(energy, error) for error in lost)
        return GravacGains(first, second[0] if second else None, self._engine.communicator.world_size)

    def seconds(self) -> float:
        """The seconds that the last step spent only on measuring gains; 0.0 if the device has not finished yet."""
        return self._spent() or 0.0
