"""Training runs whose steps are compared. Each run uses one method, and has its own model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import STOCK_SPECS
from hvdcomp.policies import median_with_error

if TYPE_CHECKING:
    from hvdcomp.tools.bench.carrier import Carrier, Distributed

COMPUTE = "compute"  # training without communication
OVERLAPS: dict[str, tuple[int | None, ...]] = {"on": (None,), "off": (0,), "both": (None, 0)}
"""For each value of the option `overlap`, the values of `Times.overlap_bytes` with which compressors are compared."""

# The number of steps at the beginning of a turn that are not measured. These steps are slower: collectives have the
# same names in all methods, so Horovod must negotiate again if the size of a collective has changed.
_SETTLING_STEPS = 2


@dataclass
class Times:
    """The measured times of one method.

    Attributes:
        overlap_bytes: the size of the smallest bucket of gradients that is sent during the backward pass; 0 if all
            gradients are sent after the backward pass; None for hvdcomp's default.
        step_ms: for each round, the milliseconds that the slowest rank needed for each step.
        bytes_per_step: the bytes that one rank passes to the collectives in a step.
        encode_ms, communicate_ms, decode_ms: mean milliseconds per step on rank 0 of encoding, of waiting for
            collectives, and of decoding; None if hvdcomp's engine is not used.
    """

    method: str
    overlap_bytes: int | None = None
    step_ms: list[list[float]] = field(default_factory=list)
    bytes_per_step: float = 0.0
    dense_bytes: int = 0
    encode_ms: float | None = None
    communicate_ms: float | None = None
    decode_ms: float | None = None

    @property
    def name(self) -> str:
        """A unique name: the method, followed by `overlap_bytes` unless it is None."""
        if self.overlap_bytes is None:
            return self.method
        return f"{self.method}, {f'{self.overlap_bytes:,}' if self.overlap_bytes else 'at the end'}"

    def as_json(self) -> dict[str, Any]:
        """The fields, and the median and the quartiles of the times of all steps."""
        steps = [time for block in self.step_ms for time in block]
        low, middle, high = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3
        return {**vars(self), "median_ms": middle, "quartiles_ms": [low, high]}


class Training:
    """A model that is trained with one method, on one batch of random data, one block of steps at a time.

    Args:
        carrier: the library that exchanges the gradients.
        method: a method of the library (`Carrier.stock`), `COMPUTE` for training without communication, or the spec of
            a compressor.
        model_name, batch_size, seed: the arguments of `hvdcomp.tools.bench.workload.build`.
        overlap_bytes: size of the smallest bucket that is sent during the backward pass, as in `Times`.
        device: name of the model's device.
    """

    def __init__(
        self,
        carrier: Carrier,
        method: str,
        model_name: str,
        batch_size: int,
        seed: int,
        overlap_bytes: int | None = None,
        device: str = "cpu",
    ) -> None:
        import torch

        from hvdcomp.tools.bench.workload import build

        self._carrier = carrier
        self._workload = build(model_name, batch_size, seed, carrier.ranks.rank, torch.device(device))
        self.numel = sum(parameter.numel() for parameter in self._workload.model.parameters())
        self.times = Times(method, overlap_bytes, dense_bytes=4 * self.numel)
        self._distributed = self._distribute(method, seed)
        self.compression = self._distributed.compression
        self._counted = 0

    def _distribute(self, method: str, seed: int) -> Distributed:
        from hvdcomp.tools.bench.carrier import alone

        if method == COMPUTE:
            return alone(self._workload)
        overlap_bytes = self.times.overlap_bytes
        name = method if overlap_bytes is None else f"{method}.{overlap_bytes}"
        if method in STOCK_SPECS:
            dense = method == self._carrier.stock[0]
            self.times.bytes_per_step = self.numel * (4 if dense else 2)
            return self._carrier.with_stock(self._workload, method, name)
        options = {} if overlap_bytes is None else {"overlap": overlap_bytes > 0}
        return self._compressed(name, seed=seed, bucket_bytes=overlap_bytes or None, **options)

    def _compressed(self, name: str, **options: Any) -> Distributed:
        """A training run with hvdcomp. options: as in `Carrier.compressed`."""
        return self._carrier.compressed(self._workload, self.times.method, name, **options)

    def _turn(self) -> AbstractContextManager[None]:
        """A context manager that is active during the steps of a block."""
        return nullcontext()

    def block(self, steps: int, settling: int = _SETTLING_STEPS) -> None:
        """Runs the steps of one round together with all other ranks, and adds their times to the results.

        Args:
            steps: number of steps that are measured.
            settling: the number of steps before the measured steps.
        """
        ranks = self._carrier.ranks
        ranks.barrier()
        with self._turn():
            for _ in range(settling):
                self._step()
            before = self._costs()
            own_times = [self._step() for _ in range(steps)]
            after = self._costs()
        all_times = ranks.gather(own_times, "steps")
        self.times.step_ms.append([1000 * max(times) for times in zip(*all_times, strict=True)])
        if self.compression is not None:
            self._add_costs(before, after, steps)

    def forget(self) -> None:
        """Drops all results."""
        self.times.step_ms = []
        self._counted = 0

    def _step(self) -> float:
        from hvdcomp.tools.bench.marks import wait_for

        device = self._workload.device
        start = time.perf_counter()
        self._distributed.optimizer.zero_grad()
        self._distributed.loss().backward()
        self._distributed.optimizer.step()
        wait_for(device)
        return time.perf_counter() - start

    def _costs(self) -> dict[str, float | None]:
        return {} if self.compression is None else dict(vars(self.compression.ledger.totals))

    def _add_costs(self, before: dict[str, Any], after: dict[str, Any], steps: int) -> None:
        """Adds the costs of the latest block to the means per step over all measured blocks."""
        total = self._counted + steps
        for key, name, unit in (
            ("bytes_sent", "bytes_per_step", 1),
            ("encode_seconds", "encode_ms", 1000),
            ("communicate_seconds", "communicate_ms", 1000),
            ("decode_seconds", "decode_ms", 1000),
        ):
            if after[key] is None:
                continue
            grown = unit * (after[key] - (before[key] or 0))
            past = self._counted * (getattr(self.times, name) or 0.0)
            setattr(self.times, name, (past + grown) / total)
        self._counted = total


class Turns:
    """Training runs that take turns.

    Args:
        carrier: the library that exchanges the gradients.
        trainings: the training runs that take turns. Earlier results of these runs are dropped.
        show: a function that is called on every rank with the name of the next measurement.

    Attributes:
        rounds: number of rounds so far. In a round, each training run has one turn.
    """

    def __init__(self, carrier: Carrier, trainings: Sequence[Training], show: Callable[[str], None]) -> None:
        from hvdcomp.tools.bench.workload import turn_of

        self.trainings, self.rounds = trainings, 0
        self._show = show
        step_s = []
        for training in trainings:
            show(f"warming up: {training.times.method}")
            training.forget()
            training.block(1, settling=carrier.warm_up)
            step_s.append(training.times.step_ms[-1][0] / 1000)
            training.forget()
        self._turns = [turn_of(seconds) for seconds in carrier.ranks.broadcast(step_s, "turn")]

    def round(self) -> None:
        """Runs a block of steps of each training run. Each round begins with a different training run."""
        from hvdcomp.tools.bench.workload import in_turn

        self._show(f"steps: round {self.rounds + 1}")
        for training, (settling, steps) in in_turn(list(zip(self.trainings, self._turns, strict=True)), self.rounds):
            training.block(steps, settling)
        self.rounds += 1


def trainings_of(
    carrier: Carrier,
    model: str,
    methods: Sequence[str],
    overlaps: Sequence[int | None],
    batch_size: int,
    seed: int,
    device: str = "cpu",
) -> list[Training]:
    """The training runs to compare. The first training run has no communication.

    Args:
        carrier: the library that exchanges the gradients.
        overlaps: values of `overlap_bytes` (`Times`). There is one training run for each compressor and each value. If
            there are no values, there is one training run for each compressor, with hvdcomp's default. If the model is
            so small that hvdcomp sends all gradients at the end by default, there is only one training run for each
            compressor. There is also one training run without communication, and one for each of the library's own
            methods.
        device: name of the models' device.
    """
    compute = Training(carrier, COMPUTE, model, batch_size, seed, device=device)
    if None in overlaps and 4 * compute.numel <= carrier.early_bytes:
        overlaps = (None,)
    return [
        compute,
        *(
            Training(carrier, method, model, batch_size, seed, least, device)
            for method in methods
            for least in (overlaps or (None,) if _may_overlap(method) else (None,))
        ),
    ]


def _may_overlap(method: str) -> bool:
    if method in STOCK_SPECS:
        return False
    return any(leaf.wire_dtype("float32") is None for leaf in parse_compressor(method).leaves())


def ratio(steps: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compares the step times of two training runs. For each round, the ratio of their median step times is computed.
    Returns the median of this ratio over all rounds, and its standard error."""
    medians, reference_medians = (map(statistics.median, rounds) for rounds in (steps, reference))
    return median_with_error([median / other for median, other in zip(medians, reference_medians, strict=True)])
