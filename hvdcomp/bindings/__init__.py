"""The part of bindings that all frameworks share. A binding connects a `Compression` to a training run."""

from hvdcomp.bindings.adam import kind_of
from hvdcomp.bindings.callers import caller_local
from hvdcomp.bindings.frameworks import left_as_written

__all__ = ["caller_local", "kind_of", "left_as_written"]
