"""Levels and batch size together: each as its rule says, from the same statistics."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoCompression, SpecError, TopK
from hvdcomp.policies.decisions import BatchSize, Levels, LevelsAndBatch
from hvdcomp.policies.joint import AccordionJoint
from hvdcomp.policies.request import LearningRates, Statistic, Statistics

LOW, HIGH = 0.5, 0.1
SETTINGS = {"low": LOW, "high": HIGH, "batch_low": 64, "batch_high": 256}


def oracle(
    norms: list[dict[str, float]], model_norms: list[float], falls: list[bool], interval: int, eta: float
) -> list[tuple[dict[str, float], int]]:
    """The levels and the accumulation after each epoch's end, each looked up in the whole history before it."""

    def calm(history: list[float], end: int) -> bool:
        """Whether the comparison at the end of epoch `end` (from 1) finds little change."""
        if end < 2 * interval:
            return False
        before, after = history[end - interval - 1], history[end - 1]
        return bool(before) and abs(before - after) / before < eta

    found = []
    for end in range(1, len(norms) + 1):
        boundaries = range(interval, end + 1, interval)
        last = max(boundaries, default=0)
        low_for_all = not last or any(falls[last - 1 : end])
        levels = {
            name: LOW if low_for_all or not calm([each[name] for each in norms], last) else HIGH for name in norms[0]
        }
        grown = any(calm(model_norms, boundary) and not falls[boundary - 1] for boundary in boundaries)
        found.append((levels, 4 if grown else 1))
    return found


def drive(
    policy: AccordionJoint,
    norms: list[dict[str, float]],
    model_norms: list[float],
    rates: list[float],
    restart: bool = False,
) -> list[tuple[dict[str, float], int]]:
    """The same of the policy; rates[e] is of epoch e. With `restart`, each epoch from a state kept as JSON."""
    state, found = policy.initial_state(list(norms[0])), []
    assert policy.decision(state) == LevelsAndBatch(Levels(dict.fromkeys(norms[0], LOW)), BatchSize(1, 1.0))
    for epoch, (now, following) in enumerate(pairwise(rates)):
        asked = policy.request(state).statistics
        told = Statistics(
            step=epoch,
            learning_rates=LearningRates((now,), (following,)),
            norms=norms[epoch] if Statistic.NORMS in asked else None,
            model_norm=model_norms[epoch] if Statistic.MODEL_NORM in asked else None,
        )
        state, decision = policy.decide(state, told)
        assert isinstance(decision, LevelsAndBatch)
        if restart:
            state = policy.from_json(json.loads(json.dumps(policy.to_json(state), allow_nan=False)))
            assert policy.decision(state) == decision
        assert decision.batch_size.learning_rate_factor == decision.batch_size.accumulation
        found.append((dict(decision.levels.levels), decision.batch_size.accumulation))
    return found


norm = st.sampled_from([0.0, 0.5, 0.6, 1.0, 1.4, 1.5, 2.0])


@given(
    history=st.lists(st.tuples(norm, norm, norm, st.sampled_from([0.1, 0.1, 0.1, 0.01])), min_size=1, max_size=20),
    interval=st.integers(1, 4),
    eta=st.sampled_from([0.25, 0.5, 1.0]),
    restart=st.booleans(),
)
def test_whole_histories(history: list, interval: int, eta: float, restart: bool) -> None:
    norms = [{"a": a, "b": b} for a, b, _, _ in history]
    model_norms = [model for _, _, model, _ in history]
    rates = [rate for _, _, _, rate in history] + [0.1]
    falls = [after < before for before, after in pairwise(rates)]
    policy = AccordionJoint(**SETTINGS, interval=interval, eta=eta)
    expected = oracle(norms, model_norms, falls, interval, eta)
    assert drive(policy, norms, model_norms, rates, restart) == expected


L, H = LOW, HIGH


