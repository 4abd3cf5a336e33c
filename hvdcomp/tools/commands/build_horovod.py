"""`hvdcomp build-horovod` builds a wheel of Horovod for the frameworks of this environment, and keeps the wheel in a
cache."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hvdcomp.tools.horovod_build import BuildError, log
from hvdcomp.tools.horovod_build.check import load_extension, run_two_ranks
from hvdcomp.tools.horovod_build.environment import find_environment
from hvdcomp.tools.horovod_build.guard import end_with_make
from hvdcomp.tools.horovod_build.plan import (
    HOROVOD_VERSION,
    Options,
    Plan,
    check_environment,
    make_plan,
    missing_build_requirements,
    wheel_folder,
)
from hvdcomp.tools.horovod_build.wheel import (
    build_wheel,
    cached_wheel,
    default_jobs,
    install_wheel,
    installed_record,
    uninstall,
)
from hvdcomp.tools.terminal import make_console


def _parse_architectures(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of compute capabilities; write them without a dot, separated by commas, as in "
            "70,80"
        ) from None


@click.command("build-horovod")
@click.option(
    "--gpu", is_flag=True, help="Build with CUDA and NCCL. This needs the development files of CUDA and NCCL."
)
@click.option(
    "--cuda-arch",
    callback=_parse_architectures,
    metavar="LIST",
    help="With --gpu: compute capabilities to compile for, as in 70,80. [default: Horovod's own list]",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Number of parallel compilations. [default: chosen from the number of cores and the memory]",
)
@click.option("--force", is_flag=True, help="Build again even if a cached wheel exists.")
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="After installing, check Horovod by running two ranks. The command always checks the import.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be built, and build nothing.")
def command(gpu: bool, cuda_arch: tuple[int, ...], jobs: int | None, force: bool, check: bool, dry_run: bool) -> None:
    """Build Horovod for the PyTorch, TensorFlow and MPI of this environment, and install it.

    The wheel is kept in the cache folder ($HVDCOMP_CACHE, or else ~/.cache/hvdcomp). A wheel is used again for the same
    versions of Python, frameworks, MPI and compiler.
    """
    end_with_make()
    console = make_console()
    try:
        options = Options(gpu, cuda_arch)
        environment = find_environment()
        notes = check_environment(environment, options)
        plan = make_plan(environment, options)
        if dry_run:
            _describe(console, plan, notes)
        else:
            _provide(console, plan, notes, jobs or default_jobs(), force, check)
    except BuildError as error:
        raise click.ClickException(str(error)) from None


def _provide(console: Console, plan: Plan, notes: list[str], jobs: int, force: bool, check: bool) -> None:
    installed = installed_record()
    if installed is not None and installed["key"] == plan.key and not force:
        console.print(f"Horovod {HOROVOD_VERSION} is already installed for {_versions(plan)}.", soft_wrap=True)
        return
    for note in notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    missing = missing_build_requirements()
    if missing:
        raise BuildError(f"Missing build packages: {', '.join(missing)}\nInstall them: pip install 'hvdcomp[build]'")
    cache = wheel_folder()
    wheel = None if force else cached_wheel(cache, plan)
    if wheel is None:
        console.print(
            f"Building Horovod {HOROVOD_VERSION} for {_versions(plan)} with {jobs} parallel jobs. This takes some "
            "minutes.",
            soft_wrap=True,
        )
        started = time.monotonic()
        with _BuildProgress(console) as progress:
            wheel = build_wheel(cache, plan, jobs, progress.update)
        console.print(f"Built in {time.monotonic() - started:.0f} s: {wheel}", soft_wrap=True)
    else:
        console.print(f"Using the cached wheel: {wheel}", soft_wrap=True)
    install_wheel(wheel)
    try:
        for framework in plan.frameworks:
            load_extension(framework)
        if check:
            _run_ranks(console, plan)
    except BuildError:
        uninstall()  # otherwise, the next call would assume that the build works
        raise
    console.print(f"Horovod {HOROVOD_VERSION} is ready.")


def _run_ranks(console: Console, plan: Plan) -> None:
    checks = list(itertools.product(plan.frameworks, plan.controllers))

    def run(check: tuple[str, str]) -> float:
        started = time.monotonic()
        run_two_ranks(*check)
        return time.monotonic() - started

    # Two checks run in parallel, because horovodrun itself imports the frameworks, and uses only one core to do so.
    with ThreadPoolExecutor(max_workers=2) as pool:
        for (framework, controller), seconds in zip(checks, pool.map(run, checks), strict=True):
            console.print(f"Two ranks ran: {framework} under {controller} ({seconds:.0f} s)")


class _BuildProgress:
    """Shows the progress of the build. On a terminal, it shows a progress bar. Elsewhere, such as in a CI log, it
    prints a line after every tenth of the build."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.percentage:3.0f} %"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=100)
        self._next_line = 0
        self._started = time.monotonic()

    def __enter__(self) -> _BuildProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, progress: log.Progress) -> None:
        self._bar.update(self._task, completed=progress.percent, description=progress.step)
        if not self._console.is_terminal and (progress.percent == 0 or progress.percent >= self._next_line):
            seconds = time.monotonic() - self._started
            self._console.print(f"  {progress.percent:3d} %  {seconds:4.0f} s  {progress.step}", soft_wrap=True)
            self._next_line = progress.percent // 10 * 10 + 10


def _versions(plan: Plan) -> str:
    environment = plan.environment
    parts = []
    if environment.torch:
        parts.append(f"torch {environment.torch}")
    if environment.tensorflow:
        parts.append(f"TensorFlow {environment.tensorflow}")
    if environment.mpi is not None and "mpi" in plan.controllers:
        parts.append(f"{environment.mpi.implementation} {environment.mpi.version}")
    if plan.options.gpu:
        parts.append(f"CUDA {environment.nvcc} with NCCL")
    return ", ".join([*parts, f"Python {environment.python}"])


def _describe(console: Console, plan: Plan, notes: list[str]) -> None:
    installed = installed_record()
    cache = wheel_folder()
    lines = [
        f"Horovod {HOROVOD_VERSION} for {_versions(plan)}",
        f"C++ compiler: {plan.environment.compiler}",
        f"Cached wheel: {cached_wheel(cache, plan) or f'none yet for key {plan.key} in {cache}'}",
        f"Installed now: {'this' if installed and installed['key'] == plan.key else 'not this'} build",
        "Source edits:" if plan.edits else "Source edits: none",
        *(f"  {edit.file} ({edit.when}): {edit.why}" for edit in plan.edits),
        "Environment variables of the build:",
        *(f"  {name}={value}" for name, value in sorted(plan.variables.items())),
    ]
    missing = missing_build_requirements()
    if missing:
        lines.append(f"Missing build packages: {', '.join(missing)} (pip install 'hvdcomp[build]')")
    lines += [f"Note: {note}" for note in notes]
    console.print("\n".join(lines), soft_wrap=True, markup=False)
