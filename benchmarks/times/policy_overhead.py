"""Measures the time that a policy takes in a step. Compares the same training, at the same levels, with and without a
policy.

    horovodrun -np 2 python -m benchmarks.times.policy_overhead     # about 15 minutes on two cores
    horovodrun -np 2 python -m benchmarks.times.policy_overhead --model resnet20 --steps 200

Two training runs of the cnn on digits, or of ResNet-20 on random images, alternate in one process. A turn has only two
steps, so that other work on the machine affects both runs equally. One run has a policy that reads every gradient and
makes decisions often, but always chooses the fixed level of the other run. Rank 0 writes two medians to --output: the
median of the step times, and the median of the ratios between corresponding steps in the turns of the two runs. A
median does not show the cost of rare expensive steps. The ratio of the total times shows it, but includes other work on
the machine.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click

MODELS = {"cnn": ("digits", 16), "resnet20": ("synthetic", 32)}  # the data, and the batch size
LARGEST = {"cnn": (128, 1024), "resnet20": (64, 64, 3, 3)}  # shape of the largest tensor
TURN = 2  # steps; in longer turns, other work on the machine disturbs the ratios more
# The policies do all their work: norms and ratios of all gradients are computed, and rank 0 decides every 20 steps.
# Only the decisions have no effect. Eta and fall are chosen so that each tensor stays at its level. Policies that
# compute optimal levels choose among as many levels as by default, but all levels are within 1 % of the compressor's
# own level, so that the sent bytes differ by at most 1 %.
CASES = {
    "no policy": ("powersgd:rank=4", None),
    "constant": ("powersgd:rank=4", "constant"),
    "accordion": ("powersgd:rank=4", "accordion:low=4,high=1,eta=1e-12,steps=20"),
    "accordion, lag=0": ("powersgd:rank=4", "accordion:low=4,high=1,eta=1e-12,steps=20,lag=0"),
    "accordion on topk": ("topk:ratio=0.01", "accordion:low=0.01,high=0.001,eta=1e-12,steps=20"),
    "accordion_batch_size": ("topk:ratio=0.01", "accordion_batch_size:low=32,high=64,eta=1e-12,steps=20"),
    "adaqs": ("topk:ratio=0.01", "adaqs:start=50,fall=0.999999,steps=20"),
    "lgreco": ("topk:ratio=0.01", "lgreco:interval=20,least=0.99,most=1.01"),
    "budget": ("topk:ratio=0.01", "budget:factor=10,interval=20,least=0.99,most=1.01"),
    "gravac": ("topk:ratio=0.05", "gravac:min=10,max=10,epsilon=1e-6"),
    "gravac, every=1": ("topk:ratio=0.05", "gravac:min=10,max=10,epsilon=1e-6,every=1"),
    "gravac, two levels": ("topk:ratio=0.05", "gravac:min=10,max=20,epsilon=1e-6,window=100000"),
    "gravac, two levels, every=1": ("topk:ratio=0.05", "gravac:min=10,max=20,epsilon=1e-6,window=100000,every=1"),
}
# In these cases, the other run does not use the compressor's own level, but the level with this compression factor,
# which the policy always chooses.
FIXED = {
    "adaqs": 50.0,
    "gravac": 10.0,
    "gravac, every=1": 10.0,
    "gravac, two levels": 20.0,
    "gravac, two levels, every=1": 20.0,
}


class Training:
    """A training run that is carried out step by step."""

    def __init__(self, model: str, spec: str, policy: str | None) -> None:
        import horovod.torch as hvd
        import torch

        import hvdcomp
        from hvdcomp.tools.train.data import load_data
        from hvdcomp.tools.train.frameworks import build_model
        from hvdcomp.tools.train.options import TrainingOptions

        kind, samples = MODELS[model]
        options = TrainingOptions(model=model, data=kind).resolved()
        data = load_data(options)
        self.inputs, self.labels = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
        torch.manual_seed(0)
        self.model = build_model(model, channels=data.channels, size=data.size, classes=data.classes)
        compression = hvdcomp.Compression.from_spec(
            spec, policy=policy, named_parameters=self.model.named_parameters(), steps_per_epoch=44
        )
        self.compression = compression
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            compression=compression,
        )
        generator = torch.Generator().manual_seed(hvd.rank())
        self.batches = torch.randint(len(self.inputs), (64, samples), generator=generator)
        self.number = 0

    def turn(self) -> list[float]:
        """Runs some steps, and returns the seconds of each step."""
        return [self._step() for _ in range(TURN)]

    def _step(self) -> float:
        from torch.nn.functional import cross_entropy

        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        start = time.perf_counter()
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs[batch]), self.labels[batch]).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def fixed_spec(model: str, case: str, spec: str) -> str:
    """The compressor at the level that the policy always chooses."""
    from hvdcomp.compressors.parsing import parse_compressor

    compressor = parse_compressor(spec)
    if case not in FIXED:
        return spec
    return str(compressor.at_level(compressor.level_for(FIXED[case], LARGEST[model])))


def measure(model: str, case: str, steps: int) -> dict[str, Any]:
    """Lets the two training runs of a case take turns. The first tenth of the steps is not measured."""
    from hvdcomp.policies import median_with_error

    spec, policy = CASES[case]
    plain, adaptive = Training(model, fixed_spec(model, case, spec), None), Training(model, spec, policy)
    pairs: list[tuple[float, float]] = []
    for number in range(steps // TURN):
        order = (plain, adaptive) if number % 2 else (adaptive, plain)
        seconds = {training: training.turn() for training in order}
        pairs += zip(seconds[plain], seconds[adaptive], strict=True)
    pairs = pairs[steps // 10 :]
    ratios = sorted(with_policy / without for without, with_policy in pairs)
    ratio, error = median_with_error(ratios)
    sent = [training.compression.ledger.totals.bytes_sent / training.number for training in (plain, adaptive)]
    return {
        "compression": spec,
        "policy": policy,
        "ms_without": 1000 * statistics.median(without for without, _ in pairs),
        "ms_with": 1000 * statistics.median(with_policy for _, with_policy in pairs),
        "ratio": ratio,
        "ratio_standard_error": error,
        "ratio_of_totals": math.fsum(adapted for _, adapted in pairs) / math.fsum(without for without, _ in pairs),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "bytes_per_step_without_and_with": sent,
        "steps": len(pairs),
    }


def keep_to_one_core(number: int) -> None:
    """Binds all threads of this process to one core, because ranks that move between cores disturb each other more than
    a policy does."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[number % len(cores)]})


