"""Checks a run before its framework is imported and its ranks are connected, because both take long.

An error that does not depend on the rank is raised on each rank. Only rank 0 uses files. Rank 0 checks its files here
only if the launcher ends the other ranks after an error. Otherwise, the files are checked after the ranks are
connected.
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
# Variables of horovodrun, torchrun and mpirun. These launchers end all ranks when one rank fails.
_END_ALL = ("HOROVOD_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK")
# The number of steps of an epoch is still unknown. This number is larger than any number of steps that a policy needs.
_STEPS = 2**31 - 1
_SECONDS = 10.0  # how long other ranks wait for rank 0 to start


def check(options: TrainingOptions) -> None:
    """Checks the options with their specs, and on rank 0 the output and the policy's calibration.

    Does nothing if the ranks are already connected, because they then check everything together.

    Raises:
        SetupError, SpecError, ConfigurationError: if an option, a spec or a file is wrong.
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
    """Whether this rank checks files here. Only rank 0 does so, and only if it is the only rank, or if the launcher
    ends the other ranks when rank 0 ends."""
    ended_by_launcher = any(name in os.environ for name in _END_ALL) and _ELASTIC not in os.environ
    return rank_so_far() == 0 and (ended_by_launcher or not environment.launched())


def let_rank_0_speak() -> None:
    """Makes sure that only rank 0 prints an error that all ranks have found. Call this before the error is raised.

    Most launchers end all ranks when the first rank ends. The other ranks therefore wait some seconds until rank 0
    ends. If the launcher does not end them, they also print the error. Elastic Horovod does not end ranks; it waits for
    all of them.
    """
    if rank_so_far() == 0:
        return
    if _ELASTIC in os.environ:
        raise SystemExit(2)
    time.sleep(_SECONDS)
