"""The reduce-scatter of sharded trainings, computed in NumPy for all ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.protocol import Context


def stated(
    method: Gathering,
    gradients: Sequence[np.ndarray],
    residuals: np.ndarray,
    step: int = 0,
    name: str = "w",
    seed: int = 0,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The row of each rank, and the residual of each rank.

    Args:
        gradients: by rank, node after node, float32 (ranks, length): row r is for rank r.
        residuals: (nodes, ranks of a node, nodes, length): of each rank, by the node that gets it.
    """
    nodes, places, _, length = residuals.shape
    received = np.stack(gradients).reshape(nodes, places, nodes, places, length)  # by node and place, from and to
    x = received.mean(1, dtype=np.float32).swapaxes(1, 2) + residuals  # of each node's mean, the part of each place
    sent = np.empty_like(x)
    for node, place, to in np.ndindex(nodes, places, nodes):
        context = Context(f"{name}@{place}#{to}", step, seed, node, nodes)
        parts = method.encode(numpy_arrays, x[node, place, to], context)
        sent[node, place, to] = method.decoded(numpy_arrays, parts, (length,), context)
    rows = []
    for node in range(nodes):
        sent[node, :, node] = x[node, :, node]  # what stays is not rounded
        for place in range(places):
            row = sent[node, place, node]
            for sender in range(nodes):
                row = row + sent[sender, place, node] if sender != node else row
            rows.append(row * np.float32(1 / nodes))
    return rows, x - sent
