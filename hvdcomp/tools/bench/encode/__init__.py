"""Measures the cost of compression. The time of an engine step without a network is compared with the time of a copy of
the same gradients, and with the times of PyTorch's own hooks.

`measurement` times a method in a separate process. `gradients` has the gradients of each framework, copies them, and
counts operations. `peers` runs PyTorch's hooks. `comparison` decides which rows may be compared, and `output` shows
them.
"""
