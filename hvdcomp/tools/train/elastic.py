"""Trains with a changing number of ranks, with elastic Horovod.

After a change, every rank sets up the run again, and resumes from the newest checkpoint, like a run that is resumed
with a different number of ranks. If a change is announced, the ranks save before the change, so nothing is lost. After
a failure, the ranks repeat the steps since the last checkpoint.
"""

from __future__ import annotations

import importlib
from typing import Any

from hvdcomp.tools.train.checkpoints import Warnings
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.ranks_horovod import Changes, HorovodRanks
from hvdcomp.tools.train.trainer import train


def train_elastic(options: TrainingOptions) -> tuple[dict[str, Any], Ranks]:
    """Trains like `trainer.train`, but the number of ranks may change. Every rank must call this function, including
    ranks that join later.

    Returns:
        The summary, and the ranks at the end.
    """
    hvd = importlib.import_module(f"horovod.{options.framework}")
    elastic = importlib.import_module(f"horovod.{options.framework}.elastic")

    def go(changes: Changes) -> tuple[dict[str, Any], Ranks]:
        ranks = HorovodRanks(options.framework, changes)
        return train(options, ranks, warnings), ranks

    with Warnings() as warnings:  # signals are also recorded while the ranks connect again
        hvd.init()
        return elastic.run(go)(Changes(hvd))
