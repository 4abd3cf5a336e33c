"""LocalSteps in fragments and with a delay against Streaming DiLoCo in plain NumPy. Real ranks: `multirank`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import Compression, ConfigurationError, TopK, state_for  # noqa: E402
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import LocalSteps  # noqa: E402
from hvdcomp.torch.local_steps.rounds import Rounds, in_fragments  # noqa: E402
from tests.torch.local_steps.test_local_steps import (  # noqa: E402
    RANKS,
    RATE,
    Model,
    adamw,
    advance,
    everything,
    sgd,
    start_of,
    target_of,
    top,
)

STEPS = 17
FRAGMENTS = {"matrix": 0, "vector": 1}


def stated(
    c: Callable[[np.ndarray], np.ndarray], every: int, fragments: int, delay: int, share: float
) -> tuple[list[list[dict[str, np.ndarray]]], list[dict[str, np.ndarray]]]:
    """Streaming DiLoCo's algorithm 2 with inner SGD, an outer Nesterov step of momentum 0.9 at rate 0.7, and error
    feedback of what C has not sent of the matrix; the weights of each rank, and the outer ones, after each step."""
    outer = {name: start_of(name).astype(np.float64) for name in FRAGMENTS}
    velocity = {name: np.zeros_like(outer[name]) for name in outer}
    local = [{name: outer[name].copy() for name in outer} for _ in range(RANKS)]
    rest = [{name: np.zeros_like(outer[name]) for name in outer} for _ in range(RANKS)]
    on_the_way: dict[int, tuple[list[str], dict[str, np.ndarray]]] = {}  # by the step in which it is applied
    locals_, outers = [], []

    def send(names: list[str]) -> dict[str, np.ndarray]:
        means = {}
        for name in names:
            x = [outer[name] - local[rank][name] + rest[rank][name] for rank in range(RANKS)]
            sent = [c(one) if name == "matrix" else one for one in x]
            for rank in range(RANKS):
                rest[rank][name] = x[rank] - sent[rank]
            means[name] = sum(sent) / RANKS
        return means

    for step in range(1, STEPS + 1):
        for rank in range(RANKS):
            for name in outer:
                local[rank][name] = local[rank][name] - RATE * (local[rank][name] - target_of(rank, name))
        for number in range(fragments):
            if step >= every // fragments * (number + 1) and (step - every // fragments * (number + 1)) % every == 0:
                names = [name for name in FRAGMENTS if fragments == 1 or FRAGMENTS[name] == number]
                on_the_way[step + delay] = names, send(names)
        for name, mean in on_the_way.pop(step, ([], {}))[1].items():
            velocity[name] = 0.9 * velocity[name] + mean
            outer[name] = outer[name] - 0.7 * (mean + 0.9 * velocity[name])
            for rank in range(RANKS):
                local[rank][name] = share * local[rank][name] + (1 - share) * outer[name]
        locals_.append([dict(one) for one in local])
        outers.append(dict(outer))
    return locals_, outers


def outer_values(model: Model, optimizer: LocalSteps) -> dict[str, np.ndarray]:
    with optimizer.outer_weights():
        return model.values()


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "share"),
    [(4, 2, 0, 0.0), (4, 2, 1, 0.5), (5, 2, 2, 0.25), (4, 1, 3, 0.5), (3, 1, 1, 0.0), (3, 1, 0, 0.5)],
)
@pytest.mark.parametrize("c", ["all", "topk"])
def test_it_is_the_algorithm(c: str, every: int, fragments: int, delay: int, share: float) -> None:
    def work(communicator: SimulatedCommunicator) -> list[Any]:
        model = Model()
        compression = Compression(TopK(ratio=0.1)) if c == "topk" else None
        given = {"compression": compression, "communicator": communicator, "local_share": share, "delay": delay}
        optimizer = LocalSteps(sgd(model), every, fragments=fragments, **given)
        found = []
        for _ in range(STEPS):
            advance(model, optimizer, communicator.rank, 1)
            found.append((model.values(), outer_values(model, optimizer)))
        return found

    shortened = everything if c == "all" else lambda x: top(x, round(0.1 * x.size))
    own, outer = stated(shortened, every, fragments, delay, share)
    ranks = SimulatedGroup(RANKS).run(work)
    for step in range(STEPS):
        for rank in range(RANKS):
            found, common = ranks[rank][step]
            for name in FRAGMENTS:
                np.testing.assert_allclose(found[name], own[step][rank][name], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(common[name], outer[step][name], rtol=1e-4, atol=1e-5)
                np.testing.assert_array_equal(common[name], ranks[0][step][1][name])  # on all ranks


def test_each_fragment_goes_once_in_a_round_and_never_two_at_once() -> None:
    for every in range(1, 14):
        for fragments in range(1, every + 1):
            due = [Rounds(every, fragments, 0, 0.0).due(step) for step in range(1, 3 * every + 1)]
            assert due == 3 * due[:every]
            assert [one for one in due[:every] if one is not None] == list(range(fragments))
            sent = [step for step, one in enumerate(due) if one is not None]
            assert min(np.diff(sent)) == every // fragments


def test_fragments_are_of_about_equal_size() -> None:
    assert in_fragments([100, 3, 50, 50, 2, 1], 3) == [[0], [1, 2], [3, 4, 5]]
    assert in_fragments([5, 0, 0], 3) == [[0], [1], [2]]
    sizes = np.random.default_rng(0).integers(1, 1000, 200).tolist()
    sums = [sum(sizes[place] for place in fragment) for fragment in in_fragments(sizes, 7)]
    assert max(sums) - min(sums) <= max(sizes) / 7
    assert sorted(place for fragment in in_fragments(sizes, 7) for place in fragment) == list(range(200))


def made(model: Model, communicator: SimulatedCommunicator, method: str) -> LocalSteps:
    compression = Compression.from_spec(method, min_numel=0, min_ndim=0)
    given = {"fragments": 2, "delay": 2, "local_share": 0.5, "communicator": communicator}
    return LocalSteps(adamw(model), 6, compression=compression, **given)


@pytest.mark.parametrize("method", ["topk:ratio=0.05", "qsgd:bits=4", "eden"])
def test_it_goes_on_bit_for_bit_from_any_step_of_a_round(method: str) -> None:
    """Also with an exchange under way, whose random choices and residuals are those of the step that sent it."""

    def whole(communicator: SimulatedCommunicator) -> list[Any]:
        model = Model()
        optimizer = made(model, communicator, method)
        states = []
        for _ in range(13):
            advance(model, optimizer, communicator.rank, 1)
            states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        return states

    ranks = SimulatedGroup(2).run(whole)
    under_way = set()
    for at in range(6, 12):
        under_way.add(ranks[0][at - 1][1]["local_steps"]["sent"] is not None)

        def after(communicator: SimulatedCommunicator, at: int = at) -> Any:
            model = Model()
            optimizer = made(model, communicator, method)
            weights, state = copy.deepcopy(ranks[communicator.rank][at - 1])
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            advance(model, optimizer, communicator.rank, 13 - at)
            return model.values(), optimizer.state_dict()["local_steps"]

        for rank, (values, own) in enumerate(SimulatedGroup(2).run(after)):
            weights, state = ranks[rank][-1]
            for name, value in values.items():
                np.testing.assert_array_equal(value, weights[name].numpy(), f"from step {at}")
            before, now = state["local_steps"]["compression"]["own"], own["compression"]["own"]
            assert before["steps"] == now["steps"] == 13
            bytes_of = [{name: one[name] for name in ("bytes_sent", "dense_bytes")} for one in
                        (before["totals"], now["totals"])]  # fmt: skip
            assert bytes_of[0] == bytes_of[1]
    assert under_way == {True, False}


def test_with_an_exchange_under_way_rounds_must_be_as_they_were() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        optimizer = made(model, communicator, "topk:ratio=0.05")
        advance(model, optimizer, 0, 4)
        with pytest.raises(ConfigurationError, match="use the same settings"):
            LocalSteps(sgd(Model()), 7, delay=2, communicator=communicator).load_state_dict(optimizer.state_dict())

    SimulatedGroup(1).run(work)


def test_bytes_are_those_of_the_fragments_and_every_step_has_the_whole_model() -> None:
    def work(communicator: SimulatedCommunicator) -> list[tuple[int, int]]:
        model = Model()
        given = {"fragments": 2, "delay": 1, "communicator": communicator}
        optimizer = LocalSteps(sgd(model), 4, **given)
        costs = []
        for _ in range(9):
            advance(model, optimizer, communicator.rank, 1)
            last = optimizer.compression.ledger.last
            costs.append((last.bytes_sent, last.dense_bytes))
        return costs

    costs = SimulatedGroup(2).run(work)[0]
    assert {dense for _, dense in costs} == {4 * (24 * 60 + 7)}
    sent = [one for one, _ in costs]
    # Sent after steps 2, 4, 6, 8, and entered with the step in which they are applied; 8 is the ranks' presence, and 4
    # a flag.
    assert [one - 12 if one else 0 for one in sent] == [0, 0, 4 * 24 * 60, 0, 4 * 7, 0, 4 * 24 * 60, 0, 4 * 7]


def test_exchange_applies_what_is_under_way_and_leaves_all_ranks_with_the_same_weights() -> None:
    def work(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer = made(model, communicator, "topk:ratio=0.05")
        advance(model, optimizer, communicator.rank, 4)
        assert optimizer.state_dict()["local_steps"]["sent"] is not None
        assert not optimizer.in_sync
        optimizer.exchange()
        assert optimizer.in_sync
        values = model.values()
        for name, value in outer_values(model, optimizer).items():
            np.testing.assert_array_equal(value, values[name])
        advance(model, optimizer, communicator.rank, 6)  # a round from there
        assert not optimizer.in_sync
        return values

    first, second = SimulatedGroup(2).run(work)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_what_is_not_finite_stops_all_ranks_when_it_is_to_be_applied() -> None:
    def work(communicator: SimulatedCommunicator) -> tuple[str, bool]:
        model = Model()
        optimizer = made(model, communicator, "topk:ratio=0.05")
        advance(model, optimizer, communicator.rank, 8)
        before = copy.deepcopy(optimizer.state_dict()["local_steps"])
        if communicator.rank == 1:
            with torch.no_grad():
                model.matrix[0, 0] = torch.nan
        advance(model, optimizer, communicator.rank, 2)  # it is sent in the first, with the matrix
        with pytest.raises(ConfigurationError) as told:
            advance(model, optimizer, communicator.rank, 1)
        after = optimizer.state_dict()["local_steps"]
        kept = [*before["anchors"], *_residuals(before)]
        now = [*after["anchors"], *_residuals(after)]
        return str(told.value), all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))

    for rank, (message, same) in enumerate(SimulatedGroup(2).run(work)):
        assert same
        assert ("on this rank in 0.0" if rank == 1 else "on another rank") in message


def test_a_new_rank_begins_with_the_outer_weights_and_adds_nothing_to_what_is_under_way() -> None:
    def optimizer_of(model: Model, communicator: SimulatedCommunicator) -> LocalSteps:
        return LocalSteps(adamw(model), 6, delay=3, communicator=communicator)

    def before(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer = optimizer_of(model, communicator)
        advance(model, optimizer, communicator.rank, 13)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    saved = SimulatedGroup(2).run(before)
    own = saved[0][1]["local_steps"]
    assert own["sent"] is not None

    def after(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer = optimizer_of(model, communicator)
        states = copy.deepcopy(saved)
        if communicator.rank < 2:
            weights, state = states[communicator.rank]
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        else:
            optimizer.join(states[0][1])
        each = iter([one["local_steps"].pop("compression") for _, one in states])
        optimizer.compression.load_state_dict(state_for(each, communicator.rank, 3))
        begins = model.values()
        moments = {id(one): state["exp_avg"].numpy().copy() for one, state in optimizer.inner.state.items()}
        found = begins, [moments[id(one)] for one in model.parameters()]
        advance(model, optimizer, communicator.rank, 2)
        return *found, outer_values(model, optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the first load of a state says that residuals are lost
        ranks = SimulatedGroup(3).run(after)
    for place, name in enumerate(FRAGMENTS):
        moved = [state["local_steps"]["sent"]["moved"][place].numpy() for _, state in saved]
        mean = (moved[0].astype(np.float64) + moved[1]) / 3
        velocity = 0.9 * own["outer"]["state"][place]["momentum_buffer"].numpy() + mean
        expected = own["anchors"][place].detach().numpy() - 0.7 * (mean + 0.9 * velocity)
        for rank, (begins, moments, outer) in enumerate(ranks):
            np.testing.assert_allclose(outer[name], expected, rtol=1e-5, atol=1e-6)
            theirs = saved[rank][0][name] if rank < 2 else own["anchors"][place]
            np.testing.assert_array_equal(begins[name], theirs.detach().numpy())
            np.testing.assert_array_equal(moments[place], saved[rank % 2][1]["state"][place]["exp_avg"].numpy())


def _residuals(own: dict[str, Any]) -> list[Any]:
    residuals = own["compression"]["own"]["residuals"]
    return [array for kept in residuals.values() for array in kept["arrays"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": 3}, "from 1 to 2"),
        ({"fragments": 2, "delay": 3}, "at most 2"),
        ({"delay": -1}, "delay=-1"),
        ({"local_share": 1}, "local_share=1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SimulatedGroup(1).run(lambda ranks: LocalSteps(sgd(Model()), 6, communicator=ranks, **options))
