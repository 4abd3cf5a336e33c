"""Where Triton finds compiled kernels, and keeps those that it compiles."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

from triton.runtime.cache import FileCacheManager

from hvdcomp.kernels.cuda import compiled_ahead


class OverlaidCache(FileCacheManager):
    """Triton's own folder (`TRITON_CACHE_DIR`, or `~/.triton/cache`) laid over what was compiled ahead.

    What is in neither is compiled, and kept in the first. Where that cannot be written, as in the home of a user whom
    an image does not know, it is kept as long as this process lives.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._below = None if override or dump else Path(compiled_ahead()) / key
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError:
            self.cache_dir = os.path.join(_folder_of_process().name, key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

    def get_file(self, filename: str) -> str | None:
        return self._found_below(filename) or super().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files that were put together with one of this name, by theirs."""
        group = self._found_below(f"__grp__{filename}")
        if group is None:
            return super().get_group(filename)
        # The paths in it are those where they were compiled.
        names = json.loads(Path(group).read_text())["child_paths"]
        return {name: path for name in names if (path := self._found_below(name)) is not None}

    def _found_below(self, filename: str) -> str | None:
        path = None if self._below is None else self._below / filename
        return str(path) if path is not None and path.is_file() else None


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hvdcomp-triton-")
