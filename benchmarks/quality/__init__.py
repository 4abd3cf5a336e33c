"""Measures the effect of compression on gradients, on trained weights and on accuracy."""
