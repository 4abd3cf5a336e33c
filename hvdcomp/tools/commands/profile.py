"""`hvdcomp profile` measures an unchanged training program, and recommends a compressor for it
(`hvdcomp.tools.bench`)."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvdcomp.communicators import allow_process_sets
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.kernels import cuda
from hvdcomp.perfmodel import CalibrationError, load
from hvdcomp.tools.commands.advise import show_advice
from hvdcomp.tools.commands.calibrate import COMPRESSORS, NETWORK_HELP, check_network, check_writable
from hvdcomp.tools.terminal import make_console, make_table, print_table
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.ranks import RunRefused

if TYPE_CHECKING:
    from hvdcomp.perfmodel import Calibration
    from hvdcomp.tools.bench.profile import Profiled
    from hvdcomp.tools.bench.watched import Watched
    from hvdcomp.tools.train.ranks import Ranks

_WARM_UP = 10
_START = "torchrun --nproc-per-node 2 -m hvdcomp profile train.py, or horovodrun -np 2 hvdcomp profile train.py"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=f"Start this command as you start your training: {_START}",
)
@click.option("--module", "-m", "as_module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.option(
    "--steps",
    type=click.IntRange(5),
    default=40,
    show_default=True,
    help=f"Training steps to time, after {_WARM_UP} warm-up steps.",
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=COMPRESSORS,
    show_default=", ".join(COMPRESSORS),
    help="Compressor to measure; repeatable.",
)
@click.option("--network", "known_network", metavar="FILE|PRESET", help=NETWORK_HELP)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=30,
    show_default=True,
    help="Approximate duration of all measurements.",
)
@click.option("--go-on", is_flag=True, help="Continue the training after the measurements. [default: end the program]")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="File for the measurements, written by rank 0 and read by hvdcomp advise --calibration.",
)
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    as_module: bool,
    steps: int,
    specs: tuple[str, ...],
    known_network: str | None,
    seconds: float,
    go_on: bool,
    output: Path,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run some steps of a training program, and recommend a compressor for it.

    PROGRAM is your unchanged training program. You may write the word python before PROGRAM. The program may use
    PyTorch, with DistributedDataParallel or Horovod, or TensorFlow, with Horovod's tape or optimizer. The command times
    the program's steps. Then it measures the network, and times each compressor on copies of the program's own
    gradients. It also runs real exchanges with the best compressors. At the end, it prints the advice of `hvdcomp
    advise`, and the lines to add to the program. The trained weights do not change.
    """
    # the user may also have typed the word python before the program
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        as_module = arguments[:1] == ("-m",)
        own = arguments[1:] if as_module else arguments
        program, arguments = (own[0], own[1:]) if own else (program, ())
    environment.prepare_mpi()
    allow_process_sets()
    output = output.absolute()  # absolute, because the program may change the current folder
    try:
        compressors = [parse_compressor(spec) for spec in specs]
        known = None if known_network is None else load(known_network)
        if beforehand.uses_files():
            check_writable(output)
        if not as_module and not Path(program).is_file():
            raise SetupError(f"there is no file {program}; to run a module, use -m")
    except (SetupError, SpecError, CalibrationError) as error:
        beforehand.let_rank_0_speak()
        raise click.UsageError(str(error), context) from None
    try:
        from hvdcomp.tools.bench.watched import Watch
    except ImportError as error:
        raise click.ClickException(f"{error}; hvdcomp profile needs PyTorch") from None

    def measure(watched: Watched) -> None:
        _measure(watched, compressors, known, seconds, output, go_on)

    def watch_tensorflow() -> None:
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"{error}; hvdcomp profile also needs Horovod for PyTorch: build Horovod for both frameworks with "
                "hvdcomp build-horovod"
            ) from None
        cuda.available()  # loads Triton, which must be loaded before TensorFlow
        from hvdcomp.tools.bench.watched_keras import KerasWatch

        watches.append(KerasWatch(steps, _WARM_UP, measure))
        watches[-1].start()

    watches: list[Any] = [Watch(steps, _WARM_UP, measure)]
    watches[0].start()
    before_import = _BeforeImport("horovod.tensorflow", watch_tensorflow)
    sys.meta_path.insert(0, before_import)
    try:
        _run(program, arguments, as_module)
    except (Exception, SystemExit) as error:
        ended = next((watch.ended for watch in watches if watch.ended is not None), error)
        if isinstance(ended, SetupError):  # a watch raised this error, on every rank in the same step
            raise click.ClickException(str(ended)) from None
        if any(watch.done for watch in watches) or not isinstance(ended, SystemExit) or ended.code not in (None, 0):
            raise ended from None
    finally:
        sys.meta_path.remove(before_import)
        for watch in watches:
            watch.stop()
    if not any(watch.done for watch in watches):
        if watches[0].before_backward >= _WARM_UP + steps and not any(watch.seen for watch in watches):
            raise click.ClickException(
                f"{program} made {watches[0].before_backward} optimizer steps without calling loss.backward(), which "
                "hvdcomp profile needs to find the backward pass: compute the gradients with loss.backward(), not "
                "with torch.autograd.grad or torch.func"
            )
        raise click.ClickException(
            f"{program} ended after {max(watch.seen for watch in watches)} optimizer steps, and hvdcomp profile needs "
            f"{_WARM_UP} + {steps} steps: train longer, or use fewer --steps"
        )


