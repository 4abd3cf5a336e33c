"""The cache of kernels that Triton has compiled."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

from triton.runtime.cache import FileCacheManager

from hvdcomp.kernels.cuda import compiled_ahead

_folders_in_process: dict[str, str] = {}  # the folder of each key; used if Triton's own folder is not writable


class OverlaidCache(FileCacheManager):
    """A cache in two folders: Triton's own (`TRITON_CACHE_DIR`, or `~/.triton/cache`) and the folder of kernels
    compiled in advance.

    If a kernel is in neither folder, Triton compiles it and writes it to its own folder. If Triton cannot write there,
    the kernel is kept only until this process ends. This happens if the user has no home folder, as in some images, or
    if a quota is exceeded.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._compiled_ahead = None if override or dump else Path(compiled_ahead()) / key
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError:  # Triton has no folder; this matters only if a kernel must be written (`put`)
            if self._compiled_ahead is None:
                raise
        if self._compiled_ahead is not None and key in _folders_in_process:
            self._use(_folders_in_process[key])

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Writes a file, and returns its path."""
        try:
            return super().put(data, filename, binary)
        except OSError:  # Triton has no folder, no permission to write, or no space
            if self._compiled_ahead is None:
                raise
            self._use(_folders_in_process.setdefault(self.key, os.path.join(_folder_of_process().name, self.key)))
            os.makedirs(self.cache_dir, exist_ok=True)
            return super().put(data, filename, binary)

    def _use(self, folder: str) -> None:
        self.cache_dir = folder
        self.lock_path = os.path.join(folder, "lock")

    def get_file(self, filename: str) -> str | None:
        return self._path_compiled_ahead(filename) or super().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of the files in the group that has this name, by file name."""
        group = self._path_compiled_ahead(f"__grp__{filename}")
        if group is None:
            return super().get_group(filename)
        # The file lists paths on the machine that compiled the kernels.
        names = json.loads(Path(group).read_text())["child_paths"]
        return {name: path for name in names if (path := self._path_compiled_ahead(name)) is not None}

    def _path_compiled_ahead(self, filename: str) -> str | None:
        path = None if self._compiled_ahead is None else self._compiled_ahead / filename
        return str(path) if path is not None and path.is_file() else None


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hvdcomp-triton-")
