"""What a rank of torch.distributed starts with: `python3 -m hvdcomp.tools.launch.torch_rank PROGRAM [ARGUMENT]...`.

srun or mpirun starts the ranks, and this says the same with torchrun's variables and becomes the program. There is no
agent as with torchrun: signals go straight to the ranks, and their exit codes come back. torchrun's is 1 for any of
them, and the code of a saved run would be lost.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.promise import EXPECTED_SIZE, check_size
from hvdcomp.tools.launch.rank import become

PROGRAM = ("python3", "-m", "hvdcomp.tools.launch.torch_rank")

OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""The variables that are set here, whatever they were. Where rank 0 is found (MASTER_ADDR, MASTER_PORT) and the job's
name (TORCHELASTIC_RUN_ID) are the same on all ranks: who starts them says it."""

DEFAULT_PORT = "29500"
"""PyTorch's own."""

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for a rank that mpirun or srun started.

    Programs ask TORCHELASTIC_RUN_ID whether torchrun started them; it is set, as what they then count on holds.

    Arguments:
        environment: of the rank. mpirun's variables count before srun's, which started mpirun's daemons under Slurm.

    Raises:
        ConfigurationError: neither of them started this process, or another number of ranks than was asked for, or
            nothing says where rank 0 is.
    """
    if _OPEN_MPI[0] in environment:
        rank, size, local_rank, local_size = _numbers(environment, _OPEN_MPI)
        # Open MPI does not number hosts. Ranks fill one host after the other, unless mpirun was told otherwise.
        host = rank // local_size
    elif _SLURM[0] in environment:
        rank, size, local_rank, host = _numbers(environment, _SLURM)
        local_size = _tasks_of(host, environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    else:
        raise ConfigurationError(
            f"neither mpirun nor srun started this process: it has neither {_OPEN_MPI[0]} nor {_SLURM[0]}; start the "
            "program with torchrun instead"
        )
    check_size(size, {EXPECTED_SIZE: environment.get(EXPECTED_SIZE, "")})
    master = environment.get("MASTER_ADDR") or ("localhost" if size == local_size else "")
    if not master:
        raise ConfigurationError("MASTER_ADDR is not set, and the ranks are on several hosts: set it to that of rank 0")
    return {
        **dict(zip(OWN, map(str, (rank, size, local_rank, local_size, host)), strict=True)),
        "MASTER_ADDR": master,
        "MASTER_PORT": environment.get("MASTER_PORT") or DEFAULT_PORT,
        "TORCHELASTIC_RUN_ID": environment.get("TORCHELASTIC_RUN_ID") or "none",
    }


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    wrong = next((name for name in names if not environment.get(name, "").isdecimal()), None)
    if wrong is not None:
        raise ConfigurationError(f"{wrong}={environment.get(wrong)!r} is not a number, which mpirun and srun set it to")
    return [int(environment[name]) for name in names]


def _tasks_of(node: int, text: str) -> int:
    """The tasks of a node in Slurm's list for all, in which "2(x3),1" is three nodes of two and one of one."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += int(times or 1) * [int(count)]
    if node >= len(counts):
        raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many ranks node {node} has")
    return counts[node]


def _chosen() -> list[str]:
    if len(sys.argv) < 2:
        raise ConfigurationError(f"name the program to run: {' '.join(PROGRAM)} PROGRAM [ARGUMENT]...")
    os.environ.update(torch_variables(os.environ))
    return sys.argv[1:]


if __name__ == "__main__":
    become(_chosen)
