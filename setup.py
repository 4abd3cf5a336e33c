"""Builds the kernels with the package; all else stands in pyproject.toml.

Without a working C compiler the package is installed without them, and `hvdcomp doctor` says why.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("hvdcomp", "kernels")


def _builder() -> ModuleType:
    """`hvdcomp/kernels/build.py` as a file: the package itself needs NumPy, which need not be here."""
    spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _builder()


class BuildWithKernels(build_py):
    """Compiles the kernels into the package that is built, or into the sources of an editable installation."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            BUILDER.build_or_say_why(Path(self.build_lib) / KERNELS)
        elif not BUILDER.is_current():
            BUILDER.build_or_say_why(BUILDER.HERE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = [Path(self.build_lib) / KERNELS / name for name in (BUILDER.LIBRARY, BUILDER.FAILURE)]
        return [*super().get_outputs(include_bytecode), *(str(path) for path in built if path.is_file())]


class WheelWithKernels(bdist_wheel):
    """One wheel for every Python 3 of a platform, since the kernels know nothing of Python; without kernels for all."""

    def run(self) -> None:
        self.run_command("build")  # first, because whether there are kernels decides where and for what
        self._library = Path(self.get_finalized_command("build_py").build_lib) / KERNELS / BUILDER.LIBRARY
        self.root_is_pure = not self._library.is_file()
        self.distribution.has_ext_modules = self._library.is_file  # `install` asks it for the folder
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform
        return "py3", "none", platform if self.plat_name_supplied else BUILDER.platform_tag(self._library, platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
