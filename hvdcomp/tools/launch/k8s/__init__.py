"""Runs a training program on Kubernetes, as an MPIJob (v2beta1) of the Kubeflow mpi-operator.

`settings` describes a job, `manifest` makes its MPIJob, `cluster` is the client of the API server, `state` reads the
job's state, and `follow` watches the job until it ends. `scheduler` combines these modules.
"""
