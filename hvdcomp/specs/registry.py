"""Registration: a class in a file of a package is found there; no list of them is kept anywhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import TypeVar

from hvdcomp.specs.described import Described

Kind = TypeVar("Kind", bound=Described)


def classes_by_name(package: str, base: type[Kind]) -> dict[str, type[Kind]]:
    """The classes with a `name` that the modules of a package define, by that name.

    Imports every module of the package.

    Args:
        package: such as "hvdcomp.compressors".
        base: what the classes are subclasses of. Those that set no `name` themselves are bases of others, and left out.

    Returns:
        In the order of the modules' names, and of the lines of each module.

    Raises:
        TypeError: if two classes have one name.
    """
    kinds: dict[str, type[Kind]] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)):
        module = importlib.import_module(f"{package}.{name}")
        for kind in vars(module).values():
            defined_here = inspect.isclass(kind) and kind.__module__ == module.__name__
            if not defined_here or not issubclass(kind, base) or "name" not in vars(kind):
                continue
            if kinds.setdefault(kind.name, kind) is not kind:
                other = kinds[kind.name]
                raise TypeError(
                    f"{other.__module__}.{other.__name__} and {kind.__module__}.{kind.__name__} are both named "
                    f"{kind.name!r}; rename one"
                )
    return kinds
