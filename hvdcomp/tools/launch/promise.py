"""What a launcher and a training program agree on: the number of ranks, and the exit code of a run that was saved.

When a launcher and what the ranks exchange through do not understand each other, such as srun and an MPI, or torchrun
and Horovod, N processes each train alone as a world of size 1, and nothing else says so. `hvdcomp launch` tells the job
its size in HVDCOMP_EXPECTED_SIZE; other launchers set variables of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdcomp.errors import ConfigurationError

EXPECTED_SIZE = "HVDCOMP_EXPECTED_SIZE"

LAUNCHERS = ("HOROVOD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Set by horovodrun (Gloo), torchrun, Open MPI's mpirun, and srun. The inner launcher counts, and an outer one's stay
set; so SLURM_NTASKS is not asked, which is the size of the allocation and not of what runs in it."""

EXIT_SAVED = 213
"""The exit code of a rank that was told to stop, saved a checkpoint and stopped. No other end of a program gives it.

A launcher may kill the last ranks while they end, and srun returns the largest code of all ranks: this code is above
those of signals, which are 128 and the signal's number.
"""

_WAYS_OUT = (
    "the launcher and the training do not understand each other (start Horovod with horovodrun, with mpirun of the MPI "
    "it was built with, or with srun --mpi=pmix; torch.distributed with torchrun, or `hvdcomp launch` and --backend "
    "torch; `hvdcomp doctor` says what is installed)"
)


def check_size(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a world that is not what was asked for.

    Call it after `hvd.init()` with `hvd.size()`, or after `init_process_group()` with `dist.get_world_size()`.

    Where HVDCOMP_EXPECTED_SIZE is set, the size must be exactly that. Other launchers' variables are only held against
    N worlds of size 1, as a program may choose to train with some of its ranks.

    Raises:
        ConfigurationError: the size differs; all ranks of the job see the same numbers and raise it together.
    """
    expected = environment.get(EXPECTED_SIZE, "")
    if expected:
        if not expected.isdecimal() or int(expected) < 1:
            raise ConfigurationError(
                f"{EXPECTED_SIZE}={expected!r} is not a number of ranks: set it to one, or unset it"
            )
        if size != int(expected):
            raise ConfigurationError(_message(EXPECTED_SIZE, expected, size))
        return
    promised = next((name for name in LAUNCHERS if environment.get(name, "").isdecimal()), None)
    if promised is not None and size == 1 and int(environment[promised]) > 1:
        raise ConfigurationError(_message(promised, environment[promised], size))


def _message(variable: str, promised: str, size: int) -> str:
    return f"{variable}={promised}, but the training found {size} rank{'' if size == 1 else 's'}: {_WAYS_OUT}"
