"""The ranks of a run with Horovod."""

from __future__ import annotations

import importlib
from typing import Any

from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.train import environment
from hvdcomp.tools.train.ranks import Ranks


class Changes(State):
    """Receives Horovod's notices about changes of the ranks. The state of training is in the checkpoint, not in this
    object.

    Args:
        hvd: Horovod's module for the framework.

    Attributes:
        due: whether Horovod has announced another change since the last change.
        met: the number of changes so far.
    """

    def __init__(self, hvd: Any) -> None:
        super().__init__(hvd.broadcast_object, hvd.rank)
        self.due = False
        self.met = 0

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        super().on_hosts_updated(timestamp, update_res)
        self.due = True

    def reset(self) -> None:
        self.due = False
        self.met += 1

    def save(self) -> None:
        """Does nothing, because `Checkpoints` saves the state."""

    restore = sync = save


class HorovodRanks(Ranks):
    """All ranks, connected by Horovod for a framework. Horovod is initialized if necessary.

    Args:
        framework: name of the framework: "torch" or "tensorflow".
        changes: the object that receives Horovod's notices of changes in an elastic job; None in other jobs.

    Raises:
        ImportError: if Horovod was not built for this framework.
    """

    backend = "horovod"

    def __init__(self, framework: str, changes: Changes | None = None) -> None:
        self._hvd = importlib.import_module(f"horovod.{framework}")
        if not self._hvd.is_initialized():
            self._hvd.init()
        self.rank = self._hvd.rank()
        self.size = self._hvd.size()
        self.local_rank = self._hvd.local_rank()
        self.local_size = self._hvd.local_size()
        self.controller = environment.controller(self._hvd)
        self._changes = changes
        if changes is not None:
            self.elastic, self.restarts = True, changes.met

    @property
    def changed(self) -> bool:
        return self._changes is not None and self._changes.due

    def meet_anew(self, without_me: bool) -> None:
        if without_me:
            raise SystemExit(EXIT_SAVED)
        # Nothing needs to be synchronized, because the checkpoint contains all state.
        raise HostsUpdatedInterrupt(skip_sync=True)

    def gather(self, value: Any, name: str) -> list[Any]:
        # Horovod's default name would depend on the type of the value.
        return self._hvd.allgather_object(value, name=f"hvdcomp.train.{name}")

    def broadcast(self, value: Any, name: str) -> Any:
        return self._hvd.broadcast_object(value, name=f"hvdcomp.train.{name}")
