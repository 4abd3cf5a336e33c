"""The cache of kernels that Triton has compiled."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

from triton.runtime.cache import FileCacheManager

from hvdcomp.kernels.cuda import compiled_ahead


class OverlaidCache(FileCacheManager):
    """A cache in Triton's own folder (`TRITON_CACHE_DIR`, or `~/.triton/cache`) and in that of kernels compiled ahead.

    Triton compiles kernels that are in neither, and writes them to its own folder. If that is not writable, as for a
    user without a home in an image, the kernels are kept for the life of this process.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._compiled_ahead = None if override or dump else Path(compiled_ahead()) / key
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError:
            self.cache_dir = os.path.join(_folder_of_process().name, key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

    def get_file(self, filename: str) -> str | None:
        return self._path_compiled_ahead(filename) or super().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of the files in the group of this name, by file name."""
        group = self._path_compiled_ahead(f"__grp__{filename}")
        if group is None:
            return super().get_group(filename)
        # The group has the paths of the machine that compiled it.
        names = json.loads(Path(group).read_text())["child_paths"]
        return {name: path for name in names if (path := self._path_compiled_ahead(name)) is not None}

    def _path_compiled_ahead(self, filename: str) -> str | None:
        path = None if self._compiled_ahead is None else self._compiled_ahead / filename
        return str(path) if path is not None and path.is_file() else None


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hvdcomp-triton-")
