"""Builds Horovod for the PyTorch, TensorFlow and MPI of this Python environment.

The newest Horovod release does not compile with current frameworks. Therefore `hvdcomp build-horovod` first applies a
few small edits to the sources (`edits`). It builds one wheel for each combination of versions (`plan`, `wheel`), keeps
the wheel in the user's cache, and installs it. Finally it runs two ranks as a check (`check`).
"""

from __future__ import annotations


class BuildError(RuntimeError):
    """Horovod cannot be built or installed here. The message gives the cause and the remedy."""
