"""Ranks of torch.distributed that mpirun or srun starts: torchrun's variables, and real ranks that find each other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.promise import EXIT_SAVED, EXPECTED_SIZE
from hvdcomp.tools.launch.rank import to_variable
from hvdcomp.tools.launch.torch_rank import OWN, torch_variables
from tests.launched import run_ranks
from tests.ports import free_ports

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)",
}
AT = {"MASTER_ADDR": "first"}

# Adds up ones over the ranks, says what it found, and ends as a run that was saved; not by way of the interpreter's
# end, where PyTorch now and then ends a rank of Gloo by SIGABRT.
ADDS_UP = f"""
import os
import torch
import torch.distributed as dist
from hvdcomp.tools.launch.promise import check_size

dist.init_process_group("gloo")
check_size(dist.get_world_size())
ranks = torch.ones(1)
dist.all_reduce(ranks)
names = {(*OWN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")}
said = {{"ranks": int(ranks), **{{name: os.environ[name] for name in names}}}}
os.write(1, f"\\nfound {{said}}\\n".encode())
dist.barrier()
os._exit({EXIT_SAVED})
"""

# Makes steps until any rank is warned, saves, and says so by its exit code. Started again, it looks at what was saved.
# What a rank says is one write, and a line of its own: ranks share the output.
UNTIL_WARNED = f"""
import os, pathlib, signal
import torch
import torch.distributed as dist

warned = []
signal.signal(signal.SIGUSR1, lambda *_: warned.append(1))
dist.init_process_group("gloo")
checkpoint = pathlib.Path(f"saved-{{dist.get_rank()}}")
if checkpoint.exists():
    saved = [torch.tensor(0) for _ in range(dist.get_world_size())]
    dist.all_gather(saved, torch.tensor(int(checkpoint.read_text())))
    said = " ".join(str(int(step)) for step in saved)
    os.write(1, f"\\ngoes on after {{said}}\\n".encode())
    dist.barrier()
    os._exit(0)
os.write(1, b"\\ntrains\\n")
step, stop = 0, torch.tensor(0)
while not stop:
    step, stop = step + 1, torch.tensor(len(warned))
    dist.all_reduce(stop)
checkpoint.write_text(str(step))
dist.barrier()
os._exit({EXIT_SAVED})
"""


def found(output: str) -> list[dict[str, str]]:
    """What ADDS_UP said, of each rank in turn."""
    lines = [line.removeprefix("found ") for line in output.splitlines() if line.startswith("found ")]
    return sorted(map(ast.literal_eval, lines), key=lambda one: one["RANK"])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI | AT, ("5", "8", "1", "4", "1", "first", "29500", "none")),
        (SLURM | AT, ("6", "8", "0", "1", "3", "first", "29500", "none")),
        (
            SLURM | {"SLURM_NODEID": "2"} | AT | {"MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "job"},
            ("6", "8", "0", "2", "2", "first", "7", "job"),
        ),
        # Under Slurm, mpirun starts its daemons by srun: these are the daemon's.
        (SLURM | OPEN_MPI | AT, ("5", "8", "1", "4", "1", "first", "29500", "none")),
        # What is left of a launcher outside does not count.
        (OPEN_MPI | AT | {"RANK": "0", "WORLD_SIZE": "1"}, ("5", "8", "1", "4", "1", "first", "29500", "none")),
        # On one host everybody knows where rank 0 is.
        (
            {name: "1" if "RANK" in name else "2" for name in OPEN_MPI},
            ("1", "2", "1", "2", "0", "localhost", "29500", "none"),
        ),
    ],
)
def test_a_rank_gets_the_variables_of_torchrun(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    names = (*OWN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    assert torch_variables(environment) == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "neither mpirun nor srun started this process"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "neither mpirun nor srun started this"),  # the batch script
        (OPEN_MPI, "MASTER_ADDR is not set, but the ranks are on several hosts"),
        (SLURM, "MASTER_ADDR is not set, but the ranks are on several hosts"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK='x' is not a number"),
        ({"SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS=None is not a number"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE='2(x3)' has no number of ranks"),
        (OPEN_MPI | AT | {EXPECTED_SIZE: "16"}, "HVDCOMP_EXPECTED_SIZE=16, but the training found 8 ranks"),
    ],
)
def test_a_rank_that_cannot_know_its_place_says_why(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        torch_variables(environment)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("words", "variables", "status", "said"),
    [
        (["true"], {}, 125, "hvdcomp: neither mpirun nor srun"),
        ([], OPEN_MPI | AT, 125, "hvdcomp: name the program to run"),
        (["no-such-program-here"], OPEN_MPI | AT, 127, "no-such-program-here cannot be run: No such file"),
    ],
)
def test_a_rank_that_cannot_start_says_why(words: list[str], variables: dict[str, str], status: int, said: str) -> None:
    launchers = ("OMPI_COMM_WORLD_", "SLURM_", "HVDCOMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    done = subprocess.run(
        [sys.executable, "-m", "hvdcomp.tools.launch.torch_rank", *words],
        env=kept | variables, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (status, True, False), done.stderr


@pytest.mark.alone
def test_ranks_of_mpirun_find_each_other_and_their_exit_code_comes_back(tmp_path: Path) -> None:
    """As in a pod: the program comes in a variable, and rank 0's host is named."""
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(ADDS_UP)
    job = Job("x", (sys.executable, str(tmp_path / "program.py")), 2, backend="torch")
    variables = {
        "HVDCOMP_COMMAND": to_variable(job.program),
        EXPECTED_SIZE: "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(*free_ports(1)),
        "TORCHELASTIC_RUN_ID": "x",
    }
    done = run_ranks(2, "mpi", ["-m", "hvdcomp.tools.launch.rank"], variables, timeout=120)
    place = {"ranks": 2, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    same = {name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, **place, **same} for rank in ("0", "1")]
    assert (done.returncode, found(done.stdout)) == (EXIT_SAVED, ranks), done.stdout
