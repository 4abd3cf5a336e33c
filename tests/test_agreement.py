"""Ranks that were configured differently find out together."""

from __future__ import annotations

from typing import Any

import pytest

from hvdcomp import RankMismatchError
from hvdcomp.agreement import require_agreement
from hvdcomp.communicators.in_process import run_ranks
from tests.harness import BACKENDS, make


def outcomes(backend: str, facts: list[dict[str, Any]]) -> list[str | None]:
    """What each rank was told: the error's message, or None."""

    def work(communicator: Any) -> str | None:
        try:
            require_agreement(communicator, facts[communicator.rank], make(backend, [0.0]))
        except (RankMismatchError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    return list(run_ranks(len(facts), work))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_facts_pass(backend: str, size: int) -> None:
    facts = {"compressor": "topk:ratio=0.01", "seed": 0, "level": None, "umlaut": "ä"}
    orders = [dict(sorted(facts.items(), reverse=rank % 2 == 1)) for rank in range(size)]
    assert outcomes(backend, orders) == [None] * size


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_is_told_what_differs_and_where(backend: str) -> None:
    facts = [{"compressor": "topk:ratio=0.01", "seed": 3, "min_ndim": 2} for _ in range(4)]
    facts[2]["compressor"] = "topk:ratio=0.1"
    facts[0]["seed"] = 4
    (message,) = set(outcomes(backend, facts))
    assert message is not None
    assert message.startswith("RankMismatchError: the ranks do not agree on how to compress: ")
    assert "compressor: topk:ratio=0.01 on rank 0 1 3, topk:ratio=0.1 on rank 2" in message
    assert "seed: 4 on rank 0, 3 on rank 1 2 3" in message
    assert "min_ndim" not in message
    assert "the same arguments on every rank" in message


def test_numbers_and_their_names_differ() -> None:
    assert all(outcomes("numpy", [{"a": 1}, {"a": "1"}]))
    assert all(outcomes("numpy", [{"a": None}, {"a": 0}]))


def test_a_fact_that_only_one_rank_has_is_seen_by_all() -> None:
    first, second = outcomes("numpy", [{"a": 1}, {"a": 1, "b": 2}])
    assert first == second
    assert first is not None
    assert "b: None on rank 0, 2 on rank 1" in first


def test_facts_that_are_too_long_are_an_error_on_every_rank() -> None:
    first, second = outcomes("numpy", [{"a": "short"}, {"a": "x" * 5000}])
    assert first == second
    assert first is not None
    assert first.startswith("ValueError: the settings take 5009 bytes on rank 1 as JSON; at most 4096")
    assert outcomes("numpy", [{"a": "x" * 4000}] * 2) == [None, None]
