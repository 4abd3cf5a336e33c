"""Overlap: what starts before all gradients of a step are there, and that it changes no bit of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdcomp import DGC, Compression, ErrorFeedback, MomentumCorrection, SpecError, TopK
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.look import observe
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import overlap
from hvdcomp.exchange.engine import Engine
from hvdcomp.specs.levels import DENSE
from tests.exchange.test_buckets import EVERY, needs_kernels
from tests.harness import (
    TWO_LEVELS,
    CountingCommunicator,
    Run,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    copy,
    in_turns,
    infos,
    make,
    states_of,
)

pytestmark = needs_kernels

SHAPES = {f"{kind}{place}": shape for place in range(4) for kind, shape in {"a": (30, 40), "b": (50,)}.items()}
READY = list(reversed(SHAPES))  # as from a backward pass: b3, a3, b2, ...
BYTES = 9_000  # which two matrices fill

Steps = Mapping[int, Callable[[dict[str, np.ndarray], int], None]]


def gradients_of(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step, 3])
    return {name: rng.normal(size=SHAPES[name]).astype(np.float32) for name in READY}


def run(
    spec: str,
    overlap_bytes: int | None,
    *,
    ranks: int = 2,
    ranks_per_node: int | None = None,
    backend: str = "numpy",
    steps: int = 6,
    tells: Callable[[int, int], bool] = lambda rank, step: True,
    change: Steps | None = None,
    before: Callable[[Engine, int], None] = lambda engine, step: None,
    added: str = "nothing",
    in_place: bool = False,
    dtype: str = "float32",
    **options: Any,
) -> list[Run]:
    """Steps of an engine that is told of each gradient, in another order on each rank, where `tells` says so."""

    def work(communicator: InProcessCommunicator) -> Run:
        rank, totals = communicator.rank, AccumulatedGradients()
        engine = Engine(
            CountingCommunicator(communicator), infos(SHAPES, dtype), parse_compressor(spec), min_numel=0, min_ndim=0,
            overlap_bytes=overlap_bytes, **options,
        )  # fmt: skip
        results = []
        for step in range(steps):
            before(engine, step)
            values = gradients_of(rank, step)
            if change is not None and step in change:
                change[step](values, rank)
            given = {name: make(backend, one, dtype) for name, one in values.items()}
            sums = None if added == "nothing" else totals.of_step(0.5, added == "results")
            engine.begin()
            engine.expect(in_place, sums)
            if tells(rank, step):
                for name in np.random.default_rng([rank, step]).permutation(list(given)):
                    engine.overlap.ready({str(name): given[name]})
            made = engine.step(given, in_place, sums)
            made |= {f"sum of {name}": one for name, one in totals.sums.items()}
            results.append({name: copy(one) for name, one in made.items()})
        return Run(engine, results)

    return list(run_ranks(ranks, work, ranks_per_node))


def assert_same(found: list[Run], expected: list[Run]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for step, (one, other) in enumerate(zip(mine.results, theirs.results, strict=True)):
            assert {n: bits(x) for n, x in one.items()} == {n: bits(x) for n, x in other.items()}, f"step {step}"
        assert states_of(mine.engine) == states_of(theirs.engine)


def early(one: Run) -> list[str]:
    """Names of the collectives that started by themselves."""
    return [name for _, _, name, _ in one.engine.communicator.started if ".early" in name]


def without_one(values: dict[str, np.ndarray], rank: int) -> None:
    del values["a2"]


def with_nan(values: dict[str, np.ndarray], rank: int) -> None:
    if rank == 1:
        values["a3"][2, 3] = np.nan


def test_ranks_that_never_try_are_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a policy that looks at every step: 20 steps are looked back on after 2, 4, 8 and 16 of them."""
    monkeypatch.setattr(overlap, "TRIES", 2)

    def before(engine: Engine, step: int) -> None:
        observe(engine, lambda look: {})

    for one in run("topk:ratio=0.1", BYTES, steps=20, before=before):
        assert one.engine.overlap.era
        assert [name for _, _, name, _ in one.engine.communicator.started].count("hvdcomp.early") == 4


def test_it_does_not_end_because_few_tries_came_to_nothing() -> None:
    """As with a policy that looks at most steps, where the ranks' agreement came late in the first of the others."""
    steps = 2 * overlap.TRIES

    def before(engine: Engine, step: int) -> None:
        observe(engine, (lambda look: {}) if step < overlap.TRIES - 1 else None)

    for one in run("topk:ratio=0.1", BYTES, steps=steps, before=before, tells=lambda rank, step: step > overlap.TRIES):
        assert one.engine.overlap.era


