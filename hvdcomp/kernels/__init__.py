"""Kernels in C that do the arithmetic of a step on the CPU. All frameworks use the same shared object.

The installation of hvdcomp builds this object if there is a C compiler (`build.py`). Without the object, array
functions do the same work more slowly (`exchange/tensor_group.py`). The shared object is loaded when it is first used,
not at import.

Environment variables:

- `HVDCOMP_KERNELS`: `plain`, `avx2` or `avx512` forces an instruction set; `off` disables the kernels.
- `HVDCOMP_KERNELS_LIBRARY`: the path of a different shared object to load.
- `HVDCOMP_THREADS`: the number of threads that a kernel uses.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdcomp.errors import ConfigurationError
from hvdcomp.kernels import signatures

__all__ = [
    "INSTRUCTION_SETS",
    "available",
    "instruction_set",
    "instruction_sets",
    "library",
    "reset",
    "threads",
    "use",
    "way_out",
    "why_not",
]

INSTRUCTION_SETS = ("plain", "avx2", "avx512")
_MOST_THREADS = 2**31 - 1  # kernels take an int32
_BUILD = "python -m hvdcomp.kernels.build"
_LACKING = {
    1: "the compiled library of hvdcomp was built without this instruction set",
    2: "this CPU does not support this instruction set",
}


@dataclass(frozen=True)
class _Loaded:
    releasing: ctypes.CDLL | None = None
    holding: ctypes.PyDLL | None = None
    why_not: str = ""
    way_out: str = ""


def library(*, release: bool = True) -> ctypes.CDLL | None:
    """The loaded shared object with the kernels; None if there are no kernels.

    The shared object exports the functions of `src/hvdcomp.h` and `src/kernels.def`. The types of these functions are
    declared for ctypes.

    Args:
        release: whether calls release the interpreter's lock. After a call that releases the lock, this thread may wait
            5 ms to get the lock back if another thread is busy. A call that takes less than a millisecond is faster if
            it keeps the lock.

    Raises:
        ConfigurationError: if the value of `HVDCOMP_KERNELS` is unknown, or this machine cannot use it.

    Example:
        >>> from hvdcomp import kernels
        >>> kernels.library() is not None or kernels.why_not() != ""
        True
    """
    loaded = _loaded()
    return loaded.releasing if release else loaded.holding


def available() -> bool:
    """Whether kernels can be used."""
    return library() is not None


def why_not() -> str:
    """The reason why there are no kernels; "" if there are kernels."""
    return _loaded().why_not


def way_out() -> str:
    """Advice on how to get kernels; "" if there are kernels."""
    return _loaded().way_out


def instruction_set() -> str | None:
    """The instruction set that the kernels use, one of `INSTRUCTION_SETS`; None without kernels."""
    loaded = library()
    return None if loaded is None else loaded.hvd_instruction_set().decode()


def instruction_sets() -> list[str]:
    """The instruction sets that both the shared object and this CPU support; empty without kernels."""
    before = instruction_set()
    if before is None:
        return []
    usable = [name for name in INSTRUCTION_SETS if _use(name) == 0]
    use(before)
    return usable


def use(name: str) -> None:
    """Switches to the kernels of a different instruction set. The results are the same, bit for bit.

    Raises:
        ConfigurationError: if the instruction set is unknown, or this machine cannot use it.
    """
    if name not in INSTRUCTION_SETS:
        raise ConfigurationError(
            f"{name!r} is not an instruction set of hvdcomp's kernels; give one of {', '.join(INSTRUCTION_SETS)}"
        )
    if not available():
        raise ConfigurationError(f"the instruction set {name} cannot be used: {why_not()}. {way_out()}")
    failed = _use(name)
    if failed:
        raise ConfigurationError(
            f"the instruction set {name} cannot be used: {_LACKING[failed]}; give one of "
            f"{', '.join(instruction_sets())}"
        )


def _use(name: str) -> int:
    loaded = library()
    return 1 if loaded is None else int(loaded.hvd_use_instruction_set(name.encode()))


def threads() -> int:
    """The number of threads that a kernel uses. By default, this is the number of threads that the framework uses.

    The result is the first of the following numbers that exists: `HVDCOMP_THREADS`; PyTorch's number, if PyTorch was
    imported; TensorFlow's number for one operation, if it was set explicitly; the first number in `OMP_NUM_THREADS`;
    the number of CPUs available to this process. Results do not depend on the number of threads.

    Raises:
        ConfigurationError: if `HVDCOMP_THREADS` is not a positive number below 2**31.
    """
    return chosen_threads() or default_threads()


def chosen_threads() -> int | None:
    """The number of threads in `HVDCOMP_THREADS`; None if it is not set. Raises as `threads`."""
    chosen = os.environ.get("HVDCOMP_THREADS", "")
    if chosen and not _is_number_of_threads(chosen):
        raise ConfigurationError(
            f"HVDCOMP_THREADS={chosen!r} is not a number of threads; set it to a number from 1 to {_MOST_THREADS}, "
            "or unset it"
        )
    return int(chosen) if chosen else None


def default_threads() -> int:
    """The present result of `threads` if `HVDCOMP_THREADS` is not set."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    tensorflow: Any = sys.modules.get("tensorflow")
    if hasattr(tensorflow, "config") and (inside := tensorflow.config.threading.get_intra_op_parallelism_threads()):
        return int(inside)
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if _is_number_of_threads(first) else len(os.sched_getaffinity(0))


