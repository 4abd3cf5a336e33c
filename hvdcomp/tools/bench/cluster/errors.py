"""What stops a cluster, told to its user."""


class ClusterError(Exception):
    """The cluster cannot be set up, used or removed as asked; the message says why and what to do."""
