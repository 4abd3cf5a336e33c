"""Checks whether the installation works for distributed training.

`gather` reads the environment and returns `Facts`. `checks` and `torch_checks` turn facts into problems with remedies.
These modules do not read the environment themselves.
"""
