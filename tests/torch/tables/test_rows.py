"""RowExchange against the mean of dense gradients, and its bytes, in plain NumPy. Real ranks: `multirank`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import ConfigurationError, RankMismatchError  # noqa: E402
from hvdcomp.communicators import LoopbackCommunicator, SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import RowExchange  # noqa: E402

SHAPES = {"items": (300, 5), "words": (200, 3), "dense": (40, 2)}


class Model(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.items = torch.nn.Embedding(*SHAPES["items"], sparse=True, **options)
        self.words = torch.nn.EmbeddingBag(*SHAPES["words"], sparse=True, mode="sum")
        self.dense = torch.nn.Embedding(*SHAPES["dense"])
        self.layer = torch.nn.Linear(3, 3)


def gradient_of(rank: int, name: str, kind: str, dtype: Any = torch.float32) -> Any:
    """A gradient (rows, columns), sparse with ids that occur twice but for the last table; None for no gradient."""
    rows, columns = SHAPES[name]
    shared, own = np.random.default_rng(len(name)), np.random.default_rng([rank, len(name)])
    ids = {"same": shared, "apart": own, "few": own}[kind].integers(rows // 10 if kind == "few" else rows, size=20)
    if rank == 1 and name == "words":
        return None
    values = torch.from_numpy(own.normal(size=(40, columns))).to(dtype)
    indices = torch.from_numpy(np.repeat(ids, 2))[None]
    sparse = torch.sparse_coo_tensor(indices, values, (rows, columns), check_invariants=True)
    return sparse.to_dense() if name == "dense" else sparse


def exchanged(ranks: int, kind: str, dtype: Any = torch.float32, **options: Any) -> list[tuple[Any, RowExchange]]:
    """Each rank's model, with the means in place of its gradients, and its RowExchange."""

    def work(communicator: SimulatedCommunicator) -> tuple[Any, RowExchange]:
        model = Model().to(dtype)
        names = [f"{name}.weight" for name in SHAPES]
        rows = RowExchange(model, names, communicator=communicator, **options)
        for name in SHAPES:
            getattr(model, name).weight.grad = gradient_of(communicator.rank, name, kind, dtype)
        rows.exchange()
        return model, rows

    return list(SimulatedGroup(ranks).run(work))


def parts(ranks: int, name: str, kind: str) -> list[np.ndarray]:
    """What each rank has, dense (rows, columns)."""
    given = [gradient_of(rank, name, kind) for rank in range(ranks)]
    none = torch.zeros(SHAPES[name])
    # A rank adds up its own rows as `coalesce` does.
    return [(none if one is None else one.coalesce() if one.is_sparse else one).to_dense().numpy() for one in given]


