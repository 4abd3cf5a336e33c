"""Chooses the library that connects the ranks of a run. Only this library is imported."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.ranks import Ranks

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets for its processes."""


def choose(
    backend: str,
    framework: str,
    environment: Mapping[str, str] = os.environ,
    elastic: bool = False,
    timeout: float | None = None,
) -> str:
    """Chooses the backend. "auto" stands for the backend that fits the launcher.

    Args:
        backend: name of the library that connects the ranks, one of `options.BACKENDS`.
        framework: name of the framework, one of `options.FRAMEWORKS`.
        environment: the environment variables of the process.
        elastic: whether the number of ranks may change during training.
        timeout: the seconds that a rank waits for another rank; None for PyTorch's default.

    Returns:
        "horovod" or "ddp".

    Raises:
        SetupError: if the backend does not support the framework, elastic training or the timeout.
    """
    by_torchrun = TORCHRUN in environment
    chosen = backend if backend != "auto" else "ddp" if by_torchrun else "horovod"
    if framework != "torch" and chosen == "ddp":
        launcher = f"--backend {backend}" if backend != "auto" else "torchrun"
        raise SetupError(
            f"{launcher} works only with PyTorch, and --framework {framework} trains through Horovod: start it with "
            "horovodrun, and leave out --backend"
        )
    if chosen == "horovod" and by_torchrun:
        raise SetupError(
            "--backend horovod does not work, because torchrun started these processes: start them with horovodrun, or "
            "leave out --backend"
        )
    if chosen == "ddp" and elastic:
        raise SetupError(
            "--elastic works only with Horovod. torchrun starts all ranks again when ranks are lost or added: leave "
            "out --elastic, and start torchrun with --max-restarts and --nnodes MIN:MAX. With --checkpoint-folder, the "
            "run then continues after a restart"
        )
    if chosen == "horovod" and timeout is not None:
        raise SetupError(
            f"--timeout {timeout:g} works only with torch.distributed. With Horovod, leave it out. Instead, set "
            "HOROVOD_GLOO_TIMEOUT_SECONDS for Gloo, and HOROVOD_STALL_SHUTDOWN_TIME_SECONDS for ranks that fall behind"
        )
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise SetupError(f"--timeout {timeout:g} must be more than 0 seconds")
    return chosen


def reach(backend: str, framework: str, timeout: float | None = None) -> Ranks:
    """Connects all ranks. Every rank must call this function.

    Args:
        backend, framework, timeout: the arguments of `choose`.

    Raises:
        SetupError: if `choose` raises this error.
        ImportError: if the library is not installed, or was not built for this framework.
    """
    if choose(backend, framework, timeout=timeout) == "horovod":
        from hvdcomp.tools.train.ranks_horovod import HorovodRanks

        return HorovodRanks(framework)
    from hvdcomp.tools.train.ranks_torch import TorchRanks

    return TorchRanks(timeout)