@pytest.mark.parametrize("share", [0.99, 1])
def test_where_a_step_gathers_more_than_is_allowed_no_bucket_starts_by_itself(share: float) -> None:
    """And what is left goes in parts. All payloads of two ranks are just allowed."""
    (one, _) = run("topk:ratio=0.1", BYTES)
    assert one.engine.ledger.last is not None
    payload = sum(cost.bytes_sent for cost in one.engine.ledger.last.tensors.values())
    found = run("topk:ratio=0.1", BYTES, gathered_bytes=int(2 * payload * share))
    assert_same(found, run("topk:ratio=0.1", None))
    names = [name for _, _, name, _ in found[0].engine.communicator.started]
    assert bool(early(found[0])) == (share == 1)
    assert any("part1" in name for name in names) == (share < 1)


@pytest.mark.parametrize("share", [0.99, 1])
def test_what_has_started_early_counts_for_what_is_gathered_at_a_time(share: float) -> None:
    """Half of the tensors have no gradient in the first step, so that they are not in the order, as those of DDP's last
    bucket. Each half alone is allowed."""

    def half(values: dict[str, np.ndarray], rank: int) -> None:
        for name in ("a0", "b0", "a1", "b1"):
            del values[name]

    options: dict[str, Any] = {"change": {0: half}, "steps": 4}
    expected = run("topk:ratio=0.1", None, **options)
    assert expected[0].engine.ledger.last is not None
    payload = sum(cost.bytes_sent for cost in expected[0].engine.ledger.last.tensors.values())
    found = run("topk:ratio=0.1", BYTES, gathered_bytes=int(2 * payload * share), **options)
    assert_same(found, expected)
    rest = "hvdcomp.round0.0" if share == 1 else "hvdcomp.part1.round0.0"  # which starts when the others have ended
    early_one = f"hvdcomp.order{found[0].engine.overlap.era}.early0.round0.0"
    names = [name.removesuffix(".allgather") for _, _, name, _ in found[0].engine.communicator.started]
    assert names == ["hvdcomp.round0.0", *([early_one, rest] * 3)]


@pytest.mark.parametrize("who", ["nobody", "rank 1 once", "nobody at first"])
def test_it_ends_where_no_bucket_starts_by_itself(who: str, recwarn: pytest.WarningsRecorder) -> None:
    """On all ranks, and without a change of any bit; but not because nobody has tried it yet."""
    steps = overlap.TRIES + 4
    options: dict[str, Any] = {"steps": steps}
    tells = {
        "nobody": lambda rank, step: False,
        "rank 1 once": lambda rank, step: rank == 1 and step == 3,
        "nobody at first": lambda rank, step: step >= overlap.TRIES + 2,
    }[who]
    if who == "nobody at first":

        def before(engine: Engine, step: int) -> None:
            observe(engine, (lambda look: {}) if step < overlap.TRIES + 2 else None)

        options["before"] = before
    found = run("topk:ratio=0.1", BYTES, tells=tells, **options)
    goes_on = who != "nobody"
    said = [str(one.message) for one in recwarn if "as with overlap=False" in str(one.message)]
    assert len(said) == (not goes_on)
    for one in found:
        assert bool(one.engine.overlap.era) == (one.engine.overlap.least_bytes is not None) == goes_on
        assert any(held.number is not None for held in one.engine.buckets.with_kernels) == goes_on
        names = [name for _, _, name, _ in one.engine.communicator.started]
        assert names.count("hvdcomp.early") == 1
        assert sum(".early0." in name for name in names) == (steps if goes_on else overlap.TRIES) - 1
    assert_same(found, run("topk:ratio=0.1", None, **options))


@pytest.mark.parametrize(("spec", "backend"), in_turns([*EVERY, *TWO_LEVELS]))
def test_it_changes_no_bit(spec: str, backend: str) -> None:
    """With ranks that start early and one that does not, a missing gradient, and a step that does not count.

    With two levels it depends on a tensor's bucket which ranks work on it. So there, the same buckets start at the end.
    """
    ranks, inside, overlap_bytes = (4, 2, BYTES) if spec in TWO_LEVELS else (3, None, None)
    options: dict[str, Any] = {
        "ranks": ranks, "ranks_per_node": inside, "backend": backend, "steps": 8,
        "change": {3: without_one, 5: with_nan},
    }  # fmt: skip
    found = run(spec, BYTES, tells=lambda rank, step: (rank + step) % 3 > 0, **options)
    assert early(found[0]), "nothing started early"
    assert_same(found, run(spec, overlap_bytes, tells=lambda rank, step: False, **options))
    assert_same_on_all_ranks(found)
    for rank in found:
        counted = [name for _, _, name, _ in rank.engine.communicator.started]
        assert counted == [name for _, _, name, _ in found[0].engine.communicator.started]


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "qsgd:bits=4", "efsignsgd"])
@pytest.mark.parametrize("added", ["gradients", "results"])
def test_results_in_place_and_sums_are_the_same(spec: str, added: str) -> None:
    options: dict[str, Any] = {"added": added, "in_place": True, "change": {3: with_nan}}
    found = run(spec, BYTES, **options)
    assert early(found[0])
    assert_same(found, run(spec, None, **options))


