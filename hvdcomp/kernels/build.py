"""Compiles the kernels in `src/` into one shared object, `_native.so`, next to this file or in a given folder.

This program needs only the standard library, because `setup.py` runs it before hvdcomp and NumPy can be imported. To
run it by hand:

    python -m hvdcomp.kernels.build

The files `isa_*.c` are compiled once for each instruction set; all other files are compiled once. The compiler is $CC,
cc, gcc or clang.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = "_native.so"
FAILURE = "_native.log"  # the reason why there is no library

# No -ffast-math: it would let the compiler assume that nothing is infinite or NaN, and change the order of sums.
FLAGS = (
    *("-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"),
    *("-fPIC", "-fvisibility=hidden", "-pthread", "-D_DEFAULT_SOURCE"),
)
FAST, SANITIZED = ("-O3",), ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# The object is never unloaded, because the worker threads of parallel.c run its code.
LINK = ("-shared", "-pthread", "-Wl,-z,nodelete", "-lm")
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
# Few x86 processors lack AVX2. Their code is compiled with -O2, which makes it a third as large. If there are several
# -O options, the compiler uses the last one.
X86: dict[str, tuple[str, ...]] = {"plain": ("-O2",), "avx2": AVX2, "avx512": AVX512}
OTHER_MACHINES: dict[str, tuple[str, ...]] = {"plain": ()}
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF header
SECONDS = 1800.0  # time limit of one file; all take about 5 s, far longer on an emulated CPU
SECONDS_VARIABLE = "HVDCOMP_KERNELS_BUILD_SECONDS"


class CompilationError(RuntimeError):
    """There is no compiler, or the compiler failed. The first line of the message is a summary; the compiler's lines
    follow."""


def digest() -> str:
    """A digest of this file and of the object's sources. The object contains the digest of the sources it was built
    from (`hvd_sources`)."""
    total = hashlib.sha256()
    for path in [*sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h", ".def")), Path(__file__)]:
        total.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        CompilationError: if no compiler is found, or $CC names a compiler that does not exist.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompilationError(f"the C compiler in $CC was not found: {chosen[0]}")
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name) is not None:
            return [name]
    raise CompilationError("no C compiler was found ($CC, cc, gcc, clang)")


def build(folder: Path = HERE, *, sanitize: bool = False) -> Path:
    """Compiles all sources, several of them in parallel, and links them.

    Args:
        folder: the folder in which to write the shared object. The new object replaces an older one atomically.
        sanitize: whether the object checks for invalid addresses and undefined behavior at run time, which is slow. To
            start a program that loads this object, set `LD_PRELOAD` to the path of the compiler's `libasan.so`.

    Returns:
        The path of the shared object.

    Raises:
        CompilationError: with the compiler's output.
    """
    compiler = find_compiler()
    x86 = _run([*compiler, "-dumpmachine"]).startswith("x86_64")
    flags = [*FLAGS, *(SANITIZED if sanitize else FAST), f'-DHVD_SOURCES="{digest()}"', *(["-DHVD_X86"] if x86 else [])]
    with tempfile.TemporaryDirectory(prefix="hvdcomp-kernels-") as name:
        objects = Path(name)
        jobs = list(_compilations(X86 if x86 else OTHER_MACHINES, objects))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([*compiler, *flags, *job]), jobs))
        linked = objects / LIBRARY
        sanitizers = SANITIZED if sanitize else ()
        _run([*compiler, *sanitizers, *(job[-1] for job in jobs), *LINK, "-o", str(linked)])
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / f"{LIBRARY}.{os.getpid()}"
        shutil.copyfile(linked, copy)
    os.replace(copy, folder / LIBRARY)
    (folder / FAILURE).unlink(missing_ok=True)
    return folder / LIBRARY


def _compilations(instruction_sets: dict[str, tuple[str, ...]], objects: Path) -> Iterator[list[str]]:
    """The compiler's arguments for each object file, with the largest sources first. The last argument is the path of
    the object file."""
    for source in sorted(SOURCES.glob("*.c"), key=lambda path: (-path.stat().st_size, path.name)):
        if not source.name.startswith("isa_"):
            yield ["-c", str(source), "-o", str(objects / f"{source.stem}.o")]
            continue
        for name, flags in instruction_sets.items():
            yield [f"-DHVD_ISA={name}", *flags, "-c", str(source), "-o", str(objects / f"{source.stem}-{name}.o")]


def _most_seconds() -> float:
    """The time limit of one file, from $HVDCOMP_KERNELS_BUILD_SECONDS.

    Raises:
        CompilationError: if the variable is not a number above 0.
    """
    setting = os.environ.get(SECONDS_VARIABLE, "")
    try:
        seconds = float(setting or SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise CompilationError(
            f"{SECONDS_VARIABLE}={setting!r} is not a number of seconds above 0; set it to such a number, or unset it"
        )
    return seconds


def _run(command: Sequence[str]) -> str:
    seconds = _most_seconds()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise CompilationError(
            f"{command[0]} took more than {seconds:g} seconds to compile one file; set {SECONDS_VARIABLE} to a larger "
            f"number\n{shlex.join(command)}"
        ) from None
    except OSError as error:
        raise CompilationError(f"{shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()[:20] or ["no message"]
        summary = next((line for line in lines if "error" in line), lines[0])
        heading = f"{command[0]} ended with status {done.returncode}: {summary}"
        raise CompilationError("\n".join([heading, shlex.join(command), *lines]))
    if "warning:" in done.stdout:
        sys.stderr.write(done.stdout)
    return done.stdout


def build_or_say_why(folder: Path) -> Path | None:
    """Calls `build`. If the build fails, prints the reason, writes the reason to a file that `hvdcomp doctor` reads,
    and leaves no shared object."""
    try:
        return build(folder)
    except (CompilationError, OSError) as error:
        print(
            f"hvdcomp's kernels were not compiled. hvdcomp works without them, but is slower. {error}", file=sys.stderr
        )
        (folder / LIBRARY).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).write_text(f"{error}\n")
        return None


def is_current(folder: Path = HERE) -> bool:
    """Whether the shared object in a folder was made from these sources, and for this machine's processor."""
    library = folder / LIBRARY
    content = library.read_bytes() if library.is_file() else b""
    return digest().encode() in content and _machine(content, platform.machine()) == platform.machine()


