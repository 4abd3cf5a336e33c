"""The kernels' shared object: how it is compiled, packed, chosen and refused."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.errors import ConfigurationError
from hvdcomp.kernels import build, limits, signatures, tables
from tests.kernel_calls import ROOT, python


@pytest.fixture(autouse=True)
def _loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with what this environment says, and leaves it so, with the best instruction set."""
    best = kernels.instruction_set()
    yield
    monkeypatch.undo()
    kernels.reset()
    if best is not None:
        kernels.use(best)


def loaded_with(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kernels.reset()


def test_there_are_kernels_here() -> None:
    assert kernels.available(), f"{kernels.why_not()}. {kernels.way_out()}"
    assert kernels.why_not() == kernels.way_out() == ""
    assert kernels.instruction_set() == kernels.instruction_sets()[-1]
    assert kernels.instruction_sets()[0] == "plain"


def test_importing_loads_nothing() -> None:
    loaded = "any('_native' in line for line in open('/proc/self/maps'))"
    program = f"import hvdcomp; print({loaded}); from hvdcomp import kernels; kernels.available(); print({loaded})"
    assert python(program).split() == ["False", "True"]


def test_both_handles_have_every_function_with_its_types() -> None:
    for library in (kernels.library(), kernels.library(release=False)):
        assert library is not None
        for name, (result, arguments) in signatures.signatures().items():
            function = getattr(library, name)
            assert (function.restype, function.argtypes) == (result, arguments)
    header = (build.SOURCES / "hvdcomp.h").read_text()
    assert f"#define HVD_ABI_VERSION {signatures.ABI_VERSION}\n" in header


def test_a_line_that_is_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "kernels.def"
    wrong.write_text("/* HVD_KERNEL(in a comment) */ HVD_KERNEL(int32_t, f, (float x), (x)) HVD_KERNEL(int32_t, g)")
    monkeypatch.setattr(signatures, "_LIST", wrong)
    with pytest.raises(ValueError, match=r"kernels\.def has a line that is not HVD_KERNEL"):
        signatures.signatures.__wrapped__()


def in_c(tmp_path: Path, headers: Sequence[str], checks: Sequence[str]) -> str:
    """The compiler's complaints about expressions over the headers that are not true in C."""
    program = tmp_path / "checks.c"
    lines = [f'#include "{header}"' for header in headers]
    lines += [f'_Static_assert({check}, "{check}");' for check in checks]
    program.write_text("\n".join(["#include <stddef.h>", *lines, ""]))
    flags = [*build.FLAGS, "-DHVD_ISA=plain", "-I", str(build.SOURCES), "-fsyntax-only"]
    done = subprocess.run([*build.find_compiler(), *flags, str(program)], capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def checks_of_layout(struct: str, layout: Any) -> list[str]:
    """The size of a C structure and the places and sizes of its fields, from a NumPy type or a ctypes structure."""
    if isinstance(layout, np.dtype):
        size = layout.itemsize
        fields = {name: (field[1], field[0].itemsize) for name, field in (layout.fields or {}).items()}
    else:
        size = ctypes.sizeof(layout)
        places = ((name, getattr(layout, name)) for name, _ in layout._fields_)
        fields = {name: (place.offset, place.size) for name, place in places}
    checks = [f"sizeof({struct}) == {size}"]
    for name, (place, length) in fields.items():
        checks += [f"offsetof({struct}, {name}) == {place}", f"sizeof((({struct} *)0)->{name}) == {length}"]
    return checks


STRUCTS = {
    "hvd_product": tables.FACTORS,
    "hvd_segment": tables.SEGMENT,
    "hvd_task": tables.TASK,
    "hvd_bucket": tables.BucketStruct,
    "hvd_choice": tables.CHOICE,
    "hvd_candidates": tables.CANDIDATES,
    "hvd_sparse": tables.SparseStruct,
}


def test_tables_have_the_layout_that_c_gives_them(tmp_path: Path) -> None:
    checks = [check for struct, layout in STRUCTS.items() for check in checks_of_layout(struct, layout)]
    assert in_c(tmp_path, ["bucket.h", "sparse.h"], checks) == ""
    declared = [re.findall(r"^} (\w+);", (build.SOURCES / name).read_text(), re.M) for name in ("bucket.h", "sparse.h")]
    assert {name for names in declared for name in names} == set(STRUCTS)


def test_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    enumerated = (
        *("NOTHING", "NOT_NEGATIVE", "POSITIVE", "PRODUCT", "EVERYTHING"),
        *("KTH_LARGEST", "BISECT", "SAMPLED", "FITTED", "FOUR_MEANS", "IN_HALF", "IN_FLOAT", "IN_SIGN", "SLACK"),
        "CHUNK_PIECE",
    )
    numbers = {name: getattr(tables, name) for name in enumerated}
    types = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
    numbers |= {types[dtype]: number for dtype, number in tables.NARROW.items()}
    checks = [f"HVD_{name} == {number}" for name, number in numbers.items()]
    checks.append(f"{tables._PIECE} % HVD_BLOCK == 0")
    assert in_c(tmp_path, ["bucket.h", "sparse.h"], checks) == ""


def test_limits_are_those_of_the_headers(tmp_path: Path) -> None:
    of_headers = {
        "SMALLEST_SCALE": limits.SMALLEST_SCALE,
        "SMALLEST_NORM": limits.SMALLEST_NORM,
        "MOST_HALVINGS": float(limits.MOST_HALVINGS),
        # Of these, kernels and arrays use the nearest float32.
        "SQUARES_KEPT": float(np.float32(limits.SQUARES_KEPT)),
        "SQUARES_ADDED": float(np.float32(limits.SQUARES_ADDED)),
        "LARGEST_SQUARED": float(np.float32(limits.LARGEST_SQUARED)),
        "LARGEST_HALF": limits.LARGEST["float16"],
        "LARGEST_BFLOAT16": limits.LARGEST["bfloat16"],
    }
    checks = [f"HVD_{name} == {value.hex()}" for name, value in of_headers.items()]
    assert in_c(tmp_path, ["quant.h", "lowrank.h", "half.h"], checks) == ""


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 0x7BFF), ("bfloat16", 0x7F7F)])
def test_limits_of_16_bits(dtype: str, bits: int) -> None:
    largest = np.uint32([limits.LARGEST_BITS[dtype]]).view(np.float32)
    infinite = np.uint32([limits.INFINITE_BITS[dtype] - 1, limits.INFINITE_BITS[dtype]]).view(np.float32)
    assert largest == limits.LARGEST[dtype]

    def narrowed(x: np.ndarray) -> list[int]:
        with np.errstate(over="ignore"):
            patterns = numpy_arrays.to_bfloat16_bits(x) if dtype == "bfloat16" else x.astype(np.float16).view(np.int16)
        return patterns.view(np.uint16).tolist()

    assert narrowed(largest) == [bits]
    assert narrowed(infinite) == [bits, bits + 1]


