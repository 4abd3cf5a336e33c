"""The operators of compiled graphs, and the pass that replaces all-reduces by these operators."""
