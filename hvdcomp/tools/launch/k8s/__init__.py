"""A training on Kubernetes: an MPIJob (v2beta1) of the Kubeflow mpi-operator.

`settings` is what can be asked for, `manifest` makes the MPIJob of it, `cluster` speaks with the API server, `state`
tells where the job is, and `follow` watches it to its end. `scheduler` puts them together.
"""
