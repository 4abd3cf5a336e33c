"""Trains in PyTorch with torch.distributed and FSDP2, using `fully_shard` and `hvdcomp.fsdp.register`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import hvdcomp
from hvdcomp.communicators import asked_ranks_per_node
from hvdcomp.compression import Compression
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.learner import Arrays, UnreadableError, reading
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.torch_learner import OWN, OWN_ENTRIES, TorchLearner, as_array, loss_of, write_content

_SHARDS = "shards"  # the key of `shard_compression` in a checkpoint


class FSDPLearner(TorchLearner):
    """A `Learner` that trains with FSDP2. Each block of a transformer is sharded separately, and the rest of the model
    is sharded together. Shards are distributed over all ranks, or over the `shard_ranks` ranks of each replica.

    Some methods must be called on all ranks together: `parameters`, `save`, `restore`, and the first `evaluate` after a
    step.
    """

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        super().__init__(options, data, ranks)
        self._size = ranks.size
        self._within: Compression | None = None  # the compression of the reduce-scatter within each replica
        self._spans_nodes = False  # whether a replica is on several nodes
        if options.shard_ranks is not None:
            self._check_replicas(options.shard_ranks, asked_ranks_per_node() or ranks.local_size)

    def _check_replicas(self, shard_ranks: int, ranks_per_node: int) -> None:
        divisors = [str(number) for number in range(2, self._size) if self._size % number == 0]
        if str(shard_ranks) not in divisors:
            way = f"use {' or '.join(divisors)}" if divisors else "start 4, 6, 8 or more ranks"
            raise SetupError(
                f"--shard-ranks {shard_ranks} does not divide the {self._size} ranks of this run into several replicas "
                f"of the same size; {way}, or leave --shard-ranks out to shard the model over all ranks"
            )
        self._spans_nodes = ranks_per_node % shard_ranks != 0
        if not self._spans_nodes and self._options.shard_compression != TrainingOptions.shard_compression:
            raise SetupError(
                f"--shard-compression {self._options.shard_compression} would compress nothing, because all "
                f"{shard_ranks} ranks of a replica are on one node; leave out --shard-compression, give a larger "
                "--shard-ranks, or set HVDCOMP_RANKS_PER_NODE=1 to count each rank as a node"
            )

    def broadcast(self) -> None:
        # The seed gives all ranks the same weights. Weights are not resharded between the forward and the backward
        # pass. They are also not resharded between the batches of an evaluation, because ranks may have different
        # numbers of batches.
        mesh, ranks = None, self._options.shard_ranks
        if ranks is not None:
            shape = self._size // ranks, ranks
            mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("replicate", "shard"))
        for module in (*self._model.get_submodule("blocks").children(), self._model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self._begin()

    def compression(self, spec: str, **options: Any) -> Compression:
        own = self._options
        self._weights = None if own.fsdp_weights is None else parse_compressor(own.fsdp_weights)
        if self._spans_nodes:  # Even with the method "none", this object counts the bytes between nodes.
            self._within = Compression.from_spec(own.shard_compression, seed=own.seed)
        return Compression.from_spec(spec, **options)

    def distribute(self, compression: Compression) -> None:
        self._compression = compression
        hvdcomp.fsdp.register(
            self._model, compression, optimizer=self._optimizer, weights=self._weights, shards=self._within
        )

    @property
    def shard_ledger(self) -> Any:
        return None if self._within is None else self._within.ledger

    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        loss = loss_of(self._model(inputs), targets) / passes
        loss.backward()
        return loss.detach()

    def parameters(self) -> Arrays:
        whole = self._model.state_dict()
        return {name: as_array(whole[name].full_tensor()) for name, _ in self._model.named_parameters()}

    def save(self, folder: Path) -> list[Path]:
        """Saves in the format of `torch.distributed.checkpoint`. State that only this rank has is saved in a separate
        file."""
        assert self._compression is not None
        model, optimizer = get_state_dict(self._model, self._optimizer)
        with _as_os_error():
            sharded = {"model": model, "optimizer": optimizer, "compression": hvdcomp.dcp.by_rank(self._compression)}
            if self._within is not None:
                sharded[_SHARDS] = hvdcomp.dcp.by_rank(self._within)
            dcp.save(sharded, checkpoint_id=folder)
        write_content(own := folder / OWN.format(self._rank), self._own_state())
        return [own, *folder.glob(f"__{self._rank}_*"), *([folder / ".metadata"] if self._rank == 0 else [])]

    def restore(self, folder: Path, sources: Sequence[int], ranks: int) -> None:
        assert self._compression is not None
        model, optimizer = get_state_dict(self._model, self._optimizer)
        with reading(), _as_os_error():
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        try:
            hvdcomp.dcp.load(self._compression, folder, residuals=self._options.residuals)
            # The checkpoint lacks this state if each replica of the saved run was on a single node.
            names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            if self._within is not None and any(name.startswith(f"{_SHARDS}.") for name in names):
                hvdcomp.dcp.load(self._within, folder, _SHARDS, residuals=self._options.residuals)
        except CheckpointException as error:  # some rank could not read
            raise UnreadableError(_cause_of(error)) from error
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        own = self._read(folder / OWN.format(sources[0]), *OWN_ENTRIES)
        self._load_own(own, of_this_rank=sources[0] == self._rank)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """A context manager that turns an error of `torch.distributed.checkpoint` into an OSError. This is needed because
    the original error is not a subclass of Exception."""
    try:
        yield
    except CheckpointException as error:
        raise OSError(_cause_of(error)) from error


def _cause_of(error: CheckpointException) -> str:
    """A text with the error of the first rank that failed, and the number of this rank."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r} on rank {rank}"
