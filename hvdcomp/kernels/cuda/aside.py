"""The side stream of a CUDA device, for kernels whose results the network does not need."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """Launches of a bucket on a side stream, for which only the end of its step waits.

    The order of a step, with time from top to bottom; "main" is the stream of the step:

        main                                  side
        encode: writes x and the payload
        `after_main` records an event ------> waits for it
        collective: reads the payload         keep: reads the payload, subtracts it from x
                                              `launched` records an event
        `join` waits for it <---------------- (at the next call that is not aside: decode)
        decode, settle

    Horovod, and torch.distributed with NCCL, have their own streams wait for an event that they record on the current
    stream, which is main. So a collective waits for encoding and not for the side stream.

    Memory that the two streams share:
    - x, and the velocity if it is masked: the side writes them. The next plain call of the bucket joins before it reads
      them. Readers of residuals between steps, and releases of memory, come after `settle`, a plain call. If the
      collective fails, there is no such call, but then the other place in flat storage is kept, and x stays for the
      next try.
    - The payload: the side and the collective read it. The next step writes to it, after it has joined.
    - The table on the device, which a call may replace: the arguments of a launch are held until main has joined.
      Memory that main's allocator hands out later is used after the side's work.
    - Memory that calls share (`scratch`), and flags: kernels that are launched aside use neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _side_stream(device)
        self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        self._arguments_in_use: list[Any] = []

    def after_main(self) -> torch.cuda.Stream:
        """The side stream, made to wait for all that main has launched."""
        self._before.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._before)
        return self._side

    def launched(self, *arguments: Any) -> None:
        """To be called after a launch. arguments: those of the launch, held until `join`."""
        self._after.record(self._side)
        self._arguments_in_use += arguments

    def join(self) -> None:
        """Makes the current stream wait for all launches on the side; to be called before each plain call."""
        if self._arguments_in_use:
            torch.cuda.current_stream(self._device).wait_event(self._after)
            self._arguments_in_use.clear()
