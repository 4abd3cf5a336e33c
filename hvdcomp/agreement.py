"""Finds out, once, whether all ranks were configured alike, and says on every rank what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.collectives import Array
from hvdcomp.communicators import Communicator
from hvdcomp.errors import RankMismatchError

_TEXT_BYTES = 4096
_TOO_LONG = "too long"


def require_agreement(communicator: Communicator, facts: Mapping[str, Any], like: Array) -> None:
    """Compares facts between all ranks; waits for all of them.

    Args:
        communicator: to exchange the facts with.
        facts: JSON-serialisable settings of this rank.
        like: an array of the framework and place that the communicator works on.

    Raises:
        RankMismatchError: on every rank, naming each differing setting and which ranks have which value.
        ValueError: on every rank, if the facts of any are too long to be compared.
    """
    xp = arrays_for(like)
    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > _TEXT_BYTES:  # said to all, because a rank that left now would leave the others waiting
        text = json.dumps({_TOO_LONG: len(text)}).encode()
    mine = np.frombuffer(text.ljust(_TEXT_BYTES), np.uint8).copy()
    gathered = communicator.wait(communicator.start_allgather(xp.from_numpy(mine, like=like), "hvdcomp.agreement"))
    everyone = [json.loads(bytes(row).strip()) for row in np.asarray(gathered)]
    too_long = {rank: theirs[_TOO_LONG] for rank, theirs in enumerate(everyone) if _TOO_LONG in theirs}
    if too_long:
        sizes = ", ".join(f"{size} bytes on rank {rank}" for rank, size in too_long.items())
        raise ValueError(f"the settings take {sizes} as JSON; at most {_TEXT_BYTES} can be compared")
    keys = sorted({key for theirs in everyone for key in theirs})
    different = [key for key in keys if len({json.dumps(theirs.get(key)) for theirs in everyone}) > 1]
    if different:
        raise RankMismatchError(
            "the ranks do not agree on how to compress: "
            + "; ".join(f"{key}: {_by_rank([theirs.get(key) for theirs in everyone])}" for key in different)
            + ". Give hvdcomp.Compression the same arguments on every rank."
        )


def require_same_levels(communicator: Communicator, digest: int, like: Array) -> None:
    """Compares digests of the plans (`Engine.digest`) between all ranks; waits for all of them.

    Raises:
        RankMismatchError: on every rank, with the digests, if they differ.
    """
    require_agreement(communicator, {"levels": f"{digest:012x}"}, like)


def _by_rank(values: list[Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on rank {' '.join(map(str, ranks))}" for value, ranks in groups.items())
