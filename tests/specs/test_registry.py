"""Registration: what is found in a package, in which order, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hvdcomp
from hvdcomp.compressors import COMPRESSORS, MEMORIES
from hvdcomp.policies import POLICIES
from hvdcomp.specs.described import Described
from hvdcomp.specs.registry import classes_by_name

HEADER = "from dataclasses import dataclass\nfrom hvdcomp.specs.described import Described\n"
Package = Callable[..., dict[str, type[Described]]]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """A function that makes a package of some modules' texts and returns what registration finds in it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**modules: str) -> dict[str, type[Described]]:
        folder = tmp_path / "registered"
        folder.mkdir()
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(HEADER + text, encoding="utf-8")
        importlib.import_module("registered")
        return classes_by_name("registered", Described)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "registered"]:
        del sys.modules[name]


def test_classes_are_found_in_the_order_of_files_and_lines(found: Package) -> None:
    kinds = found(
        second="from registered.first import One\nclass Three(One):\n    name = 'three'\n",
        first="class Base(Described): pass\nclass Two(Base):\n    name = 'two'\nclass One(Base):\n    name = 'one'\n",
        third="class Stranger:\n    name = 'stranger'\n",
    )
    assert [kind.__name__ for kind in kinds.values()] == ["Two", "One", "Three"]
    assert list(kinds) == ["two", "one", "three"]


def test_two_classes_of_one_name_are_refused(found: Package) -> None:
    text = "class {}(Described):\n    name = 'same'\n"
    with pytest.raises(TypeError, match=r"first\.One and registered\.second\.Two are both named 'same'; rename one"):
        found(first=text.format("One"), second=text.format("Two"))


def test_the_package_offers_every_compressor_memory_and_policy() -> None:
    for kind in (*COMPRESSORS.values(), *MEMORIES.values(), *POLICIES.values()):
        assert getattr(hvdcomp, kind.__name__) is kind
        assert kind.__name__ in hvdcomp.__all__
    assert next(iter(COMPRESSORS)) == "none"
    assert not {"by_name", "by_size", "by_dimensions", "two_level"} & set(COMPRESSORS)  # with a notation of their own
    assert "TwoLevel" in hvdcomp.__all__
