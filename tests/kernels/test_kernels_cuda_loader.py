"""What loads the kernels for CUDA devices, where there is no C compiler, and a home that nobody prepared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.doctor.test_doctor_image import driver, needs_compiler

__all__ = ["driver"]

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None or find_spec("torch") is None, reason="needs PyTorch and Triton"),
    needs_compiler,
]

ROOT = Path(__file__).parents[2]

_STEP = """
import warnings
import torch
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda

torch.cuda.is_available = lambda: True
engine = Engine(LoopbackCommunicator(2), [TensorInfo("x", (64, 33))], parse_compressor("int8"), min_numel=0, min_ndim=0)
with cuda.serving_host(), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        engine.begin()
        x = torch.arange(64.0 * 33).reshape(64, 33)
        assert (engine.step({"x": x.clone()})["x"] - x).abs().max() < 64 * 33 / 250
# On the host there may be kernels in C.
assert not any(bucket.on_device for bucket in engine.buckets.with_kernels)
(only,) = said
print(only.message)
"""

_LOADS = """
import contextlib, sys, tempfile
import torch
torch.cuda.is_available = lambda: True
from hvdcomp.kernels import cuda
if "no folder" in sys.argv:
    with contextlib.suppress(FileNotFoundError):
        sys.exit(tempfile.gettempdir() + " can be written")
print(cuda.why_not() or "loads")
assert bool(cuda.why_not()) == bool(cuda.way_out())
"""


_PUTS = """
from pathlib import Path
from hvdcomp.kernels.cuda.cache import OverlaidCache
path = OverlaidCache("key").put(b"kernel" * 10_000, "name")
assert Path(path).read_bytes() == b"kernel" * 10_000
assert OverlaidCache("key").get_file("name") == path
assert OverlaidCache("another").get_file("name") is None
print(Path(path).is_relative_to(Path.home()))
"""

# What starts a program in the conditions of an image: a folder that nobody can write, not even a temporary one; a home
# that is full; and a user whom the system does not know, as OpenShift makes one up for each namespace.
_READ_ONLY = (
    "unshare", "--mount", "--map-root-user", "sh", "-c",
    'for folder in / /tmp /var/tmp; do ! mountpoint -q $folder || mount -o remount,bind,ro $folder || exit; done; "$@"',
    "sh",
)  # fmt: skip
_FULL = ("unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=8k none "$HOME" && "$@"', "sh")
_UNKNOWN = ("unshare", "--user", "--map-user=1000660000", "--map-group=0")


def _run(program: str, driver: Path, *arguments: str, within: Sequence[str] = (), **variables: str) -> str:
    """Runs a program without the variables of this process, where PATH holds no compiler, and nobody can write to the
    home."""
    if within and subprocess.run([*within, "true"], check=False, env=os.environ | variables).returncode != 0:
        pytest.skip(f"needs namespaces of users and mounts: {' '.join(within)}")
    path = driver / "bin"
    path.mkdir(exist_ok=True)
    # Triton asks `file` what platform this is, and finds compiled code by the answer. The others are for `within`.
    for name in ("file", "sh", "mount", "mountpoint", "unshare"):
        asked = shutil.which(name)
        if asked is not None and not (path / name).exists():
            (path / name).symlink_to(asked)
    environment = {"PATH": str(path), "HOME": "/dev/null", "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*within, sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=False, env=environment | variables, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_it_a_step_goes_without_kernels_and_says_so_once(driver: Path) -> None:
    said = _run(_STEP, driver)
    assert said.count("\n") == 1
    assert said.startswith("gradients on the GPU are compressed one tensor at a time, which is slower: ")
    assert "Failed to find C compiler" in said
    assert "HVDCOMP_TRITON_CACHE=/path" in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("within", "home", "arguments"),
    [((), "/dev/null", ()), ((), "", ()), (_READ_ONLY, "/dev/null", ("no folder",)), (_UNKNOWN, "/proc", ())],
    ids=["no home", "another home", "nothing to write to", "unknown user"],
)
def test_it_is_found_in_a_folder_that_is_only_read(
    within: tuple[str, ...], home: str, arguments: tuple[str, ...], driver: Path, tmp_path: Path
) -> None:
    """Where the command of the Dockerfile has put it."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (program,) = re.findall(r"python3 -c '(.*CudaUtils\(\))'", text)
    folder, empty = tmp_path / "folder", tmp_path / "empty"
    empty.mkdir()
    _run(program, driver, TRITON_CACHE_DIR=str(folder), PATH=os.environ["PATH"])
    before = sorted(folder.rglob("*"))
    assert before
    where = {"HVDCOMP_TRITON_CACHE": str(folder), "HOME": home or str(empty)}
    assert _run(_LOADS, driver, *arguments, within=within, **where) == "loads\n"
    assert sorted(folder.rglob("*")) == before
    where["HVDCOMP_TRITON_CACHE"] = str(tmp_path / "none")
    assert "cannot be compiled here" in _run(_LOADS, driver, *arguments, within=within, **where)


def test_a_kernel_is_kept_by_the_process_if_the_home_is_full(driver: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert _run(_PUTS, driver, HOME=str(home)) == "True\n"
    assert _run(_PUTS, driver, within=_FULL, HOME=str(home)) == "False\n"
