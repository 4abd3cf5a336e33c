"""Finds compressors and policies in other packages and in the user's modules.

A package offers a class through an entry point with the name of the class. The class is imported only if a spec string
contains its name. A user's module offers all classes that are defined in it. The user specifies such modules with
`hvdcomp ... --plugin MODULE`, or in the environment variable HVDCOMP_PLUGINS.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from hvdcomp.errors import SpecError, warn_alone

VARIABLE = "HVDCOMP_PLUGINS"
"""The environment variable that contains the names of the user's modules, separated by commas. Child processes inherit
it."""


@dataclass(frozen=True, eq=False)
class Plugins:
    """Finds classes of one kind, such as compressors, in other packages and in the user's modules.

    Args:
        noun: word for an object of these classes in error messages, such as "compressor".
        group: the group of entry points in which packages offer such classes.
        bases: the base classes. Each class must be a subclass of one of these base classes.
        known: hvdcomp's own classes of this kind, by name.
    """

    noun: str
    group: str
    bases: tuple[type, ...]
    known: Mapping[str, type]

    def find(self, name: str) -> type[Any] | None:
        """The class with this name, from hvdcomp, another package or a user's module; None if there is no such class.

        Raises:
            SpecError: if a plugin cannot be imported or is not a valid class, or if two plugins have this name.
        """
        named = {module: self.of_module(module).get(name) for module in named_modules()}
        found = {f"the module {module!r}": kind for module, kind in named.items() if kind is not None}
        points = _entry_points(self.group).get(name, ())
        if name in self.known:
            for point in points:
                warn_alone(
                    f"{_package_of(point)} offers a {self.noun} {name!r}, but hvdcomp has its own {self.noun} of this "
                    f"name and uses its own. Rename the {self.noun} of the package"
                )
            return self.known[name]
        for point in points:
            found[_package_of(point)] = self._loaded(point, name)
        if len({id(kind) for kind in found.values()}) > 1:
            raise SpecError(f"the {self.noun} {name!r} is offered by {' and by '.join(found)}; rename or remove one")
        return next(iter(found.values()), None)

    def of_module(self, name: str) -> dict[str, type]:
        """The classes that a module defines, by name.

        Raises:
            SpecError: if the module cannot be imported, or if a class has the name of one of hvdcomp's own classes.
        """
        kinds: dict[str, type] = {}
        for kind in vars(imported(name)).values():
            own = inspect.isclass(kind) and f"{kind.__module__}.".startswith(f"{name}.")
            if own and issubclass(kind, self.bases) and isinstance(vars(kind).get("name"), str):
                self._require_new(kind, f"the module {name!r}")
                kinds[kind.name] = kind
        return kinds

    def _loaded(self, point: metadata.EntryPoint, name: str) -> type:
        where = f"the {self.noun} {name!r} of {_package_of(point)} ({point.value})"
        try:
            kind = point.load()
        except Exception as error:
            raise SpecError(
                f"{where} cannot be imported: {type(error).__name__}: {error}; fix or uninstall this package"
            ) from error
        if not (inspect.isclass(kind) and issubclass(kind, self.bases)):
            bases = " or ".join(f"{base.__module__}.{base.__qualname__}" for base in self.bases)
            raise SpecError(f"{where} is not a subclass of {bases}")
        if getattr(kind, "name", None) != name:
            raise SpecError(
                f"{where} has name = {getattr(kind, 'name', None)!r} in its class, but its entry point has a different "
                "name; give both the same name"
            )
        return kind

    def _require_new(self, kind: type[Any], where: str) -> None:
        if kind.name in self.known and self.known[kind.name] is not kind:
            raise SpecError(
                f"{where} has a {self.noun} {kind.__qualname__} with the name {kind.name!r}, but hvdcomp has its own "
                f"{self.noun} of this name; rename yours"
            )

    def ways(self) -> str:
        """Words that explain how to use your own classes, for the error about an unknown name."""
        return f"for a {self.noun} of your own, pass --plugin MODULE, or set {VARIABLE}=MODULE in the environment"


def named_modules() -> list[str]:
    """The names of the modules that the user has specified as plugins."""
    return list(dict.fromkeys(part.strip() for part in os.environ.get(VARIABLE, "").split(",") if part.strip()))


def name_modules(names: tuple[str, ...]) -> None:
    """Adds modules to the list of modules in which this process, and the processes that it starts, search for plugins.
    Modules in the current folder are also found."""
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*named_modules(), *names]))
    if names and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # with `python -m hvdcomp`, this folder is already in the path


def imported(name: str) -> ModuleType:
    """The module with this name. It is imported if necessary.

    Raises:
        SpecError: if the module cannot be imported.
    """
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except Exception as error:
        advice = "the module must be in the current folder, on PYTHONPATH or installed, on every host"
        if name.endswith(".py") or os.sep in name:
            advice = f"give the name of a module, such as {os.path.basename(name).removesuffix('.py')}, not of a file"
        elif not (isinstance(error, ModuleNotFoundError) and error.name == name):
            advice = "fix the module, or do not use it as a plugin"
        raise SpecError(f"the plugin {name!r} cannot be imported: {type(error).__name__}: {error}; {advice}") from error


@functools.cache
def _entry_points(group: str) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """The entry points of a group, by name. The classes to which the entry points refer are not imported."""
    points: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for point in metadata.entry_points(group=group):
        points[point.name] = (*points.get(point.name, ()), point)
    return points


def _package_of(point: metadata.EntryPoint) -> str:
    return "a package" if point.dist is None else f"the package {point.dist.name}"
