"""Builds stock Horovod for the PyTorch, TensorFlow and MPI of this Python environment.

The newest Horovod release does not compile beside current frameworks as it is, so `hvdcomp build-horovod`
applies a few small source edits (`edits`), builds a wheel once per combination of versions (`plan`, `wheel`),
keeps it in the user's cache, installs it and runs two ranks to see that it works (`check`).
"""

from __future__ import annotations


class BuildError(RuntimeError):
    """Horovod cannot be built or installed here; the message says why and what to do about it."""
