"""Runs horovodrun, and returns the exit code of the rank that failed first. horovodrun itself only prints this code,
and returns 1.

`python3 -m hvdcomp.tools.launch.k8s.horovodrun [OPTION]... PROGRAM [ARGUMENT]...`
"""

from __future__ import annotations

import re
import sys

_CODE = re.compile(r"^Exit code: (-?\d+)$", re.MULTILINE)


def exit_code(message: str) -> int:
    """The exit code in Horovod's message, as a shell would report this code; 1 if the message contains no code."""
    match = _CODE.search(message)
    code = 1 if match is None else int(match[1])
    return code if code > 0 else 128 - code


def _main() -> None:
    from horovod.runner import launch

    # Horovod would import the frameworks to find out whether it was built with Gloo. The launcher has too little memory
    # for the frameworks, so the ranks check this instead.
    launch.gloo_built = lambda verbose=False: True
    try:
        launch.run_commandline()
    except RuntimeError as error:
        print(f"hvdcomp: {error}", file=sys.stderr)
        sys.exit(exit_code(str(error)))


if __name__ == "__main__":
    _main()