def mean_of(dense: list[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(dense[0])
    for one in dense:
        total += one
    return total / np.float32(len(dense))


def stated_bytes(ranks: int, kind: str, value_bytes: int = 4, scale_bytes: int = 0) -> tuple[int, str]:
    """Bytes that a rank hands over in a step, and the way on which fewer reach it."""
    counts = 8 * len(SHAPES)
    ids, rows, back = np.zeros(ranks, int), np.zeros(ranks, int), 0
    to_owners = np.zeros((ranks, ranks), int)
    for name, (_, columns) in SHAPES.items():
        own = [np.flatnonzero(one.any(1)) for one in parts(ranks, name, kind)]
        union = np.unique(np.concatenate(own))
        row_bytes = value_bytes * columns + scale_bytes
        ids += [2 * len(one) for one in own]
        rows += [row_bytes * len(one) for one in own]
        for rank, one in enumerate(own):
            owners = np.searchsorted(union, one) % ranks
            to_owners[rank] += row_bytes * np.bincount(owners, minlength=ranks)
        back += row_bytes * -(-len(union) // ranks)
    if rows.max() <= to_owners.max() + back:
        return counts + ids.max() + rows.max(), "gather"
    return counts + ids.max() + ranks * to_owners.max() + back, "owners"


@pytest.mark.parametrize(
    ("ranks", "kind", "way"),
    [
        (1, "apart", "gather"),
        (2, "apart", "gather"),
        (2, "same", "gather"),
        (4, "same", "owners"),
        (5, "few", "owners"),
    ],
)
def test_it_is_the_mean_in_the_bytes_of_the_formula(ranks: int, kind: str, way: str) -> None:
    expected = stated_bytes(ranks, kind)
    assert expected[1] == way
    for model, rows in exchanged(ranks, kind):
        for name in SHAPES:
            gradient = getattr(model, name).weight.grad
            assert gradient.is_sparse == (name != "dense")
            np.testing.assert_array_equal(gradient.to_dense().numpy(), mean_of(parts(ranks, name, kind)))
        assert model.layer.weight.grad is None
        totals = rows.ledger.totals
        assert totals.bytes_sent == expected[0]
        assert totals.dense_bytes == sum(4 * a * b for a, b in SHAPES.values())
        assert rows.ledger.steps == 1
        assert 0 < sum(one.bytes_sent for one in rows.ledger.tensors.values()) <= totals.bytes_sent


@pytest.mark.parametrize(("ranks", "kind"), [(2, "apart"), (4, "same")])
def test_rows_travel_rounded(ranks: int, kind: str) -> None:
    results = exchanged(ranks, kind, wire_dtype=torch.float16)
    for model, rows in results:
        assert rows.ledger.totals.bytes_sent == stated_bytes(ranks, kind, 2)[0]
        for name in SHAPES:
            halves = [one.astype(np.float16).astype(np.float32) for one in parts(ranks, name, kind)]
            gradient = getattr(model, name).weight.grad.to_dense().numpy()
            assert gradient.dtype == np.float32
            np.testing.assert_array_equal(gradient, mean_of(halves).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("ranks", "kind"), [(2, "apart"), (4, "same")])
def test_rows_travel_in_int8_within_the_stated_error(ranks: int, kind: str) -> None:
    results = exchanged(ranks, kind, wire_dtype=torch.int8)
    for model, rows in results:
        assert rows.ledger.totals.bytes_sent == stated_bytes(ranks, kind, 1, scale_bytes=4)[0]
        for name in SHAPES:
            given = parts(ranks, name, kind)
            gradient = getattr(model, name).weight.grad.to_dense().numpy()
            assert np.array_equal(gradient, getattr(results[0][0], name).weight.grad.to_dense().numpy())
            # The element of the largest magnitude is sent as it is; others are off by half of 1/127 of it at most.
            rounded = np.mean([abs(one).max(1, keepdims=True) for one in given], 0) / 254
            bound = rounded + (abs(mean_of(given)).max(1, keepdims=True) + rounded) / 254
            error = abs(gradient - mean_of(given))
            assert (error <= bound * 1.001).all()
            assert error.max() > 0.2 * bound.max()


def test_the_largest_rows_are_sent_and_the_others_kept() -> None:
    """Also across a state that is saved and loaded."""
    ranks, steps, (count, columns) = 2, 5, SHAPES["items"]

    def given(rank: int, step: int) -> np.ndarray:
        draws, dense = np.random.default_rng([rank, step]), np.zeros((count, columns), np.float32)
        dense[draws.choice(30, 9, replace=False)] = draws.normal(size=(9, columns))
        return dense

    def work(communicator: SimulatedCommunicator) -> list[np.ndarray]:
        means, state = [], {}
        for step in range(steps):
            model = Model()
            rows = RowExchange(model, ["items.weight"], ratio=0.4, communicator=communicator)
            rows.load_state_dict(state)
            model.items.weight.grad = torch.from_numpy(given(communicator.rank, step)).to_sparse(1)
            rows.exchange()
            means.append(model.items.weight.grad.to_dense().numpy())
            state = rows.state_dict()
        return means

    kept, expected = np.zeros((ranks, count, columns), np.float32), []
    for step in range(steps):
        kept += [given(rank, step) for rank in range(ranks)]
        sent = np.zeros_like(kept)
        for rank in range(ranks):
            largest = np.argsort(np.linalg.norm(kept[rank], axis=1))[-4:]  # of 9 rows, a share of 0.4
            sent[rank, largest], kept[rank, largest] = kept[rank, largest], 0
        expected.append((sent[0] + sent[1]) / 2)
    for means in SimulatedGroup(ranks).run(work):
        np.testing.assert_array_equal(means, expected)


def test_rows_of_16_bits_are_kept_in_32() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(2, 1, sparse=True, dtype=torch.bfloat16))
    rows = RowExchange(model, ratio=0.5, communicator=LoopbackCommunicator())
    for _ in range(300):  # in bfloat16, 32 + 1/8 is 32
        model[0].weight.grad = torch.tensor([[100.0], [0.125]], dtype=torch.bfloat16).to_sparse(1)
        rows.exchange()
        assert model[0].weight.grad.dtype == torch.bfloat16
    assert rows.state_dict()["0.weight"]["values"].tolist() == [[300 * 0.125]]


def test_a_state_of_other_tables_is_refused() -> None:
    rows = RowExchange(Model(), ["items.weight"], ratio=1.0, communicator=LoopbackCommunicator())
    with pytest.raises(
        ConfigurationError, match=r"a state of the tables other\.weight, but it exchanges the tables items"
    ):
        rows.load_state_dict({"other.weight": {}})


def test_rows_of_zeros_and_nan_travel_in_int8() -> None:
    def work(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        rows = RowExchange(model, ["items.weight"], communicator=communicator, wire_dtype=torch.int8)
        values = torch.tensor([[0.0] * 5, [torch.nan, 1, 2, 3, 4]])
        model.items.weight.grad = torch.sparse_coo_tensor([[2, 7]], values, SHAPES["items"], check_invariants=True)
        rows.exchange()
        return model.items.weight.grad.to_dense()

    for gradient in SimulatedGroup(2).run(work):
        assert not gradient[2].any()
        assert gradient[7].isnan().all()
        assert gradient.isnan().sum() == 5


def test_rows_of_16_bits_are_added_in_32() -> None:
    for model, _ in exchanged(4, "same", torch.bfloat16):
        given = [gradient_of(rank, "items", "same", torch.bfloat16).coalesce().to_dense() for rank in range(4)]
        total = torch.zeros(SHAPES["items"])
        for one in given:
            total += one.float()
        assert torch.equal(model.items.weight.grad.to_dense(), (total / 4).bfloat16())


def test_a_table_that_nobody_used_is_left_alone_and_nan_reaches_all() -> None:
    def work(communicator: SimulatedCommunicator) -> Model:
        model = Model()
        rows = RowExchange(model, ["items.weight", "words.weight", "dense.weight"], communicator=communicator)
        if communicator.rank == 0:
            model.dense(torch.tensor([3, 3, 7])).sum().backward()
            model.dense.weight.grad[7, 1] = torch.nan
            model.dense.weight.grad[9] = -0.0  # all ranks get the same bits
        if communicator.rank == 1:
            model.words(torch.tensor([[1]])).sum().backward()
        rows.exchange()
        return model

    for model in SimulatedGroup(2).run(work):
        assert model.items.weight.grad is None
        dense, words = model.dense.weight.grad, model.words.weight.grad
        assert dense[3].tolist() == [1, 1]
        assert dense[7, 0] == 0.5
        assert dense[7, 1].isnan()
        assert dense.count_nonzero() == 4
        assert not dense.signbit().any()
        assert words.coalesce().indices().tolist() == [[1]]


@pytest.mark.parametrize(("size", "id_bytes"), [(2**16, 2), (2**16 + 1, 4)])
def test_ids_travel_in_16_bits_if_they_fit(size: int, id_bytes: int) -> None:
    def work(communicator: SimulatedCommunicator) -> tuple[Any, int]:
        model = torch.nn.Sequential(torch.nn.Embedding(size, 2, sparse=True))
        torch.nn.init.zeros_(model[0].weight)
        rows = RowExchange(model, communicator=communicator)
        model(torch.tensor([0, 2**15 - 1 + communicator.rank, size - 1])).sum().backward()
        rows.exchange()
        return model[0].weight.grad.coalesce(), rows.ledger.totals.bytes_sent

    for gradient, sent in SimulatedGroup(2).run(work):
        assert gradient.indices()[0].tolist() == [0, 2**15 - 1, 2**15, size - 1]
        assert gradient.values()[:, 0].tolist() == [1, 0.5, 0.5, 1]
        assert sent == 8 + 3 * (id_bytes + 8)


def test_tables_that_share_a_weight_are_served_once() -> None:
    model = Model()
    model.again = torch.nn.Embedding(*SHAPES["items"], sparse=True, _weight=model.items.weight)
    model.again.weight = model.items.weight
    rows = RowExchange(model, communicator=LoopbackCommunicator())
    model.again(torch.tensor([1])).sum().backward()
    rows.exchange()
    assert rows.ledger.tensors.keys() == {"items.weight", "words.weight"}
    assert model._ddp_params_and_buffers_to_ignore == ["items.weight", "words.weight", "again.weight"]


def test_all_tables_are_those_whose_weight_no_layer_shares() -> None:
    model = Model()
    model.tied = torch.nn.Embedding(3, 3)
    model.tied.weight = model.layer.weight
    rows = RowExchange(model, "all", communicator=LoopbackCommunicator())
    assert list(rows.tables) == [f"{name}.weight" for name in SHAPES]
    model.dense(torch.tensor([3, 3])).sum().backward()
    rows.exchange()
    assert model.dense.weight.grad.tolist() == [[2 * (row == 3)] * 2 for row in range(SHAPES["dense"][0])]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Model, {"tables": ["layer.weight"]}, "layer.weight, which is not the weight of an embedding; the weights"),
        (Model, {"tables": []}, "no table"),
        (lambda: torch.nn.Linear(2, 2), {}, "no table with sparse=True; the weights"),
        (lambda: Model(max_norm=1.0), {}, "items.weight has max_norm=1.0"),
        (Model, {"ratio": 0.0}, "ratio=0.0 is not allowed; give a number"),
        (Model, {"wire_dtype": torch.int16}, "wire_dtype=torch.int16 is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(model: Any, options: Any, message: str) -> None:
    def everywhere(communicator: SimulatedCommunicator) -> str:
        with pytest.raises(ConfigurationError) as raised:
            RowExchange(model(), **options, communicator=communicator)
        return str(raised.value)

    def on_rank_1(communicator: SimulatedCommunicator) -> str:
        mine = (model(), options) if communicator.rank else (Model(), {})
        with pytest.raises(RankMismatchError) as raised:
            RowExchange(mine[0], **mine[1], communicator=communicator)
        return str(raised.value)

    for work in (everywhere, on_rank_1):
        for told in SimulatedGroup(2).run(work):
            assert message in told


def test_ranks_that_differ_are_refused_on_every_rank() -> None:
    def other_tables(communicator: SimulatedCommunicator) -> str:
        with pytest.raises(RankMismatchError) as raised:
            RowExchange(Model(), ["items.weight", "words.weight"][communicator.rank :], communicator=communicator)
        return str(raised.value)

    def other_weights(communicator: SimulatedCommunicator) -> str:
        model = Model()
        rows = RowExchange(model, communicator=communicator)
        with torch.no_grad():
            model.words.weight += communicator.rank
        with pytest.raises(RankMismatchError) as raised:
            rows.exchange()
        return str(raised.value)

    for work, word in ((other_tables, "tables of RowExchange"), (other_weights, "weights of words.weight")):
        for told in SimulatedGroup(2).run(work):
            assert word in told
