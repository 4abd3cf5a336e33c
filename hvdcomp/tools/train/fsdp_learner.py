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
from torch.distributed.fsdp import FSDPModule, fully_shard

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.train.learner import Arrays, UnreadableError, reading
from hvdcomp.tools.train.torch_learner import OWN, OWN_ENTRIES, TorchLearner, as_array, loss_of, write_content


class FSDPLearner(TorchLearner):
    """A `Learner` that trains with FSDP2. Each block of a transformer is sharded separately over all ranks, and the
    rest of the model together.

    Some methods must be called on all ranks together: `parameters`, `save`, `restore`, and the first `evaluate` after a
    step.
    """

    def broadcast(self) -> None:
        # All ranks have the same weights because of the seed. Weights are not resharded between the forward and the
        # backward pass. They are also not resharded between the batches of an evaluation, because ranks may have
        # different numbers of batches.
        for module in (*self._model.get_submodule("blocks").children(), self._model):
            fully_shard(module, reshard_after_forward=False)
        self._begin()

    def compression(self, spec: str, **options: Any) -> Compression:
        weights = self._options.fsdp_weights
        self._weights = None if weights is None else parse_compressor(weights)
        return Compression.from_spec(spec, **options)

    def distribute(self, compression: Compression) -> None:
        self._compression = compression
        hvdcomp.fsdp.register(self._model, compression, optimizer=self._optimizer, weights=self._weights)

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
        except CheckpointException as error:  # some rank could not read
            raise UnreadableError(_cause_of(error)) from error
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        own = self._read(folder / OWN.format(sources[0]), *OWN_ENTRIES)
        self._load_own(own, of_this_rank=sources[0] == self._rank)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """A context manager that turns an error of `torch.distributed.checkpoint` into an OSError, because the error is not
    an Exception."""
    try:
        yield
    except CheckpointException as error:
        raise OSError(_cause_of(error)) from error


def _cause_of(error: CheckpointException) -> str:
    """A text with the error of the first rank that failed, and the number of this rank."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r} on rank {rank}"
