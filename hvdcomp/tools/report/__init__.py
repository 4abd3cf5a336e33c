"""Compares training runs: `runs` reads their folders, `table` tabulates, `curves` draws, `page` writes.

`replay` repeats the decisions of a run.
"""
