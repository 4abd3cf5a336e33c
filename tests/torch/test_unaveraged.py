"""Parameters whose gradients nobody averages are found whenever they come into a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from hvdcomp.torch.unaveraged import Unaveraged  # noqa: E402


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.nn.Linear(3, 2))


def watched(of: torch.nn.Module) -> Unaveraged:
    found = Unaveraged(of, list(of.parameters()), [], None, "{} drift")
    assert found.reason_to_refuse() is None
    return found


def test_what_takes_the_place_of_a_layer_is_found() -> None:
    of = model()
    watcher = watched(of)
    of[0][0] = torch.nn.Linear(3, 3)
    assert watcher.reason_to_refuse() == "0.0.weight, 0.0.bias drift"


def test_what_takes_the_place_of_a_parameter_is_found() -> None:
    of = model()
    watcher = watched(of)
    of[1].bias = torch.nn.Parameter(torch.zeros(2))
    assert watcher.reason_to_refuse() == "1.bias drift"


def test_what_is_deep_in_a_new_branch_is_found() -> None:
    of = model()
    watcher = watched(of)
    of[0].append(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3))))
    assert watcher.reason_to_refuse() == "0.2.0.0.weight, 0.2.0.0.bias drift"
    of[0][2][0][0].requires_grad_(False)
    assert watcher.reason_to_refuse() is None


def test_a_model_in_which_nothing_changes_is_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = model()
    watcher = watched(of)
    monkeypatch.setattr(torch.nn.Module, "modules", lambda self: pytest.fail("walked through again"))
    assert watcher.reason_to_refuse() is None


def test_before_an_optimizer_steps_only_what_no_backward_pass_has_asked_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = model()
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    watcher = Unaveraged(of, list(of.parameters()), [], optimizer, "{} drift")
    asked = []
    monkeypatch.setattr(watcher, "_in_groups", lambda: asked.append(1) or [])
    watcher.reason_to_refuse()
    optimizer.step()
    assert len(asked) == 1
    optimizer.step()
    assert len(asked) == 2