@click.command()
@click.option("--steps", default=3000, show_default=True, help="Steps of each training of a case.")
@click.option("--model", default="cnn", show_default=True, type=click.Choice(list(MODELS)))
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Case; repeatable. Default: all.")
@click.option(
    "--output",
    default=Path("docs/policy_overhead.json"),
    show_default=True,
    type=click.Path(path_type=Path),
)
def main(steps: int, model: str, only: tuple[str, ...], output: Path) -> None:
    """Measures the time of policies in a step, with two ranks."""
    import horovod.torch as hvd
    from rich.console import Console

    from hvdcomp.tools.train import environment

    hvd.init()
    environment.use_threads(hvd.local_size())
    keep_to_one_core(hvd.local_rank())
    say = Console(quiet=hvd.rank() != 0, highlight=False, soft_wrap=True).print
    results = {}
    for case in only or CASES:
        results[case] = result = measure(model, case, steps)
        say(
            f"{case}: {result['ms_without']:.2f} ms without, {result['ms_with']:.2f} ms with; "
            f"ratio {result['ratio']:.3f} +- {result['ratio_standard_error']:.3f}"
        )
    if hvd.rank() == 0:
        about = {"model": model, "ranks": hvd.size(), "controller": environment.controller(hvd)}
        about["versions"] = environment.versions()
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
        say(f"written to {output}")


if __name__ == "__main__":
    main()
