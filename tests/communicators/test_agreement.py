"""Ranks that were configured differently find out together."""

from __future__ import annotations

from typing import Any

import pytest

from hvdcomp import ConfigurationError, RankMismatchError
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.exchange.agreement import KERNELS, WEIGHTS, refused_on_every_rank, require_agreement
from tests.harness import BACKENDS, make


def outcomes(backend: str, facts: list[dict[str, Any]]) -> list[str | None]:
    """What each rank was told: the error's message, or None."""

    def work(communicator: Any) -> str | None:
        try:
            require_agreement(communicator, facts[communicator.rank], make(backend, [0.0]))
        except RankMismatchError as error:
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
    assert "seed: 4 on rank 0, 3 on rank 1-3" in message
    assert "min_ndim" not in message
    assert "the same model and arguments on every rank" in message


def test_numbers_and_their_names_differ() -> None:
    assert all(outcomes("numpy", [{"a": 1}, {"a": "1"}]))
    assert all(outcomes("numpy", [{"a": None}, {"a": 0}]))


def test_a_fact_that_only_one_rank_has_is_seen_by_all() -> None:
    first, second = outcomes("numpy", [{"a": 1}, {"a": 1, "b": 2}])
    assert first == second
    assert first is not None
    assert "b: None on rank 0, 2 on rank 1" in first


def test_facts_of_any_length_are_compared_and_only_the_difference_is_shown() -> None:
    rules = {f"rule {number}": "topk:ratio=0.01" for number in range(300)}
    assert outcomes("numpy", [rules] * 3) == [None] * 3
    (message,) = set(outcomes("numpy", [{"rules": "x" * 5000 + "a"}, {"rules": "x" * 5000 + "b" * 5000}]))
    assert message is not None
    assert "xxa on rank 0" in message
    assert "xxbbb" in message
    assert len(message) < 600


def test_many_differences_are_counted() -> None:
    many = [{f"parameter {number}": rank for number in range(20)} for rank in range(2)]
    (message,) = set(outcomes("numpy", many))
    assert message is not None
    assert message.count("parameter ") == 8
    assert "and 12 more" in message


def test_kernels_that_only_some_ranks_have_are_told_with_the_way_out() -> None:
    facts = [{KERNELS: "compiled", "seed": 0}, {KERNELS: "none", "seed": 0}]
    (message,) = set(outcomes("numpy", facts))
    assert message is not None
    assert "kernels: compiled on rank 0, none on rank 1. Run `hvdcomp doctor` on each host" in message
    assert "HVDCOMP_KERNELS=off on every rank" in message
    assert "same model and arguments" not in message
    (message,) = set(outcomes("numpy", [{**facts[0], "seed": 1}, facts[1]]))
    assert message is not None
    assert "same model and arguments" in message
    assert "HVDCOMP_KERNELS=off" in message


def test_weights_that_differ_are_told_with_the_remedy() -> None:
    (message,) = set(outcomes("numpy", [{f"{WEIGHTS}w": str(rank), "seed": 0} for rank in range(2)]))
    assert message is not None
    assert "the same weights: broadcast them." in message


@pytest.mark.parametrize(
    ("kind", "said"),
    [(ConfigurationError, "bad input"), (ValueError, "ValueError: bad input"), (KeyError, "KeyError: 'bad input'")],
)
def test_an_error_of_one_rank_reaches_those_that_compare(kind: type[Exception], said: str) -> None:
    def bind(communicator: Any) -> None:
        like = make("numpy", [0.0])
        with refused_on_every_rank(communicator, like):
            if communicator.rank in refusing:
                raise kind("bad input")
        require_agreement(communicator, {"seed": 0}, like)

    def work(communicator: Any) -> tuple[str, type[BaseException]]:
        with pytest.raises((RankMismatchError, kind)) as caught:
            bind(communicator)
        return f"{caught.typename}: {caught.value}", type(caught.value.__cause__)

    refusing = {1}
    messages, causes = zip(*run_ranks(3, work), strict=True)
    told = f"RankMismatchError: some ranks cannot take part in the training. rank 0 2: no error; rank 1: {said}"
    assert set(messages) == {told}
    assert causes == (type(None), kind, type(None))
    refusing = {0, 1, 2}
    assert set(run_ranks(3, work)) == {(f"{kind.__name__}: {kind('bad input')}", type(None))}


def test_what_stops_a_rank_from_outside_is_not_held_back() -> None:
    def work(communicator: Any) -> None:
        with refused_on_every_rank(communicator, make("numpy", [0.0])):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(None)
