"""The common code of the callbacks and strategies for trainers: it saves the state of each rank in a trainer's
checkpoint.

A trainer saves the common state of all ranks on one rank. Residuals differ between ranks, so each rank writes its own
state to its own file, in the checkpoint's folder or beside the checkpoint.
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
    """The error to raise if a library is not installed that a module of hvdcomp needs.

    Args:
        error: the error of the import.
        extra: the name of the module, and of hvdcomp's extra that installs the library.
    """
    library = (error.name or extra).partition(".")[0]
    return ModuleNotFoundError(
        f"hvdcomp.{extra} needs {library}, which is not installed: pip install 'hvdcomp[{extra}]'", name=error.name
    )


def refuse_batch_sizes(compression: UsedCompression, trainer: str) -> None:
    """Raises ConfigurationError if a policy changes the batch size, which the trainer of this name cannot follow."""
    policy = compression.settings.policy
    if changes_batch_size(policy):
        raise ConfigurationError(
            f"the policy {policy} changes the batch size, but {trainer} decides by itself how it accumulates "
            "gradients; use a policy that changes levels, such as accordion, or write a training loop that reads "
            "compression.accumulation"
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


def restore(
    compression: UsedCompression,
    read_state: Callable[[int], dict[str, Any] | None],
    rank: int,
    ranks: int,
    checkpoint: object,
) -> None:
    """Restores the state of this rank before the first step. Call it on every rank.

    If the number of ranks has changed, the new ranks share the residuals of all old ranks, as in `hvdcomp.state_for`.
    If no rank has a file, as after a training without compression, residuals start at zero, with a warning.

    Args:
        compression: the compression.
        read_state: function that returns the saved state of a rank; None if there is none.
        rank, ranks: this rank, and the number of ranks.
        checkpoint: path of the checkpoint, for messages.

    Raises:
        ConfigurationError: if the states of some ranks are missing; and as in `Compression.load_state_dict`.
    """
    own = read_state(rank)
    known = read_state(0) if own is None else own
    if known is None and rank == 0:
        warn_alone(
            f"the checkpoint {str(checkpoint)!r} has no state of hvdcomp: either the training that saved it did not "
            "compress, or files are missing. The residuals (the parts of gradients that were not sent yet) start at "
            "zero"
        )
    if not known:  # no state, or that of a training without a step
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
