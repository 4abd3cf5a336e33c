"""Time marks in a training's work, on the device that does the work. PyTorch."""

from __future__ import annotations

import time
from typing import Any

import torch

HOST = torch.device("cpu")


def mark(device: torch.device) -> Any:
    """A mark of the moment at which the device has done all work queued so far; on a CPU, the time now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds from one mark to a later mark; waits for the later mark."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
