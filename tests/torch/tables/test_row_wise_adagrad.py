"""RowWiseAdagrad against its rule in plain NumPy. With LookAhead, on real ranks: `multirank`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import ConfigurationError  # noqa: E402
from hvdcomp.torch import RowWiseAdagrad  # noqa: E402

RATE, EPS, BEGIN = 0.1, 1e-3, 0.25
LOOKUPS = torch.tensor([3, 1, 3, 7])


def table(sparse: bool) -> torch.nn.Embedding:
    torch.manual_seed(2)
    return torch.nn.Embedding(9, 5, sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_move_as_numpy_states(sparse: bool) -> None:
    module = table(sparse)
    optimizer = RowWiseAdagrad(module.parameters(), RATE, eps=EPS, initial_accumulator_value=BEGIN)
    weights = module.weight.detach().numpy().astype(np.float64)
    sums = np.full(9, BEGIN)
    for step in range(1, 4):
        gradient = np.zeros((9, 5))
        np.add.at(gradient, LOOKUPS.numpy(), step * np.cos(weights[LOOKUPS.numpy()]))
        sums += (gradient**2).mean(1)
        weights -= RATE * gradient / (np.sqrt(sums) + EPS)[:, None]
        optimizer.zero_grad()
        (step * module(LOOKUPS).sin().sum()).backward()
        optimizer.step()
        np.testing.assert_allclose(module.weight.detach().numpy(), weights, rtol=1e-5)
        np.testing.assert_allclose(optimizer.state[module.weight]["sum"].numpy(), sums, rtol=1e-5)
    assert torch.equal(module.weight[[0, 2, 4]], table(sparse).weight[[0, 2, 4]])

    again = RowWiseAdagrad(module.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == RATE
    assert torch.equal(again.state[module.weight]["sum"], optimizer.state[module.weight]["sum"])


@pytest.mark.parametrize("columns", [1, 3, 8, 33, 64, 200])
def test_a_row_moves_alike_alone_and_among_others(columns: int) -> None:
    """What `LookAhead` needs, bit for bit."""
    torch.manual_seed(columns)
    rows, begun = torch.randn(40, columns), torch.randn(40, columns)
    results = []
    for parts in ([40], [1] * 40, [7, 33]):
        weight = torch.nn.Parameter(begun.clone())
        optimizer = RowWiseAdagrad([weight])
        for ids in torch.arange(40).split(parts):
            weight.grad = torch.sparse_coo_tensor(ids[None], rows[ids], weight.shape, check_invariants=False)
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(3))])
    for options in ({"lr": -1.0}, {"eps": 0.0}, {"initial_accumulator_value": -1.0}):
        with pytest.raises(ConfigurationError, match="eps above 0"):
            RowWiseAdagrad(table(True).parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_gradients_of_16_bits_do_not_underflow(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=dtype))
    optimizer = RowWiseAdagrad([weight], RATE)
    for _ in range(2):
        weight.grad = torch.full((3, 4), 1e-4, dtype=dtype)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer = RowWiseAdagrad([weight], RATE)
        optimizer.load_state_dict(state)
    sums = optimizer.state[weight]["sum"]
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, torch.full((3,), 2e-8), rtol=0.01, atol=0)
    torch.testing.assert_close(weight.float(), torch.full((3, 4), -RATE * (1 + 0.5**0.5)), rtol=0.01, atol=0)
