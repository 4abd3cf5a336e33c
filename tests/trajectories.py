"""Short trainings whose losses, bytes and weights are kept, so that a change of their results is noticed.

    python -m tests.trajectories              # trains all, and compares
    python -m tests.trajectories --write      # writes the changed ones
    python -m tests.trajectories topk-budget  # trains the named ones

Together they cover methods, policies, optimizers and frameworks. Their results are in tests/data/trajectories.json:

- `losses`: of rank 0, by step; `bytes`: the bytes that rank 0 sent in each step.
- `weights`: SHA-256 of the final weights, which are equal on all ranks.
- `environment`: of the training. Arithmetic is equal bit by bit only in the same environment.
- `mark`: names this trajectory. It changes when the trajectory changes; figures that were measured before belong to
  another trajectory then (tests/measured.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "trajectories.json"
TOLERANCE = 0.02
"""Of each loss and of the bytes of each step, relative to them, where the environment is another one: then sums differ
in their last bits, a sparsifier chooses another one of two elements that are nearly equal, and payloads are padded
otherwise. Decisions must be the same, so none of these trainings may come near a threshold of its policy."""

Record = dict[str, Any]


@dataclass(frozen=True)
class OnSimulatedRanks:
    """A training of `hvdcomp train --simulate-ranks`.

    Args:
        words: arguments of the command, separated by spaces.
        options: further arguments, which contain spaces.
    """

    words: str
    options: tuple[str, ...] = ()
    ranks_per_node: int = 0

    @property
    def framework(self) -> str:
        return "tensorflow" if "--framework tensorflow" in self.words else "torch"

    def run(self) -> Record:
        from hvdcomp.tools.cli import main

        with tempfile.TemporaryDirectory() as folder, _environment(self.ranks_per_node):
            words = ["train", *self.words.split(), *self.options, "--no-progress", "--output", folder, "--overwrite"]
            with contextlib.redirect_stdout(io.StringIO()) as output:
                code = main.main(words, standalone_mode=False)
            if code:
                raise RuntimeError(f"{' '.join(words)}: {output.getvalue()}")
            summary = json.loads((Path(folder) / "summary.json").read_text())
            steps = [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]
        (weights,) = set(summary["weights_sha256"])
        return {
            "losses": [step["loss"] for step in steps],
            "bytes": [step["bytes_sent"] for step in steps],
            "weights": weights,
        }


@dataclass(frozen=True)
class InNumPy:
    """A network of two layers, trained with engine and coordinator only. Its clock ticks at each reading, so that a
    policy always measures the same times."""

    compression: str
    policy: str
    ranks: int = 2
    framework: str = field(default="numpy", init=False)

    def run(self) -> Record:
        from hvdcomp.communicators.in_process import run_ranks

        (first, *other_records) = run_ranks(self.ranks, self._rank)
        assert all(record["weights"] == first["weights"] for record in other_records), "ranks have weights of their own"
        return first

    def _rank(self, communicator: Any) -> Record:
        from hvdcomp.policies import parse_policy
        from tests.driven import Driven

        weights, losses, sent, ticks = _Network(communicator.rank), [], [], count()
        driven = Driven(
            communicator,
            parse_policy(self.policy),
            "numpy",
            spec=self.compression,
            steps_per_epoch=6,
            rates=lambda step: (0.2 if step < 18 else 0.02,),
            gradients=lambda rank, step: weights.gradients(step),
            shapes={name: values.shape for name, values in weights.values.items()},
            clock=lambda: float(next(ticks)),
        )
        for step in range(30):
            driven.step()
            weights.update(driven.results.pop(), 0.2 if step < 18 else 0.02)
            losses.append(weights.loss)
            last = driven.engine.ledger.last
            assert last is not None
            sent.append(last.bytes_sent)
        return {"losses": losses, "bytes": sent, "weights": weights.digest()}


class _Network:
    """Of one rank: it learns a function of random inputs, by SGD with momentum 0.9. Its loss is the squared error, as
    gradients of a softmax add up to zero: AdaQS would divide their mean, which is rounding, by their deviation."""

    def __init__(self, rank: int) -> None:
        teacher = np.random.default_rng(1)
        self._teacher = teacher.standard_normal((24, 6), dtype=np.float32)
        start = np.random.default_rng(2)
        self.values = {
            "hidden.weight": start.standard_normal((24, 40), dtype=np.float32) / np.float32(5),
            "hidden.bias": np.zeros(40, np.float32),
            "out.weight": start.standard_normal((40, 6), dtype=np.float32) / np.float32(6),
            "out.bias": np.zeros(6, np.float32),
        }
        self._velocity = {name: np.zeros_like(values) for name, values in self.values.items()}
        self._rank = rank
        self.loss = 0.0

    def gradients(self, step: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng([self._rank, step]).standard_normal((32, 24), dtype=np.float32)
        y = np.tanh(x @ self._teacher / np.float32(3))
        hidden = np.maximum(x @ self.values["hidden.weight"] + self.values["hidden.bias"], 0)
        error = hidden @ self.values["out.weight"] + self.values["out.bias"] - y
        self.loss = float(np.square(error).mean())
        error *= np.float32(2 / error.size)
        back = (error @ self.values["out.weight"].T) * (hidden > 0)
        return {
            "hidden.weight": x.T @ back,
            "hidden.bias": back.sum(axis=0),
            "out.weight": hidden.T @ error,
            "out.bias": error.sum(axis=0),
        }

    def update(self, means: dict[str, np.ndarray], rate: float) -> None:
        for name, mean in means.items():
            self._velocity[name] = np.float32(0.9) * self._velocity[name] + mean
            self.values[name] = self.values[name] - np.float32(rate / 4) * self._velocity[name]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, values in sorted(self.values.items()):
            digest.update(name.encode() + values.tobytes())
        return digest.hexdigest()


_DIGITS = "--simulate-ranks 2 --model mlp --data digits --samples 640 --epochs 1"
_IMAGES = "--simulate-ranks 4 --model cnn --data digits --steps 30"
_TEXT = "--simulate-ranks 2 --model lstm --data stdlib-text --text-size 20000 --batch-size 4 --steps 10"

TRAININGS: dict[str, OnSimulatedRanks | InNumPy] = {
    "topk-gravac": InNumPy("topk:ratio=0.2", "gravac:min=2,max=16,window=4,epsilon=0.5,smoothing=0.3"),
    "powersgd-accordion": InNumPy("powersgd:rank=3", "accordion:low=3,high=1,steps=4"),
    "qsgd-lgreco": InNumPy("qsgd:bits=4", "lgreco:interval=8,last=4,alpha=2.5", ranks=3),
    "randomk-adaqs": InNumPy("randomk:ratio=0.5", "adaqs:start=8,fall=0.1,steps=4"),
    "dgc-warmup": OnSimulatedRanks(
        f"{_DIGITS} --momentum 0 --compression dgc:ratio=0.02 --policy warmup:levels=0.25|0.1,steps=5"
    ),
    "topk-budget": OnSimulatedRanks(
        f"{_IMAGES} --compression topk:ratio=0.05 --policy budget:factor=12,interval=10,last=5"
    ),
    "onebit-nesterov": OnSimulatedRanks(f"{_IMAGES} --nesterov --compression onebit"),
    "int4-scatter": OnSimulatedRanks(f"{_IMAGES} --compression int4:exchange=scatter --clip-norm 0.5"),
    "two-level": OnSimulatedRanks(f"{_IMAGES} --compression two_level(topk:ratio=0.02)", ranks_per_node=2),
    "routed-adamw": OnSimulatedRanks(
        f"{_TEXT} --optimizer adamw",
        ("--compression", '{"ndim<2": "fp16", "numel<10000": "natural", "*emb*": "int4", "*": "int8"}'),
    ),
    "efsignsgd-adam": OnSimulatedRanks(
        f"{_IMAGES} --lr 0.001 --optimizer compressed-adam --freeze-after 12 --freeze-compression int8 "
        "--compression efsignsgd"
    ),
    "tensorflow-accordion": OnSimulatedRanks(
        f"--framework tensorflow {_DIGITS} --steps 24 --compression topk:ratio=0.1 "
        "--policy accordion:low=0.1,high=0.01,steps=5"
    ),
}


@contextlib.contextmanager
def _environment(ranks_per_node: int) -> Iterator[None]:
    """Sets the environment variables of a training: the nodes, if it has any."""
    before = os.environ.pop("HVDCOMP_RANKS_PER_NODE", None)
    if ranks_per_node:
        os.environ["HVDCOMP_RANKS_PER_NODE"] = str(ranks_per_node)
    try:
        yield
    finally:
        os.environ.pop("HVDCOMP_RANKS_PER_NODE", None)
        if before is not None:
            os.environ["HVDCOMP_RANKS_PER_NODE"] = before


def environment(framework: str) -> dict[str, str]:
    """The facts on which the last bits of a training depend: versions of libraries, and the CPU's instructions."""
    from hvdcomp import kernels

    facts = {
        "cpu": _cpu(),
        "kernels": kernels.instruction_set() or "none",
        "numpy": importlib.metadata.version("numpy"),
    }
    if framework == "torch":
        import torch

        facts |= {"torch": torch.__version__, "torch instructions": torch.backends.cpu.get_cpu_capability()}
    if framework == "tensorflow":
        facts |= {"tensorflow": importlib.metadata.version("tensorflow-cpu")}
    return facts


