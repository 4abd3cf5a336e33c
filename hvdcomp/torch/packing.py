"""States as bytes, and back."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as bytes, from which `unpacked` restores it."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """The state from the bytes of `packed`, with tensors on the host."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state
