"""Trains in PyTorch on simulated ranks, each with a model in this process."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hvdcomp.compression import Compression
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.simulation import SimulatedRanks
from hvdcomp.tools.train.torch_learner import TorchLearner, loss_of
from hvdcomp.torch import serve_simulated


class SimulatedLearner(TorchLearner):
    """A `Learner` for simulated ranks with PyTorch. If there is a GPU, all ranks share it."""

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        super().__init__(options, data, ranks)
        self._communicator = cast(SimulatedRanks, ranks).communicator

    @staticmethod
    def prepare(local_rank: int, local_size: int) -> None:
        # The clock of a rank counts only the rank's own thread, so PyTorch must not start other threads.
        torch.set_num_threads(1)

    def broadcast(self) -> None:
        self._begin()  # all ranks have the same initial weights
        self._random = self._random_state()

    def distribute(self, compression: Compression) -> None:
        if self._steps_alone:
            self._distribute_steps(compression, communicator=self._communicator)
            return
        self._compression = compression
        self._serve_tables(communicator=self._communicator)
        with self._without_tables():
            self._exchange = serve_simulated(compression, self._model, self._communicator, self._optimizer)

    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        # All ranks share PyTorch's random generators, so each rank restores its own state.
        torch.set_rng_state(self._random[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1], self._device)
        loss = loss_of(self._model(inputs), targets) / passes
        loss.backward()
        self._random = self._random_state()
        return loss.detach()

    def _random_state(self) -> list[Tensor]:
        """The states of PyTorch's random generators, for the CPU and, if there is one, for the GPU."""
        of_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_gpu]

    def _update(self) -> None:
        if not self._steps_alone:
            self._exchange()
        super()._update()
