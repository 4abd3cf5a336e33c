"""The array operations that compression needs, implemented for each framework.

`arrays_for(x)` returns the module of functions for the framework of `x`. All modules define the same functions.
Compressors call the functions as `xp.name(...)` and depend on no framework. A function may reuse the storage of its
first argument for the result only if its docstring says so. Some operations have the same form in all frameworks and
need no function: operators, `abs`, and `x.T`, `x.sum(1, keepdims=True)`, `x.mean()`, `x.max()`, `x.any(1)`,
`x.clip(low, high)`, `x.cumsum(0)`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_MODULES = {
    "numpy": "hvdcomp.arrays.numpy_arrays",
    "torch": "hvdcomp.arrays.torch_arrays",
}


def arrays_for(array: Any) -> ModuleType:
    """The module of array functions for the framework of `array`.

    Raises:
        TypeError: if `array` is neither a NumPy array nor a PyTorch tensor.
    """
    kind = type(array)
    if kind not in _of_type:
        _of_type[kind] = _module_for(kind)
    return _of_type[kind]


_of_type: dict[type, ModuleType] = {}  # cached, because it is read several times in each step


def _module_for(array_type: type) -> ModuleType:
    for kind in array_type.__mro__:
        framework = kind.__module__.partition(".")[0]
        if framework in _MODULES:
            return importlib.import_module(_MODULES[framework])
    raise TypeError(
        f"hvdcomp cannot compress a {array_type.__module__}.{array_type.__qualname__}; pass a NumPy array or a PyTorch "
        "tensor"
    )
