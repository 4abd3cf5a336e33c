"""What the results depend on beside the options: this machine, and the versions of what was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

# A framework's builds have names of their own.
_DISTRIBUTIONS = ("hvdcomp", "numpy", "torch", "tensorflow", "tensorflow-cpu", "tensorflow-gpu")


def facts(device: str) -> dict[str, object]:
    """Plain data: the processor's name, its cores, those that this process may use, the accelerator, versions."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerator": _accelerator() if device == "cuda" else None,
        "python": platform.python_version(),
        "versions": {name: found for name in _DISTRIBUTIONS if (found := _version(name)) is not None},
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
