"""Counting steps and epochs, against a loop over a data loader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import islice
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdcomp.adaptation.step_counter import Progress, StepClock
from hvdcomp.policies.request import Period


class Step(NamedTuple):
    """epoch: that it belongs to. first: whether it is the first of it. last: whether no other can follow in it."""

    epoch: int
    first: bool
    last: bool


def loop(batches_per_epoch: int, accumulations: Sequence[int]) -> list[Step]:
    """The steps of a training loop that takes `accumulations[step]` batches for each, and drops what is left over."""
    steps: list[Step] = []
    epoch = 0
    while True:
        loader = iter(range(batches_per_epoch))
        first = True
        while True:
            if len(steps) == len(accumulations):
                return steps
            taken = list(islice(loader, accumulations[len(steps)]))
            if len(taken) < accumulations[len(steps)]:
                break
            rest = batches_per_epoch - 1 - taken[-1]
            steps.append(Step(epoch, first, rest < accumulations[len(steps)]))
            first = False
        epoch += 1


def count(progress: Progress, accumulations: Sequence[int], start: int = 0) -> list[Step]:
    """The same from `Progress`, driven as the coordinator does it, from step `start` on."""
    steps: list[Step] = []
    for number in range(start, len(accumulations)):
        if number and accumulations[number] != accumulations[number - 1]:
            progress.grow(accumulations[number])
        epoch, first = progress.epoch, progress.taken == 0
        steps.append(Step(epoch, first, progress.advance(accumulations[number])))
        assert progress.step == number + 1
    return steps


@st.composite
def growing(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Batches in an epoch, and how many of them each step takes: never fewer than the step before."""
    batches = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    sizes = sorted(draw(st.lists(st.integers(1, batches), min_size=len(lengths), max_size=len(lengths))))
    return batches, [size for size, length in zip(sizes, lengths, strict=True) for _ in range(length)]


@given(growing())
def test_epochs_are_those_of_a_loop_over_a_loader(drawn: tuple[int, list[int]]) -> None:
    batches, accumulations = drawn
    assert count(Progress(batches), accumulations) == loop(batches, accumulations)


@given(growing(), st.data())
def test_a_progress_that_is_put_back_goes_on_the_same(drawn: tuple[int, list[int]], data: st.DataObject) -> None:
    batches, accumulations = drawn
    assume(len(accumulations) > 1)
    stop = data.draw(st.integers(1, len(accumulations) - 1))
    progress = Progress(batches)
    count(progress, accumulations[:stop])
    again = Progress(batches, progress.step, progress.epoch, progress.taken)
    assert count(again, accumulations, stop) == count(deepcopy(progress), accumulations, stop)
    assert count(progress, accumulations, stop) == loop(batches, accumulations)[stop:]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 60))
def test_periods_end_with_every_so_many_epochs_or_steps(batches: int, often: int, steps: int) -> None:
    accumulation = max(1, batches // 2)
    progress = Progress(batches)
    by_epochs, by_steps = [], []
    for _ in range(steps):
        ended = progress.advance(accumulation)
        by_epochs.append(progress.ends(Period(epochs=often), ended))
        by_steps.append(progress.ends(Period(steps=often), ended))
    expected = loop(batches, [accumulation] * steps)
    assert by_epochs == [step.last and (step.epoch + 1) % often == 0 for step in expected]
    assert by_steps == [(number + 1) % often == 0 for number in range(steps)]


def test_a_period_may_end_once() -> None:
    progress = Progress(4)
    ends = [progress.ends(Period(until=7), progress.advance(1)) for _ in range(20)]
    assert [number for number, ended in enumerate(ends, 1) if ended] == [7]


def test_a_larger_batch_ends_an_epoch_that_has_no_room_for_it_but_not_one_that_has_not_begun() -> None:
    progress = Progress(10)
    for _ in range(7):
        assert not progress.advance(1)
    progress.grow(3)
    assert (progress.epoch, progress.taken) == (0, 7)
    progress.grow(4)
    assert (progress.step, progress.epoch, progress.taken) == (7, 1, 0)
    progress.grow(10)
    assert (progress.epoch, progress.taken) == (1, 0)
    assert progress.advance(10)
    progress.grow(11)  # more than there is in an epoch
    assert (progress.epoch, progress.taken) == (2, 0)


@pytest.mark.parametrize("none", [None, 0])
def test_without_a_length_epochs_are_not_counted(none: int | None) -> None:
    progress = Progress(none)
    for step in range(1, 6):
        assert not progress.advance(2)
        progress.grow(3)
        assert (progress.step, progress.epoch_or_none, progress.taken) == (step, None, 0)
        assert progress.ends(Period(steps=2), False) == (step % 2 == 0)
    assert Progress(3).epoch_or_none == 0


def test_a_step_ends_where_the_next_begins_but_for_pauses() -> None:
    moments = iter([10.0, 12.0, 12.5, 40.0, 41.0, 50.0, 51.0])
    clock = StepClock(lambda: next(moments))
    assert math.isnan(clock.lap())  # 10
    assert clock.lap() == 2.0  # 12
    with clock.paused():  # 12.5 to 40
        pass
    assert clock.lap() == 1.5  # 41
    with pytest.raises(KeyError), clock.paused():  # 50 to 51: what was interrupted took its time too
        raise KeyError
    assert next(moments, None) is None


def test_a_pause_within_a_pause_counts_once() -> None:
    moments = iter([0.0, 1.0, 2.0, 5.0, 6.0])
    clock = StepClock(lambda: next(moments))
    clock.lap()
    with clock.paused(), clock.paused():  # from 1 and from 2 to 5
        pass
    assert clock.lap() == 2.0  # 6
