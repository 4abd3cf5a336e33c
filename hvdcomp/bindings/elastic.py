"""Handles changes of the ranks during a training run, as in elastic Horovod.

After every change, all ranks agree on a state in their next step. The shared state (step, levels, state of the policy,
warm starts) comes from rank 0, because Horovod has also broadcast the weights of rank 0. Each remaining rank keeps its
residuals. If the number of ranks changes from N to M, residuals are multiplied by M/N, so that their contribution to
the mean does not change. If a rank leaves, its residuals are lost, with a warning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.adaptation.channel import CommunicatorBroadcaster, MessageChannel
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray
from hvdcomp.bindings.setup import require_compression
from hvdcomp.bindings.world import renumbered
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.exchange.agreement import gather_rows

_AT_ONCE = 1 << 16  # a state of at most this number of bytes needs only one broadcast
_NOBODY = -1


class Survivor(NamedTuple):
    """The information that a rank sends to all ranks after a change of the ranks.

    Attributes:
        rank: number of this rank before the change; -1 if the rank is new.
        ranks: number of ranks before the change; 0 if the rank is new.
        energy: sum of the squares of all elements of the rank's residuals.
    """

    rank: int
    ranks: int
    energy: float


NEW = Survivor(_NOBODY, 0, 0.0)


def may_change() -> bool:
    """Whether ranks may join or leave during this job, according to the environment variables of Horovod's launcher."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def survivor(state: Mapping[str, Any]) -> Survivor:
    """The information that a remaining rank sends to all ranks after a change of the ranks. `state` is the state of
    this rank before the change."""
    own = state["own"]
    # The last array that a memory keeps is the residual.
    residuals = [kept["arrays"][-1] for kept in own["residuals"].values()]
    norms = [float(arrays_for(residual).norms([residual])[0]) for residual in residuals]
    return Survivor(own["rank"], own["size"], math.fsum(norm * norm for norm in norms))


def agree_on_state(
    communicator: Ranks,
    like: AnyArray,
    state: Mapping[str, Any],
    carried: bool,
    pack: Callable[[Mapping[str, Any]], bytes],
    unpack: Callable[[bytes], dict[str, Any]],
) -> dict[str, Any]:
    """Waits for all ranks, and returns the state from which this rank continues.

    Args:
        communicator: the communicator of the current ranks.
        like: an array with the framework and the device of the communicator's arrays.
        state: the state of this rank, as returned by `checkpoint.state_of`.
        carried: whether this rank has the state from before a change. If not, this rank is new, or the job has just
            begun.
        pack: function that converts a state to bytes.
        unpack: function that converts these bytes back to the state.

    Returns:
        A state for `checkpoint.restore` on this rank.
    """
    rank, ranks = communicator.rank, communicator.world_size
    survivors = _gather(communicator, like, survivor(state) if carried else NEW)
    own = renumbered(state["own"], rank, ranks) if carried else dict(state["own"])
    shared = dict(state["shared"])
    if carried and rank == 0 and own["coordinator"] is None and shared["coordinator"] is not None:
        shared["coordinator"] = {**shared["coordinator"], "ended": None, "partial": True}
    message = pack({"shared": shared, "held": _layout_of(own["residuals"])}) if rank == 0 else b""
    common = unpack(_from_rank_0(communicator, like, message))
    residuals = own["residuals"]
    if carried and survivors[0] == NEW:  # all ranks got new weights from rank 0, so these residuals no longer fit
        residuals = {}
    # A rank without residuals gets zeros: the exchange of a step depends on whether ranks have residuals, so either all
    # ranks or none must have them.
    own["residuals"] = {name: residuals.get(name) or _zeros(kept, like) for name, kept in common["held"].items()}
    if rank == 0 and (warning := _change_in_words(survivors)):
        warn_alone(warning)
    return {"shared": common["shared"], "own": own}


