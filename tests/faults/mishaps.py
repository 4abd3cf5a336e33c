"""What can happen to the gradients, the files, the memory and the clock of a rank; done by the rank itself."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.points import Place

MOUNT = "mounted"
"""In a row's folder, where the row has one: a file system of its own."""

# Gradients.

HUGE = 1e30
"""A gradient that is finite, with which nothing can be learned."""


def gradient(value: float) -> Callable[[Place], None]:
    """One element of the gradient in the next backward pass; at the point `step`."""

    def act(place: Place) -> None:
        parameter = next(iter(place.what["run"]._learner._model.parameters()))
        spoil(parameter, value)

    return act


def spoil(parameter: Any, value: float) -> None:
    """Changes the first element of a parameter's gradient in the next backward pass."""

    def hook(found: Any) -> Any:
        handle.remove()
        spoilt = found.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    handle = parameter.register_hook(hook)


# Files. At a point `write`, which hands over the `file` and a list `afterwards` of what to call after the write.


def disk_full(place: Place) -> None:
    """From now on no file of this process grows beyond what this one has, and a byte. So the write that is due fails
    when a part of it is done."""
    _limit(resource.RLIMIT_FSIZE, os.fstat(place.what["file"].fileno()).st_size + 1)


def disk_full_for_a_moment(place: Place) -> None:
    """The same, for the write that is due alone."""
    disk_full(place)
    place.what["afterwards"].append(lambda: _limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY))


def read_only(place: Place) -> None:
    """The file system of the row's own becomes read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(place.folder / MOUNT)], check=True)


# Memory.


def out_of_memory(place: Place) -> None:
    """More is asked for than this process may have."""
    _limit(resource.RLIMIT_AS, _address_space())
    bytearray(1 << 40)


_held: list[Any] = []


def no_memory_left(place: Place) -> None:
    """From now on this process gets no memory: all that it may have is taken."""
    _limit(resource.RLIMIT_AS, _address_space() + (64 << 20))
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 8):
        while True:
            try:
                _held.append(bytearray(size))
            except MemoryError:
                break


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.RLIM_INFINITY))


# What tests/faults/shim.c does, where the launcher has put it before the C library.

_JUMPS = (3 * 3600, -5 * 3600, 40 * 86400, -30, 0)
SLOW = 0.25
"""Seconds that each write to a file takes longer on a slow disk."""


def clock_jumps(place: Place) -> None:
    """From now on the clock of this process jumps whenever it waits for collectives, so also within a step."""
    from hvdcomp.exchange.fusion import Round

    real, jumps = Round.wait, itertools.cycle(_JUMPS)

    def wait(self: Any) -> list[Any]:
        _shim("faults_set_clock")(next(jumps))
        return real(self)

    Round.wait = wait  # type: ignore[method-assign]
    _shim("faults_set_clock")(_JUMPS[0])


def slow_disk(place: Place) -> None:
    """From now on the disk is slow for this process."""
    _shim("faults_slow_disk")(int(SLOW * 1e9))


def _shim(name: str) -> Any:
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes, function.restype = [ctypes.c_longlong], None
    return function


# Settings, at the point `start`.


def options(*more: str) -> Callable[[Place], None]:
    """`hvdcomp train` gets these too, on this rank."""

    def act(place: Place) -> None:
        from hvdcomp.tools.commands.train import command

        real = command.main

        def main(words: list[str], *arguments: Any) -> Any:
            return real([*words, *more], *arguments)

        command.main = main  # type: ignore[method-assign]

    return act


def version_of(package: str) -> Callable[[Place], None]:
    """This rank has another version of a package, as far as it can be asked."""

    def act(place: Place) -> None:
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.1" if name == package else real(name)

    return act


def without_checkpoints(place: Place) -> None:
    """`hvdcomp train` is told of no checkpoints, on this rank."""
    from hvdcomp.tools.commands.train import command

    real = command.main

    def main(words: list[str], *arguments: Any) -> Any:
        pairs = ("--checkpoint-folder", "--checkpoint-every")
        kept = [
            word for before, word in zip(["", *words], words, strict=False) if word not in pairs and before not in pairs
        ]
        return real(kept, *arguments)

    command.main = main  # type: ignore[method-assign]


ACTS: dict[str, Callable[[Place], None]] = {
    "nan": gradient(float("nan")),
    "inf": gradient(float("inf")),
    "huge": gradient(HUGE),
    "disk-full": disk_full,
    "disk-full-for-a-moment": disk_full_for_a_moment,
    "read-only": read_only,
    "slow-disk": slow_disk,
    "out-of-memory": out_of_memory,
    "no-memory-left": no_memory_left,
    "clock-jumps": clock_jumps,
    "other-seed": options("--seed", "1"),
    "other-model": options("--model", "cnn"),
    "other-spec": options("--compression", "topk:ratio=0.01"),
    "other-policy": options("--policy", "accordion:low=0.1,high=0.01,interval=1"),
    "other-memory": options("--memory", "none"),
    "other-batch": options("--batch-size", "8"),
    "other-hvdcomp": version_of("hvdcomp"),
    "without-checkpoints": without_checkpoints,
}