def _cpu() -> str:
    """The CPU's kind, by which libraries choose their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " ".join(facts.get(key, "-") for key in ("vendor_id", "cpu family", "model")) + f" {platform.machine()}"


def train(name: str) -> Record:
    """Makes one of the trainings, in this process."""
    training = TRAININGS[name]
    return {**training.run(), "environment": environment(training.framework)}


def train_in_a_process(names: Sequence[str]) -> dict[str, Record]:
    """Makes trainings in a separate process, because TensorFlow's threads can be set only once."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_USE_LEGACY_KERAS": "1",
    }
    command = [sys.executable, "-m", "tests.trajectories", *names, "--as-json"]
    process = subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr[-4000:])
    return dict(json.loads(process.stdout.splitlines()[-1]))


def kept() -> dict[str, Record]:
    """The kept records."""
    return dict(json.loads(FILE.read_text()))


def difference(now: Record, then: Record) -> str | None:
    """The difference of a trajectory from the kept one; None if they are equal.

    In the same environment all bits must be equal; in another one, losses and bytes of each step within `TOLERANCE`.
    """
    where = _differing_environment(now, then)
    for step, (loss, before) in enumerate(zip(now["losses"], then["losses"], strict=False), 1):
        if not _same(loss, before, where):
            return f"the loss of step {step} is {loss!r}, and was {before!r}{where}"
    for key in ("losses", "bytes"):
        if len(now[key]) != len(then[key]):
            return f"it has {len(now[key])} steps, and had {len(then[key])}"
    for step, (sent, before) in enumerate(zip(now["bytes"], then["bytes"], strict=True), 1):
        if not _same(sent, before, where):
            return f"step {step} sends {sent} bytes, and sent {before}{where}"
    if not where and now["weights"] != then["weights"]:
        return f"the losses are the same, and the weights are {now['weights'][:8]}, and were {then['weights'][:8]}"
    return None


