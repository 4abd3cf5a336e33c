"""Errors of the emulated cluster."""


class ClusterError(Exception):
    """The cluster cannot be created, used or removed. The message gives the cause and the remedy."""
