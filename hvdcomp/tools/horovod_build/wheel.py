"""Builds the wheel of Horovod from the edited sources, shows progress, puts the wheel into the cache, and installs
it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pprint
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.edits import apply_edits
from hvdcomp.tools.horovod_build.environment import run_logged, scripts_first
from hvdcomp.tools.horovod_build.guard import guarded
from hvdcomp.tools.horovod_build.log import Progress, first_error, hint, parse_progress
from hvdcomp.tools.horovod_build.plan import HOROVOD_VERSION, Plan, process_variables
from hvdcomp.tools.horovod_build.source import fetch_source, unpack

# The module with this name in the installed `horovod` package contains the record of the build. It is part of the
# wheel, so it is removed together with Horovod.
_RECORD_MODULE = "hvdcomp_build.py"
_MEMORY_PER_JOB = 2e9  # bytes; the compiler's peak memory when it compiles TensorFlow's headers


def default_jobs() -> int:
    """The number of parallel compilations: one for each available core, or fewer if there is little memory."""
    cores = len(os.sched_getaffinity(0))
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
        available = int(re.search(r"MemAvailable:\s+(\d+)", meminfo)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        return cores
    return max(1, min(cores, int(available / _MEMORY_PER_JOB)))


def cached_wheel(cache: Path, plan: Plan) -> Path | None:
    """The cached wheel of this plan; None if there is none."""
    return next(iter(sorted(_entry(cache, plan).glob("*.whl"))), None)


def _entry(cache: Path, plan: Plan) -> Path:
    return cache / f"{HOROVOD_VERSION}-{plan.key}"


def build_wheel(cache: Path, plan: Plan, jobs: int, report: Callable[[Progress], None]) -> Path:
    """Builds the wheel, and puts it into the cache. The cache changes only if the build succeeds.

    Args:
        cache: folder of the cache. It is created if it does not exist.
        plan: what to build, and how.
        jobs: number of compilations that run at a time.
        report: function that is called with each step of the build.

    Raises:
        BuildError: if the build failed. The message has the first error of the compiler, a hint, and the path of the
            full log.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache, prefix="build-"))
    except OSError as error:
        raise BuildError(
            f"Cannot write to the cache folder: {error}.\nSet HVDCOMP_CACHE to a folder you can write to."
        ) from None
    try:
        report(Progress(0, "fetching and unpacking the source"))
        root = unpack(fetch_source(cache), work)
        apply_edits(root, plan.edits)
        record = pprint.pformat(plan.record(), sort_dicts=False, width=110)
        module = f'"""How `hvdcomp build-horovod` built this Horovod."""\n\nRECORD = {record}\n'
        (root / "horovod" / _RECORD_MODULE).write_text(module, encoding="utf-8")
        result = work / "result"
        result.mkdir()
        report(Progress(0, "configuring with CMake"))
        _run_pip_wheel(root, result, plan, jobs, cache / "last-failed-build.log", report)
        (result / "build.json").write_text(json.dumps(plan.record(), indent=2) + "\n", encoding="utf-8")
        _publish(result, _entry(cache, plan))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    wheel = cached_wheel(cache, plan)
    if wheel is None:
        raise BuildError(f"The build succeeded, but left no wheel in {_entry(cache, plan)}.")
    return wheel


def _publish(result: Path, entry: Path) -> None:
    """Moves the finished folder into the cache. The moved folder replaces an earlier build with the same key."""
    if entry.exists():
        entry.rename(result.parent / "replaced")
    result.rename(entry)


def _run_pip_wheel(
    root: Path, result: Path, plan: Plan, jobs: int, failed_log: Path, report: Callable[[Progress], None]
) -> None:
    variables = process_variables(plan, scripts_first())
    # Under make, these variables describe the job server of the outer make, which the build's own make must not use.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CMAKE_GENERATOR"):
        variables.pop(name, None)
    variables.update(MAKEFLAGS=f"-j{jobs}", TF_CPP_MIN_LOG_LEVEL="3")
    command = [sys.executable, "-m", "pip", "wheel", "--no-input", "--disable-pip-version-check", "-v"]
    command += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(result), str(root)]
    log_path = result / "build.log"
    with (
        log_path.open("w", encoding="utf-8") as log,
        guarded(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=variables,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                progress = parse_progress(line)
                if progress:
                    report(progress)
            code = process.wait()
        except BaseException:  # After Ctrl-C, the compilers must end, too.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if code != 0:
        log_path.replace(failed_log)
        text = failed_log.read_text(encoding="utf-8", errors="replace")
        error = first_error(text) or "\n".join(text.strip().splitlines()[-10:])
        advice = hint(error)
        raise BuildError(
            f"Horovod did not build. The first error:\n\n{error}\n\n"
            + (f"{advice}\n" if advice else "")
            + f"Full log: {failed_log}"
        )


def installed_record() -> dict[str, object] | None:
    """The build record of the installed Horovod; None if this command did not build it. Horovod is not imported."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_RECORD_MODULE)
    if not path.is_file():
        return None
    assignment = ast.parse(path.read_text(encoding="utf-8")).body[-1]
    assert isinstance(assignment, ast.Assign)
    record: dict[str, object] = ast.literal_eval(assignment.value)
    return record


def install_wheel(wheel: Path) -> None:
    """Installs the wheel, which replaces any other Horovod. pip installs no requirements of the wheel here, because the
    `build` extra contains them."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--no-index", "--no-deps", "--force-reinstall", str(wheel)]
    process = run_logged(command)
    if process.returncode != 0:
        raise BuildError(f"pip could not install {wheel}:\n{process.stdout.strip()}")


def uninstall() -> None:
    """Removes the installed Horovod."""
    command = [sys.executable, "-m", "pip", "uninstall", "--no-input", "--disable-pip-version-check", "--quiet"]
    run_logged([*command, "--yes", "horovod"])
