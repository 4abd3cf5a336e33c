"""What the bindings of all frameworks share."""

from hvdcomp.bindings.adam import kind_of

__all__ = ["kind_of"]
