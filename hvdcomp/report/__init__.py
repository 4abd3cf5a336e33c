"""Compares training runs: `runs` reads their folders, `table` tabulates, `curves` draws, `page` writes."""