@pytest.mark.parametrize(
    ("what", "norms", "model_norms", "falls_after", "settings", "levels", "accumulation"),
    [
        ("calm", [1.0] * 3, [1.0] * 3, None, {}, [L, H, H], [1, 4, 4]),
        ("a tensor is critical, the model is not", [1.0, 2.0, 4.0], [9.0] * 3, None, {}, [L, L, L], [1, 4, 4]),
        ("the model is critical, the tensor is not", [1.0] * 3, [1.0, 2.0, 4.0], None, {}, [L, H, H], [1, 1, 1]),
        ("equality at eta", [1.0, 1.0, 0.5], [1.0, 0.5, 0.5], None, {}, [L, H, L], [1, 1, 4]),
        ("another eta", [1.0, 0.5], [1.0, 0.5], None, {"interval": 1, "eta": 0.6}, [L, H], [1, 4]),
        ("previous norms zero", [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], None, {}, [L, L, L, H], [1, 1, 1, 4]),
        ("not finite", [1.0, math.nan, 1.0, 1.0], [1.0, math.inf, 1.0, 1.0], None, {}, [L, L, L, H], [1, 1, 1, 4]),
        ("the batch stays large", [1.0, 1.0, 9.0], [1.0, 1.0, 9.0], None, {}, [L, H, L], [1, 4, 4]),
        ("falls at a boundary", [1.0] * 4, [1.0] * 4, 2, {}, [L, L, H, H], [1, 1, 4, 4]),
        ("falls with a large batch", [1.0] * 4, [1.0] * 4, 3, {}, [L, H, L, H], [1, 4, 4, 4]),
        (
            "falls off a boundary: levels go low, the batch need not",
            [1.0] * 6,
            [1.0] * 6,
            5,
            {"interval": 2},
            [L, L, L, H, L, H],
            [1, 1, 1, 4, 4, 4],
        ),
        (
            "falls off the boundary before",
            [1.0] * 5,
            [1.0] * 5,
            3,
            {"interval": 2},
            [L, L, L, H, H],
            [1, 1, 1, 4, 4],
        ),
        ("by steps", [1.0] * 2, [1.0] * 2, None, {"steps": 50}, [L, H], [1, 4]),
    ],
)
def test_decisions(
    what: str,
    norms: list[float],
    model_norms: list[float],
    falls_after: int | None,
    settings: dict,
    levels: list[float],
    accumulation: list[int],
) -> None:
    policy = AccordionJoint(**SETTINGS, **(settings or {"interval": 1}))
    rates = [0.1 if falls_after is None or epoch <= falls_after else 0.01 for epoch in range(1, len(norms) + 2)]
    found = drive(policy, [{"w": each} for each in norms], model_norms, rates)
    assert found == [({"w": level}, count) for level, count in zip(levels, accumulation, strict=True)], what


def test_what_is_asked_for_is_what_either_asks_for() -> None:
    policy = AccordionJoint(**SETTINGS, interval=2)
    state, seen = policy.initial_state(["w"]), []
    for epoch in range(6):
        seen.append({each.value for each in policy.request(state).statistics})
        rates = LearningRates((1.0,), (1.0,))
        state, _ = policy.decide(state, Statistics(step=epoch, learning_rates=rates, norms={"w": 1.0}, model_norm=1.0))
    rates_only, both = {"learning_rates"}, {"learning_rates", "norms", "model_norm"}
    assert seen == [rates_only, both, rates_only, both, rates_only, {"learning_rates", "norms"}]


def test_its_settings_are_those_of_both() -> None:
    policy = AccordionJoint(**SETTINGS, eta=0.4, steps=7, statistic="aggregated", lag=0)
    for part in (policy.levels, policy.batch_size):
        assert (part.eta, part.steps, part.statistic, part.lag) == (0.4, 7, "aggregated", 0)
    assert AccordionJoint(**SETTINGS, interval=3).levels.interval == 3
    assert AccordionJoint(**SETTINGS, interval=3).batch_size.interval == 3
    assert policy.request(policy.initial_state(())).source == "aggregated"


def test_a_state_of_one_of_its_parts_is_refused() -> None:
    policy = AccordionJoint(**SETTINGS)
    data = policy.to_json(policy.initial_state(["w"]))
    with pytest.raises(ValueError, match="not a state of accordion_joint"):
        policy.from_json(data["levels"])
    with pytest.raises(ValueError, match="not a state of accordion,"):
        policy.from_json({**data, "levels": data["batch_size"]})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 0.1, "high": 0.5}, r"low=0\.1,high=0\.5"),
        ({"high": "x"}, "high='x'"),
        ({"batch_low": 0}, "batch_low=0"),
        ({"batch_high": 64}, "batch_low=64,batch_high=64 .* batch_high must be a multiple of batch_low"),
        ({"batch_high": 100}, "batch_low=64,batch_high=100"),
        ({"eta": 0}, "eta=0"),
        ({"steps": 5, "interval": 5}, "not both"),
        ({"lag": 2}, "lag=2"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=f"accordion_joint: .*{words}"):
        AccordionJoint(**{**SETTINGS, **settings})


def test_the_levels_must_suit_the_compressor() -> None:
    AccordionJoint(**SETTINGS).check(10, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="ratio=2"):
        AccordionJoint(**{**SETTINGS, "low": 2}).check(10, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="no level"):
        AccordionJoint(**SETTINGS).check(10, NoCompression())
    with pytest.raises(SpecError, match="accordion_joint: epochs"):
        AccordionJoint(**SETTINGS).check(None, TopK(ratio=0.1))
