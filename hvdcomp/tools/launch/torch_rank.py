"""Starts a rank of torch.distributed: `python3 -m hvdcomp.tools.launch.torch_rank PROGRAM [ARGUMENT]...`.

srun or mpirun starts the ranks. From the variables of srun or mpirun, this program sets the variables that torchrun
would set, and then replaces itself with PROGRAM. Unlike with torchrun, there is no agent process. Ranks therefore
receive signals directly, and srun or mpirun gets the exit codes of the ranks. The exit code of a run that has saved a
checkpoint is preserved, whereas torchrun would return 1.
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
"""The variables that are set here for each rank. The launcher sets the variables that all ranks share: the address of
rank 0 (MASTER_ADDR, MASTER_PORT) and the job's name (TORCHELASTIC_RUN_ID)."""

DEFAULT_PORT = "29500"
"""PyTorch's default port."""

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a rank that mpirun or srun started.

    TORCHELASTIC_RUN_ID is also set. Programs recognize torchrun by this variable, and may then rely on torchrun's other
    variables, which are set here, too.

    Args:
        environment: environment of the rank. mpirun's variables take precedence over srun's, because under Slurm srun's
            variables belong to mpirun's daemons.

    Raises:
        ConfigurationError: if neither mpirun nor srun started this process, if the number of ranks is wrong, or if the
            address of rank 0 is unknown.
    """
    if _OPEN_MPI[0] in environment:
        rank, size, local_rank, local_size = _numbers(environment, _OPEN_MPI)
        # Open MPI does not number hosts. By default, ranks fill one host after the other.
        host = rank // local_size
    elif _SLURM[0] in environment:
        rank, size, local_rank, host = _numbers(environment, _SLURM)
        local_size = _tasks_of(host, environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    else:
        raise ConfigurationError(
            f"neither mpirun nor srun started this process, because its environment has neither {_OPEN_MPI[0]} nor "
            f"{_SLURM[0]}; start the program with torchrun instead"
        )
    check_size(size, {EXPECTED_SIZE: environment.get(EXPECTED_SIZE, "")})
    master = environment.get("MASTER_ADDR") or ("localhost" if size == local_size else "")
    if not master:
        raise ConfigurationError(
            "MASTER_ADDR is not set, but the ranks are on several hosts: set MASTER_ADDR to the host of rank 0"
        )
    return {
        **dict(zip(OWN, map(str, (rank, size, local_rank, local_size, host)), strict=True)),
        "MASTER_ADDR": master,
        "MASTER_PORT": environment.get("MASTER_PORT") or DEFAULT_PORT,
        "TORCHELASTIC_RUN_ID": environment.get("TORCHELASTIC_RUN_ID") or "none",
    }


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    wrong = next((name for name in names if not environment.get(name, "").isdecimal()), None)
    if wrong is not None:
        raise ConfigurationError(f"{wrong}={environment.get(wrong)!r} is not a number: mpirun or srun must set it")
    return [int(environment[name]) for name in names]


def _tasks_of(node: int, text: str) -> int:
    """The number of tasks of a node, from Slurm's list. For example, "2(x3),1" means three nodes with two tasks each,
    and a node with one task."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += int(times or 1) * [int(count)]
    if node >= len(counts):
        raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text!r} has no number of ranks for node {node}")
    return counts[node]


def _chosen() -> list[str]:
    if len(sys.argv) < 2:
        raise ConfigurationError(f"name the program to run: {' '.join(PROGRAM)} PROGRAM [ARGUMENT]...")
    os.environ.update(torch_variables(os.environ))
    return sys.argv[1:]


if __name__ == "__main__":
    become(_chosen)
