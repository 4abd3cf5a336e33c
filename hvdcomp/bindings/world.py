"""Converts the checkpoints of N ranks into checkpoints for M ranks, and keeps the residuals of all N ranks.

The contribution of residuals to the next mean gradient is their sum over the ranks, divided by the number of ranks.
This contribution must not change. How the residuals are distributed over the new ranks does not matter, because every
memory is linear in its residuals. New rank j gets M / N times the sum of the residuals of the old ranks j, j + M, j +
2M, and so on. If the training run uses the sum of gradients instead of their mean (op=hvd.Sum), new rank j gets this
sum without the factor M / N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray, wide_dtype
from hvdcomp.bindings.checkpoint import zeros_like
from hvdcomp.bindings.state_check import known_array, parts_of
from hvdcomp.errors import ConfigurationError

_WAY_OUT = 'or pass residuals="drop" to drop the residuals (the parts of gradients that were not sent yet)'


def state_for(states: Iterable[Mapping[str, Any]], rank: int, ranks: int, residuals: str = "keep") -> dict[str, Any]:
    """Creates the state of one rank for `Compression.load_state_dict`, from states that a different number of ranks
    saved.

        files = [f"checkpoint-{old}.pt" for old in range(old_ranks)]
        mine = files[hvd.rank() :: hvd.size()] or files[:1]
        state = hvdcomp.state_for((torch.load(file) for file in mine), hvd.rank(), hvd.size())

    The mean of the residuals over all ranks does not change (with op=hvd.Sum, their sum does not change). Warm starts,
    levels, steps and the policy continue. If the number of ranks is the same, the result is the rank's own state,
    unchanged.

    Args:
        states: the states that `Compression.state_dict` returned on the old ranks, in any order. Pass the states of all
            old ranks, or only the states that this rank needs, as above. The states are read one after another, until
            all needed states have been read.
        rank, ranks: number of this rank, and number of ranks, in the new training run. With a process set or FSDP,
            count only the ranks that exchange gradients with this rank.
        residuals: "keep" to keep the residuals of the old ranks, or "drop" to drop them. Use the same value on all
            ranks.

    Returns:
        The state of this rank. This state may share arrays with the given states.

    Raises:
        ConfigurationError: if a needed state is missing, or if the states do not come from the same training run and
            step.
    """
    if not 0 <= rank < ranks:
        raise ConfigurationError(
            f"rank {rank} of {ranks} ranks is not possible: ranks are counted from 0, so rank must be below {ranks}"
        )
    check_residuals(residuals)
    collected = _StateCollection(rank, ranks, residuals == "keep")
    for state in states:
        collected.add(state)
        if collected.complete:
            break
    return collected.state()


def check_residuals(residuals: str) -> None:
    """Raises ConfigurationError if the argument `residuals` of a user is neither "keep" nor "drop"."""
    if residuals not in ("keep", "drop"):
        raise ConfigurationError(
            f'residuals={residuals!r} is not allowed; give "keep" to keep the residuals, or "drop" to drop them'
        )


def renumbered(own: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The `own` part of a rank's state, adapted to a new rank number or a new number of ranks. Residuals are scaled for
    the new number of ranks."""
    sums = {name: _SummedResidual(name) for name in own["residuals"]}
    for name, kept in own["residuals"].items():
        sums[name].add(kept, own["rank"])
    return _own_part(own, rank, ranks, sums)


def _own_part(
    own: Mapping[str, Any], rank: int, ranks: int, residuals: Mapping[str, _SummedResidual]
) -> dict[str, Any]:
    """The `own` part of a new rank's state. It is computed from the `own` part of an old rank's state and from the
    summed residuals that the new rank gets."""
    factor = 1.0 if own.get("op") == "sum" else ranks / own["size"]
    return {
        **own,
        "rank": rank,
        "size": ranks,
        "residuals": {name: kept.times(factor) for name, kept in residuals.items()},
        "coordinator": own["coordinator"] if own["rank"] == rank else None,
    }


