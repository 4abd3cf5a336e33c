"""Forks with PyTorch imported are like processes of Python, for their launcher and for what they run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import forked

pytest.importorskip("torch")

pytestmark = pytest.mark.alone

_SAYS = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["MINE"], sys.stdin.read(), "torch" in sys.modules)
print("to the other stream", file=sys.stderr)
import atexit
atexit.register(print, "the end")
sys.exit(3)
"""
_WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(100)
"""


def _start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [forked.python(), *arguments], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_it_gets_all_that_a_process_gets_and_ends_with_its_code(way: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(_SAYS)
    words = {"-c": ["-u", "-c", _SAYS], "-m": ["-m", "says"], "file": [str(tmp_path / "says.py")]}[way]
    environment = {"PATH": os.environ["PATH"], "MINE": "my own"}
    command = [forked.python(), *words, "a", "b c"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, input="given", capture_output=True, text=True)
    assert done.stdout == f"__main__ ['a', 'b c'] {tmp_path} my own given True\nthe end\n", done.stderr
    assert done.stderr == "to the other stream\n"
    assert done.returncode == 3


def test_it_gets_signals_and_ends_by_them() -> None:
    with _start("-c", _WAITS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 5
    with _start("-c", "import os; os.kill(os.getpid(), 9)") as process:
        assert process.wait(60) == -signal.SIGKILL


def test_it_is_killed_with_the_program() -> None:
    with _start("-c", _WAITS) as process:
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        process.kill()
        fork.wait(60)
    assert not fork.is_running()


def test_ranks_0_and_1_have_hashes_of_their_own() -> None:
    found = [_start("-c", "print(hash('a name'))", RANK=str(rank)) for rank in (0, 1)]
    assert len({process.communicate()[0] for process in found}) == 2
