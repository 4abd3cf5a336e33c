"""Faults against what comes of them, on real ranks, for `make faults`.

`python -m tests.faults` runs the rows of the table in `table`, each on ranks of its own: a fault is planted at a named
point of a training (`points`), the ranks are watched to their end (`world`), and what they leave is looked at. It writes
the page docs/faults/faults.md (`report`).
"""