def _is_number_of_threads(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) <= _MOST_THREADS


def reset() -> None:
    """Unloads the shared object; the next use reads the environment again. For tests."""
    _loaded.cache_clear()


@functools.cache
def _loaded() -> _Loaded:
    choice = os.environ.get("HVDCOMP_KERNELS", "")
    if choice not in ("", "off", *INSTRUCTION_SETS):
        raise ConfigurationError(
            f"HVDCOMP_KERNELS={choice!r} is unknown. Set it to one of {', '.join(INSTRUCTION_SETS)} to use this "
            "instruction set, or to off to use no kernels. Or unset it, to use the best instruction set of this CPU"
        )
    if choice == "off":
        return _Loaded(why_not="HVDCOMP_KERNELS=off is set in the environment", way_out="unset HVDCOMP_KERNELS")
    loaded = _load(Path(os.environ.get("HVDCOMP_KERNELS_LIBRARY") or Path(__file__).parent / "_native.so"))
    if not choice:
        return loaded
    if loaded.releasing is None:
        raise ConfigurationError(
            f"HVDCOMP_KERNELS={choice} needs hvdcomp's kernels, but they cannot be used: {loaded.why_not}. "
            f"{loaded.way_out}"
        )
    failed = int(loaded.releasing.hvd_use_instruction_set(choice.encode()))
    if failed:
        raise ConfigurationError(
            f"HVDCOMP_KERNELS={choice} cannot be used: {_LACKING[failed]}; unset HVDCOMP_KERNELS to use the best "
            "instruction set of this CPU"
        )
    return loaded


def _load(path: Path) -> _Loaded:
    """Loads a shared object twice, once for calls that release the interpreter's lock and once for calls that keep it.
    The object must have been built from these sources."""
    from hvdcomp.kernels import build  # imported here, because `python -m` also runs this module as a program

    if not path.is_file():
        reason = path.with_name(build.FAILURE)
        text = reason.read_text().partition("\n")[0] if reason.is_file() else f"there is no {path}"
        return _Loaded(why_not=text, way_out=f"Install a C compiler (apt-get install gcc), and run {_BUILD}")
    try:
        releasing, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for opened in (releasing, holding):
            signatures.declare(opened)
        fits = releasing.hvd_abi_version() == signatures.ABI_VERSION
        fits = fits and releasing.hvd_sources().decode() == build.digest()
    except OSError as error:
        return _Loaded(
            why_not=f"{path} cannot be loaded: {error}", way_out=f"To build it for this machine, run {_BUILD}"
        )
    except AttributeError:  # a function is missing
        fits = False
    if not fits:
        return _Loaded(
            why_not=f"{path} was built from the sources of another version of hvdcomp",
            way_out=f"To build it again, run {_BUILD}",
        )
    return _Loaded(releasing, holding)
