"""Code that the callbacks and strategies for trainers share. This code saves the state of each rank in the checkpoint
of a trainer.

A trainer saves only the state of one rank. Residuals differ between ranks, so each rank writes its own state to its own
file, in the folder of the checkpoint or next to the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.bindings.state_check import parts_of
from hvdcomp.bindings.world import state_for
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.policies import changes_batch_size


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error to raise if a module of hvdcomp needs a library that is not installed.

    Args:
        error: the error of the import.
        extra: name of the missing module. It is also the name of the extra of hvdcomp that installs the library.
    """
    library = (error.name or extra).partition(".")[0]
    return ModuleNotFoundError(
        f"hvdcomp.{extra} needs {library}, which is not installed: pip install 'hvdcomp[{extra}]'", name=error.name
    )


def refuse_batch_sizes(compression: UsedCompression, trainer: str) -> None:
    """Raises ConfigurationError if a policy changes the batch size. The trainer of this name does not support this."""
    policy = compression.settings.policy
    if changes_batch_size(policy):
        raise ConfigurationError(
            f"the policy {policy} changes the batch size, but {trainer} decides by itself how it accumulates "
            "gradients. Use a policy that changes levels, such as accordion, or write a training loop of your own that "
            "reads compression.accumulation"
        )


def save(compression: UsedCompression, file: Path) -> None:
    """Saves the state of this rank. The file is always complete, even if the rank is killed while it saves."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.new")
    torch.save(compression.state_dict(), unfinished)
    unfinished.replace(file)


def read(file: Path) -> dict[str, Any] | None:
    """The state that `save` wrote; None if there is no such file."""
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None


def warn_of_no_state(checkpoint: object, rank: int) -> None:
    """Warns on rank 0 that a checkpoint has no state of the compression."""
    if rank == 0:
        warn_alone(
            f"the checkpoint {str(checkpoint)!r} has no state of hvdcomp: either the training that saved it did not "
            "compress, or files are missing. The residuals (the parts of gradients that were not sent yet) start at "
            "zero"
        )


def restore(
    compression: UsedCompression,
    read_state: Callable[[int], dict[str, Any] | None],
    rank: int,
    ranks: int,
    checkpoint: object,
) -> None:
    """Restores the state of this rank before the first step. Call this function on every rank.

    If the number of ranks has changed, the residuals of all old ranks are divided among the new ranks, as in
    `hvdcomp.state_for`. If no rank has a file, for example because the checkpoint comes from a training run without
    compression, residuals start at zero, and a warning is issued.

    Args:
        compression: the `Compression` whose state is restored.
        read_state: function that returns the saved state of a rank, or None if there is no such state.
        rank, ranks: number of this rank, and number of ranks.
        checkpoint: the path of the checkpoint, used in messages.

    Raises:
        ConfigurationError: if the states of some ranks are missing, or for one of the reasons given in
            `Compression.load_state_dict`.
    """
    own = read_state(rank)
    known = read_state(0) if own is None else own
    if known is None:
        warn_of_no_state(checkpoint, rank)
    if not known:  # there is no state, or only the state of a training run that has made no step
        return
    size = parts_of(known)[1]["size"]

    def needed() -> Iterator[dict[str, Any]]:
        for old in range(rank, size, ranks) or [0]:
            state = own if old == rank else read_state(old)
            if state is None:
                raise ConfigurationError(
                    f"the checkpoint {str(checkpoint)!r} was saved by {size} ranks. Rank {rank} of {ranks} needs the "
                    f"file of rank {old}, which is missing: copy the checkpoint files of all hosts to this folder, or "
                    "resume from another checkpoint"
                )
            yield state

    compression.load_state_dict(state_for(needed(), rank, ranks))
