"""`hvdcomp doctor` where ranks of torch.distributed were started: a process group really starts, or it says why not."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands import doctor
from hvdcomp.tools.doctor.facts import Facts, Started
from hvdcomp.tools.doctor.gather import start_ranks
from tests.launched import run_ranks
from tests.tools.doctor.test_doctor import NO_HOROVOD, TORCHRUN, changed


def test_nothing_is_started_where_its_ranks_would_only_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(facts: Facts) -> Started:
        started.append(facts)
        return Started(size=4, rank=0)

    monkeypatch.setattr(doctor, "start_ranks", start)
    for variables, status in (({**TORCHRUN, "RANK": "4"}, 1), ({**TORCHRUN, "RANK": "0"}, 0)):
        assert not started
        facts = changed(**NO_HOROVOD, variables=variables)
        monkeypatch.setattr(doctor, "gather", lambda facts=facts: facts)
        done = CliRunner().invoke(doctor.command, [])
        assert done.exit_code == status, done.output
    assert len(started) == 1
    assert re.search(r"^init_process_group\(\) +rank 0 of 4", done.stdout, re.MULTILINE)


# Says how a process group was started by the variables of this process, and how large it is.
_STARTS = """
import os, sys
from hvdcomp.tools.doctor.gather import VARIABLES, start_ranks
from hvdcomp.tools.doctor.facts import Facts, Torch
variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
started = start_ranks(Facts("", "", torch=Torch("", backends=("gloo",)), variables=variables))
os.write(1, f"\\nstarted {started}\\n".encode())
"""


@pytest.mark.alone
@pytest.mark.thorough
def test_ranks_of_torchrun_start_a_process_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(_STARTS)
    done = run_ranks(2, "torchrun", [str(tmp_path / "program.py")], timeout=150)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("started "))
    assert said == [f"started {Started(size=2, rank=rank)}" for rank in (0, 1)], done.stdout


def test_a_process_group_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        started = start_ranks(changed(variables=place))
    assert started is not None
    assert "address already in use" in (started.error or "")


@pytest.mark.thorough
def test_what_torch_distributed_has_and_is_told_is_looked_at() -> None:
    distributed = pytest.importorskip("torch.distributed")
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "GLOO_SOCKET_IFNAME": "none-such"}
    done = subprocess.run(
        [sys.executable, "-m", "hvdcomp", "doctor", "--json"],
        env=os.environ | told, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    facts = report["facts"]
    assert ("gloo" in facts["torch"]["backends"]) is distributed.is_gloo_available()
    assert ("nccl" in facts["torch"]["backends"]) is distributed.is_nccl_available()
    assert sorted(facts["interfaces"]) == sorted(os.listdir("/sys/class/net"))
    assert facts["started"] is None
    assert facts["variables"].items() >= told.items()
    wrong = " ".join(problem["what"] for problem in report["problems"] if problem["stops"])
    assert "MASTER_ADDR=nowhere.invalid does not resolve on this host" in wrong
    assert "not set: MASTER_PORT." in wrong
    assert "no network interface none-such" in wrong
