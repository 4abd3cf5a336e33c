"""The common part of the bindings of all frameworks."""

from hvdcomp.bindings.adam import kind_of
from hvdcomp.bindings.callers import caller_local
from hvdcomp.bindings.frameworks import left_as_written

__all__ = ["caller_local", "kind_of", "left_as_written"]
