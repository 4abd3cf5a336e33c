"""The worker of `ddp_hooks.py` on every rank. It runs steps of DistributedDataParallel with all methods, which take
turns.

A method is `compute` (training without communication), `DDP` (no hook), the name of a hook of
torch.distributed.algorithms.ddp_comm_hooks, or the spec of a compressor of hvdcomp. Each method trains a separate
model, and all share one process group. They take turns in blocks of a few steps, in a rotating order, so that other
work on the machine affects all of them equally. The time of a step is the time of the slowest rank.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.tools.bench.carrier_ddp import Loss
from hvdcomp.tools.bench.workload import build, in_turn, turn_of
from hvdcomp.tools.train.ddp_learner import OWN_BUFFERS

COMPUTE, DENSE = "compute", "DDP"
# DDP rebuilds its buckets after its first step, PowerSGD's hooks compress from the third step on, and hvdcomp sends
# during the backward pass from the fourth step on.
_FIRST_STEPS = 6
_LEAST_ROUNDS = 5
_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")  # the counter of the bytes that this host's link has sent
_TIMEOUT = timedelta(minutes=10)  # timeout of a collective


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, use_error_feedback=True, warm_start=True
    )


def _no_state() -> None:
    return None


HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "fp16_compress_hook": (_no_state, default_hooks.fp16_compress_hook),
    "bf16_compress_hook": (_no_state, default_hooks.bf16_compress_hook),
    "powerSGD_hook": (_power_sgd, powerSGD_hook.powerSGD_hook),
    "batched_powerSGD_hook": (_power_sgd, powerSGD_hook.batched_powerSGD_hook),
    "quantization_pertensor_hook": (_no_state, quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel_hook": (_no_state, quantization_hooks.quantization_perchannel_hook),
}
"""PyTorch's communication hooks by name: a function that creates the hook's state, and the hook."""

# These hooks start collectives from callbacks, which Gloo runs in two threads. With several buckets, ranks would start
# the collectives in different orders, and the run would fail because they do not match.
_IN_ONE_BUCKET = ("powerSGD_hook", "batched_powerSGD_hook")


class Training:
    """A model that trains with one method on one batch of random data, a block of steps at a time.

    Raises:
        TypeError, RuntimeError: at creation or in the first steps, if the method does not run in this setting.
    """

    def __init__(self, method: str, model_name: str, batch_size: int, seed: int) -> None:
        loss = Loss(build(model_name, batch_size, seed, dist.get_rank()))
        self.method = method
        self.numel = sum(parameter.numel() for parameter in loss.parameters())
        self.compression: hvdcomp.Compression | None = None
        self.model = loss if method == COMPUTE else self._distributed(loss, seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.step_ms: list[list[float]] = []  # for each block, the milliseconds of the measured steps
        self._steps = self._wire_bytes = self._ledger_bytes = 0  # totals over all steps of all blocks

    def _distributed(self, loss: Loss, seed: int) -> DistributedDataParallel:
        whole = 1 + 4 * self.numel // 2**20
        buckets: dict[str, Any] = {"bucket_cap_mb": whole} if self.method in _IN_ONE_BUCKET else {}
        # DDP does not broadcast buffers here, because this work has nothing to do with the methods.
        model = DistributedDataParallel(loss, **OWN_BUFFERS, **buckets)
        if self.method in HOOKS:
            make_state, hook = HOOKS[self.method]
            model.register_comm_hook(make_state(), hook)
        elif self.method != DENSE:
            self.compression = hvdcomp.Compression.from_spec(self.method, seed=seed)
            hvdcomp.ddp.register(model, self.compression)
        return model

    def step(self) -> float:
        """Runs a step, and returns its seconds on this rank."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def block(self, steps: int, settling: int) -> None:
        """Runs the steps of a turn together with all other ranks, and adds the times and bytes to the results.

        Args:
            steps: number of steps whose times count.
            settling: number of earlier steps in the turn, whose times do not count. The bytes of all steps count.
        """
        dist.barrier()
        sent, in_ledger = _sent(), self._in_ledger()
        for _ in range(settling):
            self.step()
        seconds = torch.tensor([self.step() for _ in range(steps)], dtype=torch.float64)
        dist.barrier()  # before all ranks have arrived, sent data may still be in a queue
        crossed = torch.tensor([_sent() - sent], dtype=torch.float64)
        for measurement in (seconds, crossed):
            dist.all_reduce(measurement, dist.ReduceOp.MAX)
        self.step_ms.append((1000 * seconds).tolist())
        self._steps += settling + steps
        self._wire_bytes += int(crossed)
        self._ledger_bytes += self._in_ledger() - in_ledger

    def forget(self) -> None:
        """Drops all measurements so far."""
        self.step_ms.clear()
        self._steps = self._wire_bytes = self._ledger_bytes = 0

    def as_json(self) -> dict[str, Any]:
        """The measurements. Bytes are per step. There are two numbers. The first number is the bytes on the link of the
        host that sent the most, including headers and acknowledgments. The second number is the bytes that rank 0
        passed to collectives, according to hvdcomp's ledger."""
        low, middle, high = statistics.quantiles(
            [time for block in self.step_ms for time in block], n=4, method="inclusive"
        )
        return {
            "method": self.method,
            "step_ms": self.step_ms,
            "median_ms": middle,
            "quartiles_ms": [low, high],
            "wire_bytes": self._wire_bytes / self._steps,
            "ledger_bytes": None if self.compression is None else self._ledger_bytes / self._steps,
        }

    def _in_ledger(self) -> int:
        return 0 if self.compression is None else self.compression.ledger.totals.bytes_sent


