"""Tables of errors that are known before the gradient is: nothing is compressed, only the norm of the mean is read.

`tests/policies/test_policies_lgreco.py` has the tables that are measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hvdcomp import EDEN
from hvdcomp.adaptation import level_errors
from hvdcomp.adaptation.previews import Previews
from hvdcomp.compressors.quantization_rotated import ERRORS
from hvdcomp.policies.budget import Budget
from hvdcomp.policies.lgreco import LGreCo
from hvdcomp.policies.request import Statistics
from hvdcomp.tools.cli import main
from tests.driven import random_gradients
from tests.harness import BACKENDS, make
from tests.policies.test_policies_lgreco import engine_of, measured, topk_error

AROUND = LGreCo().around
LARGE = {"matrix": (64, 1024), "ragged": (75, 401)}


@pytest.fixture
def previewed(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the tensors of each preview."""
    calls: list[set[str]] = []
    lost_alone = Previews.lost_alone

    def counted(self: Previews, xp: Any, xs: Mapping[str, Any], *others: Any) -> Any:
        calls.append(set(xs))
        return lost_alone(self, xp, xs, *others)

    monkeypatch.setattr(Previews, "lost_alone", counted)
    return calls


@pytest.fixture
def norms_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each reading of norms, the number of tensors."""
    calls: list[int] = []
    arrays_for = level_errors.arrays_for

    class Counted:
        def __init__(self, array: Any) -> None:
            self._xp = arrays_for(array)

        def __getattr__(self, name: str) -> Any:
            if name != "norms":
                return getattr(self._xp, name)
            return lambda arrays: calls.append(len(arrays)) or self._xp.norms(arrays)

    monkeypatch.setattr(level_errors, "arrays_for", Counted)
    return calls


@pytest.mark.parametrize("spec", ["eden", "two_level(eden)"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_known_shares_of_the_means_norms(
    backend: str, spec: str, previewed: list[set[str]], norms_read: list[int]
) -> None:
    sums = random_gradients(0, 0)
    sums["linear"] *= np.float32(1e-3)
    given = {name: make(backend, x) for name, x in sums.items()}
    engine = engine_of(spec)
    for scaled in (False, True):
        found = measured(engine, given, AROUND, steps=4, scaled=scaled)
        assert found.own == {"conv": 2, "linear": 2}
        for name, errors in found.errors.items():
            norm = float(np.linalg.norm(sums[name].astype(float) / 4))
            unit = norm / math.sqrt(sums[name].size) if scaled else 1.0
            expected = {bits: math.sqrt(share) * norm / unit for bits, share in ERRORS.items()}
            assert errors == pytest.approx(expected, rel=1e-5)
        whole = sum(math.sqrt(sums[name].size) for name in ("conv", "linear"))
        assert found.norm == (pytest.approx(whole, rel=1e-5) if scaled else None)
    assert previewed == []
    assert norms_read == [2, 2]  # all tensors at once, once for each table


@pytest.mark.parametrize("backend", BACKENDS)
def test_previews_would_have_measured_the_same(
    backend: str, previewed: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sums = {name: make(backend, rng.standard_normal(shape)) for name, shape in LARGE.items()}
    known = measured(engine_of("eden", shapes=LARGE), sums, AROUND)
    assert previewed == []
    monkeypatch.setattr(EDEN, "known_error", None)
    found = measured(engine_of("eden", shapes=LARGE), sums, AROUND)
    assert len(previewed) == 4
    assert found.sent == known.sent
    for name, errors in known.errors.items():
        assert errors == pytest.approx(found.errors[name], rel=0.03)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_router_may_mix_known_and_measured_methods(backend: str, previewed: list[set[str]]) -> None:
    sums = random_gradients(0, 0)
    engine = engine_of('{"conv": "topk:ratio=0.1", "linear": "eden", "*": "none"}')
    found = measured(engine, {name: make(backend, x) for name, x in sums.items()}, (0.5, 1.0, 2.0))
    assert found.own == {"conv": 0.1, "linear": 2}
    assert found.errors["conv"] == pytest.approx(
        {ratio: topk_error(sums["conv"], ratio) for ratio in (0.1, 0.05, 0.2)}, rel=1e-5
    )
    whole = np.linalg.norm(sums["linear"])
    assert found.errors["linear"] == pytest.approx({bits: math.sqrt(ERRORS[bits]) * whole for bits in (2, 1, 4)})
    assert previewed == [{"conv"}] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", [LGreCo(), Budget(factor=18), Budget(error=0.3)])
def test_sums_that_are_not_finite_change_no_level(backend: str, policy: Any) -> None:
    sums = random_gradients(0, 0)
    given = {name: make(backend, x) for name, x in sums.items()}
    state = policy.initial_state(["conv", "linear"])
    engine, scaled = engine_of("eden"), isinstance(policy, Budget)
    state = policy.update(state, Statistics(10, level_table=measured(engine, given, policy.around, scaled=scaled)))
    assert None not in state.levels.values()
    for bad in (np.inf, np.nan):
        sums["linear"][0, 0] = bad
        given["linear"] = make(backend, sums["linear"])
        with np.errstate(invalid="ignore"):
            table = measured(engine, given, policy.around, scaled=scaled)
        assert all(map(math.isnan, table.errors["linear"].values()))
        assert all(map(math.isfinite, table.errors["conv"].values()))
        assert policy.update(state, Statistics(20, level_table=table)) is state
    given["linear"] = make(backend, 0 * random_gradients(0, 0)["linear"])
    assert set(measured(engine, given, policy.around, scaled=scaled).errors["linear"].values()) == {0.0}


# In a training -------------------------------------------------------------------------------------------------------

_DENSE_BYTES = 4 * (64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10)


def bytes_at(bits: tuple[int, int, int]) -> int:
    """Bytes that a rank sends in a step of the mlp on digits: blocks, biases, and its presence."""
    blocks = (16, 32, 2)
    return sum(count * (4 + 128 * own) for count, own in zip(blocks, bits, strict=True)) + 4 * (256 + 128 + 10) + 12


def sent_by(policy: str, folder: Path) -> list[int]:
    """Bytes that a rank sends in each of 30 steps of a training with `eden`."""
    pytest.importorskip("torch")
    options = ["--model", "mlp", "--data", "digits", "--samples", "640", "--steps", "30", "--compression", "eden"]
    words = ["train", "--simulate-ranks", "2", *options, "--policy", policy, "--no-progress", "--output", str(folder)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "summary.json").read_text())["identical"]
    return [json.loads(line)["bytes_sent"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_budget_of_bytes_is_met_by_levels_that_differ(tmp_path: Path) -> None:
    sent = sent_by("budget:factor=18,interval=10,last=5", tmp_path)
    assert sent == [bytes_at((2, 2, 2))] * 5 + [bytes_at((2, 1, 4))] * 25
    assert 0.95 * _DENSE_BYTES / 18 < sent[-1] - 12 <= _DENSE_BYTES / 18


def test_lgreco_sends_fewer_bytes_than_the_own_levels(tmp_path: Path, previewed: list[set[str]]) -> None:
    sent = sent_by("lgreco:interval=10,last=5,alpha=1.5", tmp_path)
    own = bytes_at((2, 2, 2))
    assert sent[:10] == [own] * 10
    assert max(sent[10:]) < own
    assert previewed == []


def test_a_schedule_sends_the_bytes_of_its_levels(tmp_path: Path) -> None:
    sent = sent_by("schedule:levels=4|2|1,steps=5|10|15", tmp_path)
    bits = [4] * 5 + [2] * 5 + [1] * 5 + [2] * 15
    assert sent == [bytes_at((each, each, each)) for each in bits]
