"""Additional process groups for collectives whose order may differ from the order of the user's own collectives.

torch.distributed matches the collectives of a process group by their order. Some collectives start in the backward
pass, as soon as a rank knows that all ranks take part. In the user's process group, such a collective could be matched
with a wrong collective, for example with a collective of another model in the same backward pass.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator

# the additional process groups, by the user's process group
_made: WeakKeyDictionary[dist.ProcessGroup, list[GroupBeside]] = WeakKeyDictionary()


class GroupBeside:
    """A second process group with the same ranks as the user's process group. Only one object uses the second process
    group at a time.

    A process group keeps its threads, connections and memory until the process ends. A process group is never
    destroyed, because torch.distributed numbers process groups. If the number of a process group were free on only one
    rank, a later process group would have different names on different ranks. Instead, a process group is used again
    when the object that used it is freed.

    Attributes:
        ranks: the communicator of the additional process group.
        under_way: whether the object that uses the process group has unfinished collectives. If this object is freed
            with unfinished collectives, the process group is not used again, because ranks may have started different
            numbers of collectives.
    """

    def __init__(self, ranks: TorchDistributedCommunicator, user: Any) -> None:
        self.ranks = ranks
        self.under_way = False
        self._user = ref(user)

    @classmethod
    def of(cls, ranks: TorchDistributedCommunicator, user: Any) -> GroupBeside:
        """Returns a process group that no other object uses on any rank. All ranks must call this method at the same
        point.

        Args:
            ranks: the communicator of the process group that the user of hvdcomp chose.
            user: the object that will use the process group. The process group is free again when this object is freed.
        """
        made = _made.setdefault(ranks.group, [])
        if made:
            in_use = torch.tensor([one.under_way or one._user() is not None for one in made], dtype=torch.int32)
            anywhere = ranks.wait(ranks.start_allreduce(in_use, "max", UNNAMED)).tolist()
            if 0 in anywhere:
                free = made[anywhere.index(0)]
                free._user = ref(user)
                return free
        made.append(cls(ranks.duplicate(), user))
        return made[-1]
