"""States that are damaged, or none at all, are refused before anything of them is taken over, and say what is wrong."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import hvdcomp
from hvdcomp import ConfigurationError
from hvdcomp.bindings.checkpoint import restore
from hvdcomp.bindings.state_check import checked
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from tests.bindings.test_bindings import bound, gradients
from tests.bindings.test_checkpoint import policy_of
from tests.driven import Driven
from tests.harness import BACKENDS, copy, make

SPEC, POLICY = "powersgd:rank=2", "accordion:steps=3,eta=0.3,low=4,high=1"

Change = Callable[[dict[str, Any]], None]


def driven(communicator: InProcessCommunicator, backend: str, policy: str) -> Driven:
    return Driven(communicator, policy_of(policy, 1), backend, spec=SPEC)


def state_of_training(backend: str, policy: str = POLICY, steps: int = 4) -> dict[str, Any]:
    (state,) = run_ranks(1, lambda communicator: driven(communicator, backend, policy).run(steps).state())
    return dict(state)


def refused(state: Mapping[str, Any], match: str, backend: str = "numpy", policy: str = POLICY) -> None:
    """Nothing is taken over, and the state that was not damaged is."""

    def work(communicator: InProcessCommunicator) -> None:
        run = driven(communicator, backend, policy)
        with pytest.raises(ConfigurationError, match=match):
            restore(state, run.engine, run.coordinator, lambda array, name: copy(array))
        assert run.engine.step_number == run.coordinator.progress.step == 0
        assert not run.engine.has_residuals
        assert not any(kept.compressor for kept in run.engine.states.values())

    run_ranks(1, work)


def put(*path: Any, value: Any) -> Change:
    """Puts a value into a state; a function is given the one that was there."""

    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        old = place.get(path[-1]) if isinstance(place, dict) else place[path[-1]]
        place[path[-1]] = value(old) if callable(value) else value

    return change


def without(*path: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


DAMAGED = [
    (put("shared", "step", value="x"), r"damaged: step: 'x' must be a whole number"),
    (put("shared", "step", value=1.5), r"step: 1\.5 must be a whole number"),
    (put("shared", "step", value=True), r"step: True must be a whole number"),
    (put("shared", "step", value=-1), r"step: -1 must be a whole number of at least 0"),
    (without("shared", "step"), "shared lacks step"),
    (without("own", "residuals"), "own lacks residuals"),
    (put("shared", "level", value="x"), "level: 'x' must be"),
    (put("shared", "level", value=0), "rank=0 is not allowed"),
    (put("shared", "tensors", value=[1]), r"tensors: \[1\] must be a table"),
    (put("shared", "compressor", value=None), "compressor: None must be text"),
    (put("shared", "coordinator", "progress", value=[4, 0]), "progress: .*three whole numbers"),
    (put("shared", "coordinator", "progress", value=[4, 0, -1]), "progress: .*three whole numbers"),
    (put("shared", "coordinator", "progress", value=[4.5, 0, 0]), r"progress\[0\]: 4\.5 must be a whole number"),
    (put("shared", "coordinator", "period_rates", value=["a"]), r"period_rates\[0\]: 'a' must be a number"),
    (put("shared", "coordinator", "ended", value=[1]), "ended: .*a step number and an epoch number"),
    (put("shared", "coordinator", "state", value={"policy": "accordion"}), "not a state of accordion"),
    (put("own", "coordinator", "latest", value={}), "not a state of accordion"),
    (put("own", "coordinator", "ended", value={"what": 1}), "ended: .*must contain step"),
    (put("own", "coordinator", "step_times", value="soon"), "step_times: 'soon' must be a list"),
    (put("own", "coordinator", "sums", value={"other": np.zeros(3)}), "of 'other', but this model has no"),
    (put("own", "coordinator", "sums", "conv", value=np.zeros(3)), r"gradients of conv has the shape \[3\]"),
    (put("own", "size", value=0), "size: 0 must be a whole number of at least 1"),
    (put("own", "rank", value=1), "rank: 1 must be from 0 to 0"),
    (put("own", "steps", value=-2), "steps: -2 must be a whole number of at least 0"),
    (put("own", "totals", "bytes_sent", value="many"), "bytes_sent: 'many' must be a number"),
    (put("own", "totals", "bytes_sent", value=float("nan")), "bytes_sent=nan is not allowed"),
    (put("own", "totals", "coins", value=3), "coins=3 is not allowed; the names are bytes_sent"),
    (put("own", "loss_scale", value=-2.0), "loss_scale: -2.0 must be a finite number above 0"),
    (put("own", "residuals", "other", value=None), "other.*must be an object"),
    (put("own", "residuals", "conv", "memory", value="elephant"), "elephant"),
    (
        put("own", "residuals", "conv", "memory", value="none"),
        "residual of conv has 1 arrays, but the memory none needs 0",
    ),
    (put("own", "residuals", "conv", "arrays", value=None), "residual of conv: None must be a list of arrays"),
    (put("own", "residuals", "conv", "arrays", value=["x"]), "conv: an array has type str.* must be one of"),
    (
        put("own", "residuals", "conv", "arrays", value=lambda old: old * 2),
        "has 2 arrays, but the memory error_feedback needs 1",
    ),
    (
        put("own", "residuals", "conv", "arrays", 0, value=lambda old: old[:4]),
        r"residual of conv has the shape \[4, 4, 3, 3\], but the parameter has the shape \[8, 4, 3, 3\]",
    ),
    (
        put("own", "residuals", "conv", "arrays", 0, value=lambda old: old.reshape(36, 8)),
        r"residual of conv has the shape \[36, 8\]",
    ),
    (
        put("own", "residuals", "conv", "arrays", 0, value=lambda old: make("numpy", np.array(old), "float64")),
        "residual of conv has type float64, but the parameter has type float32",
    ),
    (
        put("own", "residuals", "conv", "arrays", 0, value=lambda old: make("numpy", np.array(old), "int32")),
        "residual of conv: an array has type int32",
    ),
    (put("shared", "warm_starts", "linear", "arrays", value=[]), r"warm start of linear has arrays of shapes \[\]"),
    (
        put("shared", "warm_starts", "linear", "arrays", 0, value=lambda old: old[:, 0]),
        r"linear has arrays of shapes \[\[24\]\], but powersgd:rank=2 needs arrays of shapes such as \[\[24, 2\]\]",
    ),
    (put("shared", "warm_starts", "linear", "method", value=3), "method: 3 must be text"),
    (
        put("shared", "warm_starts", "lost", value={"method": "powersgd", "arrays": []}),
        "of 'lost', but this model has no",
    ),
]


@pytest.mark.parametrize(("change", "match"), DAMAGED, ids=[match for _, match in DAMAGED])
def test_a_damaged_state_is_refused_before_anything_of_it_is_taken_over(change: Change, match: str) -> None:
    state = copying.deepcopy(state_of_training("numpy"))
    change(state)
    refused(state, match)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("what", ["residual", "warm start"])
def test_numbers_that_would_spoil_every_step_are_refused(what: str, number: str, backend: str) -> None:
    state = copying.deepcopy(state_of_training(backend))
    kept = state["own"]["residuals"] if what == "residual" else state["shared"]["warm_starts"]
    (array,) = kept["linear"]["arrays"]
    array[3, 1] = float(number)
    refused(state, f"the {what} of linear contains an inf or NaN", backend)


def test_a_rank_outside_of_its_process_set_has_a_state() -> None:
    state = copying.deepcopy(state_of_training("numpy"))
    state["own"]["rank"] = -1
    assert checked(state) == state


def test_later_versions_may_have_more_in_a_state() -> None:
    state = copying.deepcopy(state_of_training("numpy"))
    for part in (state["shared"], state["own"], state["shared"]["coordinator"], state["own"]["coordinator"]):
        part["of a later version"] = 1

    def work(communicator: InProcessCommunicator) -> None:
        run = driven(communicator, "numpy", POLICY)
        restore(state, run.engine, run.coordinator, lambda array, name: copy(array))
        assert run.engine.step_number == 4

    run_ranks(1, work)


@pytest.mark.parametrize("wrong", [None, 3, "state", [], {"foo": 1}, {"shared": {}, "own": {}}], ids=repr)
def test_a_compression_refuses_at_once_what_is_no_state(wrong: Any) -> None:
    """Also where the training is not known yet, for which the state waits."""
    compression = hvdcomp.Compression.from_spec("topk:ratio=0.1")
    with pytest.raises(ConfigurationError, match=r"not a state of hvdcomp\.Compression.*compression\.state_dict\(\)"):
        compression.load_state_dict(wrong)
    assert compression.state_dict() == {}


def test_a_compression_refuses_a_damaged_state_at_once() -> None:
    state = copying.deepcopy(state_of_training("numpy"))
    compression = hvdcomp.Compression.from_spec(SPEC, policy=POLICY)
    state["own"]["residuals"]["conv"]["arrays"][0][0] = np.nan
    with pytest.raises(ConfigurationError, match="the residual of conv contains an inf or NaN"):
        compression.load_state_dict(state)
    assert compression.state_dict() == {}


def test_the_state_before_the_first_step_is_one() -> None:
    compression = hvdcomp.Compression.from_spec("topk:ratio=0.1")
    compression.load_state_dict(compression.state_dict())
    assert compression.state_dict() == {}


def test_a_training_goes_on_after_a_state_was_refused() -> None:
    def work(communicator: InProcessCommunicator) -> None:
        first = bound(communicator)
        first.average(gradients(communicator))
        state = first.state_dict()
        second = bound(communicator)
        wrong = copying.deepcopy(state)
        wrong["own"]["residuals"]["w"]["arrays"][0] = np.zeros((64, 63), np.float32)
        with pytest.raises(ConfigurationError, match=r"residual of w has the shape \[64, 63\]"):
            second.load_state_dict(wrong)
        second.load_state_dict(state)
        one, other = (binding.average(gradients(communicator))["w"] for binding in (first, second))
        assert (one == other).all()

    run_ranks(2, work)
