"""Compares training runs: `runs` reads their folders, `table` tabulates, `curves` draws, `page` writes.

Beside them `replay` makes a run's decisions again.
"""
