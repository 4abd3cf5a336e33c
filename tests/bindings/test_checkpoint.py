"""Trainings that are stopped at any step and go on as if they had not been; engines and coordinators, no framework."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from hvdcomp import ConfigurationError, ErrorFeedback
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.bindings.state_check import FORMAT
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.memory import MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import parse_policy
from hvdcomp.policies.base import Policy
from tests.driven import COMPRESSED, SHAPES, Driven, random_gradients
from tests.harness import BACKENDS, as_numpy, bits, copy, in_turns, infos, make, states_of
from tests.pairs import lags_of

every_backend = pytest.mark.parametrize("backend", BACKENDS)
EPOCH = 2  # steps
STEPS = 10
# GraVAC's search does not depend on how long a step takes: no two throughputs are the same where omega is 0.
POLICIES = [
    ("topk:ratio=0.1", "constant:level=0.3"),
    ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=2,eta=0.3"),
    ("powersgd:rank=2", "accordion:low=4,high=1,steps=2,statistic=aggregated,eta=0.5"),
    ("powersgd:rank=2", "adaqs:start=8,fall=0.01,steps=2"),
    ("two_level(powersgd:rank=2)", "accordion:low=4,high=1,steps=2,eta=0.5"),
    ("randomk:ratio=0.1", "adaqs:start=64,fall=0.01,interval=1"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.5,smoothing=0.3"),
    ("powersgd:rank=2", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.1,smoothing=0.3"),
    ("topk:ratio=0.1", "accordion_batch_size:low=16,high=32,steps=2,eta=0.9"),
    ("none", "increase_batch_size:low=16,high=64"),
    ("topk:ratio=0.1", "lgreco:interval=4,last=2,alpha=1.1"),
    ("powersgd:rank=4", "lgreco:interval=3,last=3,alpha=1.2"),
    ("topk:ratio=0.1", "budget:factor=4,interval=4,last=2"),
    ("powersgd:rank=4", "budget:error=0.3,interval=3,last=1"),
    ("topk:ratio=0.1", "budget:factor=8,critical=2,eta=0.3,interval=3,last=2"),
    ("topk:ratio=0.1", "budget:ms=2,calibration=nowhere.json,interval=3,last=2"),
]

CASES = [
    *((spec, text, lag) for spec, text in POLICIES for lag in lags_of(text)),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=4,every=2,omega=0,epsilon=0.5,smoothing=0.3", 1),
]


def falling(step: int) -> tuple[float, ...]:
    return (1.0,) if step < 5 else (0.5,)


def policy_of(text: str, lag: int) -> Policy[Any]:
    policy = parse_policy(text + f",lag={lag}")
    assert isinstance(policy, Policy)
    return policy


def driven(
    communicator: InProcessCommunicator, spec: str, policy: Policy[Any], backend: str, state: Any = None
) -> Driven:
    told = {"rates": falling, "exchange_seconds": {300: 0.001, 1200: 0.003}}
    return Driven(communicator, policy, backend, spec=spec, steps_per_epoch=EPOCH, state=state, **told)


@pytest.mark.parametrize(("spec", "text", "lag", "backend"), in_turns(CASES))
def test_a_training_goes_on_from_any_step_as_if_never_stopped(spec: str, text: str, lag: int, backend: str) -> None:
    """Checkpoints are used only after the run that wrote them is over, so that they must have copied everything."""
    policy = policy_of(text, lag)

    def work(communicator: InProcessCommunicator) -> list[list[str]]:
        plain = driven(communicator, spec, policy, backend).run(STEPS)
        whole = driven(communicator, spec, policy, backend)
        states = []
        for _ in range(STEPS):
            states.append(whole.state())
            whole.step()
        # That checkpoints are written changes nothing.
        assert (whole.plans, whole.batches, whole.result_bits()) == (plain.plans, plain.batches, plain.result_bits())
        for stop, state in enumerate(states):
            resumed = driven(communicator, spec, policy, backend, state)
            assert resumed.engine.step_number == stop
            assert resumed.engine.ledger.steps == stop
            resumed.run(STEPS - stop)
            assert resumed.plans == whole.plans[stop:], stop
            assert resumed.batches == whole.batches[stop:], stop
            assert resumed.result_bits() == whole.result_bits(stop), stop
            assert resumed.observed == whole.observed[stop:], stop
            assert resumed.needed_engine == whole.needed_engine[stop:], stop
            assert states_of(resumed.engine) == states_of(whole.engine), stop
            assert resumed.engine.ledger.totals.bytes_sent == whole.engine.ledger.totals.bytes_sent
            last = resumed.coordinator.progress
            assert last == whole.coordinator.progress, stop
        return [[str(plan) for plan in whole.plans], [str(batch) for batch in whole.batches]]

    first, second = run_ranks(2, work)
    assert first == second
    assert len({*first[0]}) > 1 or len({*first[1]}) > 1 or text.startswith("constant")


@pytest.mark.parametrize(
    ("memory", "spec", "backend"),
    in_turns(
        itertools.chain(
            itertools.product(
                [ErrorFeedback(decay=0.5), MomentumCorrection(momentum=0.5, clip=3.0), NoMemory(), None],
                ["topk:ratio=0.1", "powersgd:rank=2,alternating=true", "qsgd:bits=4"],
            ),
            [(None, "eden"), (ErrorFeedback(decay=0.5), "eden")],
            itertools.product([ErrorFeedback(decay=0.5)], ["two_level(topk:ratio=0.1)", "two_level(powersgd:rank=2)"]),
        )
    ),
    ids=str,
)
def test_an_engine_without_a_policy_goes_on_with_its_level_and_what_other_memories_left(
    memory: Any, spec: str, backend: str
) -> None:
    """The level is set in the middle; then a dense step, after which warm starts are kept and residuals gone."""
    two_levels = spec.startswith("two_level")
    method = spec.removeprefix("two_level(").partition(":")[0]
    levels = {2: {"topk": 0.5, "powersgd": 1, "qsgd": 2, "eden": 1}[method], 5: "dense", 6: None}

    def engine_of(communicator: InProcessCommunicator) -> Engine:
        return Engine(communicator, infos(SHAPES), parse_compressor(spec), memory=memory, min_numel=16, seed=4)

    def go(engine: Engine, end: int) -> list[dict[str, bytes]]:
        results = []
        while engine.step_number < end:
            step = engine.step_number
            if step in levels:
                engine.set_level(levels[step])  # type: ignore[arg-type]
            engine.begin()
            mine = random_gradients(engine.communicator.rank, step)
            found = engine.step({name: make(backend, values) for name, values in mine.items()})
            results.append({name: bits(x) for name, x in found.items()})
        return results

    def work(communicator: InProcessCommunicator) -> None:
        whole = engine_of(communicator)
        results, states = [], []
        for step in range(8):
            states.append(state_of(whole, None, copy))
            results += go(whole, step + 1)
        for stop, state in enumerate(states):
            resumed = engine_of(communicator)
            restore(state, resumed, None, lambda array, name: copy(array))
            assert go(resumed, 8) == results[stop:], stop
            assert states_of(resumed) == states_of(whole)
            assert {name: str(kept.keeper) for name, kept in resumed.states.items() if kept.memory} == {
                name: str(kept.keeper) for name, kept in whole.states.items() if kept.memory
            }

    run_ranks(4 if two_levels else 2, work, 2)


@every_backend
def test_arrays_are_put_where_their_tensors_are(backend: str) -> None:
    """`place` is told the tensor of every array, also of sums."""
    policy = policy_of("accordion:low=4,high=1,interval=1", 1)
    asked: list[tuple[str, tuple[int, ...]]] = []

    def work(communicator: InProcessCommunicator) -> None:
        state = driven(communicator, "powersgd:rank=2", policy, backend).run(3).state()
        resumed = driven(communicator, "powersgd:rank=2", policy, backend)

        def place(array: Any, name: str) -> Any:
            asked.append((name, tuple(array.shape)))
            return copy(array)

        restore(state, resumed.engine, resumed.coordinator, place)

    run_ranks(1, work)
    names = {"conv": 36, "linear": 24}  # columns of the matrix
    sums = [(name, tuple(SHAPES[name])) for name in SHAPES]
    residuals = [(name, tuple(SHAPES[name])) for name in COMPRESSED]
    warm = [(name, shape) for name, shape in asked if len(shape) == 2 and shape[0] == names.get(name)]
    assert sorted(asked) == sorted(sums + residuals + warm)
    assert [name for name, _ in warm] == list(COMPRESSED)


@every_backend
def test_a_checkpoint_shares_nothing_with_the_training_before_or_after_it(backend: str) -> None:
    policy = policy_of("accordion:low=4,high=1,interval=1", 1)

    def arrays(run: Driven) -> list[Any]:
        return [array for state in run.engine.states.values() for array in (*state.memory, *state.compressor)]

    def work(communicator: InProcessCommunicator) -> None:
        run = driven(communicator, "powersgd:rank=2", policy, backend).run(3)
        before = states_of(run.engine)
        state = run.state()
        for round_ in range(2):
            for array in arrays(run):  # first those of the training that went on, then those of one that was resumed
                array[...] = 7 + round_
            run = driven(communicator, "powersgd:rank=2", policy, backend, state)
            assert states_of(run.engine) == before
            assert len(arrays(run)) == 4

    run_ranks(1, work)


# Other ranks ---------------------------------------------------------------------------------------------------------

SPEC, POLICY = "powersgd:rank=2", "accordion:steps=3,eta=0.3,low=4,high=1"


def states_after(steps: int, size: int) -> list[dict[str, Any]]:
    policy = policy_of(POLICY, 1)
    return list(
        run_ranks(size, lambda communicator: Driven(communicator, policy, "numpy", spec=SPEC).run(steps).state())
    )


def resumed_with(states: list[Mapping[str, Any]]) -> tuple[list[Driven], list[str]]:
    """A training of as many ranks as states, and the warnings that it began with."""
    policy = policy_of(POLICY, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = run_ranks(
            len(states),
            lambda communicator: Driven(communicator, policy, "numpy", spec=SPEC, state=states[communicator.rank]),
        )
    return list(runs), [str(warning.message) for warning in caught if "residual" in str(warning.message)]


def run_again(runs: list[Driven], steps: int) -> None:
    """Some more steps of all ranks of a training."""
    runs[0].engine.communicator.group.run(lambda communicator: runs[communicator.rank].run(steps))  # type: ignore[attr-defined]


def go_on(runs: list[Driven], step: int, lost: list[bool]) -> None:
    """Ranks that begin at `step`, with the same warm starts and levels, and go on; some without their residuals."""
    for run, loses in zip(runs, lost, strict=True):
        assert run.engine.step_number == run.coordinator.progress.step == step
        assert run.coordinator.decision == runs[0].coordinator.decision
        assert run.engine.has_residuals != loses
        assert all(run.engine.states[name].compressor for name in COMPRESSED)
    run_again(runs, 4)
    for run in runs[1:]:
        assert run.plans == runs[0].plans
        assert run.result_bits() == runs[0].result_bits()
    assert len({str(plan) for plan in runs[0].plans}) == 2  # a decision was made and obeyed on the way


@pytest.mark.parametrize("size", [1, 3])
def test_on_another_number_of_ranks_residuals_start_at_zero_with_one_warning(size: int) -> None:
    states = states_after(5, 2)
    runs, said = resumed_with([states[0]] * size)
    assert len(said) == 1
    assert f"written by 2 ranks, but this run has {size}" in said[0]
    first = [kept for kept in runs[0].engine.states.values() if kept.memory]
    assert not first
    go_on(runs, 5, [True] * size)


def test_a_checkpoint_of_rank_0_on_all_ranks_keeps_only_its_residuals_and_the_others_warn() -> None:
    states = states_after(5, 2)
    runs, said = resumed_with([states[0]] * 2)
    assert len(said) == 1
    assert "rank 1 was given the checkpoint of rank 0" in said[0]
    kept = [[as_numpy(run.engine.states[name].memory[0]) for name in COMPRESSED] for run in runs]
    assert all(array.any() for array in kept[0])
    assert not any(array.any() for array in kept[1])
    go_on(runs, 5, [False, False])  # all ranks hold residuals, or none does: steps go by it


def test_each_ranks_own_checkpoint_says_nothing() -> None:
    runs, said = resumed_with(list(states_after(5, 2)))
    assert not said
    go_on(runs, 5, [False, False])


def test_lost_residuals_are_zeros_and_not_those_of_another_rank() -> None:
    """The next step of a rank without residuals is that of a rank whose residuals were set to zero."""
    states = states_after(5, 2)
    runs, _ = resumed_with([states[0]] * 2)
    zeroed, _ = resumed_with(states)
    for kept in zeroed[1].engine.states.values():
        kept.memory = tuple(array * 0 for array in kept.memory)
    for trainings in (runs, zeroed):
        run_again(trainings, 3)
    assert runs[0].result_bits() == zeroed[0].result_bits()
    whole = states_after(8, 2)
    assert whole[0]["shared"]["step"] == 8
    assert as_numpy(runs[0].engine.states["conv"].memory[0]).any()


def test_rank_0_has_to_have_its_own() -> None:
    states = states_after(4, 2)
    with pytest.raises(ConfigurationError, match="on rank 0, load the state that rank 0 saved"):
        resumed_with([states[1]])
    refused(states[1], "on rank 0, load the state that rank 0 saved")


# What is refused -----------------------------------------------------------------------------------------------------


def refused(state: Mapping[str, Any], match: str, spec: str = SPEC, policy: str | None = POLICY, **shapes: Any) -> None:
    """A checkpoint is refused before anything of it was taken over."""

    def work(communicator: InProcessCommunicator) -> None:
        run = Driven(communicator, policy_of(policy or POLICY, 1), "numpy", spec=spec, **shapes)
        with pytest.raises(ConfigurationError, match=match):
            restore(state, run.engine, run.coordinator if policy else None, lambda array, name: copy(array))
        assert run.engine.step_number == run.coordinator.progress.step == 0
        assert not run.engine.has_residuals
        assert not any(kept.compressor for kept in run.engine.states.values())

    run_ranks(1, work)


def test_another_model_compressor_or_policy_is_refused_by_name() -> None:
    (state,) = states_after(4, 1)
    refused(state, "compressor powersgd:rank=2, but this run has powersgd:rank=1", spec="powersgd:rank=1")
    refused(state, f"{POLICY}.*, but this run has adaqs", policy="adaqs:start=64,fall=0.1,steps=3")
    refused(state, "this run has accordion:.*high=2", policy=POLICY.replace("high=1", "high=2"))
    refused(state, "this run has constant", policy=None)
    for shapes in (
        {**SHAPES, "linear": (24, 16)},
        {**SHAPES, "other": (3,)},
        {name: shape for name, shape in SHAPES.items() if name != "linear"},
    ):
        wrong = "other" if "other" in shapes else "linear"
        refused(state, f"these parameters differ: {wrong}$", shapes=shapes)


@pytest.mark.parametrize(
    ("saved", "present", "fits"),
    [
        (None, ErrorFeedback(), True),  # the default of topk
        (ErrorFeedback(), ErrorFeedback(decay=0.5), True),
        (ErrorFeedback(), NoMemory(), False),
        (ErrorFeedback(), MomentumCorrection(), False),
        (MomentumCorrection(), None, False),
    ],
)
def test_what_another_kind_of_memory_left_is_refused(saved: Any, present: Any, fits: bool) -> None:
    """It would go on to keep what this run was told not to keep."""

    def work(communicator: InProcessCommunicator) -> None:
        engines = [
            Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.1"), memory=memory, min_numel=16)
            for memory in (saved, present)
        ]
        engines[0].begin()
        engines[0].step({name: make("numpy", values) for name, values in random_gradients(0, 0).items()})
        state = state_of(engines[0], None, copy)
        if fits:
            restore(state, engines[1], None, lambda array, name: copy(array))
            return
        with pytest.raises(ConfigurationError, match=r"has a residual of .* Use the same memory, or drop the"):
            restore(state, engines[1], None, lambda array, name: copy(array))
        assert not engines[1].has_residuals

    run_ranks(1, work)


def test_a_second_state_leaves_nothing_of_the_first() -> None:
    def work(communicator: InProcessCommunicator) -> None:
        one, empty, fresh = (
            Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.1"), min_numel=16) for _ in range(3)
        )
        one.begin()
        one.step({name: make("numpy", values) for name, values in random_gradients(0, 0).items()})
        for state in (state_of(one, None, copy), state_of(empty, None, copy)):
            restore(state, fresh, None, lambda array, name: copy(array))
        assert not fresh.has_residuals

    run_ranks(1, work)


def test_what_is_no_checkpoint_or_one_of_another_format_is_refused() -> None:
    (state,) = states_after(4, 1)
    for wrong in (
        {},
        {"shared": state["shared"]},
        {"own": state["own"]},
        {"shared": 3, "own": state["own"]},
        {**state, "shared": {**state["shared"], "format": FORMAT + 1}},
        {"model": {}, "optimizer": {}},
    ):
        refused(wrong, "the given value is not a state of hvdcomp.Compression")


def test_a_checkpoint_without_a_policy_is_refused_with_one() -> None:
    def work(communicator: InProcessCommunicator) -> dict[str, Any]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(SPEC), min_numel=16)
        return state_of(engine, None, copy)

    (state,) = run_ranks(1, work)
    refused(state, f"policy constant, but this run has {POLICY}")
