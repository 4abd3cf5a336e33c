"""A `python` for launchers of ranks, which has imported PyTorch before: each rank is a fork of such a process.

PyTorch, Dynamo, which every optimizer of PyTorch imports, and scikit-learn take four seconds of each rank's processor.
`python()` starts two interpreters, which import all of this once, and returns a program that a launcher can start like
`python ARGUMENTS`. This program asks one of the two interpreters for a fork. The fork gets the program's arguments,
environment, folder, input and output. The program passes signals on to the fork, and ends as the fork ends.

There are two interpreters because each has its own hashes of strings, as ranks have: if the order of a set decides what
a rank sends, ranks 0 and 1 differ.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
COUNT = 2

_FOLDERS = ExitStack()
atexit.register(_FOLDERS.close)
_SERVERS: list[subprocess.Popen[bytes]] = []  # each ends when its input does, at the latest when this process ends

# Without the modules of the environment, so that it starts at once.
_PROGRAM = f"""#!{sys.executable} -S
import json, os, signal, socket, sys

ranks = (os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"))
place = int(next((rank for rank in ranks if rank), 0)) % {COUNT}
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.path.join(os.path.dirname(__file__), str(place)))
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()])
socket.send_fds(connection, [b"1"], [0, 1, 2])
connection.sendall(asked.encode() + b"\\n")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
code = int(connection.recv(16) or -signal.SIGKILL)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def python() -> str:
    """The path of the program."""
    folder = Path(_FOLDERS.enter_context(TemporaryDirectory(prefix="hvdcomp-forks-")))
    program = folder / "python"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for place in range(COUNT):
        command = [sys.executable, "-m", "tests.forked", str(folder / str(place))]
        _SERVERS.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
    for server in _SERVERS:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
    return str(program)


def _serve(path: str) -> list[str]:
    """Waits for programs; returns in each fork, with its arguments."""
    for module in ("torch._dynamo", "hvdcomp.torch", "hvdcomp.tools.commands.train", "sklearn.datasets"):
        with suppress(ImportError):
            import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch a fork
    gc.freeze()
    print("ready", flush=True)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, files, *_ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb", buffering=0) as stream:  # what follows is for `_watch`
            arguments, environment, folder = json.loads(stream.readline())
        if fork := os.fork():
            _watch(connection, files, fork)
        connection.close()
        _become(files, environment, folder)
        return arguments


def _watch(connection: socket.socket, files: list[int], fork: int) -> None:
    """Passes signals on to a fork, and kills it if the program was killed; does not return."""
    for file in files:
        os.close(file)
    ended = os.pidfd_open(fork)
    while ended not in select.select([connection, ended], [], [])[0]:
        number = connection.recv(1)
        os.kill(fork, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(fork, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


def _become(files: list[int], environment: dict[str, str], folder: str) -> None:
    """Gives this fork input, output, environment and folder of the program."""
    import numpy as np

    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    np.random.seed()  # Python's own random numbers begin anew in each fork


def _run(arguments: list[str]) -> None:
    """Does what `python ARGUMENTS` does."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = paths  # instead of the folder of this project
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _run(_serve(sys.argv[1]))