PREFETCHING = [path.name for path in build.SOURCES.glob("*.c") if re.search("prefetch|ask_ahead", path.read_text())]


@pytest.mark.parametrize("name", sorted(PREFETCHING))
def test_compiled_code_prefetches_where_the_sources_do(name: str) -> None:
    """GCC removes calls of a function that only prefetches: it takes such a function for one without any effect."""
    machine = platform.machine()
    if machine not in (instructions := {"x86_64": "prefetch", "aarch64": "prfm"}):
        pytest.skip(f"which instruction prefetches is known of {', '.join(instructions)}, not of {machine}")
    flags = [*build.FLAGS, *build.FAST, "-DHVD_ISA=plain", "-S", "-o", "-"]
    command = [*build.find_compiler(), *flags, str(build.SOURCES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert instructions[machine] in done.stdout


# --- What the environment chooses ---


@pytest.mark.parametrize("name", kernels.INSTRUCTION_SETS)
def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name not in kernels.instruction_sets():
        with pytest.raises(ConfigurationError, match=r"built without this instruction set|does not support this"):
            kernels.use(name)
        return
    loaded_with(monkeypatch, HVDCOMP_KERNELS=name)
    assert kernels.instruction_set() == name


def test_an_instruction_set_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        def hvd_use_instruction_set(self, name: bytes) -> int:
            return 2

    monkeypatch.setattr(kernels, "_load", lambda path: kernels._Loaded(Lacking()))
    loaded_with(monkeypatch, HVDCOMP_KERNELS="avx512")
    with pytest.raises(ConfigurationError, match="does not support this instruction set; unset HVDCOMP_KERNELS"):
        kernels.library()


def test_kernels_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_with(monkeypatch, HVDCOMP_KERNELS="off")
    assert kernels.library() is kernels.library(release=False) is kernels.instruction_set() is None
    assert not kernels.available()
    assert kernels.instruction_sets() == []
    assert "HVDCOMP_KERNELS=off" in kernels.why_not()
    assert kernels.way_out() == "unset HVDCOMP_KERNELS"
    with pytest.raises(ConfigurationError, match="plain cannot be used: HVDCOMP_KERNELS=off"):
        kernels.use("plain")


def test_an_unknown_choice_is_refused_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"'sse9' is not an instruction set .*; give one of plain, avx2"):
        kernels.use("sse9")
    loaded_with(monkeypatch, HVDCOMP_KERNELS="sse9")
    with pytest.raises(ConfigurationError, match=r"'sse9' is unknown\. Set it to one of plain, avx2, avx512"):
        kernels.available()


def test_threads_are_as_many_as_the_framework_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HVDCOMP_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("torch", "tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert kernels.threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert kernels.threads() == 3
    for wrong in ("many", str(2**31)):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        assert kernels.threads() == len(os.sched_getaffinity(0))

    def tensorflow(threads: int) -> SimpleNamespace:
        threading = SimpleNamespace(get_intra_op_parallelism_threads=lambda: threads)
        return SimpleNamespace(config=SimpleNamespace(threading=threading))

    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow(0))  # its choice
    assert kernels.threads() == len(os.sched_getaffinity(0))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow(4))
    assert kernels.threads() == 4

    class Torch:
        def get_num_threads(self) -> int:
            return 5

    monkeypatch.setitem(sys.modules, "torch", Torch())
    assert kernels.threads() == 5
    monkeypatch.setenv("HVDCOMP_THREADS", "7")
    assert kernels.threads() == 7
    for wrong in ("0", "-1", "two", str(2**31), str(2**32 + 1)):
        monkeypatch.setenv("HVDCOMP_THREADS", wrong)
        with pytest.raises(ConfigurationError, match=f"HVDCOMP_THREADS='{wrong}' is not a number of threads"):
            kernels.threads()


