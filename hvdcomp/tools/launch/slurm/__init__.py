"""Runs a training under Slurm. `settings` describes a job, `script` makes its batch script from `job.sh`, `client` runs
the commands of Slurm, and `follow` follows a job to its end. `scheduler` combines them.
"""
