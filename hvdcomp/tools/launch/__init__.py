"""Runs a training program on a cluster, through its scheduler: settings, submission, and following the job.

`job` has the settings of all schedulers, and reads the settings file. `scheduler` is the protocol of a scheduler;
Kubernetes and Slurm each have a package of their own. `promise` is the agreement of a launcher and a training program:
the number of ranks, and the exit code of a saved run. `rank` and `torch_rank` are the programs that ranks start with.
"""