def platform_tag(library: Path, otherwise: str) -> str:
    """The platform part of a wheel's name: `manylinux_2_X_<machine>`, where X is the newest version of glibc that the
    object needs.

    Args:
        library: the shared object. Its symbols name the versions of glibc that they need. Its header names the target
            machine, which differs from the build machine if the object is cross-compiled.
        otherwise: the result for an object that needs no glibc, such as an object for musl.
    """
    content = library.read_bytes()
    versions = [int(number) for number in re.findall(rb"GLIBC_2\.(\d+)", content)]
    machine = _machine(content, otherwise.partition("_")[2])
    return f"manylinux_2_{max(versions)}_{machine}" if versions else otherwise


def _machine(content: bytes, otherwise: str) -> str:
    """The machine in the header of a shared object; `otherwise` if `MACHINES` does not list this machine."""
    return MACHINES.get(int.from_bytes(content[18:20], "little"), otherwise)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hvdcomp.kernels.build", description="Compile hvdcomp's kernels.")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE,
        help="the folder for the shared object (default: the folder of the package)",
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="compile with address and undefined-behaviour sanitizers"
    )
    parser.add_argument(
        "--if-changed",
        action="store_true",
        help="compile only if the sources have changed since the shared object was built",
    )
    chosen = parser.parse_args()
    if chosen.if_changed and is_current(chosen.output):
        return 0
    if not chosen.sanitize:
        return 0 if build_or_say_why(chosen.output) else 1
    try:
        build(chosen.output, sanitize=True)
    except CompilationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