# --- Compiling, and what is wrong with an object ---


def build_command(folder: Path) -> list[str]:
    """Makes the object in a folder, unless the one that is there is current."""
    program = [sys.executable, "-W", "error", "-m", "hvdcomp.kernels.build"]
    return [*program, "--output", str(folder), "--if-changed"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's own, where it is current; compiling takes longer than all other tests of this file."""
    folder = tmp_path_factory.mktemp("built")
    return Path(shutil.copy(build.HERE / build.LIBRARY, folder)) if build.is_current() else compiled(folder)


def compiled(folder: Path) -> Path:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(build_command(folder), env=environment, check=False).returncode == 0
    return folder / build.LIBRARY


@pytest.mark.thorough
def test_what_is_compiled_works_and_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = compiled(tmp_path / "built")
    assert [path.name for path in built.parent.iterdir()] == [build.LIBRARY]
    assert build.is_current(built.parent)
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=str(built))
    assert kernels.available(), kernels.why_not()


def test_another_source_makes_it_out_of_date(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.setattr(build, "digest", lambda: "fedcba9876543210")
    assert not build.is_current(built.parent)
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=str(built))
    assert kernels.why_not() == f"{built} was built from the sources of another version of hvdcomp"
    assert kernels.way_out() == "To build it again, run python -m hvdcomp.kernels.build"


