"""`hvdcomp profile`: what compression would do for a training program, which stays as it is. How it measures is in
`hvdcomp.tools.bench`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hvdcomp.communicators import allow_process_sets
from hvdcomp.compressors import FIRST, lost_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.kernels import cuda
from hvdcomp.perfmodel.advice import FREE
from hvdcomp.tools.commands.advise import lines_to_type, show_advice
from hvdcomp.tools.commands.calibrate import COMPRESSORS, check_writable
from hvdcomp.tools.terminal import make_console, make_table, print_table
from hvdcomp.tools.train import beforehand, environment
from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.ranks import RunRefused

if TYPE_CHECKING:
    from hvdcomp.perfmodel import Advice, Adviser
    from hvdcomp.tools.bench.profile import Profiled
    from hvdcomp.tools.bench.watched import Watched
    from hvdcomp.tools.train.ranks import Ranks

_WARM_UP = 10
HARMLESS = 0.02
"""What a method may have lost in trainings, as a share, to be named as the one to begin with."""
METHODS = tuple(dict.fromkeys([*COMPRESSORS, *(spec for specs in FIRST.values() for spec in specs)]))
_START = "torchrun --nproc-per-node 2 -m hvdcomp profile train.py, or horovodrun -np 2 hvdcomp profile train.py"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=f"Start it as training is started: {_START}",
)
@click.option("--module", "-m", "as_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--steps",
    type=click.IntRange(5),
    default=40,
    show_default=True,
    help=f"Steps of the training to take times of, after {_WARM_UP} others.",
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=METHODS,
    show_default=", ".join(METHODS),
    help="Repeat.",
)
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), default=30, show_default=True, help="About how long to measure."
)
@click.option("--go-on", is_flag=True, help="Go on with the training afterwards. [default: end it]")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="The file that rank 0 writes, for hvdcomp advise --calibration.",
)
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    as_module: bool,
    steps: int,
    specs: tuple[str, ...],
    seconds: float,
    go_on: bool,
    output: Path,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a training program for some steps, and say which compression would pay there.

    PROGRAM is a training in PyTorch, with DistributedDataParallel or Horovod, or in TensorFlow, with Horovod's tape or
    optimizer, as it is. Takes the times of its steps, then measures the network, and each compressor on copies of the
    program's own gradients; carries out the exchange of the best ones; and says what `hvdcomp advise` would, with the
    lines to add. The training's weights stay what they would be.
    """
    environment.prepare_mpi()
    allow_process_sets()
    output = output.absolute()  # the program may change the folder
    try:
        compressors = [parse_compressor(spec) for spec in specs]
        if beforehand.uses_files():
            check_writable(output)
        if not as_module and not Path(program).is_file():
            raise SetupError(f"there is no file {program}; a module is given with -m")
    except (SetupError, SpecError) as error:
        beforehand.let_rank_0_speak()
        raise click.UsageError(str(error), context) from None
    try:
        from hvdcomp.tools.bench.watched import Watch
    except ImportError as error:
        raise click.ClickException(f"{error}; hvdcomp profile needs PyTorch") from None

    def measure(watched: Watched) -> None:
        _measure(watched, compressors, seconds, output, go_on)

    def watch_tensorflow() -> None:
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"{error}; hvdcomp profile measures through Horovod's PyTorch: build it for both, hvdcomp build-horovod"
            ) from None
        cuda.available()  # loads Triton, which must come before TensorFlow
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
        if isinstance(ended, SetupError):  # of what is watched: on every rank, in the same step
            raise click.ClickException(str(ended)) from None
        if any(watch.done for watch in watches) or not isinstance(ended, SystemExit) or ended.code not in (None, 0):
            raise ended from None
    finally:
        sys.meta_path.remove(before_import)
        for one in watches:
            one.stop()
    if not any(watch.done for watch in watches):
        raise click.ClickException(
            f"{program} ended after {max(watch.seen for watch in watches)} steps of its optimizer, and {_WARM_UP} + "
            f"{steps} were to be watched: give it more to train, or give fewer --steps"
        )


class _BeforeImport(MetaPathFinder):
    """Calls a function before a module is imported: Python asks it where each module is that it does not have."""

    def __init__(self, module: str, call: Callable[[], None]) -> None:
        self._module, self._call = module, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == self._module:
            self._module = ""  # once
            self._call()


def _run(program: str, arguments: tuple[str, ...], as_module: bool) -> None:
    """Runs the program in this process, as Python would."""
    sys.argv = [program, *arguments]
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).absolute().parent))
        runpy.run_path(program, run_name="__main__")


