"""Compares training runs. `runs` reads their folders, `table` makes tables, `curves` draws figures, and `page` writes
the report.

`replay` repeats the decisions of a run.
"""
