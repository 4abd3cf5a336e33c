"""Runs whose ranks come and go, in elastic Horovod.

The checkpoint is all that goes on. After a change every rank sets the run up anew, and goes on from the newest
checkpoint as a run with another number of ranks does. Before a change that is announced the ranks save, so that nothing
is lost; after a failure they make the steps since the last checkpoint again.
"""

from __future__ import annotations

import importlib
from typing import Any

from horovod.common.elastic import State

from hvdcomp.train.options import TrainingOptions
from hvdcomp.train.ranks import Ranks
from hvdcomp.train.trainer import train


class Changes(State):
    """What Horovod tells of changes of the ranks. It keeps nothing: the checkpoint does.

    Args:
        hvd: Horovod's module for the framework.

    Attributes:
        due: whether this rank has heard of a change since the last one.
        met: how often the ranks have met anew.
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
        """Nothing: `Checkpoints` does."""

    restore = sync = save


def train_elastic(options: TrainingOptions) -> tuple[dict[str, Any], Ranks]:
    """As `trainer.train`, while ranks come and go. Every rank calls it, also one that comes later.

    Returns:
        The summary, and the ranks that there were in the end.
    """
    from hvdcomp.train.ranks_horovod import HorovodRanks

    hvd = importlib.import_module(f"horovod.{options.framework}")
    elastic = importlib.import_module(f"horovod.{options.framework}.elastic")

    def go(changes: Changes) -> tuple[dict[str, Any], Ranks]:
        ranks = HorovodRanks(options.framework, changes)
        return train(options, ranks), ranks

    hvd.init()
    return elastic.run(go)(Changes(hvd))
