"""What the training loop asks of a framework: a model, an optimizer and a step, and nothing else.

The loop, the data, the ranks and the files are the same for all frameworks; `torch_learner` and `tensorflow_learner`
hold what differs. Arguments and results are NumPy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hvdcomp.compression import Compression
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks

Arrays = dict[str, np.ndarray]


class Learner(ABC):
    """A model in training on one rank.

    In this order: `prepare`, the constructor, `broadcast`, `compression`, `distribute`, and then steps.

    Args:
        options: resolved.
        data: whose shapes the model is built for.
        ranks: that this one is among; random choices of the model (dropout) differ between them.

    Raises:
        SetupError: the model does not suit the data.
    """

    first_step: str | None = None
    """What to tell the user before the first step, if it takes much longer than the others; None: nothing."""

    @abstractmethod
    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None: ...

    @staticmethod
    @abstractmethod
    def prepare(local_rank: int, local_size: int) -> None:
        """Choose this rank's device and threads; to be called after Horovod's init and before all else."""

    @abstractmethod
    def broadcast(self) -> None:
        """Put rank 0's weights on every rank, and make an optimizer that starts there."""

    @abstractmethod
    def compression(self, spec: str, **options: Any) -> Compression:
        """`hvdcomp.Compression.from_spec` for the parameters of this model."""

    @abstractmethod
    def distribute(self, compression: Compression) -> None:
        """Exchange gradients through Horovod from now on, compressed so."""

    @property
    def row_ledger(self) -> Any:
        """The ledger of the tables whose rows are exchanged beside the compression; None without any."""
        return None

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    @abstractmethod
    def step(self, inputs: np.ndarray, targets: np.ndarray, accumulation: int) -> float:
        """Make one optimizer step on this rank's share of its samples; returns their mean loss before the step.

        Args:
            inputs, targets: as `DataSet` gives them, (accumulation * backward_passes_per_step * batch_size, ...).
            accumulation: how many batches of the usual size they are.
        """

    def end(self) -> None:
        """Lets all ranks have the same weights, after the last step."""
        return

    def common_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that are to be the same on all ranks."""
        return nullcontext()

    @abstractmethod
    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Mean loss (of text: per token) and number of right answers of the model as it is."""

    @abstractmethod
    def parameters(self) -> Arrays:
        """The trained weights, by name."""

    @abstractmethod
    def buffers(self) -> Arrays:
        """The running statistics of normalization layers, by name."""

    @abstractmethod
    def set_buffers(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the running statistics, by name."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Write this rank's part of the training state: weights, optimizer, compression, random generators.

        Call it between two steps. Every rank writes to the same folder; a file of one rank has its number in its name.

        Returns:
            The files that this rank wrote.

        Raises:
            OSError: one cannot be written.
        """

    @abstractmethod
    def restore(self, folder: Path, sources: Sequence[int], ranks: int) -> None:
        """Load what `save` wrote, with any number of ranks; after `distribute` and before the first step.

        Args:
            sources: the ranks of then from whose files this rank goes on: in all by the first, and by the others in
                what was left to be sent.
            ranks: of now.

        Raises:
            ConfigurationError: the files are those of another model or compression.
        """
