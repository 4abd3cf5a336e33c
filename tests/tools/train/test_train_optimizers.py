"""Optimizers of other packages in `hvdcomp train`, on simulated ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdcomp.tools.cli import main

pytest.importorskip("torch")

from hvdcomp.tools.train.options import SetupError, TrainingOptions

MODULE = """
import torch

def adamw(groups, lr):
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))

class TwoWeights(torch.optim.SGD):
    '''Evaluates weights of zero, and trains others.'''

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.kept = None

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def eval(self):
        if self.kept is None:
            self.kept = [parameter.clone() for parameter in self._parameters()]
            for parameter in self._parameters():
                parameter.zero_()

    @torch.no_grad()
    def train(self):
        if self.kept is not None:
            for parameter, kept in zip(self._parameters(), self.kept):
                parameter.copy_(kept)
            self.kept = None

    def step(self, closure=None):
        assert self.kept is None, "a step with the weights of the evaluation"
        return super().step(closure)

def no_optimizer(groups, lr):
    return groups

def wants_more(groups, lr, momentum):
    return torch.optim.SGD(groups, lr, momentum)

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with optimizers."""
    name = f"optimizers_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def _train(folder: Path, optimizer: str, *options: str) -> tuple[Any, list[dict[str, Any]]]:
    words = ["train", "--simulate-ranks", "2", "--model", "mlp", "--samples", "192", "--validation-samples", "64"]
    words += ["--steps", "6", "--evaluate-every", "3", "--no-progress", "--compression", "int8", "--lr", "0.01"]
    done = CliRunner().invoke(main, [*words, "--optimizer", optimizer, "--output", str(folder), *options])
    file = folder / "evaluations.jsonl"
    return done, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _figures(evaluations: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(one["step"], one["loss"], one["accuracy"]) for one in evaluations]


def test_a_function_of_a_module_of_ones_own_makes_the_optimizer(tmp_path: Path, module: str) -> None:
    by_name, expected = _train(tmp_path / "adamw", "adamw", "--weight-decay", "0.3")
    own, found = _train(tmp_path / "own", f"{module}.adamw", "--weight-decay", "0.3")
    assert by_name.exit_code == own.exit_code == 0, own.output
    assert _figures(found) == _figures(expected)
    assert len(expected) == 2


def test_a_class_of_a_package_trains(tmp_path: Path) -> None:
    done, found = _train(tmp_path / "run", "torch.optim.Adafactor", "--steps", "40")
    assert done.exit_code == 0, done.output
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]


def test_an_optimizer_with_weights_for_evaluations_trains_its_other_weights(tmp_path: Path, module: str) -> None:
    done, found = _train(tmp_path / "run", f"{module}.TwoWeights")
    assert done.exit_code == 0, done.output
    assert [one["loss"] for one in found] == pytest.approx([2.302585] * 2)  # ten classes, equally likely


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adagrad", "--optimizer 'adagrad' is unknown; choose one of sgd, adamw, compressed-adam, muon, or name"),
        ("torch.", "--optimizer 'torch.' is unknown"),
        ("torch.optim.Adams", "--optimizer torch.optim.Adams cannot be imported: module 'torch.optim' has no"),
        ("no_such_package.Lion", "--optimizer no_such_package.Lion cannot be imported: No module named"),
        ("{module}.NUMBER", "NUMBER is neither a class nor a function, but an object of type int"),
        ("{module}.no_optimizer", "returns an object of type list; name a class of torch.optim.Optimizer"),
        (
            "{module}.wants_more",
            "cannot be called with the parameter groups of a model and lr=: TypeError: wants_more()",
        ),
    ],
)
def test_what_makes_no_optimizer_is_refused(tmp_path: Path, module: str, optimizer: str, message: str) -> None:
    done, _ = _train(tmp_path / "run", optimizer.format(module=module))
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


def test_it_is_refused_in_tensorflow() -> None:
    with pytest.raises(SetupError, match=r"torch\.optim\.Adafactor works only with --framework torch; use"):
        TrainingOptions(optimizer="torch.optim.Adafactor", framework="tensorflow").resolved()
