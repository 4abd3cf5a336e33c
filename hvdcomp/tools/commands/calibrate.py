"""`hvdcomp calibrate` measures the network, the forward and backward passes of models, and compressors. The results are
the input of `hvdcomp advise`. The measurements are in `hvdcomp.tools.bench`."""

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
from hvdcomp.compressors import RECOMMENDED
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.perfmodel import CalibrationError, load
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

_WELL_KNOWN = (
    "topk:ratio=0.01",
    "mstopk:ratio=0.01",
    "dgc:ratio=0.01",
    "randomk:ratio=0.01",
    "efsignsgd",  # what compressed steps send
    "efsignsgd:exchange=scatter",
    "signsgd",
    "qsgd:bits=4",
    "qsgd:bits=4,exchange=scatter",
    "eden",
    "eden:bits=1",
)
COMPRESSORS = tuple(dict.fromkeys(("fp16", *RECOMMENDED, *_WELL_KNOWN)))
"""The methods that are measured by default: all recommended methods, and well-known methods to compare them with."""
DEVICES = ("auto", "cpu", "cuda")
TWO_LEVELS = ("two_level(qsgd:bits=4)", "two_level(topk:ratio=0.01)")
_START = (
    "horovodrun -np 2 hvdcomp calibrate --output calibration.json, or "
    "torchrun --nproc-per-node 2 -m hvdcomp calibrate --output calibration.json"
)
NETWORK_HELP = (
    "Do not measure the network, but use the network of this calibration file or preset. With this option, one rank is "
    "enough."
)
_NEEDS = (
    "PyTorch and Horovod: pip install 'hvdcomp[torch,build]', then hvdcomp build-horovod; or PyTorch alone, started "
    "with torchrun"
)


@click.command(epilog=f"Start this command as you start your training: {_START}")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("resnet20",),
    show_default=True,
    metavar="NAME|NAME@DATA|MODULE:FUNCTION",
    help=f"Model to measure; repeatable. NAME is one of {', '.join(TIMED)}, trained on random images of CIFAR-10's "
    "size, or of another data set's size if you name the data set, as in cnn@digits. MODULE:FUNCTION is your own "
    "function. It is called with the batch size, and returns a torch.nn.Module and a function that computes the loss "
    "of a batch.",
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=COMPRESSORS,
    show_default=f"{', '.join(COMPRESSORS)}; with several ranks on each of several hosts, also {', '.join(TWO_LEVELS)}",
    help="Compressor to measure; repeatable.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Library that averages gradients: Horovod or DistributedDataParallel. auto: the library that fits the "
    "launcher.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Device of the model. auto: a CUDA device for each rank if the host has any, or else the CPU. Ranks share "
    "devices if a host has more ranks than devices.",
)
@click.option("--network", "known_network", metavar="FILE|PRESET", help=NETWORK_HELP)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Samples per rank.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=120,
    show_default=True,
    help="Approximate duration of all measurements.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and data.")
@click.option("--name", help="Name of the calibration, shown by hvdcomp advise. [default: the file's name]")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("calibration.json"),
    show_default=True,
    help="File for the calibration, written by rank 0 and read by hvdcomp advise --calibration.",
)
@click.pass_context
def command(
    context: click.Context,
    models: tuple[str, ...],
    specs: tuple[str, ...],
    backend: str,
    device: str,
    known_network: str | None,
    output: Path,
    name: str | None,
    **options: Any,
) -> None:
    """Measure the network, a model and compressors, as input for `hvdcomp advise`.

    The command runs on all ranks at once, and uses Horovod or torch.distributed. It measures collectives of several
    sizes, the model's forward and backward passes (alone and during an exchange), encoding and decoding with each
    compressor, and the part of the exchange that the backward pass hides. If several hosts have several ranks each, it
    also measures collectives within hosts and between hosts. The command needs PyTorch.
    """
    environment.prepare_mpi()
    allow_process_sets()
    try:
        choose(backend, "torch")
        for spec in specs:
            parse_compressor(spec)
        known = None if known_network is None else load(known_network)
        if beforehand.uses_files():
            check_writable(output)
    except (SetupError, SpecError, CalibrationError) as error:
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
        check_network(ranks.size, known, _START)
        environment.use_threads(ranks.local_size)
        device_used = ranks.together(lambda: environment.use_device(device, ranks.local_rank))
        levels = find_levels(carrier.communicator())
        if levels.ranks_per_node is not None and not _is_given(context, "specs"):
            specs += TWO_LEVELS
        compressors = ranks.together(lambda: _checked(models, specs, options, output, ranks.rank, levels, device_used))
        asked = (models, specs, known_network, sorted(options.items()))
        ranks.check_same({"options": asked, "device": device_used.type})
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
        calibrated = calibrate(
            carrier,
            models,
            compressors,
            name=name or output.stem,
            device=device_used,
            known_network=known,
            show=lambda stage: progress.update(task, description=stage),
            **options,
        )
    if ranks.rank == 0:
        print_summary(calibrated, make_console(), known)
        if levels.why_not:
            click.echo(f"Two-level compressors were not measured, because {levels.why_not}.")
        try:
            save(calibrated.calibration, output)
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
        size = f" --world-size {ranks.size}" if ranks.size > 1 else ""
        click.echo(f"Wrote {output}. Next: hvdcomp advise --calibration {output}{size}")
    ranks.leave(0)


