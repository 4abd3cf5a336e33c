"""Describes the functions of the shared object for ctypes. The descriptions are read from the list that the C sources
include."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

ABI_VERSION = 1  # version of the interface in src/hvdcomp.h

_LIST = Path(__file__).parent / "src" / "kernels.def"
_KERNEL = re.compile(r"HVD_KERNEL\(\s*(\w+),\s*(\w+),\s*\(([^()]*)\),\s*\(([^()]*)\)\s*\)")
_TYPES: dict[str, Any] = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_OWN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hvd_abi_version": (ctypes.c_int32, ()),
    "hvd_sources": (ctypes.c_char_p, ()),
    "hvd_instruction_set": (ctypes.c_char_p, ()),
    "hvd_use_instruction_set": (ctypes.c_int32, (ctypes.c_char_p,)),
    "hvd_parallel": (None, (ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)),
}


@cache
def signatures() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The result type and the argument types of each exported function. All pointers have the type `c_void_p`."""
    text = re.sub(r"/\*.*?\*/", "", _LIST.read_text(), flags=re.DOTALL)
    declared = _KERNEL.findall(text)
    if len(declared) != text.count("HVD_KERNEL"):
        raise ValueError(f"{_LIST} has a line that is not HVD_KERNEL(type, name, (parameters), (names))")
    kernels = {
        f"hvd_{name}": (_TYPES[result], tuple(_argument(parameter) for parameter in parameters.split(",")))
        for result, name, parameters, _ in declared
    }
    return {**_OWN, **kernels}


def _argument(parameter: str) -> Any:
    return ctypes.c_void_p if "*" in parameter else _TYPES[parameter.split()[0]]


def declare(library: ctypes.CDLL) -> None:
    """Declares result and argument types of each function of the shared object."""
    for name, (result, arguments) in signatures().items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