def _sent() -> int:
    return int(_COUNTER.read_text())


def begin(method: str, model: str, batch_size: int, seed: int) -> tuple[Training | None, str]:
    """Creates a training run and runs its first steps. Returns the training run, or None and the reason why the method
    does not run here. The result is the same on every rank."""
    training, reason = None, ""
    try:
        training = Training(method, model, batch_size, seed)
        for _ in range(_FIRST_STEPS):
            training.step()
    except (AssertionError, RuntimeError, TypeError) as error:  # hooks raise these errors on all ranks alike
        if method not in HOOKS:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split()) or "no message"
        reason = f"{type(error).__name__} in {place.name}, {place.filename}: {message}"
        reason = re.sub(r"/\S*/site-packages/", "", reason)
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    reason = next(filter(None, reasons), "")
    return (None if reason else training), reason


def take_turns(trainings: list[Training], seconds: float) -> None:
    """Lets all training runs take turns, round by round, for `seconds` by the clock of rank 0."""
    turns = []
    for training in trainings:
        training.block(1, settling=1)
        turns.append((training, *turn_of(training.step_ms[0][0] / 1000)))
        training.forget()
    end, rounds, unfinished = time.perf_counter() + seconds, 0, torch.ones(1)
    while unfinished:
        for training, settling, steps in in_turn(turns, rounds):
            training.block(steps, settling)
        rounds += 1
        unfinished.fill_(rounds < _LEAST_ROUNDS or time.perf_counter() < end)
        dist.broadcast(unfinished, 0)


@click.command(help=__doc__)
@click.option("--model", required=True)
@click.option("--method", "methods", multiple=True, required=True)
@click.option("--batch-size", type=int, required=True)
@click.option("--seconds", type=float, required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file that rank 0 writes.")
def main(model: str, methods: tuple[str, ...], batch_size: int, seconds: float, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    trainings, refused = [], {}
    for method in (COMPUTE, *methods):
        training, reason = begin(method, model, batch_size, seed=0)
        if training is None:
            refused[method] = reason
        else:
            trainings.append(training)
    take_turns(trainings, seconds)
    if dist.get_rank() == 0:
        versions = {name: importlib.metadata.version(name) for name in ("hvdcomp", "torch")}
        result = {
            "parameters": trainings[0].numel,
            "versions": {"python": platform.python_version(), **versions},
            "refused": refused,
            "methods": [training.as_json() for training in trainings],
        }
        output.write_text(json.dumps(result))
    dist.barrier()  # a rank that ends before the other ranks may be killed by a signal
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
