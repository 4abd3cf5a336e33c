"""Finds the cache folder. Missing files in this folder are created again when they are needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder $HVDCOMP_CACHE if this variable is set, otherwise the folder `hvdcomp` in the user's cache folder."""
    folder = environ.get("HVDCOMP_CACHE")
    if folder:
        return Path(folder).expanduser().absolute()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdcomp"
