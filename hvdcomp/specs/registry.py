"""Finds the classes that a spec string can name in the files of a package, so that no list of them is needed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import TypeVar

from hvdcomp.specs.described import Described

Kind = TypeVar("Kind", bound=Described)


def classes_by_name(package: str, base: type[Kind]) -> dict[str, type[Kind]]:
    """Imports every module of a package, and returns the classes that have a `name` for spec strings.

    Args:
        package: name of the package, such as "hvdcomp.compressors".
        base: base class of the classes to find. A class that does not set `name` itself is not included, because it is
            only a base of other classes.

    Returns:
        The classes, by name. The classes are sorted by the names of their modules. The classes of a module are in the
        order of their definitions.

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
