"""Time marks on the device that does the work of training. This module needs PyTorch."""

from __future__ import annotations

import time
from typing import Any

import torch

HOST = torch.device("cpu")


def mark(device: torch.device) -> Any:
    """A mark for the time at which the device finishes all work that is queued so far. On a CPU, this is the current
    time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """The seconds from one mark to a later mark. Waits for the later mark."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
