"""The keys of the embedding rows that each rank looks up in batches that were read ahead. The ranks exchange these
keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.exchange.rows import Rows

END = object()
"""The value that takes the place of a batch after the last batch of the loader."""
_ENDED, _REFUSED = -1, -2  # a rank sends one of these numbers instead of its number of keys


class Share(NamedTuple):
    """The rows of a step that are exchanged together.

    Attributes:
        keys: the keys of the rows that this rank updates.
        start: a function that starts the exchange. The arguments of this function are this rank's rows of each table,
            the ranks, and the name of a collective. `start` returns a function that waits for the means.
    """

    keys: torch.Tensor
    start: Callable[[Sequence[torch.Tensor], Ranks, str], Callable[[], list[Rows]]]


def by_table(keys: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    """The ids of each table, computed from sorted keys. The key of a row is its id plus the start of its table."""
    bounds = torch.searchsorted(keys, starts.to(keys.dtype))
    sizes = bounds.diff()
    return list((keys - starts[:-1].repeat_interleave(sizes).to(keys.dtype)).split(sizes.tolist()))


class ReadBatch:
    """A batch that was read, and the keys of its rows on each rank. The ranks first exchange the numbers of keys, and
    then the keys. Every rank must call the methods in the same order.

    Attributes:
        batch: the batch, or `END` after the last batch.
        own: the keys of the rows that this rank looks up in the batch.
        sent: number of bytes that this rank sent to exchange keys.
    """

    def __init__(self, ranks: Ranks, batch: Any, own: torch.Tensor, refused: str | Exception | None, name: str) -> None:
        self.batch, self.own, self.sent = batch, own, 8
        self._ranks, self._refused, self._name = ranks, refused, name
        length = _REFUSED if refused is not None else _ENDED if self.ended else len(own)
        self._handle = ranks.start_allgather(torch.tensor([length]).view(torch.uint8), name)
        self._lengths: list[int] | None = None
        self._by_rank: list[torch.Tensor] | None = None

    @property
    def ended(self) -> bool:
        return self.batch is END

    def start_keys(self) -> None:
        """Waits for the numbers of keys, and starts the exchange of keys.

        Raises:
            RankMismatchError: on every rank, if any rank's batch was refused, or if the loaders of only some ranks have
                ended.
        """
        if self._lengths is not None:
            return
        lengths = self._ranks.wait(self._handle).contiguous().view(torch.int64)[:, 0]
        self._handle, self._lengths = None, lengths.clamp(min=0).tolist()
        refuse((lengths == _REFUSED).numpy(), "could not find out which rows a batch looks up", self._refused)
        ended = (lengths == _ENDED).numpy()
        if not ended.all():
            refuse(ended, "has fewer batches than the other ranks; give every rank the same number of batches")
        longest = max(self._lengths)
        if longest:
            keys = torch.nn.functional.pad(self.own, (0, longest - len(self.own))).view(torch.uint8)
            self.sent += len(keys)
            self._handle = self._ranks.start_allgather(keys, self._name)

    def drop(self) -> None:
        """If a collective is running, waits for it and drops its result."""
        if self._by_rank is None and self._handle is not None:
            self._ranks.wait(self._handle)
            self._handle = None

    def by_rank(self) -> list[torch.Tensor]:
        """The sorted keys of each rank."""
        if self._by_rank is None:
            self.start_keys()
            assert self._lengths is not None
            rows = [self.own] * len(self._lengths)
            if self._handle is not None:
                rows = list(self._ranks.wait(self._handle).view(self.own.dtype))
            self._by_rank = [row[:length] for row, length in zip(rows, self._lengths, strict=True)]
        return self._by_rank


def refuse(at_fault: np.ndarray, reason: str, own: str | Exception | None = None) -> None:
    """Raises RankMismatchError on every rank if any rank has reported an error.

    Args:
        at_fault: for each rank, whether it has reported an error.
        reason: what went wrong, after the numbers of the ranks.
        own: what went wrong on this rank, if it is one of these ranks.
    """
    if at_fault.any():
        is_users = isinstance(own, Exception) and not isinstance(own, ConfigurationError)
        detail = "" if own is None else f": {type(own).__name__}: {own}" if is_users else f": {own}"
        message = f"LookAhead: rank {', '.join(map(str, np.flatnonzero(at_fault)))} {reason}{detail}"
        raise RankMismatchError(message) from (own if isinstance(own, Exception) else None)
