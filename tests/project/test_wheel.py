"""The built wheel beside NumPy alone, PyTorch alone and TensorFlow alone, without Horovod: a training, and the doctor.

Versions are those of constraints.txt, which docs/installation.md says were tested.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from tests.package_index import ROOT, fresh_environment, pip_with_index, source_of_package

pytestmark = [pytest.mark.alone, pytest.mark.network, pytest.mark.thorough, pytest.mark.timeout(1200)]

# The gradient of the mean of (x w - x)^2, by each library; the weights begin at 0.
_BY = {
    "numpy": "(2 / x.size) * x.T @ (x @ w - x)",
    "tensorflow": "by_tape(tf.constant(x), tf.constant(w))",
}
_TAPE = """
import tensorflow as tf

def by_tape(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_mean((x @ w - x) ** 2)
    return tape.gradient(loss, w).numpy()
"""
_ON_THREADS = """
import numpy as np
import hvdcomp
from hvdcomp import kernels
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine

def train(ranks):
    w, rng = np.zeros((64, 64), np.float32), np.random.default_rng(ranks.rank)
    engine = Engine(ranks, [TensorInfo("w", w.shape, "float32")], hvdcomp.TopK(ratio=0.1))
    for _ in range(300):
        x = rng.normal(size=(32, 64)).astype(np.float32)
        engine.begin()
        w = w - 4 * engine.step({"w": GRADIENT})["w"]
    return w, engine.ledger.totals.compression_factor

(one, factor), (other, _) = run_ranks(2, train)
print("kernels", kernels.available(), "equal", (one == other).all(), "factor", round(factor))
print("error", np.abs(one - np.eye(64)).mean())
"""
_ON_PROCESSES = """
import torch
import torch.distributed as dist
import hvdcomp
from hvdcomp import kernels

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=4)
compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.1))
hvdcomp.ddp.register(model, compression, optimizer)
for _ in range(300):
    x = torch.randn(32, 64)
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
(w,) = model.parameters()
every = [torch.empty_like(w) for _ in range(2)]
dist.all_gather(every, w.detach())
if dist.get_rank() == 0:
    factor = compression.ledger.totals.compression_factor
    print("kernels", kernels.available(), "equal", torch.equal(*every), "factor", round(factor))
    print("error", (every[0] - torch.eye(64)).abs().mean().item())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, by pip, as for an upload."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = pip_with_index(fresh_environment(folder / "venv"), folder / "reached")
    words = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source_of_package(folder / "source"))]
    subprocess.run(words, check=True, timeout=600)
    (made,) = folder.glob("hvdcomp-*.whl")
    return made


def _environment(folder: Path, wheel: Path, *packages: str) -> Path:
    """A fresh environment with the wheel and these packages; its interpreter."""
    python = fresh_environment(folder / "venv")
    pip = pip_with_index(python, folder / "reached")
    words = [*pip, "install", "--constraint", str(ROOT / "constraints.txt"), *packages, str(wheel)]
    subprocess.run(words, check=True, timeout=900)
    return python


def _said(python: Path, *words: str | Path, code: int = 0) -> str:
    """What a program in the environment says, without anything of the repository."""
    done = subprocess.run(
        [str(python), *map(str, words)], capture_output=True, text=True, timeout=300, cwd=python.parent
    )
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def _trained(said: str) -> None:
    assert "kernels True equal True factor 7" in said, said  # of ten, as each element travels with its place
    assert float(said.rpartition("error ")[2].split()[0]) < 1e-4, said


def _packages(python: Path) -> set[str]:
    listed = _said(python, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze").lower()
    return {line.partition("==")[0] for line in listed.split()}


def test_beside_numpy_alone(tmp_path: Path, wheel: Path) -> None:
    python = _environment(tmp_path, wheel)
    assert not _packages(python) & {"torch", "tensorflow", "tensorflow-cpu", "horovod"}
    program = tmp_path / "train.py"
    program.write_text(_ON_THREADS.replace("GRADIENT", _BY["numpy"]))
    _trained(_said(python, program))
    assert "Neither PyTorch nor TensorFlow is installed" in _said(python, "-m", "hvdcomp", "doctor", code=1)


def test_beside_pytorch_alone(tmp_path: Path, wheel: Path) -> None:
    python = _environment(tmp_path, wheel, "torch")
    assert not _packages(python) & {"tensorflow", "tensorflow-cpu", "tf-keras", "horovod"}
    program = tmp_path / "train.py"
    program.write_text(_ON_PROCESSES)
    _trained(_said(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program))
    said = _said(python, "-m", "hvdcomp", "doctor")
    assert "Horovod is not installed. PyTorch can train without Horovod" in said


def test_beside_tensorflow_alone(tmp_path: Path, wheel: Path) -> None:
    python = _environment(tmp_path, wheel, "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow")
    assert not _packages(python) & {"torch", "horovod"}
    program = tmp_path / "train.py"
    program.write_text(_TAPE + _ON_THREADS.replace("GRADIENT", _BY["tensorflow"]))
    _trained(_said(python, program))
    assert "Horovod is not installed. -> hvdcomp build-horovod" in _said(python, "-m", "hvdcomp", "doctor", code=1)
