"""Error feedback on methods that are no contraction: refused with the reason, on whatever way the pair comes about."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdcomp import Auto, ByName, Compression, ErrorFeedback, NoMemory, SpecError
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.contraction import require_bounded_residuals
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import parse_policy
from hvdcomp.settings import check_policy
from tests.harness import infos

EXPLODES = [
    "randomk:ratio=0.1,unbiased=true", "randomk:ratio=0.45,unbiased=true", "qsgd:bits=1", "qsgd:bits=2", "qsgd:bits=3",
    "qsgd:bits=4", "qsgd:bits=5,bucket=4096", "atomo:rank=4",
]  # fmt: skip
STAYS = [
    "randomk:ratio=0.1", "randomk:ratio=0.55,unbiased=true", "qsgd:bits=5", "qsgd:bits=4,bucket=64", "qsgd:bits=8",
    "terngrad", "terngrad:clip=0", "natural", "globalqsgd:bits=2", "globalqsgd:bits=8", "int4",
    "int4:block=4096,rounding=stochastic", "fp8:rounding=stochastic,format=e5m2", "chunkedtopk",
    "chunkedtopk:chunk=8,k=1,values=sign", "eden", "eden:bits=1",
]  # fmt: skip


def refuses(spec: str, memory: str | None = "error_feedback") -> bool:
    try:
        require_bounded_residuals(parse_compressor(spec), memory and parse_memory(memory))
    except SpecError:
        return True
    return False


@pytest.mark.parametrize("spec", EXPLODES + STAYS)
def test_what_is_refused_is_what_explodes(spec: str) -> None:
    """Unit normal gradients, 200 steps; all that is allowed stays within some tens of a gradient."""
    engine = Engine(LoopbackCommunicator(), infos({"w": (64, 64)}), parse_compressor(spec), ErrorFeedback())
    rng = np.random.default_rng(0)
    norm = 0.0
    for _ in range(200):
        engine.step({"w": rng.standard_normal((64, 64), np.float32)})
        norm = math.sqrt(np.mean(np.square(engine.states["w"].memory[0], dtype=float)))
        if norm > 1e4:
            break
    assert (norm > 1e4) == (spec in EXPLODES), norm
    assert refuses(spec) == (spec in EXPLODES)


def compression(spec: str, **options: Any) -> Compression:
    return Compression.from_spec(spec, named_parameters=[("w", None)], **options)


def test_the_refusal_names_the_pair_the_number_and_the_way_out() -> None:
    with pytest.raises(SpecError) as raised:
        compression("qsgd:bits=2", memory="error_feedback")
    for text in ("qsgd:bits=2", "memory=error_feedback", "128 times the energy", "Leave memory at its default"):
        assert text in str(raised.value)
    assert compression("qsgd:bits=2").settings.memory is None


def test_less_is_fed_back_with_a_decay() -> None:
    assert refuses("randomk:ratio=0.45,unbiased=true")
    assert not refuses("randomk:ratio=0.45,unbiased=true", "error_feedback:decay=0.9")  # 1.22 * 0.81
    assert not refuses("atomo:rank=1", "none")
    assert refuses("atomo:rank=1", "momentum_correction")


def test_routed_compressors_and_a_momentum_that_is_for_all() -> None:
    mixed = '{"embed.*": "topk:ratio=0.01", "numel<100": "none", "*": "qsgd:bits=2"}'
    assert refuses(mixed)
    assert not refuses(mixed, None)  # a residual for topk's alone
    assert refuses('{"embed.*": "dgc:ratio=0.01", "*": "qsgd:bits=2"}', None)
    with pytest.raises(SpecError, match="randomk"):
        Compression(
            ByName({"*": parse_compressor("randomk:ratio=0.1,unbiased=true")}),
            named_parameters=[("w", None)], memory=ErrorFeedback(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        ("accordion:low=8,high=5", True),
        ("accordion:low=8,high=4", False),
        ("warmup:levels=8,steps=10", True),
        ("warmup:dense_steps=10", True),
        ("constant:level=3", False),
        ("auto:calibration=x", True),
        ("adaqs:start=20,floor=2,fall=0.5", False),
        ("gravac", False),
    ],
)
def test_levels_that_a_policy_may_set(policy: str, allowed: bool) -> None:
    chosen, compressor = parse_policy(policy), parse_compressor("qsgd:bits=8")
    check_policy(chosen, 10, compressor, None)
    check_policy(chosen, 10, compressor, NoMemory())
    if allowed:
        check_policy(chosen, 10, compressor, ErrorFeedback())
    else:
        with pytest.raises(SpecError, match="residuals would grow without limit"):
            check_policy(chosen, 10, compressor, ErrorFeedback())


@pytest.mark.parametrize(
    ("spec", "others", "memory", "words"),
    [
        ("topk:ratio=0.1", ["qsgd:bits=8", "powersgd:rank=4", "two_level(topk:ratio=0.1)", "int4"], None, None),
        ("qsgd:bits=4", ["randomk:ratio=0.1,unbiased=True", "natural"], None, None),
        ("topk:ratio=0.1", ["qsgd:bits=4"], None, "qsgd:bits=4 and topk:ratio=0.1 cannot be used in one"),
        ("qsgd:bits=4", ["natural", "topk:ratio=0.1"], None, "qsgd:bits=4 and topk:ratio=0.1 cannot be used"),
        ("natural", ["qsgd:bits=4", "two_level(topk:ratio=0.1)"], None, r"and two_level\(topk:ratio=0.1\) cannot be"),
        ("topk:ratio=0.1", ["qsgd:bits=4"], "none", None),
        ("natural", ["qsgd:bits=4"], "error_feedback", "qsgd:bits=4 does not work with memory=error_feedback"),
        ("dgc:ratio=0.1", ["topk:ratio=0.1", "qsgd:bits=8", "dgc:ratio=0.01"], None, None),
        ("dgc:ratio=0.1", ["qsgd:bits=4"], None, "qsgd:bits=4 and dgc:ratio=0.1 cannot be used"),
        (
            "topk:ratio=0.1",
            ["dgc:ratio=0.1"],
            None,
            "dgc:ratio=0.1 is not allowed in the parameter compressors, because it",
        ),
        (
            "dgc:ratio=0.1",
            ["dgc:ratio=0.1,momentum=0.5"],
            None,
            "momentum=0.5 is not allowed in the parameter compressors",
        ),
        ("topk:ratio=0.1", ["dgc:ratio=0.1"], "momentum_correction", None),
        ("topk:ratio=0.1", ["natural", "fp8", "natural:exchange=gather"], None, "compressors lists natural more than"),
        ("topk:ratio=0.1", ["topkk:ratio=0.1"], None, "unknown compressor 'topkk'"),
    ],
)
def test_compressors_that_take_turns(spec: str, others: list[str], memory: str | None, words: str | None) -> None:
    """What one has kept is added to what the next one sends, and kept on by it."""
    policy = Auto(calibration="v100x8", compressors=tuple(others))
    if words is None:
        assert compression(spec, policy=policy, memory=memory).settings.policy == policy
    else:
        with pytest.raises(SpecError, match=words):
            compression(spec, policy=policy, memory=memory)


def test_compressors_of_a_policy_are_written_as_they_print_and_without_the_trainings_own() -> None:
    auto = "auto:calibration=v100x8,compressors="
    others = "( topk: ratio = 1e-1 | natural:exchange=gather|powersgd:rank=4)"
    settings = compression("topk:ratio=0.1", policy=auto + others).settings
    assert str(settings.policy) == f"{auto}(natural|powersgd:rank=4)"
    assert [str(one) for one in settings.compressors] == ["topk:ratio=0.1", "natural", "powersgd:rank=4"]


def test_levels_that_are_set_by_hand() -> None:
    how = compression("qsgd:bits=8", memory="error_feedback")
    how.set_level(6)
    with pytest.raises(SpecError, match="qsgd:bits=3 does not work with memory=error_feedback"):
        how.set_level(3)
    assert how.level == 6
