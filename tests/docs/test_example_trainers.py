"""What is for accelerate, PyTorch Lightning and Transformers, in an environment with these libraries: the examples, and
the tests that an environment without them skips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launched import launcher_variables, run_ranks
from tests.package_index import environment_on_top, pip_with_index
from tests.project.test_project import EXTRAS, ROOT

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.alone, pytest.mark.network, pytest.mark.thorough, pytest.mark.timeout(900)]


# Packages with a recipe. All that they require would bring a fbgemm for GPUs, and what only torchtitan's trainer uses.
RECIPES, NEEDED = ["fbgemm-gpu-cpu", "torchrec"], ["pyre-extensions", "tensordict", "torchmetrics", "tqdm"]
if sys.version_info >= (3, 11):
    RECIPES, NEEDED = [*RECIPES, "torchtitan"], [*NEEDED, "einops", "spmd_types", "tyro"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the extras of all trainers and examples, and the torch of this one."""
    folder = tmp_path_factory.mktemp("trainers")
    python = environment_on_top(folder / "venv")
    install = [*pip_with_index(python, folder), "install", "--constraint", str(ROOT / "constraints.txt")]
    extras = [str(one) for extra in ("accelerate", "examples", "lightning", "transformers") for one in EXTRAS[extra]]
    for wanted in ([f"torch=={torch.__version__}", *extras, *NEEDED], ["--no-deps", *RECIPES]):
        done = subprocess.run([*install, *wanted], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = subprocess.run(
        [python, "-c", "import torch; print(torch.__file__)"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == torch.__file__, "torch was installed once more"
    return python


def train(python: Path, example: str, folder: Path, epochs: int) -> list[dict[str, Any]]:
    """What both ranks end with. The exit status is not looked at, as in `tests/docs/test_example_ddp.py`."""
    folder.mkdir(exist_ok=True)
    program = ["-m", "tests.multirank.example", str(ROOT / "examples" / example), str(folder)]
    done = run_ranks(2, "torchrun", [*program, str(folder / "saved"), str(epochs)], timeout=200, python=python)
    files = [folder / f"rank{rank}.pt" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stdout[-4000:]
    ends = [torch.load(file) for file in files]
    for file in files:
        file.unlink()
    return ends


def test_the_tests_with_the_libraries_pass(python: Path) -> None:
    files = [f"tests/torch/{name}.py" for name in ("test_trainers", "test_ranks_trainers")]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True, env=launcher_variables(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert ("skipped" in done.stdout) == (sys.version_info < (3, 11)), done.stdout[-4000:]


@pytest.mark.parametrize("example", ["accelerate_ddp.py", "lightning_ddp.py", "transformers_ddp.py"])
def test_it_compresses_and_goes_on_bit_for_bit(python: Path, example: str, tmp_path: Path) -> None:
    whole = train(python, example, tmp_path / "whole", epochs=3)
    (first, _) = train(python, example, tmp_path / "stopped", epochs=2)
    resumed = train(python, example, tmp_path / "stopped", epochs=3)
    # 1797 images in batches of 32 on two ranks are 29 batches of a rank; two batches make a step.
    assert [end["steps"] for end in (*whole, *resumed)] == [45] * 4
    assert first["steps"] == 30
    for end in (*whole, *resumed):
        assert end["factor"] > 6
        assert all(torch.equal(weight, whole[0]["weights"][name]) for name, weight in end["weights"].items())
    assert not all(torch.equal(weight, whole[0]["weights"][name]) for name, weight in first["weights"].items())
