"""The stream of a CUDA device for kernels that nobody waits for at once."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """Launches of a bucket that only the end of its step waits for, on a stream of their own.

    The order of a step is this, where time goes down and "main" is the stream that the step runs on:

        main                                  side
        encode: writes x and the payload
        `after_main` records an event ------> waits for it
        collective: reads the payload         keep: reads the payload, takes what was sent off x
                                              `launched` records an event
        `join` waits for it <---------------- (at the next call that is not aside: decode)
        decode, settle

    Horovod, and torch.distributed with NCCL, have their own streams wait for an event that they record on the current
    stream, which is main. So a collective waits for what encodes, and not for what is aside.

    Memory that the two streams share:
    - x, and the velocity where it is masked: the side writes them, and the first one to read them after it is the next
      plain call of the bucket, which joins. Who reads residuals between steps comes after `settle`, a plain call, and
      so does what gives memory back. If the collective fails, there is none, but then the other place in flat storage
      is what is kept, and x stays for the next try.
    - The payload: the side and the collective read it. The next step writes to it, after it has joined.
    - The table on the device, which a call may replace: what a launch was given is held until main has joined. What
      main's allocator hands out after that is used behind the side's work.
    - Memory that calls share (`scratch`), and flags: kernels that are launched aside use neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _side_stream(device)
        self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        self._held: list[Any] = []

    def after_main(self) -> torch.cuda.Stream:
        """The stream to launch on, which has been told to wait for what is under way."""
        self._before.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._before)
        return self._side

    def launched(self, *given: Any) -> None:
        """After a launch. given: what it was given."""
        self._after.record(self._side)
        self._held += given

    def join(self) -> None:
        """Before anything else of the bucket: the current stream waits for what was launched aside."""
        if self._held:
            torch.cuda.current_stream(self._device).wait_event(self._after)
            self._held.clear()
