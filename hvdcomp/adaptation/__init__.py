"""Runs policies: measures the statistics that they request, broadcasts the decisions of rank 0, and changes the
plan."""
