"""Checks the installation for distributed training.

`gather` reads the environment and returns `Facts`; `checks` and `torch_checks` turn facts into problems with remedies,
and read nothing themselves.
"""
