"""The interface between the training loop and a framework. The framework provides a model, an optimizer and a training
step.

The loop, the data, the ranks and the files are the same for all frameworks. `torch_learner` and `keras_learner`
implement the parts that differ. Arguments and results are NumPy arrays.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hvdcomp.compression import Compression
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks

Arrays = dict[str, np.ndarray]

# Errors that may occur if a file is damaged, malicious, or written by another program.
_UNREADABLE: tuple[type[Exception], ...] = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    pickle.UnpicklingError,
)


class UnreadableError(Exception):
    """A file of a checkpoint cannot be read, or `Learner.save` did not write it."""


@contextmanager
def reading(*others: type[Exception]) -> Iterator[None]:
    """A context manager for code that only reads files of a checkpoint. An error in such code means that a file is
    wrong.

    Args:
        others: further types of errors that a wrong file may cause.

    Raises:
        UnreadableError: instead of an error that a wrong file may cause.
    """
    try:
        yield
    except _UNREADABLE + others as error:
        raise UnreadableError(repr(error)) from error


class Learner(ABC):
    """A model that is trained on one rank.

    The order of calls is `prepare`, the constructor, `broadcast`, `compression`, `distribute`, and then steps.

    Args:
        options: the options of the run, as `TrainingOptions.resolved` returns them.
        data: the data set. The model depends on the shapes of its samples.
        ranks: the ranks of the run. Random choices of the model (dropout) differ between ranks.

    Raises:
        SetupError: if the model does not suit the data.
    """

    first_step: str | None = None
    """A message to show before the first step if that step takes much longer than later steps; otherwise None."""

    @abstractmethod
    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None: ...

    @staticmethod
    @abstractmethod
    def prepare(local_rank: int, local_size: int) -> None:
        """Chooses the device and the threads of this rank. Call this after Horovod's init, and before all other
        methods."""

    @abstractmethod
    def broadcast(self) -> None:
        """Copies rank 0's weights to every rank, and creates the optimizer."""

    @abstractmethod
    def compression(self, spec: str, **options: Any) -> Compression:
        """Calls `hvdcomp.Compression.from_spec` for the parameters of this model."""

    @abstractmethod
    def distribute(self, compression: Compression) -> None:
        """From now on, all steps exchange gradients with the given compression."""

    @property
    def row_ledger(self) -> Any:
        """The ledger of tables whose rows are exchanged separately from the compression; None if there are no such
        tables."""
        return None

    @property
    def shard_ledger(self) -> Any:
        """The ledger of the reduce-scatter within each replica. It is None if there are no replicas, or if each replica
        is on a single node."""
        return None

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of the next step."""

    @abstractmethod
    def step(self, inputs: np.ndarray, targets: np.ndarray, accumulation: int) -> float:
        """Takes an optimizer step on this rank's share of the samples. Returns the mean loss of these samples before
        the step.

        Args:
            inputs, targets: the samples from `DataSet`, (accumulation * backward_passes_per_step * batch_size, ...).
            accumulation: the number of batches whose gradients are added up in one step.
        """

    def end(self) -> None:
        """Gives all ranks the same weights after the last step."""
        return

    def common_weights(self) -> AbstractContextManager[None]:
        """A context manager. In its block, the weights of the model are the same on all ranks."""
        return nullcontext()

    @abstractmethod
    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """The mean loss (for text, per token) and the number of correct answers of the current model. For a regression,
        the number is 0."""

    @abstractmethod
    def parameters(self) -> Arrays:
        """The trained weights, by name."""

    @abstractmethod
    def buffers(self) -> Arrays:
        """The running statistics of normalization layers, by name."""

    @abstractmethod
    def set_buffers(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets the running statistics, by name."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Writes this rank's part of the training state: weights, optimizer, compression and random generators.

        Call this between two steps. All ranks write to the same folder. The names of a rank's files contain its number.

        Returns:
            The files that this rank wrote.

        Raises:
            OSError: if a file cannot be written.
        """

    @abstractmethod
    def restore(self, folder: Path, sources: Sequence[int], ranks: int) -> None:
        """Loads the files that `save` wrote, with any number of ranks. Call this after `distribute`, and before the
        first step.

        Args:
            folder: folder of the checkpoint's files.
            sources: the saved ranks whose files this rank loads. From the files of the first saved rank, this rank
                loads all state. From the files of the other saved ranks, it loads only the residuals.
            ranks: the current number of ranks.

        Raises:
            UnreadableError: if a file is damaged, or was written by another program.
            ConfigurationError: if the files belong to a different model or compression.
        """
