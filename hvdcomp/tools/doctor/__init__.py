"""Checks whether the installation works for distributed training.

`gather` reads the environment and returns `Facts`. `checks` and `torch_checks` derive problems and remedies from the
facts. These two modules do not read the environment themselves.
"""
