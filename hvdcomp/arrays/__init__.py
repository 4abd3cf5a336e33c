"""The array operations that the maths of compression needs, once for each framework.

`arrays_for(x)` gives the module of functions for the framework of `x`. The modules define the same functions with
the same meaning; compressors call them as `xp.name(...)` and know no framework. A function that returns a changed
array may reuse the storage of its first argument only where its docstring says so.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_MODULES = {
    "numpy": "hvdcomp.arrays.numpy_arrays",
    "torch": "hvdcomp.arrays.torch_arrays",
    "tensorflow": "hvdcomp.arrays.tensorflow_arrays",
}


def arrays_for(array: Any) -> ModuleType:
    """The module of array functions for the framework that `array` belongs to.

    Raises:
        TypeError: for anything but a NumPy array, a PyTorch tensor or a TensorFlow tensor.
    """
    for kind in type(array).__mro__:
        framework = kind.__module__.partition(".")[0]
        if framework in _MODULES:
            return importlib.import_module(_MODULES[framework])
    raise TypeError(
        f"hvdcomp cannot compress a {type(array).__module__}.{type(array).__qualname__}; "
        "it takes NumPy arrays, PyTorch tensors and TensorFlow tensors"
    )
