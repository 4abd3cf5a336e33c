"""What can be told of a run before its framework is imported and its ranks are connected, which takes long.

What does not depend on the rank is refused on each of them. Files are looked at on rank 0, which uses them, and only
where the others do not wait for it in vain; elsewhere the ranks hear of it together, when they are connected.
"""

from __future__ import annotations

import os
import time

from hvdcomp.communicators import connected_rank, rank_so_far
from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.train import environment, outputs
from hvdcomp.tools.train.options import TrainingOptions

_ELASTIC = "HOROVOD_ELASTIC"
_END_ALL = ("HOROVOD_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK")  # of horovodrun, torchrun and mpirun
_STEPS = 2**31 - 1  # of an epoch, whose number is not known yet: more than any policy asks for
_SECONDS = 10.0  # in which rank 0 starts too


def check(options: TrainingOptions) -> None:
    """Checks the options, the specs among them, and on rank 0 the output and the policy's calibration.

    Ranks that are connected already hear of it together, which takes no longer then.

    Raises:
        SetupError, SpecError, ConfigurationError: say what is wrong.
    """
    if connected_rank() is not None:
        return
    chosen = options.resolved()
    files = uses_files()
    if files and chosen.output is not None:
        overwrite = chosen.overwrite or chosen.checkpoint_folder is not None or environment.restarts() > 0
        outputs.check_output(chosen.output, overwrite)
    try:
        Compression.from_spec(**chosen.of_compression(), steps_per_epoch=_STEPS)
    except ConfigurationError:
        if files:
            raise


def uses_files() -> bool:
    """Whether this is rank 0, and the other ranks, if there are any, are ended by the launcher when it ends."""
    ended = any(name in os.environ for name in _END_ALL) and _ELASTIC not in os.environ
    return rank_so_far() == 0 and (ended or not environment.launched())


def let_rank_0_speak() -> None:
    """To be called before a rank says what all of them have found, and ends: it is to be said once.

    A launcher ends all ranks with the first that ends. So the others give rank 0 some seconds. The launcher then ends
    them; if it does not, they speak too. Elastic Horovod ends none, and waits for all.
    """
    if rank_so_far() == 0:
        return
    if _ELASTIC in os.environ:
        raise SystemExit(2)
    time.sleep(_SECONDS)