@dataclass(frozen=True)
class Halving(ErrorFeedback):
    """A memory of a user's own, which no kernel knows."""

    def compensate(self, xp: Any, gradient: Any, state: tuple[Any, ...]) -> Any:
        return gradient + state[0] * 0.5, ()


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"])
@pytest.mark.parametrize(
    "what",
    [{"dtype": "float64"}, {"memory": Halving()}, {"dtype": "float64", "in_place": True, "added": "gradients"}],
    ids=["float64", "memory", "in place"],
)
def test_what_no_kernel_takes_starts_early_too(spec: str, what: dict[str, Any]) -> None:
    """Groups follow from the order and the plan, as buckets do: ranks that start early and one that does not have the
    same collectives, with a missing gradient and a step that does not count."""
    options: dict[str, Any] = what | {"ranks": 3, "steps": 8, "change": {3: without_one, 5: with_nan}}
    found = run(spec, 2 * BYTES, tells=lambda rank, step: (rank + step) % 3 > 0, **options)
    assert_same(found, run(spec, None, tells=lambda rank, step: False, **options))
    started = [[name for _, _, name, _ in one.engine.communicator.started] for one in found]
    assert early(found[0])
    assert started[0] == started[1] == started[2]
    assert any(group.number is not None for group in found[0].engine.buckets.tensor_groups)


def test_a_group_goes_in_parts_where_it_would_gather_too_much() -> None:
    """All payloads of two ranks are one byte more than is allowed."""
    (one, _) = run("topk:ratio=0.1", BYTES, dtype="float64")
    assert one.engine.ledger.last is not None
    payload = sum(cost.bytes_sent for cost in one.engine.ledger.last.tensors.values())
    found = run("topk:ratio=0.1", BYTES, dtype="float64", gathered_bytes=2 * payload - 1)
    assert_same(found, run("topk:ratio=0.1", None, dtype="float64"))
    assert not early(found[0])
    assert len(found[0].engine.buckets.tensor_groups) == 2


@pytest.mark.parametrize("spec", ["two_level(topk:ratio=0.1)", "two_level(powersgd:rank=2)"])
def test_nothing_is_lost_where_tensors_go_to_other_ranks_of_the_node(spec: str) -> None:
    """The first two steps have one bucket of all that is compressed, the others have several. What all get and what all
    keep, together, is what all gave."""
    runs = run(spec, BYTES, ranks=4, ranks_per_node=2)
    assert len({name.split(".")[2] for name in early(runs[0])}) == 2
    for name in (name for name in SHAPES if name.startswith("a")):
        given = np.mean([sum(gradients_of(rank, step)[name] for step in range(6)) for rank in range(4)], axis=0)
        got = sum(as_numpy(one[name]) for one in runs[0].results)
        kept = np.mean([as_numpy(one.engine.states[name].memory[0]) for one in runs], axis=0)
        np.testing.assert_allclose(got + kept, given, atol=1e-5)


@pytest.mark.parametrize("memory", [ErrorFeedback(0.5), MomentumCorrection(0.9)], ids=str)
def test_memories_and_changes_of_level_are_the_same(memory: Any) -> None:
    def before(engine: Engine, step: int) -> None:
        engine.set_level({0: 0.1, 1: 0.1, 2: 0.02, 3: 0.02, 4: DENSE, 5: DENSE, 6: 0.1, 7: 0.1}[step])

    options: dict[str, Any] = {"before": before, "steps": 8, "memory": memory}
    found = run("topk:ratio=0.3", BYTES, **options)
    assert len(early(found[0])) == 7 * 2
    assert_same(found, run("topk:ratio=0.3", None, **options))


