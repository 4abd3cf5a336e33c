"""From decisions to plans."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import (
    ATOMO,
    FP16,
    ByName,
    BySize,
    NoCompression,
    PowerSGD,
    RandomK,
    SignSGD,
    SparseTernary,
    TopK,
    TwoLevel,
)
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.decisions import BatchSize, Decision, Factors, Levels, Methods, MultiLevel
from tests.harness import infos

SHAPES = {"conv": (64, 32, 3, 3), "linear": (100, 128), "small": (20, 20), "bias": (4096,), "none": (0, 4)}
NAMES = ("conv", "linear")
SIZES = {"conv": 18432, "linear": 12800}
NONE = NoCompression()


def engine_of(compressor: Compressor, **options: Any) -> Engine:
    return Engine(LoopbackCommunicator(), infos(SHAPES), compressor, **options)


def plan(decision: Decision, compressor: Compressor) -> dict[str, Compressor]:
    """The plan of the two large tensors; all others must be as they are without a policy."""
    engine = engine_of(compressor)
    names = levelled_tensors(engine)
    assert names == NAMES
    found = dict(decision.plan(Plans(engine, names)))
    own = engine.planner.plan_for(compressor)
    assert list(found) == list(engine.tensors)
    assert {name: found[name] for name in SHAPES if name not in NAMES} == {
        name: own[name] for name in SHAPES if name not in NAMES
    }
    engine.set_plan(found)
    assert dict(engine.begin()) == found
    return {name: found[name] for name in NAMES}


def top_k(factor: float) -> dict[str, TopK]:
    """Values of four bytes and indices of two, so that k elements take 6 k bytes."""
    return {name: TopK(math.floor(4 * size / factor / 6) / size) for name, size in SIZES.items()}


def test_levelled_tensors_are_those_that_are_large_enough() -> None:
    assert levelled_tensors(engine_of(TopK(0.1))) == NAMES
    assert levelled_tensors(engine_of(TopK(0.1), min_numel=0)) == ("conv", "linear", "small")
    assert levelled_tensors(engine_of(TopK(0.1), min_numel=0, min_ndim=0)) == ("bias", "conv", "linear", "small")
    assert levelled_tensors(engine_of(TopK(0.1), min_numel=12801)) == ("conv",)
    assert levelled_tensors(engine_of(TopK(0.1), min_numel=12800)) == NAMES
    assert levelled_tensors(engine_of(TopK(0.1), min_ndim=3)) == ("conv",)


def test_tensors_that_other_groups_of_ranks_have_too_are_sent_dense_or_cast() -> None:
    tensors = [dataclasses.replace(tensor, is_shared=tensor.name == "conv") for tensor in infos(SHAPES)]
    for compressor, expected in ((TopK(0.1), NONE), (FP16(), FP16())):
        engine = Engine(LoopbackCommunicator(), tensors, compressor, min_numel=0)
        assert engine.plan["conv"] == expected
        assert engine.plan["linear"] == compressor
        assert levelled_tensors(engine) == ("linear", "small")
        decided = Methods({"conv": "topk:ratio=0.5"}, others=None).plan(Plans(engine, NAMES))
        assert decided["conv"] == NONE


def test_levels_are_in_the_compressors_own_terms_and_none_is_its_own() -> None:
    assert plan(Levels({"conv": 0.5, "linear": None}), TopK(0.1)) == {"conv": TopK(0.5), "linear": TopK(0.1)}
    assert plan(Levels({"conv": 4, "linear": 1}), PowerSGD(2)) == {"conv": PowerSGD(4), "linear": PowerSGD(1)}
    assert plan(Levels({"conv": 0.5, "linear": 0.2}), RandomK(0.1, unbiased=True)) == {
        "conv": RandomK(0.5, unbiased=True),
        "linear": RandomK(0.2, unbiased=True),
    }


def test_tensors_that_a_decision_does_not_name_are_as_without_a_policy() -> None:
    assert plan(Levels({"conv": 0.5}), TopK(0.1)) == {"conv": TopK(0.5), "linear": TopK(0.1)}
    assert plan(Factors({"linear": 1.0}), TopK(0.1)) == {"conv": TopK(0.1), "linear": NONE}
    assert plan(BatchSize(4, 4.0), TopK(0.1)) == {"conv": TopK(0.1), "linear": TopK(0.1)}
    assert plan(BatchSize(4, 4.0), FP16()) == {"conv": FP16(), "linear": FP16()}


def test_factors_of_single_tensors_and_factor_one_is_dense() -> None:
    right = {"conv": NONE, "linear": top_k(64)["linear"]}
    assert plan(Factors({"conv": 1.0, "linear": 64.0}), TopK(0.1)) == right
    assert plan(Factors({"conv": 1.0, "linear": 1.0}), PowerSGD(2)) == {"conv": NONE, "linear": NONE}


def test_methods_are_of_all_tensors_also_of_those_too_small_to_be_compressed() -> None:
    engine = engine_of(TopK(0.1))
    plans = Plans(engine, NAMES)

    def of(methods: dict[str, str | None], others: str | None) -> dict[str, Compressor]:
        return dict(Methods(methods, others).plan(plans))

    small = {"small": NONE, "bias": NONE, "none": NONE}
    assert of({}, None) == dict(engine.planner.plan_for(TopK(0.1)))
    assert of({}, "none") == {"conv": NONE, "linear": NONE, **small}
    assert of({}, "fp16") == dict.fromkeys(("conv", "linear", "small", "bias"), FP16()) | {"none": NONE}
    assert of({"conv": None}, "none") == {"conv": TopK(0.1), "linear": NONE, **small}
    assert of({"conv": None, "linear": "powersgd:rank=2"}, "none") == {
        "conv": TopK(0.1), "linear": PowerSGD(2), **small,
    }  # fmt: skip
    mixed = of({"linear": None, "small": None}, "fp16")
    assert mixed == {"conv": FP16(), "linear": TopK(0.1), "bias": FP16(), "small": NONE, "none": NONE}
    with pytest.raises(ValueError, match="that the model does not have: other"):
        of({"other": None}, "none")
    with pytest.raises(SpecError, match="unknown compressor 'dense'"):
        of({}, "dense")


@pytest.mark.parametrize(("send", "factor"), [("minimum", 5.0), ("candidate", 40.0), ("dense", 1.0)])
def test_multilevel_compresses_to_what_is_sent(send: Any, factor: float) -> None:
    right = top_k(factor) if factor > 1 else {"conv": NONE, "linear": NONE}
    assert plan(MultiLevel(5.0, 40.0, send), TopK(0.1)) == right


def test_the_plan_of_a_factor_is_made_once() -> None:
    """A decision that only says what is sent then costs no more than looking it up."""
    plans = Plans(engine_of(TopK(0.1)), NAMES)
    first = MultiLevel(5.0, 40.0, "minimum").plan(plans)
    assert MultiLevel(5.0, 160.0, "minimum").plan(plans) is first
    assert plans.at_factor(5.0) is first
    assert MultiLevel(5.0, 40.0, "candidate").plan(plans) is plans.at_factor(40.0)
    assert MultiLevel(5.0, 40.0, "dense").plan(plans) is MultiLevel(2.0, None, "dense").plan(plans)


@pytest.mark.parametrize(("send", "factor"), [("minimum", 5.0), ("candidate", 40.0), ("dense", 1.0)])
def test_factors_of_elements_count_no_indices(send: Any, factor: float) -> None:
    decision = MultiLevel(5.0, 40.0, send, "elements")
    ratios = {name: math.floor(size / factor) / size for name, size in SIZES.items()}
    for method in (TopK(0.1), TopK(0.1, values="fp16"), RandomK(0.1, values="fp16"), SparseTernary(0.1)):
        right = {name: NONE if factor == 1 else method.at_level(ratio) for name, ratio in ratios.items()}
        assert plan(decision, method) == right
    router = ByName({"conv": TwoLevel(TopK(0.1)), "*": PowerSGD(2)})
    bytes_of = plan(MultiLevel(5.0, 40.0, send), router)
    right = {"conv": NONE if factor == 1 else TwoLevel(TopK(ratios["conv"])), "linear": bytes_of["linear"]}
    assert plan(decision, router) == right


def test_the_plans_of_a_factor_of_bytes_and_of_elements_are_two() -> None:
    plans = Plans(engine_of(TopK(0.1)), NAMES)
    assert plans.at_factor(5.0, "elements") is plans.at_factor(5.0, "elements")
    assert plans.at_factor(5.0, "elements") != plans.at_factor(5.0)


def test_what_is_not_about_the_batch_leaves_it_as_at_the_start() -> None:
    assert BatchSize(2, 2.0).batch() == BatchSize(2, 2.0)
    for other in (Levels({}), Factors({}), MultiLevel(2.0, None, "dense")):
        assert other.batch() == BatchSize(1, 1.0)


def test_powersgd_goes_dense_where_a_rank_saves_nothing() -> None:
    """Rank 50 of a matrix of 100 x 128 takes 11400 of its 12800 floats, rank 57 more than all."""
    assert plan(Levels({"linear": 50}), PowerSGD(2))["linear"] == PowerSGD(50)
    assert plan(Levels({"linear": 57}), PowerSGD(2))["linear"] == NONE
    assert plan(Levels({"linear": 57}), ATOMO(2))["linear"] == NONE
    # A compressor whose own rank saves nothing still takes levels that do.
    assert plan(BatchSize(1, 1.0), PowerSGD(57))["linear"] == NONE
    assert plan(Levels({"linear": 4}), PowerSGD(57))["linear"] == PowerSGD(4)
    assert plan(Factors({"linear": 8.0}), PowerSGD(57))["linear"] == PowerSGD(7)  # 12800 / 8 / 228
    assert plan(Factors({"linear": 1e6}), PowerSGD(57))["linear"] == PowerSGD(1)


def test_a_level_that_does_not_exist_is_refused_with_its_name() -> None:
    for decision in (Levels({"conv": 2}), Levels({"conv": 0.0})):
        with pytest.raises(SpecError, match="ratio="):
            plan(decision, TopK(0.1))
    with pytest.raises(SpecError, match="level"):
        plan(Levels({"conv": 2}), FP16())


ROUTERS = [
    ByName({"linear": PowerSGD(2), "*": NoCompression()}),
    ByName({"lin*": BySize(100, small=FP16(), large=PowerSGD(2)), "*": NoCompression()}),
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routed_tensors_take_levels_and_factors_by_their_own_compressor(router: Compressor) -> None:
    right = {"conv": NONE, "linear": PowerSGD(4)}
    assert plan(Levels({"conv": 4, "linear": 4}), router) == right
    assert plan(Levels({"conv": 57, "linear": 57}), router) == {"conv": NONE, "linear": NONE}
    right = {"conv": NONE, "linear": PowerSGD(7)}
    assert plan(Factors({"conv": 8.0, "linear": 8.0}), router) == right
    assert plan(MultiLevel(8.0, 16.0, "minimum"), router) == right
    assert plan(Factors({"conv": 1.0, "linear": 1.0}), router) == {"conv": NONE, "linear": NONE}


MIXED = ByName({"conv": TopK(0.1), "linear": PowerSGD(2), "*": SignSGD()})


@pytest.mark.parametrize("two_levels", [False, True])
def test_tensors_of_different_methods_take_levels_each_in_its_own_terms(two_levels: bool) -> None:
    within = TwoLevel if two_levels else lambda compressor: compressor
    assert plan(Levels({"conv": 0.5, "linear": 4}), within(MIXED)) == {
        "conv": within(TopK(0.5)), "linear": within(PowerSGD(4)),
    }  # fmt: skip
    assert plan(Levels({"conv": None, "linear": 1}), within(MIXED)) == {
        "conv": within(TopK(0.1)), "linear": within(PowerSGD(1)),
    }  # fmt: skip
    assert plan(Factors({"conv": 8.0, "linear": 8.0}), within(MIXED)) == {
        "conv": within(top_k(8)["conv"]), "linear": within(PowerSGD(7)),
    }  # fmt: skip
    # What has no level stays as it is.
    unlevelled = ByName({"conv": TopK(0.1), "*": SignSGD()})
    assert plan(Levels({"conv": 0.5, "linear": 0.5}), within(unlevelled))["linear"] == within(SignSGD())


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1", "topk:ratio=0.1,values=fp16", "randomk:ratio=0.1", "powersgd:rank=2", "atomo:rank=2",
             "qsgd:bits=4", "globalqsgd:bits=8"]
)  # fmt: skip
@given(factor=st.floats(1.001, 5000))
def test_a_factor_is_met_or_else_the_highest_compression_taken(spec: str, factor: float) -> None:
    """The payload is within dense bytes / factor, but for a level beyond which none compresses more."""
    compressor = parse_compressor(spec)
    least = {"topk": 1e-9, "randomk": 1e-9, "powersgd": 1, "atomo": 1, "qsgd": 1, "globalqsgd": 2}[compressor.name]
    engine = engine_of(compressor)
    for name, chosen in Plans(engine, NAMES).at_factor(factor).items():
        if name in NAMES:
            shape = SHAPES[name]
            smallest = compressor.payload_bytes(shape, least)
            assert chosen.payload_bytes(shape) <= max(4 * SIZES[name] / factor, smallest)
