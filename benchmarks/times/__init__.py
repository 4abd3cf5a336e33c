"""Measures the times of steps, of parts of steps, and of training runs until they reach a target."""
