"""Checks of a run before its framework is imported and its ranks are connected, which takes long.

Errors that do not depend on the rank are raised on each rank. Rank 0 checks the files, which only it uses, if the
launcher then ends the other ranks; otherwise the files are checked after the ranks are connected.
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
_STEPS = 2**31 - 1  # of an epoch, whose number is not known yet: more than any policy needs
_SECONDS = 10.0  # for rank 0 to start


def check(options: TrainingOptions) -> None:
    """Checks the options with their specs, and on rank 0 the output and the policy's calibration.

    Does nothing if the ranks are connected already, as they then check all of it together.

    Raises:
        SetupError, SpecError, ConfigurationError: an option, a spec or a file is wrong.
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
    """Whether this is rank 0, and its end ends the other ranks, if there are any."""
    ended_by_launcher = any(name in os.environ for name in _END_ALL) and _ELASTIC not in os.environ
    return rank_so_far() == 0 and (ended_by_launcher or not environment.launched())


def let_rank_0_speak() -> None:
    """Lets only rank 0 print an error that all ranks have found; call it before the error is raised.

    A launcher ends all ranks when the first rank ends, so the other ranks wait some seconds for rank 0. If the launcher
    does not end them, they print the error, too. Elastic Horovod ends no ranks, and waits for all.
    """
    if rank_so_far() == 0:
        return
    if _ELASTIC in os.environ:
        raise SystemExit(2)
    time.sleep(_SECONDS)
