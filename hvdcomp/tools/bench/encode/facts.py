"""Describes this machine and the versions of its software. The results of measurements depend on both."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from hvdcomp.files import commit

# TensorFlow has several names in this list, because each of its builds has its own name.
_DISTRIBUTIONS = ("hvdcomp", "numpy", "torch", "triton", "tensorflow", "tensorflow-cpu", "tensorflow-gpu")


def facts(device: str) -> dict[str, object]:
    """The facts as plain data: the commit of the sources, the name of the processor, its cores, the cores that this
    process may use, the accelerator, and versions.

    With "cuda", `gpu` has details of the accelerator: memory and second-level cache in bytes, multiprocessors, compute
    capability, and the versions of CUDA, NCCL and the driver.
    """
    return {
        "commit": commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerator": _accelerator() if device == "cuda" else None,
        **({"gpu": _gpu()} if device == "cuda" else {}),
        "python": platform.python_version(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name()


def _gpu() -> dict[str, object]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "second_cache": getattr(properties, "L2_cache_size", None),  # not every version of PyTorch has this attribute
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        process = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip().partition("\n")[0] or None if process.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
