"""The checks of `hvdcomp doctor` for torch.distributed: the variables of its launcher, and its network interfaces."""

from __future__ import annotations

from collections.abc import Iterator

from hvdcomp.tools.doctor.facts import Facts
from hvdcomp.tools.doctor.problem import Problem

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH = "Start the ranks with torchrun, or with `hvdcomp launch` and --backend torch, which set these variables."


def check_torch_variables(facts: Facts) -> Iterator[Problem]:
    """Checks the variables that init_process_group() reads, if at least one of them is set."""
    variables = facts.variables
    if facts.torch is None or not {"RANK", "WORLD_SIZE"} & variables.keys():
        return
    missing = [name for name in _NEEDED if not variables.get(name)]
    if missing:
        yield Problem(
            _stops(facts),
            f"torch.distributed's init_process_group() needs {', '.join(_NEEDED)}; not set: {', '.join(missing)}.",
            _LAUNCH,
        )
    rank, size = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank and size and not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        yield Problem(
            _stops(facts),
            f"RANK={rank} and WORLD_SIZE={size} do not match: ranks are numbered from 0 to WORLD_SIZE - 1.",
            _LAUNCH,
        )
    port = variables.get("MASTER_PORT")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        yield Problem(
            _stops(facts),
            f"MASTER_PORT={port} is not a port.",
            "Set MASTER_PORT to a number from 1 to 65535. No other program on the host of rank 0 may listen on this "
            "port.",
        )
    if facts.master_error:
        yield Problem(
            _stops(facts),
            f"MASTER_ADDR={variables.get('MASTER_ADDR')} does not resolve on this host: {facts.master_error}",
            "Set MASTER_ADDR to a name or an address of rank 0's host that all hosts can resolve; `getent hosts NAME` "
            "resolves a name.",
        )


def check_interfaces(facts: Facts) -> Iterator[Problem]:
    """Checks the variables that name network interfaces. Gloo's variable contains names. NCCL's variable contains
    prefixes of names, or names after "=", or interfaces to exclude after "^"."""
    remedy = f"Set the variable to one of {', '.join(facts.interfaces)}, or unset it."
    gloo = facts.variables.get("GLOO_SOCKET_IFNAME", "")
    for name in _names(gloo):
        if facts.torch is not None and name not in facts.interfaces:
            cause = f"GLOO_SOCKET_IFNAME={gloo}, but there is no network interface {name}, so Gloo cannot start."
            yield Problem(_stops(facts), cause, remedy)
    nccl = facts.variables.get("NCCL_SOCKET_IFNAME", "")
    exact = nccl.startswith("=")
    names = [name.partition(":")[0] for name in _names(nccl.removeprefix("="))]
    if names and not nccl.startswith("^"):
        fits = str.__eq__ if exact else str.startswith
        if not any(fits(interface, name) for interface in facts.interfaces for name in names):
            cause = f"NCCL_SOCKET_IFNAME={nccl}, but there is no such network interface, so NCCL cannot start."
            yield Problem(bool(facts.gpus), cause, remedy)


def check_torch_nccl(facts: Facts) -> Iterator[Problem]:
    torch = facts.torch
    if facts.gpus and torch is not None and torch.cuda and "nccl" not in torch.backends:
        yield Problem(
            False,
            f"There is a GPU, but torch.distributed of torch {torch.version} has no NCCL: DistributedDataParallel and "
            "FSDP exchange gradients on GPUs through the host's memory, or not at all.",
            "Install one of PyTorch's own builds for CUDA.",
        )


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _stops(facts: Facts) -> bool:
    """Whether a failure of torch.distributed prevents training. The failure is harmless if Horovod is installed and no
    launcher has set the variables that torch.distributed reads."""
    return facts.horovod is None or facts.by_torch
