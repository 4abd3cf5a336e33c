"""The collectives of Horovod's communicator for TensorFlow, against the same in NumPy."""

from __future__ import annotations

import horovod.tensorflow as hvd

from hvdcomp.communicators.horovod_tensorflow import HorovodTensorFlowCommunicator
from tests.multirank.collectives import check, check_groups


def case_every_collective() -> None:
    check(HorovodTensorFlowCommunicator(), lambda array: array, hvd.rank(), list(range(hvd.size())))


def case_every_collective_of_a_process_set() -> None:
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members)
    if hvd.rank() in members:
        check(HorovodTensorFlowCommunicator(some), lambda array: array, hvd.rank(), members)
    hvd.remove_process_set(some)


def case_every_collective_of_a_node_and_across_nodes() -> None:
    check_groups(HorovodTensorFlowCommunicator(), lambda array: array, hvd.rank(), hvd.size())
