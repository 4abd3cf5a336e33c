"""The version of hvdcomp."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("hvdcomp")
except PackageNotFoundError:  # a checkout on the path that nobody has installed
    VERSION = "0+checkout"