def _layout_of(residuals: Mapping[str, Any]) -> dict[str, Any]:
    """The memory, the shapes and the element types of the residuals in a state, by name of the tensor."""
    return {
        name: {
            "memory": kept["memory"],
            "arrays": [(list(array.shape), arrays_for(array).dtype_name(array)) for array in kept["arrays"]],
        }
        for name, kept in residuals.items()
    }


def _zeros(layout: Mapping[str, Any], like: AnyArray) -> dict[str, Any]:
    """Residuals that are all zero, with the memory, shapes and element types of `layout` and the framework of
    `like`."""
    xp = arrays_for(like)
    arrays = [xp.astype(xp.zeros(tuple(shape), like=like), dtype) for shape, dtype in layout["arrays"]]
    return {"memory": layout["memory"], "arrays": arrays}


def _gather(communicator: Ranks, like: AnyArray, own: Survivor) -> list[Survivor]:
    rows = gather_rows(communicator, np.array(own, np.float64).tobytes(), like, "hvdcomp.survivors")
    survivors = (np.frombuffer(row, np.float64).tolist() for row in rows)
    return [Survivor(int(rank), int(ranks), energy) for rank, ranks, energy in survivors]


def _from_rank_0(communicator: Ranks, like: AnyArray, message: bytes) -> bytes:
    messages = MessageChannel(lambda: CommunicatorBroadcaster(communicator, like), _AT_ONCE)
    messages.start(message)
    return messages.finish()


def _change_in_words(ranks: Sequence[Survivor]) -> str:
    """The text of rank 0's warning about residuals that a change of the ranks has lost; empty if no residuals were
    lost.
    """
    survivors = [old for old in ranks if old != NEW]
    if not survivors:
        return ""
    before = survivors[0].ranks
    kept = {old.rank for old in survivors}
    lost = [rank for rank in range(before) if rank not in kept]
    if ranks[0] == NEW:
        return (
            f"rank 0 is new, and all {len(ranks)} ranks now have the weights of rank 0, so the residuals of the "
            f"{len(survivors)} old ranks (the parts of gradients that these ranks had not sent yet) are lost"
        )
    if not lost:
        return ""
    norm = math.sqrt(math.fsum(old.energy for old in survivors) / len(survivors))
    return (
        f"{len(lost)} of {before} ranks are gone ({', '.join(map(str, lost))}), and their residuals are "
        f"lost. The lost residuals are about {len(lost) / before:.0%} of all gradients that were not sent yet. The "
        f"residuals of each remaining rank have a norm of {norm:.3g} (root mean square over the ranks)."
    )


def track(state: Any, compression: Any) -> Any:
    """Adds an `hvdcomp.Compression` to one of Horovod's elastic states, so that this state also commits, restores and
    synchronizes the `Compression`.

        state = hvdcomp.track(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0), compression)

    In PyTorch you do not need `track`: write `hvd.elastic.TorchState(..., compression=compression)`.

    Args:
        state: an elastic state of Horovod.
        compression: the `Compression` of the same training run.

    Returns:
        The elastic state `state`.

    Raises:
        ConfigurationError: if `state` is not an elastic state of Horovod, or `compression` is not a Compression.
    """
    require_compression(compression, "hvdcomp.track")
    missing = [name for name in ("save", "restore", "sync") if not callable(getattr(state, name, None))]
    if missing:
        raise ConfigurationError(
            f"hvdcomp.track was given {state!r}, which has no method {missing[0]}(); pass an elastic state of Horovod, "
            "such as hvd.elastic.TensorFlowKerasState(model, optimizer)"
        )
    saved = compression.state_dict()
    save, restore, sync = state.save, state.restore, state.sync

    def save_all() -> None:
        nonlocal saved
        saved = compression.state_dict()
        save()

    def restore_all() -> None:
        compression.roll_back(saved)
        restore()

    def sync_all() -> None:
        sync()
        compression.meet_ranks_early()

    state.save, state.restore, state.sync = save_all, restore_all, sync_all
    return state
