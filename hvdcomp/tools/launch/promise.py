"""The agreement between a launcher and a training program about the number of ranks and the exit code of a saved run.

A launcher may be incompatible with the library that connects the ranks: for example, torchrun does not work with
Horovod, and srun does not work with every MPI. Each of the N processes then trains alone, as the only rank, without any
warning. Therefore `hvdcomp launch` sets HVDCOMP_EXPECTED_SIZE to the number of ranks. Other launchers set their own
variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdcomp.errors import ConfigurationError

EXPECTED_SIZE = "HVDCOMP_EXPECTED_SIZE"

LAUNCHERS = ("HOROVOD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables of horovodrun (Gloo), torchrun, Open MPI's mpirun, and srun. One launcher may start another launcher, and
the variables of both are then set. Therefore the launcher that is started last comes first in this list. SLURM_NTASKS
is not in the list, because it is the size of the allocation, not of the step."""

EXIT_SAVED = 213
"""The exit code of a rank that was told to stop, saved a checkpoint and stopped. Programs must not use this code in any
other case.

A launcher may kill the last ranks while they end, and srun returns the largest code of all ranks. This code is
therefore larger than the codes of signals, which are 128 plus the signal's number.
"""

_WAYS_OUT = (
    "the launcher does not match the library that the training uses. Start Horovod with horovodrun, with the mpirun of "
    "the MPI that it was built for, or with srun --mpi=pmix. Start torch.distributed with torchrun, or with `hvdcomp "
    "launch` and --backend torch. `hvdcomp doctor` checks the installation"
)


def check_size(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that the number of ranks equals the number of processes that the launcher started.

    Call this function after `hvd.init()` with `hvd.size()`, or after `init_process_group()` with
    `dist.get_world_size()`.

    If HVDCOMP_EXPECTED_SIZE is set, the size must be equal to it. Otherwise, a variable of another launcher gives the
    number of processes. In this case, only a size of 1 is refused, because a program may train with only some of its
    processes.

    Raises:
        ConfigurationError: if the size differs. All ranks of the job see the same numbers, so all of them raise the
            error.
    """
    expected = environment.get(EXPECTED_SIZE, "")
    if expected:
        if not expected.isdecimal() or int(expected) < 1:
            raise ConfigurationError(
                f"{EXPECTED_SIZE}={expected!r} is not a number of ranks: set it to the number of ranks, or unset it"
            )
        if size != int(expected):
            raise ConfigurationError(_message(EXPECTED_SIZE, expected, size))
        return
    promised = next((name for name in LAUNCHERS if environment.get(name, "").isdecimal()), None)
    if promised is not None and size == 1 and int(environment[promised]) > 1:
        raise ConfigurationError(_message(promised, environment[promised], size))


def _message(variable: str, promised: str, size: int) -> str:
    return f"{variable}={promised}, but the training found {size} rank{'' if size == 1 else 's'}: {_WAYS_OUT}"
