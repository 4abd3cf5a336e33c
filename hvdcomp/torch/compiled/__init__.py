"""The operators of compiled graphs, and the pass that replaces all-reduces with these operators."""
