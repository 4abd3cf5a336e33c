"""Trajectories of short trainings stay as they were, and one that changes is told (tests/trajectories.py)."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

from tests.trajectories import TOLERANCE, TRAININGS, difference, kept, marked, train_in_a_process

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'hvdcomp[train]'")
pytest.importorskip("torch")

INSTALLED = [name for name, training in TRAININGS.items() if importlib.util.find_spec(training.framework)]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Those that are tested, in a process of their own: whatever other tests have set, these have what a user has."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {item.callspec.params["name"] for item in items if item.function is test_a_trajectory_stays_as_it_was}
    return train_in_a_process([name for name in INSTALLED if name in chosen])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * name.startswith("tensorflow")) for name in INSTALLED]
)
def test_a_trajectory_stays_as_it_was(name: str, trained: dict[str, Any]) -> None:
    found = difference(trained[name], kept()[name])
    assert found is None, (
        f"{name}: {found}. If that is wanted, `python -m tests.trajectories {name} --write` writes it anew, and pages "
        "of figures that rest on it are stale: `python -m tests.measured` names them"
    )


def test_all_of_them_are_kept_and_those_with_a_policy_send_at_several_levels() -> None:
    records = kept()
    assert list(records) == list(TRAININGS)
    for name, record in records.items():
        assert len(record["losses"]) == len(record["bytes"])
        policy = any(word in name for word in ("gravac", "accordion", "lgreco", "adaqs", "warmup", "budget"))
        assert (len(set(record["bytes"])) > 1) == (policy or name == "efsignsgd-adam"), name


def _changed(record: dict[str, Any], **to: Any) -> dict[str, Any]:
    return {**copy.deepcopy(record), **to}


def test_what_changes_is_told_and_gets_another_mark() -> None:
    then = {
        "mark": "made", "losses": [2.0, 1.0], "bytes": [8, 8], "weights": "a" * 64, "environment": {"cpu": "one"},
    }  # fmt: skip
    assert difference(then, then) is None
    for change, said in (
        ({"losses": [2.0, 1.0000001]}, "the loss of step 2 is 1.0000001, and was 1.0"),
        ({"bytes": [8, 9]}, "step 2 sends 9 bytes, and sent 8"),
        ({"weights": "b" * 64}, "the weights are bbbbbbbb, and were aaaaaaaa"),
        ({"losses": [2.0], "bytes": [8]}, "it has 1 steps, and had 2"),
    ):
        now = _changed(then, **change)
        assert said in (difference(now, then) or "")
        assert marked({**now, "weights": "b" * 64}, then)["mark"] == "b" * 8
    assert marked(then, then)["mark"] == "made"


def test_in_another_environment_bits_may_differ_and_losses_by_little() -> None:
    then = {"mark": "made", "losses": [2.0], "bytes": [8], "weights": "a" * 64, "environment": {"cpu": "one"}}
    there = _changed(then, weights="b" * 64, environment={"cpu": "two"})
    for factor, same in ((1 + 0.9 * TOLERANCE, True), (1 + 1.1 * TOLERANCE, False)):
        now = _changed(there, losses=[2.0 * factor])
        assert (difference(now, then) is None) == same
        assert (marked(now, then)["mark"] == "made") == same
    assert "cpu two, then one" in (difference(_changed(there, bytes=[9]), then) or "")
