"""`hvdcomp doctor` shows the installed versions, and each problem with its remedy."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hvdcomp.tools.doctor.checks import find_problems
from hvdcomp.tools.doctor.facts import Facts, InfiniBand
from hvdcomp.tools.doctor.gather import gather, start_ranks
from hvdcomp.tools.doctor.problem import Problem
from hvdcomp.tools.doctor.torch_checks import check_torch_variables
from hvdcomp.tools.terminal import make_console


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@click.option("--report", is_flag=True, help="Print Markdown, for a bug report.")
@click.pass_context
def command(context: click.Context, as_json: bool, report: bool) -> None:
    """Check the installation: versions, GPUs, MPI, kernels, and how they fit together.

    If you start it with a launcher (horovodrun -np 2 hvdcomp doctor, torchrun --nproc-per-node 2 -m hvdcomp doctor), it
    also starts Horovod, or a process group of torch.distributed, and compares the number of its ranks with the number
    of ranks that the launcher started. Exit status 1 means that a problem prevents training.
    """
    if as_json and report:
        raise click.UsageError("--json and --report cannot be used together: give one of them")
    console = make_console()
    with make_console(stderr=True).status("Looking at the environment"):
        facts = gather()
        if not (facts.by_torch and any(check_torch_variables(facts))):  # otherwise, the ranks would wait for each other
            facts = replace(facts, started=start_ranks(facts))
    problems = find_problems(facts)
    if facts.launched_rank == 0 or any(problem.stops for problem in problems):
        if report:
            click.echo(as_markdown(facts, problems))
        elif as_json:
            everything = {"facts": asdict(facts), "problems": [asdict(problem) for problem in problems]}
            click.echo(json.dumps(everything, indent=2))
        else:
            _print(console, facts, problems)
    context.exit(1 if any(problem.stops for problem in problems) else 0)


def describe(facts: Facts) -> list[tuple[str, str]]:
    """The facts as pairs of name and value."""
    rows = [("Python", f"{facts.python} in {facts.prefix}")]
    if facts.torch is None:
        rows.append(("PyTorch", "not installed"))
    else:
        build = f"CUDA {facts.torch.cuda}, NCCL {facts.torch.nccl}" if facts.torch.cuda else "CPU build"
        rows.append(("PyTorch", f"{facts.torch.version} ({build})"))
        rows.append(("  distributed", ", ".join(facts.torch.backends) or "not built in"))
    if facts.tensorflow is None:
        rows.append(("TensorFlow", "not installed"))
    else:
        keras = facts.tensorflow.error or f"tf.keras is {facts.tensorflow.keras}"
        rows.append(("TensorFlow", f"{facts.tensorflow.version} ({keras})"))
    rows.append(("Horovod", facts.horovod or "not installed"))
    for framework, binding in facts.bindings.items():
        built = [
            name.upper() if name != "gloo" else "Gloo" for name in ("mpi", "gloo", "nccl") if getattr(binding, name)
        ]
        rows.append((f"  for {framework}", binding.error or f"built with {', '.join(built)}"))
    mpi = facts.mpi
    rows.append(("MPI", f"{mpi.implementation} {mpi.version} ({mpi.mpirun})" if mpi else "none found"))
    rows.append(("mpi4py on", facts.mpi4py_library or "not installed"))
    if not facts.gpus:
        rows.append(("GPU", "none found"))
    for gpu in facts.gpus:
        capability = gpu.compute_capability or "unknown"
        rows.append(("GPU", f"{gpu.name}, compute capability {capability}, driver {gpu.driver}"))
    if facts.infiniband is not None:
        rows.append(("InfiniBand, RoCE", _infiniband(facts.infiniband)))
    rows.append(("CUDA toolkit", _toolkit(facts)))
    rows.append(("Kernels", _kernels(facts)))
    rows.append(("  for CUDA", _device_kernels(facts)))
    rows.append(("Packages", ", ".join(f"{name} {version}" for name, version in facts.packages.items())))
    if facts.launched_size is None:
        rows.append(("Launcher", "none"))
    else:
        rows.append(("Launcher", f"rank {facts.launched_rank} of {facts.launched_size}"))
    if facts.started is not None:
        start = "init_process_group()" if facts.by_torch else "hvd.init()"
        rows.append((start, facts.started.error or f"rank {facts.started.rank} of {facts.started.size}"))
    rows += [("  variable", f"{name}={value}") for name, value in facts.variables.items()]
    return rows


def as_markdown(facts: Facts, problems: list[Problem]) -> str:
    """Facts and problems for a bug report. The home folder is replaced with ~, because its path often contains a
    person's name."""
    home = str(Path.home())
    rows = describe(facts)
    width = max(len(name) for name, _ in rows)
    lines = ["```text", *(f"{name:<{width}}  {value}" for name, value in rows), "```"]
    lines += [f"- {'Problem' if problem.stops else 'Note'}: {problem.what} ({problem.remedy})" for problem in problems]
    text = "\n".join(lines)
    return text if home == "/" else text.replace(home, "~")


def _toolkit(facts: Facts) -> str:
    toolkit, cuda = facts.toolkit, None if facts.torch is None else facts.torch.cuda
    if toolkit is None:
        return "none found"
    fits = f"torch's CUDA is {cuda}" if cuda else "not used: torch is a CPU build" if facts.torch else "no torch"
    return f"nvcc {toolkit.version} ({toolkit.nvcc}), cudart {toolkit.cudart or 'missing'}; {fits}"


def _infiniband(infiniband: InfiniBand) -> str:
    limit = "unlimited" if infiniband.locked_memory is None else f"{infiniband.locked_memory / 1024:,.0f} KiB"
    finds = infiniband.error or f"libibverbs finds {infiniband.usable}"
    return f"{', '.join(infiniband.cards)}; {finds}; locked memory {limit}"


def _kernels(facts: Facts) -> str:
    kernels = facts.kernels
    if kernels is None or kernels.instruction_set is None:
        return "none"
    return (
        f"compiled; instruction set {kernels.instruction_set}, {kernels.threads} threads (or PyTorch's number of "
        "threads)"
    )


def _device_kernels(facts: Facts) -> str:
    kernels = facts.device_kernels
    if kernels is None or kernels.error or kernels.why_not:
        return f"none: {kernels.error or kernels.why_not}" if kernels else "none"
    return f"Triton {kernels.triton}, C compiler for its loader: {kernels.compiler or 'none found'}"


def _print(console: Console, facts: Facts, problems: list[Problem]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe(facts):
        table.add_row(name, value)
    console.print(table)
    console.print()
    for problem in problems:
        console.print(f"{'PROBLEM' if problem.stops else 'Note'}: {problem.what}", soft_wrap=True)
        console.print(f"  -> {problem.remedy}", soft_wrap=True)
    if not problems:
        console.print("No problem found.")
    elif not any(problem.stops for problem in problems):
        console.print("No problem prevents training.")