class _BeforeImport(MetaPathFinder):
    """Calls a function before a module is imported for the first time. The class is a finder for sys.meta_path, but it
    never finds a module."""

    def __init__(self, module: str, call: Callable[[], None]) -> None:
        self._module, self._call = module, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == self._module:
            self._module = ""  # so that the function is called only once
            self._call()


def _run(program: str, arguments: tuple[str, ...], as_module: bool) -> None:
    """Runs the program in this process, in the same way as the command `python` would run it."""
    sys.argv = [program, *arguments]
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).absolute().parent))
        runpy.run_path(program, run_name="__main__")


def _measure(
    watched: Watched, compressors: list[Any], known: Calibration | None, seconds: float, output: Path, go_on: bool
) -> None:
    """Measures the network and the compressors, and prints and saves the results. Every rank calls this function within
    the same training step."""
    from hvdcomp.perfmodel import Adviser, Setting, save
    from hvdcomp.tools.bench.carriers import carrier_on
    from hvdcomp.tools.bench.profile import profile

    ranks = reach(_backend(), "torch")
    try:
        check_network(ranks.size, known, _START)
        carrier = carrier_on(ranks)
        ranks.check_same({"parameters": watched.workload.tensors()})
        profiled = _with_progress(
            ranks,
            lambda show: profile(
                watched, carrier, compressors, name=output.stem, seconds=seconds, known_network=known, show=show
            ),
        )
    except (RunRefused, SetupError, ConfigurationError) as refused:
        if ranks.rank == 0:
            click.UsageError(str(refused)).show()
        ranks.leave(2)
        raise SystemExit(2) from None
    if ranks.rank == 0:
        save(profiled.calibrated.calibration, output)
        print_profile(watched, profiled, make_console())
        if ranks.size > 1:
            adviser, setting = Adviser(profiled.calibrated.calibration), Setting(ranks.size)
            show_advice(adviser, setting, adviser.advise(setting))
        click.echo(
            f"Wrote {output}. For another number of ranks or another network: hvdcomp advise --calibration {output} "
            "--world-size 16"
        )
    if not go_on:
        ranks.leave(0)
        raise SystemExit(0)


def _backend() -> str:
    """The library that connects the program's ranks."""
    import torch.distributed as dist

    return "ddp" if dist.is_available() and dist.is_initialized() else "horovod"


def _with_progress(ranks: Ranks, work: Callable[[Callable[[str], None]], Profiled]) -> Profiled:
    console = make_console(stderr=True, quiet=ranks.rank != 0)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=ranks.rank != 0, transient=True) as progress:
        task = progress.add_task("profile")
        return work(lambda stage: progress.update(task, description=stage))


def print_profile(watched: Watched, profiled: Profiled, console: Console) -> None:
    """Prints the parts of a training step, and the exchanges that were actually run."""
    facts = next(iter(profiled.calibrated.calibration.models.values()))
    compute = facts.compute
    forward = 1e3 * (compute.forward_s or 0.0)
    console.print(
        f"A step takes {1e3 * profiled.step.seconds:.1f} ms: {forward:.1f} ms for the forward pass and everything "
        f"else, {1e3 * compute.backward_s:.1f} ms for the backward pass, {1e3 * compute.optimizer_s:.1f} ms for the "
        f"optimizer, and {1e3 * profiled.waits:.1f} ms of waiting for gradients.",
        soft_wrap=True,
    )
    if watched.backward_passes > 1:
        console.print(
            f"A step has {watched.backward_passes} backward passes. The time of all backward passes except the last is "
            'part of "everything else".'
        )
    if watched.more_optimizers:
        names = ", ".join(watched.more_optimizers)
        console.print(f"The profile leaves out these optimizers, and the parameters that they train: {names}.")
    if profiled.tried:
        print_table(console, _tried(profiled), "Measured exchanges")
    if profiled.calibrated.noisy:
        console.print(
            f"{len(profiled.calibrated.noisy)} measurements are too noisy to trust. The field noise.note of the file "
            "lists these measurements. Repeat the command without other programs on the machine, or with more "
            "--seconds.",
            soft_wrap=True,
        )


def _tried(profiled: Profiled) -> Table:
    """A table of the exchanges that were actually run."""
    from hvdcomp.perfmodel import UNCOMPRESSED

    numbers = ["ms", "times faster\nthan dense"]
    table = make_table("exchange of all gradients,\nafter the backward pass", *numbers, numbers=numbers)
    dense = profiled.tried[UNCOMPRESSED].seconds
    for spec, reading in profiled.tried.items():
        table.add_row(spec, f"{1e3 * reading.seconds:.2f}", f"{dense / reading.seconds:.2f}")
    return table
