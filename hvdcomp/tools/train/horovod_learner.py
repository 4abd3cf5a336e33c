"""Trains in PyTorch with Horovod, using the unmodified `hvd.DistributedOptimizer` with
`compression=hvdcomp.Compression`."""

from __future__ import annotations

import horovod.torch as hvd
from torch import Tensor

from hvdcomp.compression import Compression
from hvdcomp.tools.train.torch_learner import TorchLearner, loss_of


class HorovodLearner(TorchLearner):
    """A `Learner` that trains with Horovod and PyTorch."""

    def broadcast(self) -> None:
        # hvd.broadcast_optimizer_state is not called. The optimizer has no state yet, so Horovod would take a step to
        # create the state, and AdamW would count this step.
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        self._begin()

    def distribute(self, compression: Compression) -> None:
        if self._steps_alone:
            self._distribute_steps(compression)
            return
        self._compression = compression
        self._serve_tables()
        with self._without_tables():  # Horovod averages all parameters that require gradients
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=self._model.named_parameters(),
                compression=compression,
                backward_passes_per_step=self._options.backward_passes_per_step,
            )

    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        loss = loss_of(self._model(inputs), targets) / passes
        loss.backward()
        return loss.detach()

    def _update(self) -> None:
        if self._steps_alone:
            super()._update()
        elif self._clips:
            self._optimizer.synchronize()  # The averaged gradients exist only after this call.
            self._clip()
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
        else:
            self._optimizer.step()
