"""What ranks go on from after a change of the ranks, on ranks in one process."""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.bindings import checkpoint, elastic
from hvdcomp.bindings.packed import pack, unpack
from hvdcomp.bindings.training import Training
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import infos

SHAPES = {"matrix": (12, 9), "vector": (40,)}


def state_of(communicator: Any, spec: str, steps: int) -> tuple[dict[str, Any], Engine]:
    """The state of a rank after some steps, and its engine."""
    engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), min_numel=0, min_ndim=1)
    rng = np.random.default_rng(communicator.rank)
    for _ in range(steps):
        engine.begin()
        engine.step({name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()})
    return checkpoint.state_of(engine, None, np.array), engine


def meeting(before: list[dict[str, Any]], now: list[int | None], spec: str) -> tuple[list[Engine], list[str]]:
    """Lets ranks meet, each with the state of one that there was before, or new.

    Args:
        before: of the old ranks.
        now: of each new rank, which old one it was.
    """

    def work(communicator: Any) -> Engine:
        fresh, engine = state_of(communicator, spec, 0)
        was = now[communicator.rank]
        state = fresh if was is None else before[was]
        like = np.zeros(0, np.float32)
        agreed = elastic.agree_on_state(communicator, like, state, was is not None, pack, unpack)
        checkpoint.restore(agreed, engine, None, lambda array, name: np.array(array))
        return engine

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engines = run_ranks(len(now), work)
    return list(engines), [str(one.message) for one in caught]


def pending(states: list[Any]) -> dict[str, np.ndarray]:
    """By name, what all ranks hold back, as it counts in the mean."""
    kept = [
        {name: one["arrays"][-1] for name, one in state["own"]["residuals"].items()}
        if isinstance(state, dict)
        else {name: one.memory[-1] for name, one in state.states.items() if one.memory}
        for state in states
    ]
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    return {
        name: sum(one.get(name, zero).astype(np.float64) for one in kept) / len(states) for name, zero in zeros.items()
    }


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "efsignsgd:exchange=scatter"])
@pytest.mark.parametrize(
    "now", [[0, 1, None], [2, 0, 1], [1, None, 0, None, 2]], ids=["one has gone, one is new", "others", "two are new"]
)
def test_what_survivors_hold_back_counts_as_before(spec, now):
    before = [state for state, _ in run_ranks(3, lambda communicator: state_of(communicator, spec, 4))]
    survivors = [rank for rank in now if rank is not None]
    engines, said = meeting(before, now, spec)

    lost = [rank for rank in range(3) if rank not in survivors]
    without = [
        before[rank] | {"own": before[rank]["own"] | {"residuals": {}}} if rank in lost else before[rank]
        for rank in range(3)
    ]
    kept = pending(without)
    assert np.abs(kept["matrix"]).max() > 0
    for name, mean in pending(engines).items():
        np.testing.assert_allclose(mean, kept[name], rtol=1e-5, atol=1e-7)
    assert [engine.step_number for engine in engines] == [4] * len(now)
    assert len({tuple(name for name, one in engine.states.items() if one.has_residual) for engine in engines}) == 1
    for engine in engines:  # warm starts are those of rank 0
        for name, state in engine.states.items():
            warm = before[survivors[0]]["shared"]["warm_starts"].get(name, {"arrays": ()})["arrays"]
            assert [one.tobytes() for one in state.compressor] == [one.tobytes() for one in warm]
    assert [text.split(",")[0] for text in said] == [f"1 of 3 ranks are gone ({rank})" for rank in lost]


def test_sums_of_gradients_keep_their_residuals_as_they_are():
    before = [state for state, _ in run_ranks(2, lambda communicator: state_of(communicator, "topk:ratio=0.1", 3))]
    for state in before:
        state["own"]["op"] = "sum"
    engines, _ = meeting(before, [0, 1, None, None], "topk:ratio=0.1")
    for state, engine in zip(before, engines, strict=False):
        for name, kept in state["own"]["residuals"].items():
            assert engine.states[name].memory[-1].tobytes() == kept["arrays"][-1].tobytes()


def test_residuals_do_not_outlive_the_weights_they_belong_to():
    before = [state for state, _ in run_ranks(2, lambda communicator: state_of(communicator, "topk:ratio=0.1", 3))]
    engines, said = meeting(before, [None, 1], "topk:ratio=0.1")
    assert [engine.step_number for engine in engines] == [0, 0]
    assert not any(engine.has_residuals for engine in engines)
    assert said
    assert said[0].startswith("rank 0 is new")


def test_a_job_that_begins_has_nothing_to_say():
    before = [state for state, _ in run_ranks(2, lambda communicator: state_of(communicator, "topk:ratio=0.1", 3))]
    engines, said = meeting(before, [None, None], "topk:ratio=0.1")
    assert [engine.step_number for engine in engines] == [0, 0]
    assert said == []


def test_track_refuses_what_is_no_state():
    import hvdcomp

    compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.1))
    with pytest.raises(hvdcomp.ConfigurationError, match=r"which has no method save\(\); pass an elastic state"):
        hvdcomp.track({"step": 0}, compression)
    with pytest.raises(hvdcomp.ConfigurationError, match=r"hvdcomp.track was given 3 as compression"):
        hvdcomp.track(object(), 3)


class _Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_what_travels_between_ranks_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(zipfile.BadZipFile):
        Training.unpack(None, pickle.dumps(_Harm(tmp_path / "harm")))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
def test_what_travels_between_ranks_comes_as_it_was(dtype: str) -> None:
    arrays = [np.arange(6).reshape(2, 3).T.astype(dtype), np.zeros((0, 4), dtype), np.array(1, dtype)]
    state = {"arrays": arrays, "by factor": {0.1: [1, None], 2.0: {"a": float("inf")}}, "number": np.float64(0.1)}
    made = Training.unpack(None, Training.pack(None, state))  # type: ignore[arg-type]
    for one, other in zip(made.pop("arrays"), arrays, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert one.flags.writeable
    assert made == {"by factor": {0.1: [1, None], 2.0: {"a": float("inf")}}, "number": 0.1}
