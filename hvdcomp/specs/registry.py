"""Registration: classes are found in the files of a package, without a list."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import TypeVar

from hvdcomp.specs.described import Described

Kind = TypeVar("Kind", bound=Described)


def classes_by_name(package: str, base: type[Kind]) -> dict[str, type[Kind]]:
    """The classes with a `name` in the modules of a package, by name.

    Imports every module of the package.

    Args:
        package: name of the package, such as "hvdcomp.compressors".
        base: base of the classes. Classes that do not set `name` themselves are bases of others, and left out.

    Returns:
        The classes, in the order of the modules' names, and of the lines of each module.

    Raises:
        TypeError: if two classes have the same name.
    """
    kinds: dict[str, type[Kind]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)):
        module = importlib.import_module(f"{package}.{name}")
        for kind in vars(module).values():
            defined_here = inspect.isclass(kind) and kind.__module__ == module.__name__
            if not defined_here or not issubclass(kind, base) or "name" not in vars(kind):
                continue
            if kinds.setdefault(kind.name, kind) is not kind:
                first = kinds[kind.name]
                raise TypeError(
                    f"{first.__module__}.{first.__name__} and {kind.__module__}.{kind.__name__} are both named "
                    f"{kind.name!r}; rename one"
                )
    return kinds
