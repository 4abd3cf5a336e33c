"""What a GPU has to show, for `make gpu-check`.

It needs PyTorch for CUDA, Triton and NumPy, and nothing else: no Horovod, no pytest, no environment of hvdcomp's own.
`python -m tests.gpu` runs all parts, each in a process of its own. `tests/project/test_gpu_check.py` runs the same in
Triton's interpreter, on tensors in the host's memory.
"""
