"""Examples in docstrings are run, and public classes have them."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import hvdcomp
from hvdcomp.compressors import COMPRESSORS, MEMORIES
from hvdcomp.policies import POLICIES

ROOT = Path(hvdcomp.__file__).parent
WITH_EXAMPLES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if ">>>" in file.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name: str) -> None:
    if "torch" in name or "bench" in name:
        pytest.importorskip("torch")
    if "tensorflow" in name:
        pytest.importorskip("tensorflow")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_method_memory_and_policy_has_an_example() -> None:
    kinds = (*COMPRESSORS.values(), *MEMORIES.values(), *POLICIES.values())
    assert [kind.__name__ for kind in kinds if ">>>" not in (kind.__doc__ or "")] == []
