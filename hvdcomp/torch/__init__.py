"""The PyTorch binding: what Horovod calls for each gradient, and how a gradient is known."""
