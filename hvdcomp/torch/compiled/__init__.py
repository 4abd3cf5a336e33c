"""The operators of compiled graphs, and the pass that puts them in place of all-reduces."""
