"""The capture of a CUDA graph as hvdcomp sees it, on machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

REFUSED = "hvdcomp does not exchange gradients while a CUDA graph is captured"
"""How the error begins."""


@contextmanager
def as_captured(captures: bool = True) -> Iterator[None]:
    """Within it, PyTorch says of the current stream whether a graph captures it."""
    with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: captures):
        yield
