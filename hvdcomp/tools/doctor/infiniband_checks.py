"""The check of `hvdcomp doctor` for InfiniBand and RoCE. If NCCL cannot use these networks, it uses TCP and gives no
warning."""

from __future__ import annotations

from collections.abc import Iterator

from hvdcomp.tools.doctor.facts import Facts
from hvdcomp.tools.doctor.problem import Problem

# NCCL locks its buffers in memory, some MB for each connection. The usual limits for users are 64 KB or 8 MB.
_LOCKED_MEMORY = 2**30


def check_infiniband(facts: Facts) -> Iterator[Problem]:
    """Checks InfiniBand, but only if there is a GPU, because only NCCL uses InfiniBand."""
    infiniband = facts.infiniband
    if infiniband is None or not facts.gpus or _not_wanted(facts):
        return
    cards = f"There is a card for InfiniBand or RoCE ({', '.join(infiniband.cards)})"
    if infiniband.error:
        yield Problem(
            False,
            f"{cards}, but libibverbs cannot be loaded, so NCCL uses TCP, which is slower: {infiniband.error}",
            "Install libibverbs with the providers; on Debian and Ubuntu: libibverbs1 ibverbs-providers.",
        )
    elif infiniband.usable == 0:
        yield Problem(
            False,
            f"{cards}, but libibverbs finds no card that this process may use, so NCCL uses TCP, which is slower.",
            "The card's files in /dev/infiniband or its provider (ibverbs-providers) are missing. docs/infiniband.md "
            "explains how to give them to a job.",
        )
    elif infiniband.locked_memory is not None and infiniband.locked_memory < _LOCKED_MEMORY:
        yield Problem(
            False,
            f"{cards}, but a process may lock only {infiniband.locked_memory / 1024:,.0f} KiB of memory: NCCL may "
            "fail at its first exchange (ibv_reg_mr: Cannot allocate memory).",
            "Run ulimit -l unlimited. The host must allow it: see docs/infiniband.md.",
        )


def _not_wanted(facts: Facts) -> bool:
    """Whether a variable disables InfiniBand for NCCL."""
    disabled = facts.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    return disabled or facts.variables.get("NCCL_NET", "IB").upper() != "IB"
