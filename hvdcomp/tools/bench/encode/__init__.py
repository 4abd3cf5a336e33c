"""What compressing costs: the time of a whole engine step without a network, beside one copy of the same gradients and
beside PyTorch's own hooks.

`measurement` times one method in a process of its own, `gradients` says what gradients, copies and operations are in
each framework, `peers` runs PyTorch's hooks, `comparison` says which rows may be compared, and `output` shows them.
"""
