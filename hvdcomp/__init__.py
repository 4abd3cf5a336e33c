"""hvdcomp."""
