"""Settings that no training would ever get through are refused at once, with what is allowed."""

from __future__ import annotations

import json
import time

import pytest

from hvdcomp import BySize, Compressor, NoCompression, SpecError
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.routing import MOST_NESTED
from hvdcomp.policies import parse_policy


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("powersgd:rank=2,iterations=1000000000", "powersgd: iterations=1000000000 is not allowed; .* at most 100"),
        ("mstopk:ratio=0.1,rounds=1000000000", "mstopk: rounds=1000000000 is not allowed; .* at most 100"),
        ("sidco:ratio=0.1,stages=1000000000", "sidco: stages=1000000000 is not allowed; .* at most 100"),
        (f"powersgd:rank={2**63}", f"powersgd: rank={2**63} is not allowed; .* below 2\\*\\*63"),
        (f"atomo:rank={2**63}", f"atomo: rank={2**63} is not allowed; .* below 2\\*\\*63"),
        (f"qsgd:bits=2,bucket={2**63}", f"qsgd: bucket={2**63} is not allowed; .* below 2\\*\\*63"),
        ("powersgd:rank=2,min_rate=nan", "min_rate=nan is not allowed; it must be positive"),
        (f'{{"numel<{2**63}": "none", "*": "none"}}', f"threshold={2**63} is not allowed; .* below 2\\*\\*63"),
        ('{"numel<' + "9" * 5000 + '": "none", "*": "none"}', "expected a whole number"),
    ],
)
def test_numbers_beyond_all_bounds(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_compressor(spec)


def test_a_level_beyond_the_largest_float() -> None:
    with pytest.raises(SpecError, match=r"low=1000.* is not allowed"):
        parse_policy(f"accordion:low=1{'0' * 400},high=1")


def nested(depth: int) -> str:
    return '{"numel<10": "none", "*": ' * depth + '"none"' + "}" * depth


@pytest.mark.parametrize(
    "spec",
    [
        nested(900),
        nested(100_000),
        json.dumps({**{f"numel<{number}": "none" for number in range(1, 901)}, "*": "none"}),
        json.dumps({"a": "none", **{f"ndim<{number}": "none" for number in range(1, 1 + MOST_NESTED)}, "*": "none"}),
    ],
    ids=["900 deep", "deeper than JSON allows", "900 conditions", "one too many below a pattern"],
)
def test_routers_nested_too_deep(spec: str) -> None:
    start = time.process_time()
    with pytest.raises(SpecError, match=f"nested at most {MOST_NESTED} deep"):
        parse_compressor(spec)
    assert time.process_time() - start < 5


def test_routers_nested_as_deep_as_allowed_are_quick() -> None:
    start = time.process_time()
    compressor = parse_compressor(nested(MOST_NESTED))
    assert compressor.level is None
    assert parse_compressor(str(compressor)) == compressor
    assert time.process_time() - start < 5


def test_many_patterns_are_not_nested() -> None:
    rules = {f"layer{number}.*": "topk:ratio=0.1" for number in range(900)}
    assert parse_compressor(json.dumps({**rules, "*": "none"})).depth == 1


def test_routers_made_in_python() -> None:
    router: Compressor = NoCompression()
    for _ in range(MOST_NESTED):
        router = BySize(10, NoCompression(), router)
    with pytest.raises(SpecError, match=f"nested at most {MOST_NESTED} deep"):
        BySize(10, NoCompression(), router)
