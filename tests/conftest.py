"""Common settings of all tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.compressors import evidence, harm
from hvdcomp.kernels import cuda
from tests.multirank.outcomes import SECONDS

# No deadline, because machines differ. Examples are derived from the test's own code, so that a run can be repeated;
# `make test-all` asks for "fresh" ones, by a seed that it prints. HVDCOMP_EXAMPLES is their number in each test.
hypothesis.settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("HVDCOMP_EXAMPLES", "12")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "fresh", hypothesis.settings.get_profile("quick"), derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("quick")

# Whose tests take longest. They come first, so that in the end none of several processes waits long for another.
_LONGEST = {
    "test_advise", "test_buckets", "test_kernels_cuda", "test_kernels_cuda_bits", "test_launch_k8s_tls", "test_profile",
    "test_train_tensorflow", "test_train_tensorflow_models",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONGEST)


def pytest_sessionstart(session: pytest.Session) -> None:
    """On a machine for tests only, installs the system packages that some tests need.

    If that fails, the script prints the reason, and those tests are skipped with the name of the missing package.
    """
    if hasattr(session.config, "workerinput"):
        return  # one of pytest-xdist's processes, whose parent has done it
    if os.environ.get("HVDCOMP_INSTALL_SYSTEM_PACKAGES") == "1":
        script = Path(__file__).parents[1] / "scripts" / "install-system-packages"
        subprocess.run([script, "--slurm", "--images", "--prometheus"], check=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the slowest cases on real ranks after pytest's slowest tests, if pytest prints those."""
    count = config.getoption("durations")
    if count and SECONDS:
        terminalreporter.section("slowest cases on real ranks, as rank 0 saw them")
        for name in sorted(SECONDS, key=SECONDS.__getitem__, reverse=True)[:count]:
            terminalreporter.write_line(f"{SECONDS[name]:.2f}s {name}")


@pytest.fixture(autouse=True)
def _global_random_states() -> Iterator[None]:
    """Restores the global random states, so that no test depends on the tests before it."""
    torch = sys.modules.get("torch")
    python, numpy, drawn = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    if torch is not None:
        torch.set_rng_state(drawn)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: its ranks need all cores or the machine's network: no test beside it")
    config.addinivalue_line("markers", "cluster: needs a cluster here, or its image; in `make test-all` only")
    config.addinivalue_line("markers", "network: downloads packages; skipped where no package index can be reached")
    config.addinivalue_line("markers", "thorough: rarely needed or slow; runs in `make test-all` only")
    # Started in the background by a shell, this process ignores Ctrl-C, and so would those that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)  # the ranks of a test are threads already
    # PyTorch's optimizers import Triton, which ends a process that has TensorFlow unless hvdcomp has loaded it before.
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # which refuses to load Triton
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if cuda.available():
            import hvdcomp.kernels.cuda.device  # noqa: F401  # in Triton's interpreter, where all tests have them


@pytest.fixture
def in_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs kernels for CUDA devices on the CPU, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with cuda.serving_host():
        yield


@pytest.fixture
def spoiled(in_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been let go of on the device that the interpreter stands for. It holds NaN, and so does what is taken
    without being cleared, so that whoever reads it is found."""
    torch = pytest.importorskip("torch")
    from hvdcomp.exchange.device_residuals import DeviceResiduals
    from hvdcomp.kernels.cuda.device import DeviceKernels

    gone: list[Any] = []

    def spoil(array: Any) -> Any:
        array.view(torch.int8 if array.dtype == torch.uint8 else torch.int16).fill_(-1)  # of all floats a NaN
        return array

    for kind, name in ((DeviceResiduals, "_buffer"), (DeviceKernels, "passing")):
        fresh: Any = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *arguments, fresh=fresh: spoil(fresh(*arguments)))
    monkeypatch.setattr(cuda, "let_go", lambda array: gone.append(spoil(array)))
    return gone


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables the compiled kernels: buckets are in NumPy, and `aggregate` compresses each tensor."""
    monkeypatch.setenv("HVDCOMP_KERNELS", "off")
    kernels.reset()
    yield
    monkeypatch.undo()
    kernels.reset()


@pytest.fixture
def at_one_rate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Evidence from the trainings at one learning rate only, which does not change as others are trained."""
    found = (*map(evidence._parse, evidence._read("evidence_one_rate.json")), evidence._WITH_MUON)
    monkeypatch.setattr(evidence, "evidence", lambda: found)
    harm._settings.cache_clear()
    yield
    monkeypatch.undo()
    harm._settings.cache_clear()


@pytest.fixture(autouse=True)
def _denormal_numbers() -> Iterator[None]:
    """Restores denormal numbers: calibrations make the processor treat them as zero, which would change later tests."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
