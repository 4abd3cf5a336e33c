"""Runs whose ranks come and go, in elastic Horovod.

The checkpoint is all that goes on. After a change every rank sets the run up anew, and goes on from the newest
checkpoint as a run with another number of ranks does. Before a change that is announced the ranks save, so that nothing
is lost; after a failure they make the steps since the last checkpoint again.
"""

from __future__ import annotations

import importlib
from typing import Any

from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.ranks_horovod import Changes, HorovodRanks
from hvdcomp.tools.train.trainer import train


def train_elastic(options: TrainingOptions) -> tuple[dict[str, Any], Ranks]:
    """As `trainer.train`, while ranks come and go. Every rank calls it, also one that comes later.

    Returns:
        The summary, and the ranks that there were in the end.
    """
    hvd = importlib.import_module(f"horovod.{options.framework}")
    elastic = importlib.import_module(f"horovod.{options.framework}.elastic")

    def go(changes: Changes) -> tuple[dict[str, Any], Ranks]:
        ranks = HorovodRanks(options.framework, changes)
        return train(options, ranks), ranks

    hvd.init()
    return elastic.run(go)(Changes(hvd))
