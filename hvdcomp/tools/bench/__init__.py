"""Benchmarks of the package itself, run as `hvdcomp bench`."""
