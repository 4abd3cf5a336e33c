"""The binding of DistributedDataParallel."""
