"""`shim.c` before the C library of ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.faults.world import NotHere, World

_SOURCE = Path(__file__).with_name("shim.c")


def with_shim(world: World) -> dict[str, str]:
    """The variables of ranks whose clock can jump and whose disk can be slow.

    Raises:
        NotHere: there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotHere("there is no C compiler for tests/faults/shim.c")
    library = world.folder / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