class _StateCollection:
    """Combines the states of old ranks, one after another, into the state of a new rank.

    Args:
        rank, ranks: number of the new rank, and number of new ranks.
        keeps: whether residuals are kept.
    """

    def __init__(self, rank: int, ranks: int, keeps: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self._keeps = keeps
        self._facts: dict[str, Any] = {}  # values that must be the same in all states, such as the step
        self._given: set[int] = set()  # the old ranks whose states were read
        self._empty = 0  # number of empty states, which ranks saved before their first step
        self._shared: Mapping[str, Any] = {}
        self._own: Mapping[str, Any] = {}  # the `own` part from which the new rank continues, without residuals
        self._residuals: dict[str, _SummedResidual] = {}

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
                self._residuals.setdefault(name, _SummedResidual(name)).add(kept, old)
        elif self._rank >= own["size"] and not self._residuals:
            # There are more new ranks than old ranks, so this rank gets no residuals, but zeros for the same tensors.
            self._residuals = {name: _SummedResidual(name).begin(kept) for name, kept in own["residuals"].items()}

    def _check(self, facts: dict[str, Any], old: int) -> None:
        if self._empty:
            raise ConfigurationError(
                "some of the states are empty, because the ranks that saved them had not made a step, but other states "
                "are not empty. Give the states that all ranks saved after the same step"
            )
        if old in self._given:
            raise ConfigurationError(f"the state of rank {old} was given twice; give the state of each old rank once")
        for fact, first in self._facts.items():
            if facts[fact] != first:
                if isinstance(first, Mapping):
                    names = sorted(name for name in {*first, *facts[fact]} if first.get(name) != facts[fact].get(name))
                    differ = f"in the {fact} {', '.join(names)}"
                else:
                    differ = f"in the {fact}: {first} and {facts[fact]}"
                raise ConfigurationError(
                    f"the states of ranks {min(self._given)} and {old} are not from the same training run and step: "
                    f"the two states differ {differ}. Give the states that all ranks saved after the same step, "
                    f'{_WAY_OUT}. With residuals="drop", give only the state of rank 0'
                )
        self._facts = facts

    @property
    def complete(self) -> bool:
        """Whether all states that this rank needs were read."""
        return bool(self._given) and self._useful <= self._given

    @property
    def _useful(self) -> set[int]:
        """The old ranks whose states this rank uses."""
        size = self._own["size"]
        return set(range(self._rank, size, self._ranks if self._keeps else size))

    @property
    def _required(self) -> set[int]:
        if self._keeps:
            return self._useful
        # New rank 0 also needs the `own` part of old rank 0, because this part contains the statistics of the policy.
        return {0} if self._rank == 0 and self._shared["coordinator"] is not None else set()

    def state(self) -> dict[str, Any]:
        if not self._given:
            if self._empty:
                return {}
            raise ConfigurationError("no state was given; give the states that compression.state_dict() returned")
        size = self._own["size"]
        missing = sorted(self._required - self._given)
        if missing:
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            way_out = (
                f"Give it, {_WAY_OUT}" if self._keeps else "Only this state has the pending decision of the policy"
            )
            raise ConfigurationError(
                f"rank {self._rank} of {self._ranks} needs the state that {named} saved (the checkpoint was saved by "
                f"{size} ranks). {way_out}"
            )
        return {"shared": self._shared, "own": _own_part(self._own, self._rank, self._ranks, self._residuals)}


class _SummedResidual:
    """The sum of a tensor's residuals over old ranks.

    Args:
        name: name of the tensor.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = ""
        self._dtypes: list[str] = []
        self._arrays: list[AnyArray] = []
        self._count = 0

    def begin(self, kept: Mapping[str, Any]) -> _SummedResidual:
        """Copies the memory, the shapes and the element types from a rank's residual, without adding this residual to
        the sum."""
        self._memory = kept["memory"]
        self._arrays = [known_array(array) for array in kept["arrays"]]
        self._dtypes = [arrays_for(array).dtype_name(array) for array in self._arrays]
        return self

    def add(self, kept: Mapping[str, Any], old: int) -> None:
        """Adds the residual of the old rank `old`."""
        if not self._count:
            self.begin(kept)
        elif kept["memory"] != self._memory:
            raise ConfigurationError(
                f"the residual of {self._name} comes from memory {self._memory} on one rank, and from {kept['memory']} "
                f"on rank {old}. Residuals of different memories cannot be added up. Give states of the same training "
                f"run, {_WAY_OUT}"
            )
        else:
            arrays = map(known_array, kept["arrays"])
            self._arrays = [_wide(total) + _wide(array) for total, array in zip(self._arrays, arrays, strict=True)]
        self._count += 1

    def times(self, factor: float) -> dict[str, Any]:
        """The sum multiplied by a factor, in the format in which a state stores residuals. Elements that are too large
        for the element type become zero, as in a step."""
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


def _wide(array: AnyArray) -> AnyArray:
    xp = arrays_for(array)
    return xp.astype(array, wide_dtype(xp.dtype_name(array)))


def _narrow(array: AnyArray, dtype: str) -> AnyArray:
    xp = arrays_for(array)
    with np.errstate(over="ignore"):
        return xp.finite_or_zero(xp.astype(array, dtype))
