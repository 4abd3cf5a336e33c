"""Handing a training program to a cluster's scheduler: what is asked for, how the scheduler is told, and following it.

`job` is what every scheduler needs to know, and reads the settings file. `scheduler` is the protocol of a scheduler;
Kubernetes and Slurm each have a package of their own. `promise` is what a launcher and a training program agree on: the
number of ranks, and the exit code of a saved run. `rank` and `torch_rank` are what ranks start with.
"""