def test_an_object_for_another_machine_is_out_of_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a folder that machines share; one that the table does not have is taken for this one."""
    for code, machine, current in ((183, "x86_64", False), (183, "aarch64", True), (243, "riscv64", True)):
        header = b"\x7fELF".ljust(18, b"\2") + code.to_bytes(2, "little")
        (tmp_path / build.LIBRARY).write_bytes(header + build.digest().encode())
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert build.is_current(tmp_path) is current, machine


def test_the_digest_is_of_names_and_contents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(build.SOURCES, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    digests = [build.digest()]
    (tmp_path / "src" / "new.h").write_text("1")
    digests.append(build.digest())
    (tmp_path / "src" / "new.h").write_text("2")
    digests.append(build.digest())
    (tmp_path / "src" / "new.h").rename(tmp_path / "src" / "newer.h")
    digests.append(build.digest())
    assert len(set(digests)) == 4
    (tmp_path / "src" / "newer.h").unlink()
    (tmp_path / "src" / "notes.txt").write_text("not compiled")
    assert build.digest() == digests[0]


@pytest.mark.parametrize(
    ("compiler", "named"),
    [("no-such-compiler -m64", "the C compiler in $CC was not found: no-such-compiler"), ("false", "false ended with")],
)
def test_without_a_working_compiler_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, built: Path, tmp_path: Path, compiler: str, named: str
) -> None:
    old = tmp_path / build.LIBRARY
    shutil.copy(built, old)
    monkeypatch.setenv("CC", compiler)
    assert build.build_or_say_why(tmp_path) is None
    assert not old.exists()
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=str(old))
    assert not kernels.available()
    assert kernels.why_not().startswith(named)
    assert "python -m hvdcomp.kernels.build" in kernels.way_out()


def test_a_slow_compiler_is_given_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "slow-cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = -dumpmachine ] && exec sleep 60\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    for given, named in (
        ("0.01", "slow-cc took more than 0.01 seconds to compile one file; set HVDCOMP_KERNELS_BUILD_SECONDS to a"),
        ("0", "HVDCOMP_KERNELS_BUILD_SECONDS='0' is not a number of seconds above 0; set it to such a number"),
        ("long", "HVDCOMP_KERNELS_BUILD_SECONDS='long' is not a number of seconds above 0"),
    ):
        monkeypatch.setenv("HVDCOMP_KERNELS_BUILD_SECONDS", given)
        with pytest.raises(build.CompilationError, match=re.escape(named)):
            build.build(tmp_path)
    assert build.SECONDS >= 1800  # of one file, on a machine that is emulated or very busy


def test_no_compiler_at_all_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilationError, match=r"no C compiler was found \(\$CC, cc, gcc, clang\)"):
        build.build(tmp_path)
    (tmp_path / "clang").symlink_to("/bin/true")
    assert build.find_compiler() == ["clang"]


def test_what_the_compiler_says_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "right.c").write_text("int right(void) { return 0; }\n")
    (sources / "isa_wrong.c").write_text("int wrong(void) { return missing; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.CompilationError) as raised:
        build.build(tmp_path)
    first = str(raised.value).splitlines()[0]
    assert "isa_wrong.c" in first
    assert "missing" in first
    assert not (tmp_path / build.LIBRARY).exists()


def test_what_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=str(tmp_path / "missing.so"))
    assert kernels.why_not() == f"there is no {tmp_path}/missing.so"
    (tmp_path / "wrong.so").write_text("no library")
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=str(tmp_path / "wrong.so"))
    assert f"{tmp_path}/wrong.so cannot be loaded: " in kernels.why_not()
    (tmp_path / "empty.c").write_text("int nothing;")
    another = str(tmp_path / "another.so")
    subprocess.run([*build.find_compiler(), "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", another], check=True)
    loaded_with(monkeypatch, HVDCOMP_KERNELS_LIBRARY=another)
    assert kernels.why_not() == f"{another} was built from the sources of another version of hvdcomp"


def test_a_forced_instruction_set_needs_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded_with(monkeypatch, HVDCOMP_KERNELS="plain", HVDCOMP_KERNELS_LIBRARY=str(tmp_path / "missing.so"))
    with pytest.raises(ConfigurationError, match=r"=plain needs hvdcomp's kernels, .*: there is no .*missing\.so"):
        kernels.library()


def test_the_program_builds_only_if_something_changed(built: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CC": "false"}
    made = built.stat()
    assert subprocess.run(build_command(built.parent), env=environment, check=False).returncode == 0
    assert built.stat().st_mtime_ns == made.st_mtime_ns
    shutil.copy(built, tmp_path)
    for folder in (tmp_path, tmp_path / "empty"):  # asked for it in any case; or there is none
        command = build_command(folder)[: -1 if folder == tmp_path else None]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "were not compiled" in done.stderr


def test_the_tag_names_the_newest_glibc_that_is_needed(built: Path, tmp_path: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("objdump, which says what symbols an object needs, is not installed")
    symbols = subprocess.run(["objdump", "-T", built], capture_output=True, text=True, check=True).stdout
    needed = max(int(minor) for minor in re.findall(r"\(GLIBC_2\.(\d+)(?:\.\d+)?\)", symbols))
    assert build.platform_tag(built, "linux_x86_64") == f"manylinux_2_{needed}_x86_64"
    (tmp_path / "for_musl.so").write_bytes(b"libc.musl-x86_64.so.1")
    assert build.platform_tag(tmp_path / "for_musl.so", "linux_x86_64") == "linux_x86_64"


def test_the_tag_names_the_machine_of_the_object_and_not_that_which_builds(tmp_path: Path) -> None:
    (tmp_path / build.LIBRARY).write_bytes(b"\x7fELF".ljust(18, b"\2") + (183).to_bytes(2, "little") + b"GLIBC_2.17")
    assert build.platform_tag(tmp_path / build.LIBRARY, "linux_x86_64") == "manylinux_2_17_aarch64"


CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
IN_HALF_PRECISION = """
#include <stdio.h>
#include "hvdcomp.h"

