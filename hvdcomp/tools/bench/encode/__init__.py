"""Measures the cost of compression. The measurement compares the time of an engine step without a network with a copy
of the same gradients, and with PyTorch's own hooks.

`measurement` times a method in a separate process. `gradients` has the gradients, copies and operations of each
framework. `peers` runs PyTorch's hooks. `comparison` decides which rows may be compared, and `output` shows them.
"""
