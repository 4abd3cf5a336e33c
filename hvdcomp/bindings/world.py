"""A checkpoint of some ranks for another number of ranks, with all that the old ranks had left to send.

What counts is what the next steps add to the gradients' mean: the sum over the ranks of what they keep, divided by
their number. Every memory is linear in what it keeps, so the new ranks may share it in any way. Rank j of M takes over
from the old ranks j, j + M, j + 2M, and so on, M / N times the sum of what they kept, if there were N. Where the
training takes the sum of the gradients and not their mean (op=hvd.Sum), it is the sum itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, wide_dtype
from hvdcomp.bindings.checkpoint import zeros_like
from hvdcomp.bindings.state_check import known_array, parts_of
from hvdcomp.errors import ConfigurationError

_WAY_OUT = 'or start without what was left to be sent: residuals="drop"'


def state_for(states: Iterable[Mapping[str, Any]], rank: int, ranks: int, residuals: str = "keep") -> dict[str, Any]:
    """The state of one rank, from those that another number of ranks saved; for `Compression.load_state_dict`.

        files = [f"checkpoint-{old}.pt" for old in range(old_ranks)]
        mine = files[hvd.rank() :: hvd.size()] or files[:1]
        state = hvdcomp.state_for((torch.load(file) for file in mine), hvd.rank(), hvd.size())

    The mean over all ranks of what was left to be sent stays as it was (with op=hvd.Sum, the sum). Warm starts, levels,
    steps and the policy go on. On the same number of ranks the state is that of the rank, unchanged.

    Args:
        states: what `Compression.state_dict` returned on the old ranks, in any order: of all of them, or of those that
            this rank needs, as above. They are read one by one, and no more than needed.
        rank, ranks: of the new training; with a process set, or the replicas of FSDP, those of the ranks that exchange.
        residuals: "keep" what the old ranks had left to send, or "drop" it on all ranks alike.

    Returns:
        A state that may share arrays with those that were given.

    Raises:
        ConfigurationError: if a state that is needed is missing, or they are not of one training.
    """
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"rank {rank} of {ranks} ranks: ranks are counted from 0, so it is below {ranks}")
    if residuals not in ("keep", "drop"):
        raise ConfigurationError(f'residuals={residuals!r}: "keep" what was left to be sent, or "drop" it')
    collected = _Collected(rank, ranks, residuals == "keep")
    for state in states:
        collected.add(state)
        if collected.complete:
            break
    return collected.state()


def renumbered(own: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """A rank's own part of a state, for its number among other ranks: it keeps what it had left to send."""
    sums = {name: _Sum(name) for name in own["residuals"]}
    for name, kept in own["residuals"].items():
        sums[name].add(kept, own["rank"])
    return _own_for(own, rank, ranks, sums)


def _own_for(own: Mapping[str, Any], rank: int, ranks: int, residuals: Mapping[str, _Sum]) -> dict[str, Any]:
    """A rank's own part, which goes on from that of an old rank, and from these residuals."""
    factor = 1.0 if own.get("op") == "sum" else ranks / own["size"]
    return {
        **own,
        "rank": rank,
        "size": ranks,
        "residuals": {name: kept.times(factor) for name, kept in residuals.items()},
        "coordinator": own["coordinator"] if own["rank"] == rank else None,
    }


