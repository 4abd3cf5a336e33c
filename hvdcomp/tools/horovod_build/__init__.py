"""Builds stock Horovod for the PyTorch, TensorFlow and MPI of this Python environment.

The newest Horovod release does not compile with current frameworks, so `hvdcomp build-horovod` applies a few small
source edits (`edits`), builds a wheel for each combination of versions (`plan`, `wheel`), keeps it in the user's cache,
installs it, and runs two ranks as a check (`check`).
"""

from __future__ import annotations


class BuildError(RuntimeError):
    """Horovod cannot be built or installed here; the message gives the cause and the remedy."""
