"""Optimizers, and the learning rate during a step."""
