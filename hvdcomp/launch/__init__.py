"""Handing a training program to a cluster's scheduler: what is asked for, how the scheduler is told, and following it.

`job` is what every scheduler needs to know, and reads the settings file. `promise` is the check that the ranks found
each other, made inside the job. Each scheduler has a package of its own.
"""
