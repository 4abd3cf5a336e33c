"""Additional process groups for collectives whose order may differ from the order of the user's own collectives.

torch.distributed matches the collectives of a group by their order. A collective that starts in the backward pass, as
soon as a rank knows that all ranks take part, could be matched with another collective of the user's group, such as one
of another model in the same pass.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator

_made: WeakKeyDictionary[dist.ProcessGroup, list[GroupBeside]] = WeakKeyDictionary()  # by the user's group


class GroupBeside:
    """A second process group with the same ranks as the user's group. Only one object uses it at a time.

    Threads, connections and memory of a group stay as long as the process: torch.distributed numbers groups, and a
    number that is free again on one rank only would give a later group two names. So a group is used again when its
    user is freed.

    Attributes:
        ranks: the communicator of the group.
        under_way: whether its user has collectives under way. A group that is left so is not used again, as ranks may
            have started different numbers of them.
    """

    def __init__(self, ranks: TorchDistributedCommunicator, user: Any) -> None:
        self.ranks = ranks
        self.under_way = False
        self._user = ref(user)

    @classmethod
    def of(cls, ranks: TorchDistributedCommunicator, user: Any) -> GroupBeside:
        """One that no other object uses on any rank; all ranks call it at the same point.

        Args:
            ranks: the communicator of the user's group.
            user: the object that uses the group until it is freed.
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
