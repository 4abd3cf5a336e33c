"""The array operations that compression needs, implemented for each framework.

`arrays_for(x)` returns the module of functions for the framework of `x`. All modules define the same functions, which
`types.AllFunctions` lists. Compressors call the functions as `xp.name(...)` and depend on no framework. A function may
reuse the storage of its first argument for the result only if its docstring says so. Some operations have the same form
in all frameworks and need no function. `types.Array` lists these operations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdcomp.arrays.types import AllFunctions, Array, ArrayFunctions

if TYPE_CHECKING:  # mypy then checks that all arrays and modules match the Protocols
    import numpy as np
    import torch

    from hvdcomp.arrays import numpy_arrays, shapes, torch_arrays

    def _is_array(x: np.ndarray | torch.Tensor | shapes.ShapeArray) -> Array:
        return x

    _of_numpy: AllFunctions = numpy_arrays
    _of_torch: AllFunctions = torch_arrays
    _of_shapes: ArrayFunctions = shapes

_MODULES = {
    "numpy": "hvdcomp.arrays.numpy_arrays",
    "torch": "hvdcomp.arrays.torch_arrays",
}


def arrays_for(array: Any) -> AllFunctions:
    """The module of array functions for the framework of `array`.

    Raises:
        TypeError: if `array` is neither a NumPy array nor a PyTorch tensor.
    """
    kind = type(array)
    if kind not in _of_type:
        _of_type[kind] = _module_for(kind)
    return _of_type[kind]


_of_type: dict[type, AllFunctions] = {}  # cached, because it is read several times in each step


def _module_for(array_type: type) -> AllFunctions:
    for kind in array_type.__mro__:
        framework = kind.__module__.partition(".")[0]
        if framework in _MODULES:
            module: Any = importlib.import_module(_MODULES[framework])
            functions: AllFunctions = module
            return functions
    raise TypeError(
        f"hvdcomp cannot compress a {array_type.__module__}.{array_type.__qualname__}; pass a NumPy array or a PyTorch "
        "tensor"
    )
