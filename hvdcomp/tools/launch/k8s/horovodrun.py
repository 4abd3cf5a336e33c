"""horovodrun, which ends with the exit code of the rank that failed first; by itself it says the code, and ends with 1.

`python3 -m hvdcomp.tools.launch.k8s.horovodrun [OPTION]... PROGRAM [ARGUMENT]...`
"""

from __future__ import annotations

import re
import sys

_CODE = re.compile(r"^Exit code: (-?\d+)$", re.MULTILINE)


def exit_code(message: str) -> int:
    """The exit code that Horovod's message names, as a shell would say it; 1 if it names none."""
    match = _CODE.search(message)
    code = 1 if match is None else int(match[1])
    return code if code > 0 else 128 - code


def _main() -> None:
    from horovod.runner import launch

    # The ranks find out by themselves. The launcher would import the frameworks for it, for which its memory is small.
    launch.gloo_built = lambda verbose=False: True
    try:
        launch.run_commandline()
    except RuntimeError as error:
        print(f"hvdcomp: {error}", file=sys.stderr)
        sys.exit(exit_code(str(error)))


if __name__ == "__main__":
    _main()