def test_a_bucket_starts_as_soon_as_its_gradients_are_there_and_those_before_have_started() -> None:
    def work(communicator: InProcessCommunicator) -> list[tuple[str, list[str]]]:
        engine = Engine(
            counting := CountingCommunicator(communicator), infos(SHAPES), TopK(0.1), min_numel=100, min_ndim=0,
            overlap_bytes=BYTES,
        )  # fmt: skip
        # The first step shows the order, the second one has the buckets that the third one need not wait for.
        for step in range(2):
            engine.begin()
            engine.step(gradients_of(communicator.rank, step))
        engine.begin()
        engine.expect()
        counting.started.clear()
        given, seen = gradients_of(communicator.rank, 2), []
        for name in ["a1", "a0", "a3", "b3", "a2", "b2", "b1", "b0"]:
            engine.overlap.ready({name: given[name]})
            seen.append((name, [name for *_, name, _ in counting.started]))
        engine.step(given)
        seen.append(("step", [name for *_, name, _ in counting.started]))
        return seen

    for seen in run_ranks(2, work):
        started = dict(seen)
        first, second = started["step"][:2]
        assert ".early0.round0" in first
        assert ".early1.round0" in second
        # a3 and a2 fill the first, which a1 and a0, the second, have to wait for. Vectors are too small.
        assert started["b3"] == []
        assert started["a2"] == [first, second] == started["b0"]
        assert len(started["step"]) == 3


def test_small_models_and_engines_without_overlap_start_nothing_early() -> None:
    for overlap_bytes in (None, 10**6):
        for one in run("topk:ratio=0.1", overlap_bytes, steps=3):
            assert {name for *_, name, _ in one.engine.communicator.started} == {"hvdcomp.round0.0.allgather"}


def test_who_looks_at_x_starts_late_and_changes_nothing() -> None:
    """Rank 0 alone looks, as with policies that measure gains."""
    looked = []

    def before(engine: Engine, step: int) -> None:
        if engine.communicator.rank == 0:
            observe(engine, lambda look: looked.append(look.energies(list(SHAPES))) or {})

    found = run("topk:ratio=0.1", BYTES, before=before)
    assert len(looked) == 6
    assert early(found[0]) == early(found[1])
    assert_same(found, run("topk:ratio=0.1", None, before=before))


def test_nothing_starts_before_all_ranks_agree() -> None:
    """The answer comes after the fifth gradient, one that belongs to no bucket that starts by itself."""

    def work(communicator: InProcessCommunicator) -> list[int]:
        engine = Engine(communicator, infos(SHAPES), TopK(0.1), min_numel=100, min_ndim=0, overlap_bytes=BYTES)
        for step in range(2):
            engine.begin()
            engine.step(gradients_of(communicator.rank, step))
        told: list[str] = []
        engine.begin()
        engine.expect(agreed=lambda: len(told) >= 5)
        started = []
        for name, one in gradients_of(communicator.rank, 2).items():
            told.append(name)
            engine.overlap.ready({name: one})
            started.append(len(engine.overlap.started))
        return started

    assert READY[4] == "b1"
    for started in run_ranks(2, work):
        assert started == [0, 0, 0, 0, 1, 1, 1, 2]


def test_gradients_of_a_step_that_was_not_made_are_forgotten() -> None:
    """Not enough of them came for a bucket to start. Who looks at x in the next step starts nothing in hooks."""

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), TopK(0.1), min_numel=0, min_ndim=0, overlap_bytes=BYTES)
        for step in range(2):
            engine.begin()
            engine.step(gradients_of(communicator.rank, step))
        engine.begin()
        engine.expect()
        old, new = (gradients_of(communicator.rank, step) for step in (2, 3))
        engine.overlap.ready({"a3": old["a3"]})
        observe(engine, lambda look: {})
        engine.begin()
        engine.expect()
        for name, one in new.items():
            engine.overlap.ready({name: one})
        assert not engine.overlap.started

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlap": "yes"}, "overlap='yes' is not allowed; give True, False or \"auto\""),
        ({"overlap": 1}, 'overlap=1 is not allowed; give True, False or "auto"'),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not allowed; give a whole number of at least 1, or None"),
        ({"gathered_bytes": 0}, "gathered_bytes=0 is not allowed; give a whole number of at least 1, or None"),
        ({"overlap": True, "memory": MomentumCorrection(0.9, clip=1.0)}, "clips each gradient by the norm of all"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Compression(DGC(0.01), **options)


@pytest.mark.parametrize(("chosen", "starts"), [(BYTES, True), (10**9, False), (2**40, False)])
def test_rank_0_may_choose_how_much_a_bucket_holds(chosen: int, starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn it with the order, and if nothing is to start early."""
    monkeypatch.setattr(overlap, "LEAST_BYTES", 1_000)

    def choose(engine: Engine, step: int) -> None:
        engine.overlap.from_rank_0 = True
        if step == 0 and engine.communicator.rank == 0:
            engine.overlap.least_bytes = chosen

    found = run("topk:ratio=0.1", 10**9, before=choose)
    assert_same(found, run("topk:ratio=0.1", BYTES if starts else None))
    for one in found:
        assert bool(early(one)) == starts
        assert bool(one.engine.overlap.era) == starts
        assert one.engine.overlap.least_bytes == min(chosen, 2**31 - 1)
