"""Faults against what comes of them, on real ranks, for `make faults`.

`python -m tests.faults` runs the rows of the table in `table`, each on ranks of its own. A fault is planted at a named
point of a training (`points`). The ranks are watched to their end, and what they leave is looked at (`world`). The page
docs/faults/faults.md is written from that (`report`).
"""