def _measure(watched: Watched, compressors: list[Any], seconds: float, output: Path, go_on: bool) -> None:
    """Called in a step of the training, on every rank."""
    from hvdcomp.perfmodel import Adviser, Setting, save
    from hvdcomp.tools.bench.carriers import carrier_on
    from hvdcomp.tools.bench.profile import profile

    ranks = reach(_backend(), "torch")
    try:
        if ranks.size < 2:
            raise SetupError(f"with one rank there is no network to measure; start several: {_START}")
        carrier = carrier_on(ranks)
        ranks.check_same({"parameters": watched.workload.tensors()})
        made = _with_progress(
            ranks,
            lambda show: profile(watched, carrier, compressors, name=output.stem, seconds=seconds, show=show),
        )
    except (RunRefused, SetupError, ConfigurationError) as refused:
        if ranks.rank == 0:
            click.UsageError(str(refused)).show()
        ranks.leave(2)
        raise SystemExit(2) from None
    if ranks.rank == 0:
        save(made.calibrated.calibration, output)
        print_profile(watched, made, make_console())
        adviser, setting = Adviser(made.calibrated.calibration), Setting(ranks.size)
        advice = adviser.advise(setting)
        show_advice(adviser, setting, advice)
        for line in to_begin_with(adviser, advice, watched.optimizer):
            click.echo(line)
        click.echo(f"Wrote {output}. For other ranks or rates: hvdcomp advise --calibration {output} --world-size 16")
    if not go_on:
        ranks.leave(0)
        raise SystemExit(0)


def to_begin_with(adviser: Adviser, advice: Advice, optimizer: str | None) -> list[str]:
    """Which method to take, of those that have been seen to do a training no harm, in sentences.

    Args:
        advice: the adviser's, for several ranks.
        optimizer: as in `Watched`.
    """
    assert advice.free is not None
    free = advice.methods[advice.free]
    lost = {spec: lost_with(adviser.compressors[spec], optimizer) for spec in advice.methods}
    known = [
        method
        for method in advice.methods.values()
        if (found := lost[method.spec]) is not None and found <= HARMLESS and method.spec not in FREE
    ]
    best = min(known, key=lambda method: method.step_s, default=None)
    which = f"with {optimizer}" if optimizer else "with SGD and with Adam"
    those = f"Of the methods that lost at most {HARMLESS:.0%} {which} in hvdcomp's own trainings,"
    if best is None:
        return [f"{those} none was measured here: name some with --compressor, such as int4 or powersgd:rank=4."]
    if free.step_s / best.step_s - 1 < advice.error:
        return [f"{those} none is faster than {free.spec} by more than the model's error: begin with {free.spec}."]
    lead = f"{free.step_s / best.step_s:.1f} times as fast as {free.spec}"
    line = f"{those} {best.spec} is the fastest, {lead}. Begin with:"
    return [line, *lines_to_type(best.spec, adviser.calibration.machine.get("backend")).values()]


def _backend() -> str:
    """The library that the program has connected its ranks with."""
    import torch.distributed as dist

    return "ddp" if dist.is_available() and dist.is_initialized() else "horovod"


def _with_progress(ranks: Ranks, work: Callable[[Callable[[str], None]], Profiled]) -> Profiled:
    console = make_console(stderr=True, quiet=ranks.rank != 0)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=ranks.rank != 0, transient=True) as progress:
        task = progress.add_task("profile")
        return work(lambda what: progress.update(task, description=what))


def print_profile(watched: Watched, made: Profiled, console: Console) -> None:
    """What the training's steps take, and what was carried out here."""
    from hvdcomp.perfmodel import UNCOMPRESSED

    facts = next(iter(made.calibrated.calibration.models.values()))
    compute = facts.compute
    forward = 1e3 * (compute.forward_s or 0.0)
    console.print(
        f"A step takes {1e3 * made.step.seconds:.1f} ms: forward pass and all else {forward:.1f}, "
        f"backward pass {1e3 * compute.backward_s:.1f}, optimizer {1e3 * compute.optimizer_s:.1f}, and "
        f"{1e3 * made.waits:.1f} in which gradients are still on their way.",
        soft_wrap=True,
    )
    if watched.backward_passes > 1:
        console.print(f"Of its {watched.backward_passes} backward passes the last one counts; the others are all else.")
    if watched.more_optimizers:
        others = ", ".join(watched.more_optimizers)
        console.print(f"Other optimizers make steps too, and were left out, with what they train: {others}.")
    numbers = ["ms", "times as fast\nas dense"]
    table = make_table("exchange of all gradients,\nafter the backward pass", *numbers, numbers=numbers)
    dense = made.tried[UNCOMPRESSED].seconds
    for spec, taken in made.tried.items():
        table.add_row(spec, f"{1e3 * taken.seconds:.2f}", f"{dense / taken.seconds:.2f}")
    print_table(console, table, "Carried out here")
    if made.calibrated.noisy:
        console.print(
            f"{len(made.calibrated.noisy)} measurements are too noisy to trust, and noise_note in the file names them: "
            "repeat it where nothing else runs, or with more --seconds.",
            soft_wrap=True,
        )
