"""The program that starts each rank of a launched job: `python3 -m hvdcomp.tools.launch.rank`.

The training program and its arguments are a JSON list in HVDCOMP_COMMAND. They are not on the command line of `mpirun`,
because `mpirun` interprets some arguments of the program as its own options: it splits arguments at ":", and puts
`--mca NAME VALUE` on a command line that a shell interprets on every host. Environment variables reach the ranks
unchanged.
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
    """The command as a value for HVDCOMP_COMMAND. It is in ASCII, so that it does not depend on the locale."""
    return json.dumps(list(command))


def from_variable(value: str) -> list[str]:
    """Reads the command from a value of the environment variable HVDCOMP_COMMAND.

    Raises:
        ConfigurationError: if the value is not a JSON list of at least one string.
    """
    try:
        command = json.loads(value)
    except ValueError:
        command = None
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigurationError(
            f'{COMMAND}={value!r} is not a command: it must be a JSON list of strings, such as ["python3", "train.py"]'
        )
    return command


def _check_started() -> None:
    """Checks the number of ranks that mpirun started. The size of Horovod or torch.distributed is checked by the
    training program, which initializes them."""
    started, expected = os.environ.get("OMPI_COMM_WORLD_SIZE"), os.environ.get(EXPECTED_SIZE)
    if expected and started != expected:
        raise ConfigurationError(
            f"{EXPECTED_SIZE}={expected}, but OMPI_COMM_WORLD_SIZE={started}: mpirun started a different number of "
            "ranks. Set mpirun's -np to the job's number of ranks"
        )


def become(choose: Callable[[], list[str]]) -> NoReturn:
    """Replaces this process with the command that `choose` returns.

    If `choose` raises ConfigurationError, the exit status is 125. If the program cannot be run, the exit status is 126
    or 127, as in a shell.
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
