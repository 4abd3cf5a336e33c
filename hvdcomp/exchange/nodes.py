"""Place of this rank among the ranks of its node, and the rank of a node that works on a tensor that is not cut."""

from __future__ import annotations

from collections.abc import Mapping

from hvdcomp.communicators import Communicator
from hvdcomp.compressors.node_shares import deal
from hvdcomp.compressors.protocol import NodePlaces, Place, TensorInfo


class FoundLevels:
    """`Context.node_places` of a training, found out when a compressor first asks.

    Args:
        communicator: of all ranks.
        tensors: of the training, by name. They are dealt by their sizes, once: the plan may change, and a tensor that
            is sent dense for a while keeps its owner.
    """

    def __init__(self, communicator: Communicator, tensors: Mapping[str, TensorInfo]) -> None:
        self._communicator = communicator
        self._tensors = tensors
        self._places: tuple[Place, Place] | None = None
        self._owners: dict[str, int] = {}

    def find(self) -> tuple[Place, Place]:
        """Place of this rank in its node, and among the ranks that have its place in other nodes. Waits for all ranks
        the first time.

        Raises:
            ConfigurationError: as of `Communicator.part`.
        """
        if self._places is None:
            node, across = (self._communicator.part(group) for group in ("node", "across"))
            owners = deal([tensor.size for tensor in self._tensors.values()], node.world_size)
            self._owners = dict(zip(self._tensors, owners, strict=True))
            self._places = Place(node.rank, node.world_size), Place(across.rank, across.world_size)
        return self._places

    def __call__(self, name: str) -> NodePlaces:
        """Places of this rank, as of `find`, and the owner of a tensor.

        Args:
            name: name of a tensor; for another name the owner means nothing.
        """
        return NodePlaces(*self.find(), self._owners.get(name, 0))
