"""Checks whether all ranks have the same configuration. If not, every rank raises an error with the differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdcomp import kernels
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError, RankMismatchError, SpecError
from hvdcomp.kernels import cuda

_LENGTH_BYTES = 8
_SHOWN_FACTS = 8
_SHOWN_CHARACTERS = 100
_REFUSED = "refused"
WEIGHTS = "weights of "  # the beginning of the name of each fact about the value of a parameter
KERNELS = "kernels"  # name of the fact: whether kernels were compiled


def facts_of_kernels() -> dict[str, str]:
    """Which kernels this rank has. All ranks need the same kernels, because the results of different kernels may differ
    in their last bits."""
    return {KERNELS: "compiled" if kernels.available() else "none", f"{KERNELS} for CUDA": cuda.described()}


def require_agreement(
    communicator: Communicator, facts: Mapping[str, Any], like: Array, broadcast: str = "broadcast them"
) -> None:
    """Compares facts between all ranks; waits for all ranks.

    The ranks first exchange a digest of fixed length. They exchange the facts themselves only if the digests differ.

    Args:
        communicator: the communicator of all ranks that must agree.
        facts: the settings of this rank, by name. JSON must be able to represent the values.
        like: an array of the framework, on the device where collectives run.
        broadcast: the code with which a user sends the weights of rank 0 to all ranks. It is part of the message.

    Raises:
        RankMismatchError: on every rank. The message names each setting that differs, and which ranks have which value.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.sha256(text).digest()
    rows = gather_rows(communicator, digest + len(text).to_bytes(_LENGTH_BYTES, "big"), like, "hvdcomp.agreement")
    if len({row[:-_LENGTH_BYTES] for row in rows}) == 1:
        return
    longest = max(int.from_bytes(row[-_LENGTH_BYTES:], "big") for row in rows)
    texts = gather_rows(communicator, text.ljust(longest), like, "hvdcomp.agreement.facts")
    raise RankMismatchError(_what_differs([json.loads(text) for text in texts], broadcast))


def require_same_levels(
    communicator: Communicator,
    digest: int,
    like: Array,
    refused: str | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Compares the plans of all ranks; waits for all ranks.

    Args:
        communicator, like: as in `require_agreement`.
        digest: the digest of this rank's plan (`Planner.digest`).
        refused: the reason why this rank cannot make the step; None if it can.
        facts: further values that must be the same on all ranks in this step, by name.

    Raises:
        RankMismatchError: on every rank, if digests, reasons or facts differ. The message contains them.
    """
    require_agreement(communicator, {"levels": f"{digest:012x}", **facts, _REFUSED: refused}, like)


@contextmanager
def refused_on_every_rank(communicator: Communicator, like: Array) -> Iterator[None]:
    """Context manager that turns an error on one rank into an error on all ranks.

    The other ranks must call `require_agreement` as their next exchange. The code in the context must not exchange
    anything.

    Raises:
        Exception: the error that was raised in the context, if all ranks raised the same error.
        RankMismatchError: on every rank, with the messages of all errors, if ranks raised different errors, or if some
            ranks raised none.
    """
    try:
        yield
    except Exception as error:
        try:
            require_agreement(communicator, {_REFUSED: _message_of(error)}, like)
        except RankMismatchError as mismatch:
            raise mismatch from error
        raise


def _message_of(error: Exception) -> str:
    """The message of an error for other ranks. It begins with the class of the error, unless hvdcomp raised the error:
    hvdcomp's own messages are clear without the class."""
    own = isinstance(error, ConfigurationError | SpecError | RankMismatchError)
    return str(error) if own else f"{type(error).__name__}: {error}"


def gather_rows(communicator: Communicator, row: bytes, like: Array, name: str) -> list[bytes]:
    """All-gathers a row of bytes, which must have the same length on all ranks; returns the rows of all ranks."""
    array = arrays_for(like).from_numpy(np.frombuffer(row, np.uint8).copy(), like=like)
    gathered = np.asarray(communicator.wait(communicator.start_allgather(array, name)))
    return [bytes(row) for row in gathered]


def _what_differs(everyone: Sequence[Mapping[str, Any]], broadcast: str) -> str:
    refused = {theirs.get(_REFUSED) for theirs in everyone}
    if refused != {None}:  # a rank that cannot make the step may have sent no other facts
        reasons = _ranks_of([theirs.get(_REFUSED) or "no error" for theirs in everyone])
        told = "; ".join(f"rank {ranks}: {text}" for text, ranks in reasons.items())
        return f"some ranks cannot take part in the training. {told}"
    keys = dict.fromkeys(key for theirs in everyone for key in theirs)
    different = [key for key in keys if len({json.dumps(theirs.get(key)) for theirs in everyone}) > 1]
    if all(key.startswith(WEIGHTS) for key in different):
        problem = "the ranks would train different models, because their weights differ: "
        remedy = f"Before the first step, give all ranks the same weights: {broadcast}."
    else:
        problem = "the ranks do not agree on how to compress: "
        remedy = "Give hvdcomp.Compression and Horovod's optimizer the same model and arguments on every rank."
        different.sort(key=lambda key: key.startswith(WEIGHTS))
    if KERNELS in different:
        ways_out = (
            "Run `hvdcomp doctor` on each host to see why a host has no kernels. Or set HVDCOMP_KERNELS=off on every "
            "rank (with mpirun, pass it to the other hosts with -x HVDCOMP_KERNELS)."
        )
        remedy = f"{remedy} {ways_out}" if len(different) > 1 else ways_out
    shown = [f"{key}: {_by_rank([theirs.get(key) for theirs in everyone])}" for key in different[:_SHOWN_FACTS]]
    if len(different) > _SHOWN_FACTS:
        shown.append(f"and {len(different) - _SHOWN_FACTS} more")
    return f"{problem}{'; '.join(shown)}. {remedy}"


def _by_rank(values: Sequence[Any]) -> str:
    ranks = _ranks_of(values)
    shown = zip(_excerpts(list(ranks)), ranks.values(), strict=True)
    return ", ".join(f"{text} on rank {numbers}" for text, numbers in shown)


def _ranks_of(values: Sequence[Any]) -> dict[str, str]:
    """For each value, the ranks that have it, such as `0 2-5 7`."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(str(value), []).append(rank)
    return {text: _ranges(ranks) for text, ranks in ranks_by_value.items()}


def _excerpts(texts: Sequence[str]) -> list[str]:
    """The texts. If they are long, they are shortened to the part around the first character that differs."""
    if max(map(len, texts)) <= _SHOWN_CHARACTERS or len(texts) == 1:
        return list(texts)
    same = next((place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), None)
    start = max(0, (min(map(len, texts)) if same is None else same) - _SHOWN_CHARACTERS // 2)
    end = start + _SHOWN_CHARACTERS
    return [("..." if start else "") + text[start:end] + ("..." if end < len(text) else "") for text in texts]


def _ranges(ranks: Sequence[int]) -> str:
    """`0 2-5 7` for 0, 2, 3, 4, 5, 7."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else " ".join(map(str, part)) for part in parts)
