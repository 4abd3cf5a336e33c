"""The side stream of a CUDA device, which runs kernels whose results are not sent."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """Launches of a bucket's kernels on a side stream. Only the end of the bucket's step waits for these kernels.

    The order of a step, with time from top to bottom; "main" is the stream of the step:

        main                                  side
        encode: writes x and the payload
        `after_main` records an event ------> waits for it
        collective: reads the payload         keep: reads the payload, subtracts it from x
                                              `launched` records an event
        `join` waits for it <---------------- (in the next call on main: decode)
        decode, settle

    Horovod records an event on the current stream, which is main, and makes its own stream wait for this event.
    torch.distributed with NCCL does the same. Therefore a collective waits for encoding, but not for the side stream.

    Memory that the two streams share:
    - x, and the velocity if it is masked: the side stream writes them. The next call of the bucket on main calls `join`
      before it reads them. Code that reads residuals or frees memory between steps runs after `settle`, which is a call
      on main. If the collective fails, `settle` does not run. The memory that contains x is then not freed, and x is
      kept for the next attempt.
    - The payload: the side stream and the collective read it. The next step calls `join` before it writes to the
      payload.
    - The table on the device: a call may replace it. Therefore the arguments of a launch are kept alive until main has
      called `join`. After that, the side stream no longer needs their memory, and main's allocator may reuse it.
    - Memory that calls share (`scratch`), and flags: kernels on the side stream do not use them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _side_stream(device)
        self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        self._arguments_in_use: list[Any] = []

    def after_main(self) -> torch.cuda.Stream:
        """Makes the side stream wait for everything that main has launched, and returns the side stream."""
        self._before.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._before)
        return self._side

    def launched(self, *arguments: Any) -> None:
        """Call this after a launch on the side stream. `arguments` are the arguments of the launch. They are kept alive
        until `join`."""
        self._after.record(self._side)
        self._arguments_in_use += arguments

    def join(self) -> None:
        """Makes the current stream wait for all launches on the side stream. Call this before each call on main."""
        if self._arguments_in_use:
            torch.cuda.current_stream(self._device).wait_event(self._after)
            self._arguments_in_use.clear()
