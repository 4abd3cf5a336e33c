"""Saves the state of each rank in checkpoints of `torch.distributed.checkpoint`, and restores it.

import torch.distributed.checkpoint as dcp

dcp.save({"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(compression)}, checkpoint_id=folder)
hvdcomp.dcp.load(compression, folder)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.bindings.world import check_residuals, state_for
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.training import packed, unpacked

__all__ = ["by_rank", "load"]


def by_rank(compression: UsedCompression) -> dict[str, bytes]:
    """The state of this rank, under a name that only this rank uses. Call this function on every rank.

    If all ranks used the same name, `torch.distributed.checkpoint` would keep the state of only one rank.

    Returns:
        A dictionary with one entry, for `torch.distributed.checkpoint.save` or `async_save`. Later steps do not change
        the dictionary.
    """
    return {_name(dist.get_rank()): packed(compression.state_dict())}


def load(
    compression: UsedCompression,
    saved: str | os.PathLike[str] | torch.distributed.checkpoint.StorageReader,
    key: str = "compression",
    optimizer: Any = None,
    residuals: str = "keep",
) -> None:
    """Restores the states that `by_rank` saved. Call this function on every rank, before the first step.

    If the number of ranks has changed, each rank gets its share of the old ranks' residuals, as in `hvdcomp.state_for`.
    With FSDP, each rank then reads the states of all old ranks, one after another. With FSDP, this also happens if the
    number of ranks is the same but the mesh has changed.

    Args:
        compression: the `Compression` of the training run, before its first step.
        saved: the folder of the checkpoint, or a storage reader of `torch.distributed.checkpoint`.
        key: the key of the states in the dictionary that was saved.
        optimizer: the model's optimizer, as in `Compression.load_state_dict`; None if it is not needed.
        residuals: "keep" to keep the residuals of the old ranks, or "drop" to drop them. Use the same value on all
            ranks.

    Raises:
        ConfigurationError: if the checkpoint has no states under this key; if the number of ranks has changed and ranks
            exchange in several process groups; or for one of the reasons given in `Compression.load_state_dict`.
    """
    check_residuals(residuals)
    reader = torch.distributed.checkpoint.FileSystemReader(saved) if isinstance(saved, str | os.PathLike) else saved
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = reader.read_metadata().state_dict_metadata
    count = sum(name.startswith(f"{key}.{_name('')}") for name in names)
    if not count:
        raise ConfigurationError(
            f"the checkpoint {str(saved)!r} has no states of hvdcomp.Compression under the key {key!r}. When you save, "
            f"pass {{{key!r}: hvdcomp.dcp.by_rank(compression)}} to torch.distributed.checkpoint.save on every rank"
        )
    needed = [rank] if count == ranks else list(range(rank, count, ranks)) or [0]
    states = _read(reader, key, needed)
    if residuals == "drop":
        states = list(map(_without_residuals, states))
    # If the shards have changed, a rank may need the states of all old ranks. These states are read only if they are
    # needed.
    if states[0] and "shards" in states[0]["shared"]:
        states = [{**states[0], "every": (_read(reader, key, [other])[0] for other in range(count))}]
    elif states[0] and "boxes" in states[0]["own"]:
        every = (_read(reader, key, [other], alone=True)[0] for other in range(count))
        states = [{**states[0], "every": map(_without_residuals, every) if residuals == "drop" else every}]
    elif count != ranks:
        for state in filter(None, states):
            if state["own"]["size"] != count:
                raise ConfigurationError(
                    f"the checkpoint {str(saved)!r} was saved by {count} ranks, which exchanged in groups of "
                    f"{state['own']['size']}, but this run has {ranks} ranks. Such a checkpoint can be loaded only by "
                    f"the same number of ranks: start {count} ranks"
                )
        states = [state_for(states, rank, ranks)]
    compression.load_state_dict(states[0], optimizer)


def _without_residuals(state: dict[str, Any]) -> dict[str, Any]:
    return state and {**state, "own": {**state["own"], "residuals": {}}}


def _read(
    reader: torch.distributed.checkpoint.StorageReader, key: str, ranks: Sequence[int], alone: bool = False
) -> list[dict[str, Any]]:
    """Reads the states of some ranks from a checkpoint.

    Args:
        reader: the storage reader of the checkpoint.
        key: the key of the states in the checkpoint.
        ranks: the ranks whose states are read.
        alone: whether this rank reads without the other ranks, because they may not need these states.
    """
    content = {key: {_name(rank): b"" for rank in ranks}}
    with warnings.catch_warnings():
        if alone:  # torch.distributed.checkpoint warns if a rank reads alone
            warnings.simplefilter("ignore", UserWarning)
        torch.distributed.checkpoint.load(content, storage_reader=reader, **({"no_dist": True} if alone else {}))
    return [unpacked(content[key][_name(rank)]) for rank in ranks]


def _name(rank: int | str) -> str:
    return f"rank{rank}"
