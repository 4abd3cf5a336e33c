"""Checks this machine before the set-up downloads anything, and names the fix of each problem.

`make` runs it with the Python from which it makes the environment. It must run on old Pythons (from 3.6) too, so that
they get a clear message: use no newer syntax here.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST, NEWEST = (3, 10), (3, 13)  # versions for which the pinned PyTorch and TensorFlow have wheels
# Unpacked packages and the build folder; measured 3.5 GB with the CPU builds of both frameworks.
ENVIRONMENT_BYTES, CACHE_BYTES, TEMPORARY_BYTES = 6e9, 1e9, 1.5e9


def check_platform():
    if sys.platform != "linux":
        yield f"this is {sys.platform}: the set-up is for Linux (use a Linux machine, container or WSL 2)"
    elif platform.libc_ver()[0] != "glibc":
        yield "this Linux has no glibc, which the frameworks' wheels need: use Debian, Ubuntu, Fedora, ..."


def check_python():
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        yield (
            f"Python {platform.python_version()} ({sys.executable}) does not fit: the pinned PyTorch and TensorFlow "
            f"need Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}. Name one of these: make PYTHON=python3.12"
        )
        return
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            yield (
                f"this Python has no {module} module: apt-get install python3-venv (Debian, Ubuntu), or name a "
                "Python that has it: make PYTHON=/path/to/python3"
            )
            break
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        yield (
            "this Python has no header files (Python.h), which Horovod's build needs: apt-get install "
            "python3-dev (Debian, Ubuntu), dnf install python3-devel (Fedora, RHEL), or name a Python that has "
            "them: make PYTHON=/path/to/python3"
        )


def check_compiler():
    """Compiles a probe, because a compiler without C++20 would fail only minutes later."""
    names = [name for name in (os.environ.get("CXX"), "c++", "g++") if name]
    compiler = next((name for name in names if shutil.which(name.split()[0])), None)
    fix = "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), or set CXX to a newer one"
    if compiler is None:
        yield f"no C++ compiler found ($CXX, c++, g++): {fix}"
        return
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.cc")
        with open(source, "w") as file:
            file.write("#include <concepts>\n#include <span>\n")
            file.write("template <std::integral T> T same(T x) { return x; }\nint main() { return same(0); }\n")
        command = [*compiler.split(), "-std=c++20", source, "-o", os.path.join(folder, "probe")]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if process.returncode != 0:
        first = (process.stdout.decode(errors="replace").strip().splitlines() or ["no message"])[0]
        yield f"{compiler} cannot compile C++20 ({first}): {fix}"


def check_disk(environment):
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("HVDCOMP_CACHE") or cache
    needs = {}  # by file system, the needed free bytes, and the first folder on it with its fix
    for folder, size, fix in (
        (environment, ENVIRONMENT_BYTES, "free some space, or clone the project to another disk"),
        (cache, CACHE_BYTES, "free some space, or set HVDCOMP_CACHE to a folder elsewhere"),
        (tempfile.gettempdir(), TEMPORARY_BYTES, "free some space, or set TMPDIR to a folder elsewhere"),
    ):
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder) or "."
        device = os.stat(folder).st_dev
        total, first, first_fix = needs.get(device, (0, folder, fix))
        needs[device] = (total + size, first, first_fix)
    for total, folder, fix in needs.values():
        free = shutil.disk_usage(folder).free
        if free < total:
            where = os.path.abspath(folder)
            yield f"{where} has {free / 1e9:.1f} GB free, and the set-up needs {total / 1e9:.1f} GB there: {fix}"


def main():
    problems = []
    for check in (check_platform(), check_python(), check_compiler(), check_disk(sys.argv[1])):
        problems.extend(check)
    for problem in problems:
        sys.stderr.write("Set-up cannot start: " + problem + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