class _Collected:
    """The states that were read so far, joined. Arguments as of `state_for`, but whether residuals are kept."""

    def __init__(self, rank: int, ranks: int, keeps: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self._keeps = keeps
        self._facts: dict[str, Any] = {}  # in which all states agree
        self._given: set[int] = set()
        self._empty = 0  # states of ranks that had made no step
        self._shared: Mapping[str, Any] = {}
        self._own: Mapping[str, Any] = {}  # of the state that goes on, without residuals
        self._residuals: dict[str, _Sum] = {}

    def add(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._empty += 1
            return
        shared, own = parts_of(state)
        old = own["rank"]
        self._check(_facts_of(shared, own), old)
        self._given.add(old)
        if old == self._rank or not self._own:
            self._shared, self._own = shared, {**own, "residuals": {}}
        if not self._keeps:
            return
        if old % self._ranks == self._rank:
            for name, kept in own["residuals"].items():
                self._residuals.setdefault(name, _Sum(name)).add(kept, old)
        elif self._rank >= own["size"] and not self._residuals:
            # A rank of its own, which keeps nothing of anybody; but of the same tensors as all others.
            self._residuals = {name: _Sum(name).begin(kept) for name, kept in own["residuals"].items()}

    def _check(self, facts: dict[str, Any], old: int) -> None:
        if self._empty:
            raise ConfigurationError(
                "some of the states are empty, those of ranks that had made no step, and others are not: give those "
                "that all ranks saved after the same step"
            )
        if old in self._given:
            raise ConfigurationError(f"the state of rank {old} was given twice; give that of each old rank once")
        for what, first in self._facts.items():
            if facts[what] != first:
                if isinstance(first, Mapping):
                    names = sorted(name for name in {*first, *facts[what]} if first.get(name) != facts[what].get(name))
                    differ = f"in the {what} {', '.join(names)}"
                else:
                    differ = f"in the {what}: {first} and {facts[what]}"
                raise ConfigurationError(
                    f"the states of ranks {min(self._given)} and {old} are not of one training after one step, they "
                    f"differ {differ}. Give those that all ranks saved after the same step, {_WAY_OUT}, with rank 0's "
                    "state alone"
                )
        self._facts = facts

    @property
    def complete(self) -> bool:
        """Whether no further state is needed."""
        return bool(self._given) and self._wanted <= self._given

    @property
    def _wanted(self) -> set[int]:
        """The old ranks whose states this rank goes on with, if there are any."""
        size = self._own["size"]
        return set(range(self._rank, size, self._ranks if self._keeps else size))

    @property
    def _required(self) -> set[int]:
        if self._keeps:
            return self._wanted
        # What only rank 0 knows of the policy goes on too.
        return {0} if self._rank == 0 and self._shared["coordinator"] is not None else set()

    def state(self) -> dict[str, Any]:
        if not self._given:
            if self._empty:
                return {}
            raise ConfigurationError("no state was given; give those that compression.state_dict() returned")
        size = self._own["size"]
        missing = sorted(self._required - self._given)
        if missing:
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            way_out = f", {_WAY_OUT}" if self._keeps else ", which alone knows what the policy was about to decide"
            raise ConfigurationError(
                f"rank {self._rank} of {self._ranks} needs the state of {named} of the {size} that saved{way_out}"
            )
        return {"shared": self._shared, "own": _own_for(self._own, self._rank, self._ranks, self._residuals)}


class _Sum:
    """What several ranks have kept of a tensor, added up.

    Args:
        name: of the tensor.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = ""
        self._dtypes: list[str] = []
        self._arrays: list[Array] = []
        self._count = 0

    def begin(self, kept: Mapping[str, Any]) -> _Sum:
        """Makes it a sum of nothing: zeros, of the same memory."""
        self._memory = kept["memory"]
        self._arrays = [known_array(array) for array in kept["arrays"]]
        self._dtypes = [arrays_for(array).dtype_name(array) for array in self._arrays]
        return self

    def add(self, kept: Mapping[str, Any], old: int) -> None:
        """Adds what an old rank has kept."""
        if not self._count:
            self.begin(kept)
        elif kept["memory"] != self._memory:
            raise ConfigurationError(
                f"the memory {self._memory} has kept what was left of {self._name}, but on rank {old} it was "
                f"{kept['memory']}, and what they keep cannot be added up: give states of one training, {_WAY_OUT}"
            )
        else:
            arrays = map(known_array, kept["arrays"])
            self._arrays = [_wide(total) + _wide(array) for total, array in zip(self._arrays, arrays, strict=True)]
        self._count += 1

    def times(self, factor: float) -> dict[str, Any]:
        """The sum times a factor, as a state has it. An element that its type cannot hold is lost, as in a step."""
        if self._count == 1 and factor == 1:
            arrays = self._arrays
        elif not self._count:
            arrays = [zeros_like(array) for array in self._arrays]
        else:
            arrays = [
                _narrow(_wide(array) * factor, dtype) for array, dtype in zip(self._arrays, self._dtypes, strict=True)
            ]
        return {"memory": self._memory, "arrays": arrays}


def _facts_of(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    coordinator = shared["coordinator"]
    return {
        "format": shared["format"],
        "number of ranks": own["size"],
        "step": shared["step"],
        "compressor": shared["compressor"],
        "policy": None if coordinator is None else coordinator["policy"],
        "shapes of": {name: list(shape) for name, shape in shared["tensors"].items()},
        "loss scale": own.get("loss_scale"),
        "op": own.get("op"),
    }


def _wide(array: Array) -> Array:
    xp = arrays_for(array)
    return xp.astype(array, wide_dtype(xp.dtype_name(array)))


def _narrow(array: Array, dtype: str) -> Array:
    xp = arrays_for(array)
    with np.errstate(over="ignore"):
        return xp.finite_or_zero(xp.astype(array, dtype))
