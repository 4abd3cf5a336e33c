"""Spec strings: there and back, and errors that say what exists."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import (
    BF16,
    FP16,
    ByName,
    Compressor,
    ErrorFeedback,
    Natural,
    NoCompression,
    NoMemory,
    PowerSGD,
    RandomK,
    SpecError,
    TopK,
)
from hvdcomp.compressors import COMPRESSORS, MEMORIES
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.policies import POLICIES, LevelSchedule, Policy, parse_policy
from hvdcomp.policies.accordion import Accordion
from hvdcomp.policies.adaqs import AdaQS
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.batch_size import AccordionBatchSize, IncreaseBatchSize
from hvdcomp.policies.constant import Constant
from hvdcomp.policies.gravac import GraVAC
from hvdcomp.policies.schedules import WarmUp

ROUTER = ByName({"a|b)": TopK(0.01), '"(': NoCompression(), "*": Natural()})  # with all that separates specs
RATIOS = st.floats(1e-9, 1, exclude_min=True)
COMPRESSOR = (
    st.sampled_from([NoCompression(), FP16(), FP16("stochastic", exchange="scatter"), BF16(), BF16("stochastic")])
    | st.builds(TopK, RATIOS)
    | st.builds(RandomK, RATIOS, st.booleans())
    | st.builds(PowerSGD, st.integers(1, 10**6), st.floats(1e-3, 1e6) | st.just(float("inf")))
)


@given(COMPRESSOR)
def test_a_compressor_is_made_again_by_its_string(compressor: Compressor) -> None:
    again = parse_compressor(str(compressor))
    assert again == compressor
    assert hash(again) == hash(compressor)
    assert str(again) == str(compressor)
    assert pickle.loads(pickle.dumps(compressor)) == compressor


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("none", NoCompression()),
        ("topk:ratio=0.01", TopK(0.01)),
        ("topk:ratio=1", TopK(1.0)),
        (" topk: ratio = 1e-2 ", TopK(0.01)),
        ("randomk:ratio=0.01,unbiased=true", RandomK(0.01, unbiased=True)),
        ("randomk:unbiased=No,ratio=0.01", RandomK(0.01)),
        ("fp16:exchange=scatter", FP16(exchange="scatter")),
        ("powersgd:rank=4", PowerSGD(4)),
        ("powersgd:rank=4,min_rate=2", PowerSGD(4, min_rate=2.0)),
    ],
)
def test_strings(spec: str, compressor: Compressor) -> None:
    assert parse_compressor(spec) == compressor


@pytest.mark.parametrize("compressor", [NoCompression(), TopK(0.25), RandomK(0.5, unbiased=True), PowerSGD(4)], ids=str)
def test_only_what_differs_from_the_default_is_shown(compressor: Compressor) -> None:
    assert str(compressor) in ("none", "topk:ratio=0.25", "randomk:ratio=0.5,unbiased=True", "powersgd:rank=4")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topkk:ratio=0.1", ["unknown compressor 'topkk' in 'topkk:ratio=0.1' (did you mean 'topk'?);", *COMPRESSORS]),
        ("", ["unknown compressor ''", "topk"]),
        ("TopK:ratio=0.1", ["unknown compressor 'TopK'", "(did you mean 'topk'?)"]),
        ("topk", ["'topk' does not set ratio", "write 'topk:ratio=0.01', for example (defaults: values=same"]),
        ("topk:", ["does not set ratio"]),
        ("topk:rank=4", ["'rank=4' in 'topk:rank=4' is not a setting of topk", "write 'topk:ratio=0.01'"]),
        ("topk:ration=0.1", ["'ration=0.1' in 'topk:ration=0.1' is not a setting of topk (did you mean 'ratio'?);"]),
        ("topk:0.1", ["'0.1' in 'topk:0.1' is not a setting of topk; write 'topk:ratio=0.01'"]),
        ("topk:ratio=0.1,", ["'' in 'topk:ratio=0.1,' is not a setting"]),
        ("topk:ratio=0.1,ratio=0.2", ["'ratio' is set twice in 'topk:ratio=0.1,ratio=0.2'"]),
        ("topk:ratio=a", ["ratio=a in 'topk:ratio=a': expected a number"]),
        ("topk:ratio=1%", ["ratio=1% in 'topk:ratio=1%': expected a number, such as 0.01 for 1 %"]),
        ("topk:ratio=%", ["ratio=% in 'topk:ratio=%': expected a number"]),
        ("powersgd=4", ["'powersgd=4' is not a valid compressor", "after a colon, as in 'powersgd:rank=4'"]),
        ("topk, ratio=0.1", ["after a colon, as in 'topk:ratio=0.01'"]),
        ("hvdcomp.TopK(ratio=0.1)", ["after a colon, as in 'topk:ratio=0.01'"]),
        ("topk:ratio=0", ["ratio=0.0 is not allowed", "above 0 and at most 1"]),
        ("topk:ratio=nan", ["ratio=nan is not allowed"]),
        ("powersgd:rank=1.5", ["rank=1.5", "expected a whole number"]),
        ("powersgd:rank=0", ["rank=0 is not allowed", "at least 1"]),
        ("powersgd:min_rate=2", ["does not set rank", "write 'powersgd:rank=4', for example (defaults: min_rate=1.0"]),
        ("randomk:ratio=0.1,unbiased=maybe", ["unbiased=maybe", "expected true or false"]),
        ("none:ratio=1", ["not a setting of none", "none has no settings: write 'none'"]),
    ],
)
def test_errors_say_what_is_wrong_and_what_exists(spec: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_compressor(spec)
    for word in words:
        assert word in str(caught.value)


def test_memories() -> None:
    assert parse_memory("none") == NoMemory()
    assert parse_memory("error_feedback") == ErrorFeedback()
    assert parse_memory("error_feedback:decay=0.9") == ErrorFeedback(decay=0.9)
    assert parse_memory("error_feedback:decay=0.9,dtype=bf16") == ErrorFeedback(0.9, "bf16")
    for spec, word in {"ef": "choose one of: " + ", ".join(MEMORIES), "error_feedback:decay=2": "at most 1"}.items():
        with pytest.raises(SpecError, match=word):
            parse_memory(spec)


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("warmup:dense_steps=10", WarmUp(dense_steps=10)),
        ("constant", Constant()),
        ("constant:level=4", Constant(level=4)),
        ("accordion:low=4,high=1", Accordion(low=4, high=1)),
        ("accordion:low=0.99,high=0.1,lag=0", Accordion(low=0.99, high=0.1, lag=0)),
        (" accordion: low = 4 , high=1.0", Accordion(low=4, high=1)),
        ("accordion_batch_size:low=512,high=4096", AccordionBatchSize(low=512, high=4096)),
        ("increase_batch_size:low=128,high=2048", IncreaseBatchSize(low=128, high=2048)),
        ("adaqs:start=64,fall=0.2", AdaQS(start=64, fall=0.2)),
        ("gravac", GraVAC()),
        ("gravac:min=20,max=1000,lag=1", GraVAC(min=20)),
        ("gravac:factor=elements,gain=raw", GraVAC(factor="elements", gain="raw")),
        ("auto:calibration=runs/cluster.json", Auto(calibration="runs/cluster.json")),
        ("auto:calibration=v100-p3.8xlarge-2021,model=bert", Auto(calibration="v100-p3.8xlarge-2021", model="bert")),
        ("auto:compressors=(natural),calibration=c.json", Auto(calibration="c.json", compressors=[Natural()])),
        ("auto:calibration=c.json,compressors=( )", Auto(calibration="c.json")),
        (
            "auto:calibration=c(1).json, compressors = ( topk:ratio=0.01 | two_level(int4:exchange=scatter)),every=9",
            Auto(calibration="c(1).json", compressors=(TopK(0.01), "two_level(int4:exchange=scatter)"), every=9),
        ),
        (
            'auto:calibration=c.json,compressors=({"a|b)": "topk:ratio=0.01", "\\"(": "none", "*": "natural"}|fp8)',
            Auto(calibration="c.json", compressors=(ROUTER, "fp8")),
        ),
    ],
)
def test_policies(spec: str, policy: LevelSchedule | Policy) -> None:
    assert parse_policy(spec) == policy
    assert parse_policy(str(policy)) == policy
    assert type(policy) is POLICIES[policy.name]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("accordion", ["'accordion' does not set low, high", "write 'accordion:low=4,high=1', for"]),
        ("accordion:low=4", ["does not set high;"]),
        ("accordion:automatic", ["'automatic' in 'accordion:automatic' is not a setting of accordion;"]),
        ("accordion:low=4,high=1,", ["'' in 'accordion:low=4,high=1,' is not a setting of accordion"]),
        ("accordion:low=4,high=1,eta=0", ["accordion: eta=0.0 is not allowed"]),
        ("gravac:lag=0.5", ["lag=0.5 in 'gravac:lag=0.5'"]),
        ("adaqs", ["'adaqs' does not set start, fall; write 'adaqs:start=64,fall=0.2', for example"]),
        ("gravac:factor=floats", ["gravac: factor='floats' is not allowed; it must be bytes or elements"]),
        ("gravac:gain=1", ["gravac: gain='1' is not allowed; it must be error_feedback or raw"]),
        ("gravac:lag=2", ["gravac: lag=2 is not allowed; it must be 0 or 1"]),
        ("auto", ["'auto' does not set calibration; write 'auto:calibration=calibration.json', for example"]),
        ("auto:calibration=", ["auto: calibration='' is not allowed; it must be a calibration file"]),
        (
            "auto:calibration=c.json,compressors=qsgd:bits=4,exchange=scatter",
            ["compressors=qsgd:bits=4 in", "expected a list in parentheses", "such as (one|two)"],
        ),
        (
            "auto:calibration=c.json,compressors=(topk:ratio=0.1|natural",
            ["a parenthesis in 'calibration=c.json,compressors=(topk:ratio=0.1|natural' is never closed; add"],
        ),
        ("acordion", ["unknown policy 'acordion' in 'acordion' (did you mean 'accordion'?)", *POLICIES]),
    ],
)
def test_errors_of_policies(spec: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_policy(spec)
    for word in words:
        assert word in str(caught.value)


def test_a_list_of_compressors_has_to_be_one() -> None:
    for one in ("topk:ratio=0.1", TopK(0.1), None):
        with pytest.raises(SpecError, match=r"auto: compressors=.* is not allowed; it must be a list, such as"):
            Auto(calibration="c.json", compressors=one)  # type: ignore[arg-type]


@given(st.lists(COMPRESSOR, unique=True))
def test_any_compressors_of_a_policy_are_made_again_by_its_string(compressors: list[Compressor]) -> None:
    policy = Auto(calibration="c.json", compressors=[*compressors, ROUTER])  # type: ignore[arg-type]
    assert parse_policy(str(policy)) == policy
    assert [parse_compressor(spec) for spec in policy.compressors] == [*compressors, ROUTER]


@pytest.mark.parametrize("kind", [*POLICIES.values(), *MEMORIES.values()], ids=lambda kind: kind.name)
def test_examples_are_specs(kind: type[LevelSchedule | Policy | Memory]) -> None:
    parse = parse_memory if issubclass(kind, Memory) else parse_policy
    assert all(type(parse(example)) is kind for example in kind.examples)


def test_compressors_are_frozen_descriptions() -> None:
    with pytest.raises(AttributeError):
        TopK(0.1).ratio = 0.2  # type: ignore[misc]
    assert TopK(0.1).at_level(0.2) == TopK(0.2)
    assert PowerSGD(4, min_rate=2).at_level(1) == PowerSGD(1, min_rate=2)
    assert PowerSGD(4).level == 4
    for name, kind in COMPRESSORS.items():
        assert kind.name == name
        assert kind.__doc__
