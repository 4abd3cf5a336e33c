"""Checks that memory, open files and disk space do not grow in a long training run, for each policy and many methods.

    python -m benchmarks.soak --steps 2000
    python -m benchmarks.soak --steps 1000000 --case topk --case auto --output runs/soak
    python -m benchmarks.soak --faults 0

Each case is a separate training run of a small network on real ranks. Each rank regularly measures its resident memory,
its open files, and the bytes of its decision log. The log's files have a small limit, so that they are rotated. In
random steps, a random rank has a fault (`FAULTS`). The training run clips the mean gradient, and skips a step if the
gradients are not finite.

A case is flat if all ranks have equal weights in every measurement, and if for every rank:

- the median memory of the last quarter of the measurements is at most 2 MiB above the median of the quarter before,
- no measurement of the last quarter has more open files than the largest number of the quarter before, and
- the log never exceeds the limit of all its files together; each file may exceed its own limit by one line.

The exit status is 1 if a case is not flat or fails. In a short run, memory is still growing to its normal size. A leak
of 100 bytes per step becomes visible only after 100,000 steps.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import click

from hvdcomp.files import commit, provenance_last

CASES: dict[str, tuple[str, str | None]] = {
    "fp16": ("fp16", None),
    "topk": ("topk:ratio=0.01", None),
    "dgc": ("dgc:ratio=0.01", None),
    "powersgd": ("powersgd:rank=2", None),
    "qsgd": ("qsgd:bits=4", None),
    "int8": ("int8", None),
    "efsignsgd": ("efsignsgd", None),
    "topk without overlap": ("topk:ratio=0.01", None),
    "constant": ("topk:ratio=0.01", "constant:level=0.02"),
    "warmup": ("topk:ratio=0.01", "warmup:levels=0.25|0.05,epochs=1"),
    "schedule": ("topk:ratio=0.01", "schedule:levels=0.25|0.02,steps=200|400"),
    "legacy": ("topk:ratio=0.01", "legacy:levels=0.1|0.01,sizes=10000"),
    "accordion": ("powersgd:rank=4", "accordion:low=4,high=1,steps=5"),
    "accordion_batch_size": ("topk:ratio=0.01", "accordion_batch_size:low=32,high=64,steps=5"),
    "increase_batch_size": ("topk:ratio=0.01", "increase_batch_size:low=32,high=64,steps=5"),
    "adaqs": ("topk:ratio=0.01", "adaqs:start=64,fall=0.02,steps=5"),
    "gravac": ("topk:ratio=0.01", "gravac:min=10,max=100,window=50"),
    "lgreco": ("powersgd:rank=4", "lgreco:interval=20"),
    "budget": ("topk:ratio=0.01", "budget:factor=50,interval=20"),
    "auto": ("topk:ratio=0.01", "auto:calibration={calibration},window=3,every=5,budget=0.5"),
}
"""The compressor and the policy of each case, by name."""
FAULTS = {
    "nan": "One element of the gradient is NaN.",
    "inf": "One element of the gradient is infinite.",
    "huge": "All elements of the gradient are multiplied by 1e12.",
    "missing": "The last layer has no gradient.",
    "full disk": "The rank cannot write to any file: neither to the decision log nor to a checkpoint.",
}
"""What each fault does, by name."""
LOOKS = 80
MEMORY = 2 * 2**20  # bytes; the median may grow by this much
LOG_BYTES, LOG_FILES, LONGEST_LINE = 2**14, 3, 2**15
STEPS_PER_EPOCH = 100
_WIDTH = 128  # number of units of each layer


def look(step: int, log: Path, model: Any) -> dict[str, int]:
    """The resources that this process uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [file.stat().st_size for file in log.parent.glob(f"{log.stem}*")]
    return {
        "step": step,
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(os.listdir("/proc/self/fd")),
        "log_files": len(files),
        "log_bytes": sum(files),
        "weights": zlib.crc32(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())),
    }


def what_grows(looks: list[dict[str, int]]) -> list[str]:
    """A sentence for each resource of a rank that grows; empty if the rank is flat."""
    quarter = len(looks) // 4
    before, last = looks[-2 * quarter : -quarter], looks[-quarter:]
    growth = []
    first, second = (statistics.median(snapshot["memory"] for snapshot in part) for part in (before, last))
    if second - first > MEMORY:
        steps = last[0]["step"] - before[0]["step"]
        growth.append(f"memory grew by {(second - first) / 2**20:.1f} MiB in {steps} steps")
    opened, now = (max(snapshot["open_files"] for snapshot in part) for part in (before, last))
    if now > opened:
        growth.append(f"{now} open files, {opened} before")
    if max(snapshot["log_bytes"] for snapshot in looks) > LOG_FILES * (LOG_BYTES + LONGEST_LINE):
        growth.append(f"the decision log took {max(snapshot['log_bytes'] for snapshot in looks)} bytes")
    return growth