int main(void) {
    static float x[100000];
    static uint16_t halves[100000];
    int64_t size = fread(x, 4, 100000, stdin);
    hvd_half_narrow(x, size, halves, 3);
    return (int64_t)fwrite(halves, 2, size, stdout) != size;
}
"""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"there is no {CROSS_COMPILER}")
def test_a_cross_compiler_makes_the_wheel_of_its_machine(source: Path, tmp_path: Path) -> None:
    wheel = make("build_wheel", source, tmp_path, CC=CROSS_COMPILER)
    assert re.fullmatch(r"hvdcomp-[\d.]+-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name)
    library = Path(zipfile.ZipFile(wheel).extract("hvdcomp/kernels/_native.so", tmp_path))
    header = library.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:], "little") == 183  # EM_AARCH64
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"made, and not tried: there is no {EMULATOR}")
    (tmp_path / "halves.c").write_text(IN_HALF_PRECISION)
    program = [tmp_path / "halves.c", library, "-I", build.SOURCES, "-o", tmp_path / "halves"]
    subprocess.run([CROSS_COMPILER, "-Wl,-rpath", library.parent, *program], check=True)
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    x[:3] = np.inf, -70_000, 1e-7
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    run = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", tmp_path / "halves"]
    assert subprocess.run(run, input=x.tobytes(), stdout=subprocess.PIPE, check=True).stdout == halves.tobytes()


# --- Installing ---


def make(what: str, source: Path, folder: Path, **environment: str) -> Path:
    """A wheel, made by a hook of PEP 517."""
    code = f"from setuptools import build_meta; build_meta.{what}({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a wheel is made from, because building leaves files behind."""
    folder = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "_native.*")
    shutil.copytree(ROOT / "hvdcomp", folder / "hvdcomp", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.thorough
def test_a_wheel_serves_every_python_of_the_platform_and_works_from_a_fresh_environment(
    source: Path, tmp_path: Path
) -> None:
    wheel = make("build_wheel", source, tmp_path)
    assert re.fullmatch(r"hvdcomp-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert "hvdcomp/kernels/_native.so" in zipfile.ZipFile(wheel).namelist()
    venv.create(tmp_path / "venv", with_pip=True)
    python_there = tmp_path / "venv" / "bin" / "python"
    install = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index", "--no-deps"]
    subprocess.run([python_there, "-I", *install, wheel], check=True, timeout=120)
    code = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})  # for NumPy\n" + (
        "from hvdcomp import kernels\nprint(kernels.__file__, kernels.instruction_set(), kernels.why_not())"
    )
    done = subprocess.run([python_there, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, chosen = done.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert chosen == kernels.instruction_set()


@pytest.mark.thorough
def test_without_a_compiler_it_is_installed_all_the_same(source: Path, tmp_path: Path) -> None:
    wheel = make("build_wheel", source, tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = "from hvdcomp import kernels; print(kernels.available(), kernels.why_not())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.stdout.strip() == "False the C compiler in $CC was not found: no-such-compiler", done.stderr


@pytest.mark.thorough
def test_an_editable_installation_compiles_into_the_sources(source: Path, tmp_path: Path) -> None:
    make("build_editable", source, tmp_path)
    library = source / "hvdcomp" / "kernels" / build.LIBRARY
    made = library.stat().st_mtime_ns
    next(tmp_path.glob("*.whl")).unlink()
    make("build_editable", source, tmp_path)
    assert library.stat().st_mtime_ns == made  # nothing has changed
    (source / "hvdcomp" / "kernels" / "src" / "new.h").write_text("\n")
    next(tmp_path.glob("*.whl")).unlink()
    make("build_editable", source, tmp_path)
    assert library.stat().st_mtime_ns != made
