"""Training under Slurm: `settings` is what a user may ask for, `script` makes the batch script of it from `job.sh`,
`client` speaks to Slurm's own commands, and `follow` stays with a job to its end. `scheduler` puts them together.
"""
