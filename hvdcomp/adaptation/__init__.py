"""Rank 0 decides, every rank obeys in the same step: what is measured, how a decision travels, what it changes."""
