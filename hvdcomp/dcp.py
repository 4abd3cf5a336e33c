"""What each rank has left to send, in checkpoints of `torch.distributed.checkpoint`.

    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(compression)}, checkpoint_id=folder)
    hvdcomp.dcp.load(compression, folder)
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint

from hvdcomp.bindings.world import state_for
from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.packing import packed, unpacked

__all__ = ["by_rank", "load"]


def by_rank(compression: Compression) -> dict[str, bytes]:
    """The state of this rank, under a name that only this rank has.

    Of what has one name, `torch.distributed.checkpoint` keeps one rank's. To be called on every rank.

    Returns:
        One part of what is given to `torch.distributed.checkpoint.save` or `async_save`. Nothing changes it any more.
    """
    return {_name(dist.get_rank()): packed(compression.state_dict())}


def load(
    compression: Compression,
    saved: str | os.PathLike[str] | torch.distributed.checkpoint.StorageReader,
    key: str = "compression",
    optimizer: Any = None,
) -> None:
    """Goes on from what `by_rank` returned on each rank, before the first step; to be called on every rank.

    On another number of ranks each takes over what it has to of what the ranks before had left to send, as
    `hvdcomp.state_for` says.

    Args:
        saved: the folder of the checkpoint, or what reads it.
        key: under which it was saved.
        optimizer: as of `Compression.load_state_dict`.

    Raises:
        ConfigurationError: if the checkpoint has no such states, or if they were saved by ranks in groups (hybrid
            sharding, process groups) and the number of ranks is another one; and as of `Compression.load_state_dict`.
    """
    reader = torch.distributed.checkpoint.FileSystemReader(saved) if isinstance(saved, str | os.PathLike) else saved
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = reader.read_metadata().state_dict_metadata
    count = sum(name.startswith(f"{key}.{_name('')}") for name in names)
    if not count:
        raise ConfigurationError(
            f"the checkpoint {str(saved)!r} has no states of ranks under the key {key!r}; give "
            f"torch.distributed.checkpoint.save {{{key!r}: hvdcomp.dcp.by_rank(compression)}} on every rank"
        )
    wanted = [rank] if count == ranks else list(range(rank, count, ranks)) or [0]
    content = {key: {_name(one): b"" for one in wanted}}
    torch.distributed.checkpoint.load(content, storage_reader=reader)
    states = [unpacked(content[key][_name(one)]) for one in wanted]
    if count != ranks:
        for state in filter(None, states):
            if state["own"]["size"] != count:
                raise ConfigurationError(
                    f"the checkpoint {str(saved)!r} was saved by {count} ranks in groups of {state['own']['size']} "
                    f"that exchange; go on with {count} ranks, this run has {ranks}"
                )
        states = [state_for(states, rank, ranks)]
    compression.load_state_dict(states[0], optimizer)


def _name(rank: int | str) -> str:
    return f"rank{rank}"
