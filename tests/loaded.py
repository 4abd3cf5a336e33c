"""Loads a Python file of the repository that belongs to no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_file(path: str, name: str) -> ModuleType:
    """The module of a file, run anew. It finds its neighbours, as when it is run as a program.

    Args:
        path: below the repository.
        name: by which the module is known.
    """
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    folder = str((ROOT / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


def load_benchmark(name: str) -> ModuleType:
    """The module of a program of benchmarks/."""
    return load_file(f"benchmarks/{name}.py", f"benchmark_{name}")
