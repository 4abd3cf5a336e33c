"""The libraries that connect the ranks of a run; one is imported when it is chosen."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.ranks import Ranks

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of a process that torchrun has started."""


def choose(
    backend: str,
    framework: str,
    environment: Mapping[str, str] = os.environ,
    elastic: bool = False,
    timeout: float | None = None,
) -> str:
    """The backend that is meant: "auto" is what the launcher is for.

    Args:
        backend: one of `options.BACKENDS`.
        framework: one of `options.FRAMEWORKS`.
        elastic: whether ranks are to come and go while they train.
        timeout: seconds that a rank waits for another; None for PyTorch's own.

    Returns:
        "horovod" or "ddp".

    Raises:
        SetupError: TensorFlow cannot be trained that way, or ranks cannot come and go, or wait that long.
    """
    by_torchrun = TORCHRUN in environment
    chosen = backend if backend != "auto" else "ddp" if by_torchrun else "horovod"
    if framework != "torch" and chosen == "ddp":
        said = f"--backend {backend}" if backend != "auto" else "torchrun"
        raise SetupError(
            f"{said} is for PyTorch, and --framework {framework} trains through Horovod: start it with horovodrun, and "
            "leave out --backend"
        )
    if chosen == "horovod" and by_torchrun:
        raise SetupError(
            "--backend horovod: torchrun has started these processes, and Horovod does not know it: start them with "
            "horovodrun, or leave out --backend"
        )
    if chosen == "ddp" and elastic:
        raise SetupError(
            "--elastic is for Horovod. torchrun starts all ranks again when some come or go: leave out --elastic, and "
            "give torchrun --max-restarts and --nnodes MIN:MAX; with --checkpoint-folder the run goes on"
        )
    if chosen == "horovod" and timeout is not None:
        raise SetupError(
            f"--timeout {timeout:g} is for torch.distributed. With Horovod leave it out; set "
            "HOROVOD_GLOO_TIMEOUT_SECONDS for Gloo, and HOROVOD_STALL_SHUTDOWN_TIME_SECONDS for ranks that fall behind"
        )
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise SetupError(f"--timeout {timeout:g}: give more than 0 seconds")
    return chosen


def reach(backend: str, framework: str, timeout: float | None = None) -> Ranks:
    """Connect to all ranks. To be called on every rank.

    Args:
        backend, framework, timeout: as for `choose`.

    Raises:
        SetupError: as of `choose`.
        ImportError: the library is not installed, or was not built for this framework.
    """
    if choose(backend, framework, timeout=timeout) == "horovod":
        from hvdcomp.tools.train.ranks_horovod import HorovodRanks

        return HorovodRanks(framework)
    from hvdcomp.tools.train.ranks_torch import TorchRanks

    return TorchRanks(timeout)
