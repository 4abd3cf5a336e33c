"""Runs a training program under Slurm. `settings` describes a job, `script` makes its batch script from `job.sh`,
`client` runs Slurm's commands, and `follow` follows a job until it ends. `scheduler` combines these modules.
"""
