"""The binding of Horovod's optimizer."""