def check_network(size: int, known: Calibration | None, start: str) -> None:
    """Checks that the job has several ranks, so that the network can be measured, or that a calibration gives the
    network.

    Args:
        size: number of ranks of this job.
        known: the calibration with the known network; None if there is none.
        start: the commands that start several ranks, for the message.

    Raises:
        SetupError: if there is neither a network to measure nor a known network.
    """
    if size < 2 and known is None:
        raise SetupError(
            f"there is only one rank, so there is no network to measure. Start several ranks: {start}. Or use the "
            "network of a preset, such as --network h100x8"
        )


def _checked(
    models: tuple[str, ...],
    specs: tuple[str, ...],
    options: dict[str, Any],
    output: Path,
    rank: int,
    levels: Levels,
    device: Any = "cpu",
) -> list[Any]:
    """Checks everything that could fail later, and returns the compressors.

    Raises:
        SetupError, SpecError: if a model, a compressor or the output file cannot be used.
    """
    import torch

    from hvdcomp.perfmodel import exchange_of
    from hvdcomp.tools.bench.workload import build

    compressors = {str(compressor): compressor for compressor in map(parse_compressor, specs)}
    for compressor in compressors.values():
        levels.check(compressor)
    for model in models:
        tensors = build(model, options["batch_size"], options["seed"], rank, torch.device(device)).tensors()
        for compressor in compressors.values():
            exchange_of(compressor, tensors, 2 * (levels.ranks_per_node or 1), levels.ranks_per_node)
    if rank == 0:
        check_writable(output)
    return list(compressors.values())


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is not ParameterSource.DEFAULT


def check_writable(file: Path) -> None:
    """Checks that a file can be written.

    Raises:
        SetupError: if the file cannot be written.
    """
    target = file if file.exists() else file.parent
    if not file.parent.is_dir():
        raise SetupError(f"--output {file} cannot be written: there is no folder {file.parent}; create it first")
    if not os.access(target, os.W_OK):
        raise SetupError(f"--output {file} cannot be written: {target} is not writable")


def print_summary(calibrated: Calibrated, console: Console, known: Calibration | None = None) -> None:
    """Prints the calibration, and which of its measurements are too noisy.

    Args:
        known: the calibration whose network was used; None if the network was measured.
    """
    calibration = calibrated.calibration
    number = int(calibration.machine["ranks"])
    console.print(Text.assemble((calibration.name, "bold"), f", {number} rank{'' if number == 1 else 's'}"))
    if known is not None:
        console.print(f"The network was not measured. These numbers are from {known.name}:", soft_wrap=True)
    for line in _links(calibration.network):
        console.print(line, soft_wrap=True)
    print_table(console, _models_table(calibration), "One step")
    if calibrated.noisy:
        advice = " Repeat on a quieter machine, or with more --seconds:"
        console.print(Text.assemble(("Some measurements are too noisy to trust.", "yellow"), advice), soft_wrap=True)
        for measurement, reading in calibrated.noisy.items():
            milliseconds = f"{1e3 * reading.seconds:.2f} ms"
            console.print(f"  {measurement}: {milliseconds}, repeated medians differ by {reading.spread:.0%}")


def _links(network: Network) -> Iterator[str]:
    """A line for each link and each kind of collective that was measured."""
    from hvdcomp.perfmodel import ALGORITHMS

    links: dict[str, Network | Among] = {"": network}
    if (levels := network.levels) is not None:
        links |= {" within nodes": levels.node, " between nodes": levels.across}
        yield f"{levels.ranks_per_node} ranks on each node"
    for scope, costs in links.items():
        for kind in ALGORITHMS:
            if costs.stand_in(kind) is None:
                cost = costs.cost(kind)
                yield (
                    f"{kind}{scope}: {8e-9 * cost.bytes_per_s:.3g} Gb/s, starts after {1e3 * cost.start_s:.2f} ms, "
                    f"{1e6 * cost.latency_s:.0f} us per message"
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
            "overhead of hvdcomp without payload": compute.engine_s,
            "return of the averaged gradients": compute.horovod_s,
        }
        ranks, inside = int(calibration.machine["ranks"]), calibration.network.ranks_per_node
        for spec, cost in compute.encode.items():
            decoded = exchange_of(parse_compressor(spec), facts.tensors, ranks, inside).decoded(ranks)
            part = "all other time, with dense gradients" if spec == UNCOMPRESSED else f"encode and decode: {spec}"
            rows[part] = float(cost.seconds(decoded))
        for part, seconds in rows.items():
            table.add_row(name, part, f"{1e3 * seconds:.2f}")
        table.add_row(name, "gamma", f"x {compute.gamma:.2f}")
        hides = "not known" if "hides" in facts.estimated else f"{compute.hides:.0%}"
        table.add_row(name, "achieved share of the possible overlap", hides)
    return table
