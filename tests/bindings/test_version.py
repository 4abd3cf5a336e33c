"""The version of a checkout that is on the path, and that nobody has installed."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import importlib.metadata

found = importlib.metadata.version

def version(name):
    if name == "hvdcomp":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.version = version
import hvdcomp
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.bindings import first_steps  # noqa: F401

print(hvdcomp.__version__)
"""


def test_a_checkout_that_is_not_installed_has_a_version() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0+checkout\n"), done.stderr
