"""Trains in PyTorch under torch.distributed, with FSDP2: `fully_shard` with `hvdcomp.fsdp.register`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.tools.train.learner import Arrays
from hvdcomp.tools.train.torch_learner import TorchLearner, as_array, loss_of

_WHOLE = StateDictOptions(full_state_dict=True)


class FSDPLearner(TorchLearner):
    """See `Learner`. The blocks of a transformer are sharded one by one over all ranks, and the rest together.

    What gathers weights is called on all ranks together: `parameters`, `save`, and the first `evaluate` after a step.
    """

    def broadcast(self) -> None:
        # The seed has given all ranks the same weights. They stay whole from the forward to the backward pass, and
        # between batches of an evaluation, of which ranks may have different numbers.
        for module in (*self._model.get_submodule("blocks").children(), self._model):
            fully_shard(module, reshard_after_forward=False)
        self._begin()

    def compression(self, spec: str, **options: Any) -> Compression:
        return Compression.from_spec(spec, **options)

    def distribute(self, compression: Compression) -> None:
        self._compression = compression
        hvdcomp.fsdp.register(self._model, compression, optimizer=self._optimizer)

    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        loss = loss_of(self._model(inputs), targets) / passes
        loss.backward()
        return loss.detach()

    def parameters(self) -> Arrays:
        whole = self._model.state_dict()
        return {name: as_array(whole[name].full_tensor()) for name, _ in self._model.named_parameters()}

    def _shared_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer, options=_WHOLE)
        return {"model": model, "optimizer": optimizer}

    def _load_shared(self, state: dict[str, Any]) -> None:
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **given, options=_WHOLE)
