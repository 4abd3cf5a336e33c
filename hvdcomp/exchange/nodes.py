"""Finds the place of this rank in its node and among the nodes. If a tensor is not divided among the ranks of a node,
one of these ranks owns the tensor. This module also finds the owner."""

from __future__ import annotations

from collections.abc import Mapping

from hvdcomp.communicators import Communicator
from hvdcomp.compressors.node_shares import deal
from hvdcomp.compressors.protocol import NodePlaces, Place, TensorInfo


class FoundLevels:
    """`Context.node_places` of a training. The places are found when a compressor first reads them.

    Args:
        communicator: the communicator of all ranks.
        tensors: all tensors of the training, by name. Each tensor is assigned to an owner once, according to the sizes
            of all tensors. So a tensor keeps its owner when the plan changes, even if the tensor is sent uncompressed
            for some steps.
    """

    def __init__(self, communicator: Communicator, tensors: Mapping[str, TensorInfo]) -> None:
        self._communicator = communicator
        self._tensors = tensors
        self._places: tuple[Place, Place] | None = None
        self._owners: dict[str, int] = {}

    def find(self) -> tuple[Place, Place]:
        """The place of this rank in its node, and its place among the ranks that have the same local rank, one on each
        node. The first call waits for all ranks.

        Raises:
            ConfigurationError: as in `Communicator.part`.
        """
        if self._places is None:
            node, across = (self._communicator.part(group) for group in ("node", "across"))
            owners = deal([tensor.size for tensor in self._tensors.values()], node.world_size)
            self._owners = dict(zip(self._tensors, owners, strict=True))
            self._places = Place(node.rank, node.world_size), Place(across.rank, across.world_size)
        return self._places

    def __call__(self, name: str) -> NodePlaces:
        """The places of this rank, as returned by `find`, and the owner of a tensor.

        Args:
            name: name of a tensor. For any other name, `NodePlaces.owner` has no meaning.
        """
        return NodePlaces(*self.find(), self._owners.get(name, 0))
