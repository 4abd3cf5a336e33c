"""Errors of the emulated cluster."""


class ClusterError(Exception):
    """The cluster cannot be created, used or removed; the message gives the cause and the remedy."""
