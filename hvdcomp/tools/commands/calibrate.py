"""`hvdcomp calibrate`: measures what `hvdcomp advise` needs to know. How it measures is in `hvdcomp.tools.bench`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hvdcomp.communicators import allow_process_sets
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.tools.bench.models import TIMED
from hvdcomp.tools.terminal import make_console, make_table, print_table
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.backends import choose, reach
from hvdcomp.tools.train.options import BACKENDS, SetupError
from hvdcomp.tools.train.ranks import RunRefused

if TYPE_CHECKING:
    from hvdcomp.perfmodel import Calibration
    from hvdcomp.perfmodel.network import Among, Network
    from hvdcomp.tools.bench.calibrate import Calibrated
    from hvdcomp.tools.bench.levels import Levels

COMPRESSORS = (
    "fp16",
    "topk:ratio=0.01",
    "mstopk:ratio=0.01",
    "dgc:ratio=0.01",
    "randomk:ratio=0.01",
    "efsignsgd",
    "efsignsgd:exchange=scatter",
    "signsgd",
    "qsgd:bits=4",
    "qsgd:bits=4,exchange=scatter",
    "int8",
    "powersgd:rank=4",
)
DEVICES = ("auto", "cpu", "cuda")
TWO_LEVELS = ("two_level(qsgd:bits=4)", "two_level(topk:ratio=0.01)")
_START = (
    "horovodrun -np 2 hvdcomp calibrate --output calibration.json, or "
    "torchrun --nproc-per-node 2 -m hvdcomp calibrate --output calibration.json"
)
_NEEDS = (
    "PyTorch and Horovod: pip install 'hvdcomp[torch,build]', then hvdcomp build-horovod; or PyTorch alone, started "
    "with torchrun"
)


@click.command(epilog=f"Start it as training is started: {_START}")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("resnet20",),
    show_default=True,
    metavar="NAME|NAME@DATA|MODULE:FUNCTION",
    help=f"Repeat. One of {', '.join(TIMED)}, on random images as CIFAR-10 has them, or of other data, as "
    "cnn@digits; or a function of your own that is given the batch size and returns "
    "(torch.nn.Module, function without arguments that returns the loss of a batch).",
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=COMPRESSORS,
    show_default=f"{', '.join(COMPRESSORS)}; with several ranks on each of several hosts also {', '.join(TWO_LEVELS)}",
    help="Repeat.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="What carries gradients: Horovod, or DistributedDataParallel; auto: what the launcher is for.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where the model is trained; auto: on CUDA devices if there are any, one for each rank of a host.",
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Of one rank.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=120, show_default=True, help="About how long.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--name", help="Of the calibration in output. [default: the name of the file]")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("calibration.json"),
    show_default=True,
    help="The file that rank 0 writes, for hvdcomp advise --calibration.",
)
@click.pass_context
def command(
    context: click.Context,
    models: tuple[str, ...],
    specs: tuple[str, ...],
    backend: str,
    device: str,
    output: Path,
    name: str | None,
    **options: Any,
) -> None:
    """Measure network, passes and compressors for `hvdcomp advise`.

    Measures through Horovod or torch.distributed, on all ranks at once: what collectives cost by their size, the passes
    of a model alone and while gradients travel, what encoding and decoding with each compressor takes, and how much of
    the exchange hides behind the backward pass. With several ranks on each of several hosts, collectives within hosts
    and between them too. PyTorch.
    """
    environment.prepare_mpi()
    allow_process_sets()
    try:
        choose(backend, "torch")
        for spec in specs:
            parse_compressor(spec)
        if beforehand.uses_files():
            check_writable(output)
    except (SetupError, SpecError) as error:
        beforehand.let_rank_0_speak()
        raise click.UsageError(str(error), context) from None
    try:
        from hvdcomp.tools.bench.carriers import carrier_on
        from hvdcomp.tools.bench.levels import find_levels

        ranks = reach(backend, "torch")
        carrier = carrier_on(ranks)
    except SetupError as error:
        raise click.UsageError(str(error), context) from None
    except ImportError as error:
        raise click.ClickException(f"{error}; hvdcomp calibrate needs {_NEEDS}") from None
    try:
        environment.check_world_size(ranks.size)
        if ranks.size < 2:
            raise SetupError(f"with one rank there is no network to measure; start several: {_START}")
        environment.use_threads(ranks.local_size)
        there = ranks.together(lambda: environment.use_device(device, ranks.local_rank))
        levels = find_levels(carrier.communicator())
        if levels.ranks_per_node is not None and not _given(context, "specs"):
            specs += TWO_LEVELS
        compressors = ranks.together(lambda: _checked(models, specs, options, output, ranks.rank, levels, there))
        ranks.check_same({"options": (models, specs, sorted(options.items())), "device": there.type})
    except (RunRefused, SetupError, ConfigurationError) as refused:
        if ranks.rank == 0:
            click.UsageError(str(refused), context).show()
        ranks.leave(2)
        context.exit(2)

    from hvdcomp.perfmodel import save
    from hvdcomp.tools.bench.calibrate import calibrate

    console = make_console(stderr=True, quiet=ranks.rank != 0)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=ranks.rank != 0, transient=True) as progress:
        task = progress.add_task("starting")
        made = calibrate(
            carrier,
            models,
            compressors,
            name=name or output.stem,
            device=there,
            show=lambda what: progress.update(task, description=what),
            **options,
        )
    if ranks.rank == 0:
        print_summary(made, make_console())
        if levels.why_not:
            click.echo(f"Without two levels: {levels.why_not}.")
        try:
            save(made.calibration, output)
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
        click.echo(f"Wrote {output}. Next: hvdcomp advise --calibration {output} --world-size {ranks.size}")
    ranks.leave(0)


def _checked(
    models: tuple[str, ...],
    specs: tuple[str, ...],
    options: dict[str, Any],
    output: Path,
    rank: int,
    levels: Levels,
    device: Any = "cpu",
) -> list[Any]:
    """The compressors, after everything that could fail later was tried.

    Raises:
        SetupError, SpecError: say what is wrong.
    """
    import torch

    from hvdcomp.perfmodel import exchange_of
    from hvdcomp.tools.bench.workload import build

    compressors = {str(one): one for one in map(parse_compressor, specs)}
    for compressor in compressors.values():
        levels.check(compressor)
    for model in models:
        tensors = build(model, options["batch_size"], options["seed"], rank, torch.device(device)).tensors()
        for compressor in compressors.values():
            exchange_of(compressor, tensors, 2 * (levels.ranks_per_node or 1), levels.ranks_per_node)
    if rank == 0:
        check_writable(output)
    return list(compressors.values())


def _given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is not ParameterSource.DEFAULT


def check_writable(file: Path) -> None:
    """Sees that a file can be written.

    Raises:
        SetupError: if it cannot.
    """
    there = file if file.exists() else file.parent
    if not file.parent.is_dir():
        raise SetupError(f"--output {file} cannot be written: there is no folder {file.parent}; make it first")
    if not os.access(there, os.W_OK):
        raise SetupError(f"--output {file} cannot be written: {there} is not writable")


def print_summary(made: Calibrated, console: Console) -> None:
    """What was found, and what is not to be trusted."""
    calibration = made.calibration
    console.print(Text.assemble((calibration.name, "bold"), f", {calibration.machine['ranks']} ranks"))
    for line in _links(calibration.network):
        console.print(line, soft_wrap=True)
    print_table(console, _models_table(calibration), "One step")
    if made.noisy:
        advice = " repeat on a quieter machine, or with more --seconds"
        console.print(Text.assemble(("Too noisy to trust:", "yellow"), advice), soft_wrap=True)
        for what, one in made.noisy.items():
            console.print(f"  {what}: {1e3 * one.seconds:.2f} ms, repeated medians differ by {one.spread:.0%}")


def _links(network: Network) -> Iterator[str]:
    """A line for each kind of collective that was measured, of each link."""
    from hvdcomp.perfmodel import ALGORITHMS

    links: dict[str, Network | Among] = {"": network}
    if (levels := network.levels) is not None:
        links |= {" within nodes": levels.node, " between nodes": levels.across}
        yield f"nodes of {levels.ranks_per_node} ranks"
    for where, costs in links.items():
        for kind in ALGORITHMS:
            if costs.stand_in(kind) is None:
                cost = costs.cost(kind)
                yield (
                    f"{kind}{where}: {8e-9 * cost.bytes_per_s:.3g} Gb/s, starts after {1e3 * cost.start_s:.2f} ms, "
                    f"{1e6 * cost.latency_s:.0f} us a message"
                )


def _models_table(calibration: Calibration) -> Table:
    from hvdcomp.perfmodel import UNCOMPRESSED, exchange_of

    table = make_table("model", "part", "ms", numbers=["ms"])
    for name, facts in calibration.models.items():
        compute = facts.compute
        rows: dict[str, float] = {
            "forward pass": compute.forward_s or 0.0,
            "backward pass": compute.backward_s,
            "optimizer": compute.optimizer_s,
            "engine without payload": compute.engine_s,
            "gradients handed back": compute.horovod_s,
        }
        ranks, inside = int(calibration.machine["ranks"]), calibration.network.ranks_per_node
        for spec, one in compute.encode.items():
            decoded = exchange_of(parse_compressor(spec), facts.tensors, ranks, inside).decoded(ranks)
            what = "dense gradients, all else" if spec == UNCOMPRESSED else f"encode, decode: {spec}"
            rows[what] = float(one.seconds(decoded))
        for part, seconds in rows.items():
            table.add_row(name, part, f"{1e3 * seconds:.2f}")
        table.add_row(name, "gamma", f"x {compute.gamma:.2f}")
        hides = "not known" if "hides" in facts.estimated else f"{compute.hides:.0%}"
        table.add_row(name, "hidden of what overlap could hide", hides)
    return table


