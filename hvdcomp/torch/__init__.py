"""The bindings of PyTorch: Horovod, DistributedDataParallel, FSDP, local steps and simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.communicators import Communicator, SimulatedCommunicator

if TYPE_CHECKING:
    from hvdcomp.torch.compressed_adam import CompressedAdam as CompressedAdam
    from hvdcomp.torch.local_steps import LocalSteps as LocalSteps
    from hvdcomp.torch.look_ahead import LookAhead as LookAhead
    from hvdcomp.torch.muon import MuonWithAdamW as MuonWithAdamW
    from hvdcomp.torch.muon import hidden_matrices as hidden_matrices
    from hvdcomp.torch.row_wise_adagrad import RowWiseAdagrad as RowWiseAdagrad
    from hvdcomp.torch.rows import RowExchange as RowExchange
    from hvdcomp.torch.sharded_tables import ShardedTables as ShardedTables


def __getattr__(name: str) -> Any:
    """Imports a name that needs PyTorch when it is first used."""
    if name == "CompressedAdam":
        from hvdcomp.torch.compressed_adam import CompressedAdam

        return CompressedAdam
    if name == "LocalSteps":
        from hvdcomp.torch.local_steps import LocalSteps

        return LocalSteps
    if name == "LookAhead":
        from hvdcomp.torch.look_ahead import LookAhead

        return LookAhead
    if name == "MuonWithAdamW":
        from hvdcomp.torch.muon import MuonWithAdamW

        return MuonWithAdamW
    if name == "RowExchange":
        from hvdcomp.torch.rows import RowExchange

        return RowExchange
    if name == "RowWiseAdagrad":
        from hvdcomp.torch.row_wise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad
    if name == "ShardedTables":
        from hvdcomp.torch.sharded_tables import ShardedTables

        return ShardedTables
    if name == "hidden_matrices":
        from hvdcomp.torch.muon import hidden_matrices

        return hidden_matrices
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def all_ranks(backend: str = "horovod") -> Communicator:
    """The communicator of all ranks of Horovod, or of torch.distributed if the backend is "ddp"."""
    if backend == "ddp":
        from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator

        return TorchDistributedCommunicator()
    from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

    return HorovodTorchCommunicator()


def serve_simulated(
    compression: UsedCompression, model: Any, communicator: SimulatedCommunicator, optimizer: Any
) -> Callable[[], None]:
    """Makes the model of a simulated rank exchange compressed gradients.

    Args:
        compression: a compression of this model only.
        model: a `torch.nn.Module` on any device.
        communicator: the rank's communicator.
        optimizer: the optimizer of the model.

    Returns:
        A function that replaces the gradients by their means. Call it after the backward passes of each step.
    """
    from hvdcomp.torch.simulated import SimulatedBinding

    return compression.serve(lambda setup: SimulatedBinding(setup, model, communicator), optimizer).exchange
