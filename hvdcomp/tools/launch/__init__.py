"""Runs a training program on a cluster through the cluster's scheduler. `hvdcomp launch` reads settings, submits a job,
and follows the job.

`job` has the settings that all schedulers share, and reads the settings file. `scheduler` defines the interface of a
scheduler. Kubernetes and Slurm each have their own package. `promise` is the agreement between a launcher and a
training program about the number of ranks and the exit code of a saved run. Each rank first runs the
program `rank` or `torch_rank`, which then starts the training program.
"""
