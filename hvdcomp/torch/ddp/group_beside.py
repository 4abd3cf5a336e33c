"""Additional process groups for collectives whose order may differ from the order of the user's own collectives.

torch.distributed matches the collectives of a process group by their order. Some collectives start in the backward
pass, as soon as a rank knows that all ranks take part. In the user's process group, such a collective could be matched
with a collective of another model in the same backward pass.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator

_made: WeakKeyDictionary[dist.ProcessGroup, list[GroupBeside]] = WeakKeyDictionary()  # by the user's


class GroupBeside:
    """A second process group with the same ranks as the user's process group. Only one object uses it at a time.

    A process group is never destroyed, so its threads, connections and memory stay as long as the process. The reason:
    torch.distributed numbers process groups. If a number became free on one rank only, a later process group would have
    two names. So a process group is used again when its user is freed.

    Attributes:
        ranks: the communicator of the process group.
        under_way: whether its user has collectives under way. If the user is freed in this state, the process group is
            not used again, because ranks may have started different numbers of collectives.
    """

    def __init__(self, ranks: TorchDistributedCommunicator, user: Any) -> None:
        self.ranks = ranks
        self.under_way = False
        self._user = ref(user)

    @classmethod
    def of(cls, ranks: TorchDistributedCommunicator, user: Any) -> GroupBeside:
        """A process group that no other object uses on any rank. All ranks call this at the same point.

        Args:
            ranks: the communicator of the user's process group.
            user: the object that uses the process group until it is freed.
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