def where_ranks_differ(looks_of_ranks: list[list[dict[str, int]]]) -> list[str]:
    """A sentence about the first step at which the weights of ranks differ; empty if there is no such step."""
    by_turn = zip(*looks_of_ranks, strict=True)
    steps = [looks[0]["step"] for looks in by_turn if len({snapshot["weights"] for snapshot in looks}) > 1]
    return [f"weights differ at step {steps[0]}"] if steps else []


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """If `full`, makes every write to a file fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def draw(random: Random, share: float, ranks: int) -> tuple[str | None, int]:
    """Draws the fault of a step, or None, and the rank that has the fault. All ranks draw the same result."""
    happens, fault, rank = random.random() < share, random.choice(list(FAULTS)), random.randrange(ranks)
    return fault if happens else None, rank


@contextmanager
def spoiled(parameters: list[Any], fault: str | None) -> Iterator[None]:
    """Makes the backward pass return gradients with the fault, before any other hook reads them."""
    hooks: list[Any] = []
    if fault in ("nan", "inf"):
        first = parameters[0].new_zeros(parameters[0].shape)
        first.view(-1)[0] = float(fault)
        hooks = [parameters[0].register_hook(lambda gradient: gradient + first)]
    elif fault == "huge":
        hooks = [parameter.register_hook(lambda gradient: gradient * 1e12) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def write_calibration(path: Path, spec: str, model: Any) -> None:
    """Writes an invented calibration, in which all methods are about equally fast."""
    cost = {"algorithm": "ring", "latency_s": 1e-5, "bytes_per_s": 1e9}
    tensors = [{"name": name, "shape": list(parameter.shape)} for name, parameter in model.named_parameters()]
    trained = {
        "tensors": tensors,
        "forward_s": 1e-3,
        "backward_s": 1e-3,
        "bucket_bytes": 1e6,
        "encode": {spec: {"encode_s": 1e-5}},
    }
    network = {"allreduce": cost, "allgather": {**cost, "algorithm": "direct"}, "reducescatter": cost}
    calibration = {
        "format": "hvdcomp-calibration", "version": 1, "name": "soak", "network": network, "models": {"net": trained},
    }  # fmt: skip
    path.write_text(json.dumps(calibration))


def train(case: str, steps: int, faults: float, folder: Path) -> None:
    """Runs on each rank: trains a case, and writes a file with the rank's measurements."""
    import horovod.torch as hvd
    import torch
    from torch.nn.functional import mse_loss

    import hvdcomp
    from hvdcomp.policies import Policy, parse_policy

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])
    spec, policy = CASES[case]
    calibration, log = folder / "calibration.json", folder / f"log-{hvd.rank()}" / "decisions.jsonl"
    if hvd.rank() == 0:  # no other rank reads it
        write_calibration(calibration, spec, model)
    chosen = parse_policy(policy.format(calibration=calibration)) if policy else None
    compression = hvdcomp.Compression.from_spec(
        spec,
        policy=chosen,
        named_parameters=model.named_parameters(),
        steps_per_epoch=STEPS_PER_EPOCH,
        decision_log=log if isinstance(chosen, Policy) else None,
        decision_log_bytes=LOG_BYTES,
        decision_log_files=LOG_FILES,
        overlap=False if "without overlap" in case else "auto",
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    parameters, random = list(model.parameters()), Random(case)
    happened = dict.fromkeys(["left out", *FAULTS], 0)
    looks, step = [], 0
    for turn in range(LOOKS):
        while step < steps * (turn + 1) // LOOKS:
            fault, rank = draw(random, faults, hvd.size())
            if fault is not None:
                happened[fault] += 1
            own_fault = fault if rank == hvd.rank() else None
            optimizer.zero_grad()
            with spoiled(parameters, own_fault), full_disk(own_fault == "full disk"):
                for _ in range(compression.accumulation):
                    inputs = torch.randn(8, _WIDTH, generator=generator)
                    outputs = (model[:-1] if own_fault == "missing" else model)(inputs)
                    (mse_loss(outputs, inputs) / compression.accumulation).backward()
                optimizer.synchronize()
                if own_fault == "full disk":
                    with suppress(OSError, RuntimeError):
                        torch.save(compression.state_dict(), log.with_name("checkpoint.pt"))
                        raise AssertionError("writing a checkpoint to a full disk raised no error")
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if torch.isfinite(norm):
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                happened["left out"] += 1
            # The learning rate falls and rises again, so that policies that react to it keep changing levels.
            optimizer.param_groups[0]["lr"] = 1e-3 * (0.5 if step % STEPS_PER_EPOCH > STEPS_PER_EPOCH // 2 else 1)
            step += 1
        looks.append(look(step, log, model))
    (folder / f"faults-{hvd.rank()}.json").write_text(json.dumps(happened))
    (folder / f"looks-{hvd.rank()}.json").write_text(json.dumps(looks))
    hvd.allreduce(torch.zeros(1), name="the end")  # rank 0 may still be sending its last decision
    hvd.shutdown()


def run_case(case: str, steps: int, ranks: int, faults: float, folder: Path) -> dict[str, Any]:
    """Starts the ranks of a case, and evaluates their measurements."""
    folder.mkdir(parents=True)
    command = ["horovodrun", "-np", str(ranks), "--gloo", sys.executable, "-m", "benchmarks.soak"]
    arguments = ["--worker", case, "--steps", str(steps), "--faults", str(faults), "--output", str(folder)]
    output = folder / "output.txt"
    with output.open("wb") as file:
        status = subprocess.run([*command, *arguments], stdout=file, stderr=subprocess.STDOUT).returncode
    files = [folder / f"looks-{rank}.json" for rank in range(ranks)]
    if status or not all(file.exists() for file in files):
        return {"ranks": [], "grows": [f"the ranks ended with status {status}: see {output}"], "faults": {}}
    looks_of_ranks = [json.loads(file.read_text()) for file in files]
    grows = [f"rank {rank}: {words}" for rank, looks in enumerate(looks_of_ranks) for words in what_grows(looks)]
    happened = json.loads((folder / "faults-0.json").read_text())
    return {"ranks": looks_of_ranks, "grows": [*where_ranks_differ(looks_of_ranks), *grows], "faults": happened}


def table_of(cases: dict[str, dict[str, Any]]) -> list[str]:
    """A Markdown table: for each case, the rank whose memory grew most in the second half."""
    lines = [
        "| case | compressor | policy | MiB halfway | MiB at the end | open files | log files | faults | flat |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        spec, policy = CASES[name]
        cells = ["", "", "", "", ""]
        if case["ranks"]:
            worst = max(case["ranks"], key=lambda looks: looks[-1]["memory"] - looks[len(looks) // 2]["memory"])
            memory = [f"{worst[place]['memory'] / 2**20:.1f}" for place in (len(worst) // 2, -1)]
            cells = [*memory, str(worst[-1]["open_files"]), str(max(looks[-1]["log_files"] for looks in case["ranks"]))]
            cells.append(str(sum(times for fault, times in case["faults"].items() if fault != "left out")))
        flat = "; ".join(case["grows"]) or "yes"
        policy = (policy or "").format(calibration="made up").replace("|", "\\|")
        lines.append(f"| {' | '.join([name, f'`{spec}`', policy and f'`{policy}`', *cells, flat])} |")
    return lines


def page_of(cases: dict[str, dict[str, Any]], steps: int, ranks: int, faults: float) -> str:
    """The page: what was run, which faults there were, and the table."""
    command = f"python -m benchmarks.soak --steps {steps} --ranks {ranks} --faults {faults:g}"
    lines = [
        "# Long trainings",
        "",
        "This page shows that long training runs do not use more and more resources, even if gradients are faulty or "
        "the disk is full from time to time. A training run is *flat* if memory, open files and the decision log do "
        "not grow, and if all ranks have the same weights. "
        f"{sum(not case['grows'] for case in cases.values())} of {len(cases)} training runs are flat.",
        "",
        f"Made by `{command}`, at commit `{commit()}`.",
        "",
        f"Each row of the table is a separate training run of {steps} steps on {ranks} ranks. In {faults:.0%} of the "
        "steps, chosen at random, one random rank has one of these faults:",
        "",
        *[f"- **{name}**: {meaning}" for name, meaning in FAULTS.items()],
        "",
        "For each run, the table shows the rank whose memory grew most in the second half of the run.",
        "",
        *table_of(cases),
    ]
    return provenance_last("\n".join(lines))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(LOOKS), default=2000, show_default=True, help="Steps of each case.")
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Case; repeatable. Default: all.")
@click.option("--faults", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Share of faulty steps.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/soak"), show_default=True)
@click.option("--worker", type=click.Choice(list(CASES)), hidden=True)
def main(steps: int, ranks: int, names: tuple[str, ...], faults: float, output: Path, worker: str | None) -> None:
    """Train for many steps, and check that the use of resources does not grow."""
    if worker is not None:
        train(worker, steps, faults, output)
        return
    if output.exists():
        raise click.UsageError(f"--output {output} exists already; name another folder")
    cases = {}
    for name in names or CASES:
        cases[name] = run_case(name, steps, ranks, faults, output / name.replace(" ", "-"))
        click.echo(f"{name}: {'; '.join(cases[name]['grows']) or 'flat'}")
    (output / "soak.md").write_text(page_of(cases, steps, ranks, faults))
    (output / "soak.json").write_text(json.dumps({"steps": steps, "number_of_ranks": ranks, "cases": cases}) + "\n")
    sys.exit(any(case["grows"] for case in cases.values()))


if __name__ == "__main__":
    main()
