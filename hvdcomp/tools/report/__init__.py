"""Compares training runs. `runs` reads the folders of runs, `table` creates tables, `curves` draws figures, and `page`
writes the report.

`replay` repeats the decisions of a run.
"""
