"""The bindings of PyTorch: Horovod, DistributedDataParallel, FSDP, local steps and simulations."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcomp.torch.local_steps.auto import AutoRounds as AutoRounds
    from hvdcomp.torch.local_steps.optimizer import LocalSteps as LocalSteps
    from hvdcomp.torch.optimizers.compressed_adam import CompressedAdam as CompressedAdam
    from hvdcomp.torch.optimizers.muon import MuonWithAdamW as MuonWithAdamW
    from hvdcomp.torch.optimizers.muon import hidden_matrices as hidden_matrices
    from hvdcomp.torch.ranks import all_ranks as all_ranks
    from hvdcomp.torch.simulated import serve_simulated as serve_simulated
    from hvdcomp.torch.tables.look_ahead import LookAhead as LookAhead
    from hvdcomp.torch.tables.row_wise_adagrad import RowWiseAdagrad as RowWiseAdagrad
    from hvdcomp.torch.tables.rows import RowExchange as RowExchange
    from hvdcomp.torch.tables.sharded import ShardedTables as ShardedTables

_FILES = {
    "AutoRounds": "local_steps.auto",
    "CompressedAdam": "optimizers.compressed_adam",
    "LocalSteps": "local_steps.optimizer",
    "LookAhead": "tables.look_ahead",
    "MuonWithAdamW": "optimizers.muon",
    "RowExchange": "tables.rows",
    "RowWiseAdagrad": "tables.row_wise_adagrad",
    "ShardedTables": "tables.sharded",
    "all_ranks": "ranks",
    "hidden_matrices": "optimizers.muon",
    "serve_simulated": "simulated",
}


def __getattr__(name: str) -> Any:
    """Imports PyTorch only when a name that needs it is used for the first time. The core can therefore import
    `hvdcomp.torch.framework` without PyTorch."""
    if name in _FILES:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
