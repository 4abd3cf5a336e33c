"""What goes on when the ranks of a training change while it runs, as in elastic Horovod.

After every change all ranks meet here, in their first step: those that survived and those that are new. What all ranks
have in common (step, levels, policy, warm starts) comes from rank 0, whose weights Horovod has given to all. Residuals
stay with the ranks that hold them. What they held back counts in the mean as before: with M ranks instead of N, a
residual is multiplied by M/N. What a lost rank held is lost, and said.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.adaptation.channel import CommunicatorBroadcaster, MessageChannel
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.bindings.setup import require_compression
from hvdcomp.bindings.world import renumbered
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import gather_rows

_AT_ONCE = 1 << 16  # bytes of rank 0's state that need no second broadcast
_NOBODY = -1


class Survivor(NamedTuple):
    """What a rank tells the others after a change.

    Attributes:
        rank, ranks: its number before the change, and how many ranks there were; -1 and 0 if it is new.
        energy: the sum of squares of all that it holds back.
    """

    rank: int
    ranks: int
    energy: float


NEW = Survivor(_NOBODY, 0, 0.0)


def may_change() -> bool:
    """Whether the ranks of this job may change while it runs: Horovod's launcher says it in the environment."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def survivor(state: Mapping[str, Any]) -> Survivor:
    """What a rank that survived tells, given its state before the change."""
    own = state["own"]
    residuals = [kept["arrays"][-1] for kept in own["residuals"].values()]  # the residual is the last of a memory's
    norms = [float(arrays_for(residual).norms([residual])[0]) for residual in residuals]
    return Survivor(own["rank"], own["size"], math.fsum(norm * norm for norm in norms))


def meet(
    communicator: Ranks,
    like: Array,
    state: Mapping[str, Any],
    carried: bool,
    pack: Callable[[Mapping[str, Any]], bytes],
    unpack: Callable[[bytes], dict[str, Any]],
) -> dict[str, Any]:
    """What this rank goes on from; waits for all ranks.

    Args:
        communicator: of the ranks that there are now.
        like: an array of the framework and place that it works on.
        state: of this rank, as of `checkpoint.state_of`.
        carried: whether the state is from before a change; else this rank is new, or the job has just begun.
        pack, unpack: make bytes of what the ranks have in common, and the other way.

    Returns:
        A state for `checkpoint.restore` on this rank.
    """
    rank, ranks = communicator.rank, communicator.world_size
    everyone = _gather(communicator, like, survivor(state) if carried else NEW)
    own = renumbered(state["own"], rank, ranks) if carried else dict(state["own"])
    shared = dict(state["shared"])
    if carried and rank == 0 and own["coordinator"] is None and shared["coordinator"] is not None:
        shared["coordinator"] = {**shared["coordinator"], "ended": None, "partial": True}
    message = pack({"shared": shared, "held": _described(own["residuals"])}) if rank == 0 else b""
    common = unpack(_from_rank_0(communicator, like, message))
    residuals = own["residuals"]
    if carried and everyone[0] == NEW:  # the weights are those of rank 0, to which these residuals do not belong
        residuals = {}
    # Zeros, and not nothing: whether there are residuals decides how a step exchanges, the same on all ranks.
    own["residuals"] = {name: residuals.get(name) or _zeros(kept, like) for name, kept in common["held"].items()}
    if rank == 0 and (said := _said(everyone)):
        warnings.warn(said, stacklevel=2)
    return {"shared": common["shared"], "own": own}


def _described(residuals: Mapping[str, Any]) -> dict[str, Any]:
    """Of residuals, as a state holds them, all but the values."""
    return {
        name: {
            "memory": kept["memory"],
            "arrays": [(list(array.shape), arrays_for(array).dtype_name(array)) for array in kept["arrays"]],
        }
        for name, kept in residuals.items()
    }


def _zeros(described: Mapping[str, Any], like: Array) -> dict[str, Any]:
    """Residuals of nothing, in the framework of `like`."""
    xp = arrays_for(like)
    arrays = [xp.astype(xp.zeros(tuple(shape), like=like), dtype) for shape, dtype in described["arrays"]]
    return {"memory": described["memory"], "arrays": arrays}


def _gather(communicator: Ranks, like: Array, own: Survivor) -> list[Survivor]:
    rows = gather_rows(communicator, np.array(own, np.float64).tobytes(), like, "hvdcomp.survivors")
    survivors = (np.frombuffer(row, np.float64).tolist() for row in rows)
    return [Survivor(int(rank), int(ranks), energy) for rank, ranks, energy in survivors]


def _from_rank_0(communicator: Ranks, like: Array, message: bytes) -> bytes:
    messages = MessageChannel(lambda: CommunicatorBroadcaster(communicator, like), _AT_ONCE)
    messages.start(message)
    return messages.finish()


def _said(everyone: Sequence[Survivor]) -> str:
    """What rank 0 says of a change; "" if nothing was lost."""
    survivors = [survivor for survivor in everyone if survivor != NEW]
    if not survivors:
        return ""
    before = survivors[0].ranks
    kept = {survivor.rank for survivor in survivors}
    lost = [rank for rank in range(before) if rank not in kept]
    if everyone[0] == NEW:
        return (
            f"rank 0 is new, and the weights of all {len(everyone)} ranks are its own: what the {len(survivors)} ranks "
            "that went on had left to be sent (residuals) is lost with theirs"
        )
    if not lost:
        return ""
    norm = math.sqrt(math.fsum(survivor.energy for survivor in survivors) / len(survivors))
    return (
        f"{len(lost)} of {before} ranks are gone ({', '.join(map(str, lost))}), and with them what they had left to be "
        f"sent: about {len(lost) / before:.0%} of all that was held back. A rank that went on holds residuals of norm "
        f"{norm:.3g} (root mean square)."
    )


def track(state: Any, compression: Any) -> Any:
    """Lets an elastic state of Horovod commit, restore and synchronise a `hvdcomp.Compression` with all else.

        state = hvdcomp.track(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0), compression)

    PyTorch's `hvd.elastic.TorchState(..., compression=compression)` needs it not.

    Args:
        state: any of Horovod's, of this training.
        compression: of the same training.

    Returns:
        The state.

    Raises:
        ConfigurationError: if either is something else.
    """
    require_compression(compression, "hvdcomp.track")
    missing = [name for name in ("save", "restore", "sync") if not callable(getattr(state, name, None))]
    if missing:
        raise ConfigurationError(
            f"hvdcomp.track was given {state!r}, which has no {missing[0]}(); give it an elastic state of Horovod, "
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