def _same(now: float, then: float, where: str) -> bool:
    return abs(now - then) <= TOLERANCE * abs(then) if where else now == then


def _differing_environment(now: Record, then: Record) -> str:
    facts = [
        f"{key} {now['environment'].get(key)}, then {value}"
        for key, value in then["environment"].items()
        if now["environment"].get(key) != value
    ]
    return f" (within {TOLERANCE:.0%}, because the environment is another one: {'; '.join(facts)})" if facts else ""


def marked(now: Record, then: Record | None) -> Record:
    """The record of a trajectory: with the kept mark if it is equal to the kept one, or a new mark."""
    same = then is not None and difference(now, then) is None
    return {**now, "mark": then["mark"] if same and then is not None else now["weights"][:8]}


def _written(records: dict[str, Record]) -> str:
    """The records as JSON, with a line for each field."""
    entries = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
        + "\n}"
        for name, record in records.items()
    )
    return f"{{\n{entries}\n}}\n"


@click.command(help="Trains all trajectories, or the named ones, and compares them with the kept ones.")
@click.argument("names", nargs=-1, type=click.Choice(list(TRAININGS)))
@click.option("--write", is_flag=True, help="Write changed and new trajectories.")
@click.option("--as-json", is_flag=True, help="Print the results as JSON, without a comparison.")
def command(names: tuple[str, ...], write: bool, as_json: bool) -> None:
    chosen = list(names or TRAININGS)
    if as_json:
        click.echo(json.dumps({name: train(name) for name in chosen}))
        return
    records = train_in_a_process(chosen)
    then = kept() if FILE.exists() else {}
    problems: dict[str, str | None] = {
        name: difference(record, then[name]) if name in then else "it is new" for name, record in records.items()
    }
    for name, problem in problems.items():
        click.echo(f"{name}: {problem or 'the same'}")
    if write:
        changed = {name: marked(records[name], then.get(name)) for name, problem in problems.items() if problem}
        FILE.write_text(_written({name: {**then, **changed}[name] for name in TRAININGS if name in then | changed}))
    elif any(problems.values()):
        sys.exit(1)


if __name__ == "__main__":
    command()
