"""`hvdcomp train --optimizer muon`, whose optimizer is tested in `test_muon`. Real ranks: `test_train_simulated`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdcomp.tools.cli import main

torch = pytest.importorskip("torch")
if not hasattr(torch.optim, "Muon"):
    pytest.skip("this PyTorch has no Muon: 2.9 and later have", allow_module_level=True)

from hvdcomp.tools.train.frameworks import build_model  # noqa: E402
from hvdcomp.tools.train.models_torch import hidden_matrices  # noqa: E402
from hvdcomp.tools.train.optimizers_torch import build_optimizer  # noqa: E402
from hvdcomp.tools.train.options import MODELS, MUON_MODELS, TrainingOptions  # noqa: E402
from hvdcomp.torch import MuonWithAdamW  # noqa: E402

_LAYERS = ("attention", "projection", "expansion", "contraction")
_HIDDEN = {
    "mlp": ["1.weight", "3.weight"],
    "cnn": ["7.weight"],
    "cnn1d": ["7.weight"],
    "lstm": [f"lstm.weight_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")],
    "encoder": [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in _LAYERS],
    "vit": [f"blocks.{block}.{layer}.weight" for block in range(4) for layer in _LAYERS],
    "gpt": [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in _LAYERS],
}
_DATA = {"cnn1d": "mnist1d", "encoder": "sorting", "lstm": "text", "gpt": "text"}  # the others: digits
_RATES = (1e-3, 3e-3, 2e-3, 1e-3)  # of the steps
_BETAS, _DECAY = (0.8, 0.9), 0.3


def _built(name: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return build_model(name, channels=1, size=8, classes=10)


def _optimizer_of_a_run(name: str, model: torch.nn.Module) -> MuonWithAdamW:
    given = TrainingOptions(
        model=name, data=_DATA.get(name, "digits"), optimizer="muon", betas=_BETAS, weight_decay=_DECAY
    )
    found = build_optimizer(given.resolved(), model)
    assert isinstance(found, MuonWithAdamW)
    return found


def _give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _step(model: torch.nn.Module, optimizers: list[Any], step: int) -> None:
    _give_gradients(model, step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = _RATES[step]
        optimizer.step()


def _check_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", _HIDDEN)
def test_its_weights_are_those_of_the_two_optimizers_bit_for_bit(name: str) -> None:
    ours, theirs = _built(name), _built(name)
    one = _optimizer_of_a_run(name, ours)
    hidden = [theirs.get_parameter(place) for place in _HIDDEN[name]]
    others = [parameter for place, parameter in theirs.named_parameters() if place not in _HIDDEN[name]]
    two = [
        torch.optim.Muon(hidden, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([matrix for matrix in others if matrix.dim() > 1], betas=_BETAS, weight_decay=_DECAY),
        torch.optim.AdamW([vector for vector in others if vector.dim() <= 1], betas=_BETAS, weight_decay=0.0),
    ]
    for step in range(len(_RATES)):
        _step(ours, [one], step)
        _step(theirs, two, step)
    _check_same(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_known_by_whether_they_have_hidden_matrices(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, channels=3, size=32, classes=10)
    assert bool(hidden_matrices(model)) == (name in MUON_MODELS)


def _train(folder: Path, *options: str) -> dict[str, Any]:
    words = ["train", "--simulate-ranks", "2", "--optimizer", "muon", *options, "--no-progress"]
    done = CliRunner().invoke(main, [*words, "--output", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads((folder / "summary.json").read_text())


def test_ranks_learn_with_it_and_stay_equal(tmp_path: Path) -> None:
    options = ["--model", "mlp", "--samples", "640", "--epochs", "4", "--lr", "0.01", "--clip-norm", "1"]
    found = _train(tmp_path, *options, "--backward-passes-per-step", "2", "--compression", "int8")
    assert found["identical"]
    assert found["accuracy"] > 0.8


def test_a_pytorch_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    done = CliRunner().invoke(main, ["train", "--simulate-ranks", "2", "--model", "mlp", "--optimizer", "muon"])
    assert (done.exit_code, "--optimizer muon needs PyTorch 2.9 or later, but this is" in done.output) == (2, True)
