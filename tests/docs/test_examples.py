"""The example programs, as their first lines say to start them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launched import run_ranks

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here for TensorFlow")

pytestmark = pytest.mark.alone

_EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.thorough
def test_keras_fit_learns_and_compresses_harder_in_the_end() -> None:
    finished = run_ranks(2, "gloo", [str(_EXAMPLES / "keras_fit.py")])
    assert finished.returncode == 0, finished.stdout[-3000:]
    accuracies = [float(found) for found in re.findall(r" accuracy: ([\d.]+)", finished.stdout)]
    factors = [float(found) for found in re.findall(r"compression_factor: ([\d.]+)", finished.stdout)]
    assert len(accuracies) == len(factors) == 8
    assert accuracies[-1] > 0.9
    assert factors[-1] > 1.5 * factors[0]


@pytest.mark.thorough
def test_tensorflow_tape_goes_on_where_it_was(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):
        finished = run_ranks(2, "gloo", [str(_EXAMPLES / "tensorflow_tape.py"), str(tmp_path)])
        assert finished.returncode == 0, finished.stdout[-3000:]
        losses += [float(found) for found in re.findall(r"loss ([\d.]+), 6.9 times fewer bytes", finished.stdout)]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
