"""A data set in memory. It consists of NumPy arrays of training, validation and test samples, and of properties that
models need.

Images have the shape (N, channels, size, size), signals (N, channels, size), and rows of features (N, channels).
Samples have integer labels (N,) or, in a regression, float targets (N,). Text consists of token ids (N, length), and
its targets (N, length) are the ids shifted by one position. Numbers to sort are also token ids, and their targets are
the sorted ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """Samples with their labels or targets."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class DataSet:
    """Training and test arrays, and their properties for models.

    Attributes:
        classes: the number of different labels, or of tokens in the vocabulary; 1 for a regression.
        table_rows: the number of rows of each table of a click model. The ids of the rows are part of the features. The
            number is 0 for other data.
        validation: the samples that are used to choose settings and to end runs; None if no samples are held out.
        mean, std: mean and standard deviation of each channel, in the units of the stored images; None for tokens.
        augment: whether training images are flipped and shifted.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    augment: bool = False
    validation: Part | None = None
    table_rows: int = 0

    @property
    def has_tokens(self) -> bool:
        return self.mean is None

    @property
    def channels(self) -> int:
        return 0 if self.has_tokens else self.train_x.shape[1]

    @property
    def size(self) -> int:
        """The size that models need. Depending on the data, this is the height and width of an image in pixels, the
        points of a signal, the length of a sequence in tokens, or the number of rows of each table."""
        return self.table_rows or self.train_x.shape[-1]

    def model_input(self, x: np.ndarray) -> np.ndarray:
        """Converts stored samples to the inputs of a model: floats with mean 0 and standard deviation 1 per channel, or
        tokens."""
        if self.mean is None or self.std is None:
            return x
        per_channel = (-1, *[1] * (x.ndim - 2))
        return (x.astype(np.float32) - self.mean.reshape(per_channel)) / self.std.reshape(per_channel)

    def training_batch(self, samples: np.ndarray, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of these training samples. If `augment` is set, they are augmented with `draws`."""
        x = self.train_x[samples]
        return self.model_input(augment(x, draws) if self.augment else x), self.train_y[samples]

    @property
    def test(self) -> Part:
        return Part(self.test_x, self.test_y)


def labeled_data(
    train_x: np.ndarray,
    train_y: np.ndarray,
    test_x: np.ndarray,
    test_y: np.ndarray,
    classes: int,
    augment: bool = False,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
) -> DataSet:
    """Creates a data set of images or signals with labels (N,). The scale is computed from the training part."""
    mean, std = scales_of(train_x)
    return DataSet(
        train_x=train_x,
        train_y=train_y.astype(np.int64),
        test_x=test_x,
        test_y=test_y.astype(np.int64),
        classes=classes,
        mean=mean,
        std=std,
        augment=augment,
        validation=None if validation is None else Part(validation[0], validation[1].astype(np.int64)),
    )


def scales_of(train_x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of images or signals."""
    axes = (0, *range(2, train_x.ndim))
    mean, std = train_x.mean(axis=axes, dtype=np.float64), train_x.std(axis=axes, dtype=np.float64)
    return mean.astype(np.float32), np.maximum(std, 1e-6).astype(np.float32)


def in_parts(x: np.ndarray, y: np.ndarray, train: int, validation: int) -> tuple[Part, Part, Part]:
    """Splits samples: the first `train` are for training, the next `validation` for validation, and the rest for
    testing."""
    end = train + validation
    return Part(x[:train], y[:train]), Part(x[train:end], y[train:end]), Part(x[end:], y[end:])


def augment(images: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Flips each image left to right at random, and shifts it by up to 4 pixels. The edges are filled with zeros.

    References: He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2.
    """
    count, _, height, width = images.shape
    flip = draws.random((count, 1, 1, 1)) < 0.5
    images = np.where(flip, images[..., ::-1], images)
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    top, left = draws.integers(9, size=(count, 1)), draws.integers(9, size=(count, 1))
    rows, columns = top + np.arange(height), left + np.arange(width)
    images_index = np.arange(count)[:, None, None]
    # Indexing moves the channels to the end, because a slice selects them.
    return padded[images_index, :, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2)
