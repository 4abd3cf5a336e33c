"""What each rank of a launched job starts with: `python3 -m hvdcomp.tools.launch.rank`.

The program and its arguments come as a JSON list in HVDCOMP_COMMAND, and not on the command line of `mpirun`, which
looks for options of its own in a program's arguments: it splits them at ":", and puts `--mca NAME VALUE` on a command
line that a shell reads on every host. Open MPI hands variables to the ranks in a message, as they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.promise import EXPECTED_SIZE

COMMAND = "HVDCOMP_COMMAND"


def to_variable(command: Sequence[str]) -> str:
    """The command as a value of HVDCOMP_COMMAND, in ASCII, so that no locale matters."""
    return json.dumps(list(command))


def from_variable(value: str) -> list[str]:
    """The command in a value of HVDCOMP_COMMAND.

    Raises:
        ConfigurationError: it is not a list of texts with at least one.
    """
    try:
        command = json.loads(value)
    except ValueError:
        command = None
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigurationError(
            f'{COMMAND}={value!r} is not a command: it must be a JSON list of texts, as ["python3", "train.py"]'
        )
    return command


def _check_started() -> None:
    """Refuse to start if mpirun started another number of ranks than was asked for; the size that Horovod or
    torch.distributed finds is checked by the training program, which alone initializes it."""
    started, expected = os.environ.get("OMPI_COMM_WORLD_SIZE"), os.environ.get(EXPECTED_SIZE)
    if expected and started != expected:
        raise ConfigurationError(
            f"{EXPECTED_SIZE}={expected}, but OMPI_COMM_WORLD_SIZE={started}: mpirun did not start the ranks that were "
            "asked for; compare its -np with the job's ranks"
        )


def become(choose: Callable[[], list[str]]) -> NoReturn:
    """Become the program that `choose` returns, with its arguments.

    Exit status 125 if that raises ConfigurationError, 126 or 127 if the program cannot be run, as a shell's.
    """
    try:
        command = choose()
    except ConfigurationError as error:
        print(f"hvdcomp: {error}", file=sys.stderr)
        sys.exit(125)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hvdcomp: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _chosen() -> list[str]:
    _check_started()
    return from_variable(os.environ.pop(COMMAND, ""))


if __name__ == "__main__":
    become(_chosen)
