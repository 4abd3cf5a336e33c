"""Policies at work: measurement of their statistics, broadcast of rank 0's decisions, and change of the plan."""
