"""What shards had left to be sent, for other ranks: what the mean lacks stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvdcomp import ConfigurationError
from hvdcomp.bindings.state_check import FORMAT
from hvdcomp.torch.fsdp.resharding import OwnedRows, resharded

LAYOUT = [("a", [5, 3]), ("b", [2]), ("c", [7])]
SIZES = [15, 2, 7]


def owners(rank: int, nodes: int, places: int) -> list[int]:
    """The ranks with a rank's place in other nodes."""
    return [other for other in range(rank % places, nodes * places, places) if other != rank]


def lengths(ranks: int) -> list[int]:
    return [-(-shape[0] // ranks) * size // shape[0] for (_, shape), size in zip(LAYOUT, SIZES, strict=True)]


def lacking(kept: list[np.ndarray], nodes: int, places: int) -> list[np.ndarray]:
    """What the mean lacks of each parameter, given each rank's rows."""
    ranks = nodes * places
    rows = np.zeros((ranks, sum(lengths(ranks))))
    for rank, array in enumerate(kept):
        for owner, row in zip(owners(rank, nodes, places), array, strict=True):
            rows[owner] += row / nodes
    parts = np.split(rows, np.cumsum(lengths(ranks))[:-1], 1)
    return [part.reshape(-1)[:size] for part, size in zip(parts, SIZES, strict=True)]


def states(nodes: int, places: int, layout: Any = LAYOUT) -> list[dict[str, Any]]:
    ranks, generator = nodes * places, np.random.default_rng(0)
    made = []
    for rank in range(ranks):
        rows = generator.normal(size=(nodes - 1, sum(lengths(ranks)))).astype(np.float32)
        kept = {"m": {"memory": "error_feedback", "arrays": [torch.from_numpy(rows)]}}
        shared = {
            "format": FORMAT, "compressor": "int4", "tensors": {}, "step": 3, "level": None, "warm_starts": {},
            "coordinator": None, "nodes": nodes, "layouts": {"m": layout},
        }  # fmt: skip
        own = {
            "rank": rank, "size": ranks, "owners": owners(rank, nodes, places), "residuals": kept, "coordinator": None,
            "totals": {}, "steps": 3,
        }  # fmt: skip
        made.append({"shared": shared, "own": own})
    return made


@pytest.mark.parametrize("new", [(2, 1), (2, 2), (3, 2), (4, 1), (2, 5)])
@pytest.mark.parametrize("old", [(2, 2), (4, 1), (3, 1)])
def test_what_the_mean_lacks_stays(old: tuple[int, int], new: tuple[int, int]) -> None:
    saved = states(*old)
    nodes, places = new
    made = []
    for rank in range(nodes * places):
        rows = OwnedRows(owners(rank, nodes, places), nodes * places, nodes)
        (kept,) = resharded(iter(saved), {"m": LAYOUT}, rows)["m"]
        made.append(kept.numpy())
    before = lacking([one["own"]["residuals"]["m"]["arrays"][0].numpy() for one in saved], *old)
    # What fills up rows is no part of a parameter, and lacks nothing.
    for mine, theirs in zip(lacking(made, *new), before, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_other_parameters_are_refused() -> None:
    rows = OwnedRows([1], 2, 2)
    with pytest.raises(ConfigurationError, match="module m cannot be cut to 2 ranks"):
        resharded(states(2, 2, [("a", [5, 4]), ("b", [2]), ("c", [7])]), {"m": LAYOUT}, rows)
    with pytest.raises(ConfigurationError, match="module m cannot"):
        resharded(states(2, 2), {}, rows)
