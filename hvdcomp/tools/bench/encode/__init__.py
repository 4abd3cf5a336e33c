"""The cost of compression: the time of an engine step without a network, beside a copy of the same gradients and
PyTorch's own hooks.

`measurement` times a method in a process of its own, `gradients` has the gradients, copies and operations of each
framework, `peers` runs PyTorch's hooks, `comparison` decides which rows may be compared, and `output` shows them.
"""
