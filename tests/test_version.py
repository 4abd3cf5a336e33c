"""The version, of an installed package and of a checkout that nobody has installed."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

import hvdcomp.version


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hvdcomp.version.VERSION == hvdcomp.__version__ == importlib.metadata.version("hvdcomp")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", missing)
        assert importlib.reload(hvdcomp.version).VERSION == "0+checkout"
    importlib.reload(hvdcomp.version)
