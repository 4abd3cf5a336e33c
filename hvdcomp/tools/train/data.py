"""Loads the data for the reference training program into memory, and distributes them to the ranks in each epoch.

All of this uses NumPy, so that every framework trains on the same batches in the same order. The split into training
and test samples does not depend on the seed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hvdcomp.tools.train import (
    data_cifar,
    data_clicks,
    data_criteo,
    data_heavy_tails,
    data_mnist1d,
    data_shapes,
    data_sorting,
    data_text,
)
from hvdcomp.tools.train.dataset import DataSet, Part, labeled_data
from hvdcomp.tools.train.options import SetupError, TrainingOptions

# The numbers of a seed's random streams. The shuffles of the epochs use the numbers from _SHUFFLES on.
_PATTERNS, _IMAGES, _NOISE, _SHUFFLES = 0, 1, 2, 3


def load_data(options: TrainingOptions) -> DataSet:
    """Loads the data of `options`, limits them to `samples`, splits off the validation part, and adds label noise.

    Raises:
        SetupError: if a file is missing or damaged, or if there are fewer samples than `samples`.
    """
    loaders = {
        "digits": lambda: digits(),
        "synthetic": lambda: synthetic(options.image_size, options.seed),
        "cifar10": lambda: data_cifar.load(options.data_dir, "cifar10"),
        "cifar100": lambda: data_cifar.load(options.data_dir, "cifar100"),
        "shapes": lambda: data_shapes.load(),
        "mnist1d": lambda: data_mnist1d.load(),
        "heavy-tails": lambda: data_heavy_tails.load(),
        "sorting": lambda: data_sorting.load(),
        "clicks": lambda: data_clicks.load(options.table_rows),
        "criteo": lambda: data_criteo.load(options.data_dir, options.table_rows, options.samples),
        "text": lambda: data_text.bytes_of_standard_library(options.text_size, options.sequence_length),
        "stdlib-text": lambda: data_text.standard_library(
            options.text_size, options.text_unit, options.sequence_length
        ),
        "wikitext2": lambda: data_text.load(options.data_dir, "wikitext2", options.sequence_length),
        "ptb": lambda: data_text.load(options.data_dir, "ptb", options.sequence_length),
    }
    data = loaders[options.data]()
    if options.validation_samples:
        data = _held_back(data, options.validation_samples)
    if options.samples is not None:
        if options.samples > len(data.train_x):
            raise SetupError(
                f"--samples {options.samples} is more than the {len(data.train_x)} training samples of --data "
                f"{options.data}; give {len(data.train_x)} or fewer"
            )
        data = dataclasses.replace(
            data, train_x=data.train_x[: options.samples], train_y=data.train_y[: options.samples]
        )
    if options.label_noise:
        data = dataclasses.replace(data, train_y=_noisy(data, options.label_noise, options.seed))
    return data


def digits() -> DataSet:
    """The 1797 scanned 8x8 digits of scikit-learn. A fifth of each class is for testing.

    Raises:
        SetupError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SetupError("--data digits needs scikit-learn: pip install 'hvdcomp[train]'") from None
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return labeled_data(train_x, train_y, test_x, test_y, classes=10)


def synthetic(size: int, seed: int, train: int = 2000, test: int = 500, classes: int = 10) -> DataSet:
    """RGB images of noise. Each image also contains the smooth pattern of its class, which is too weak to be seen in a
    single pixel.

    The patterns are the same for every seed; the seed only determines the images.
    """
    coarse = np.random.default_rng([0, _PATTERNS]).standard_normal((classes, 3, 4, 4))
    along = _interpolation(4, size)
    pattern = along @ coarse @ along.T
    draws = np.random.default_rng([seed, _IMAGES])
    y = draws.integers(classes, size=train + test)
    noise = draws.standard_normal((train + test, 3, size, size), dtype=np.float32)
    x = 0.5 * pattern[y].astype(np.float32) + noise
    return labeled_data(x[:train], y[:train], x[train:], y[train:], classes=classes)


def _interpolation(coarse: int, fine: int) -> np.ndarray:
    """Weights (fine, coarse) that interpolate between the centers of pixels. Beyond the outer centers, the interpolated
    values are constant."""
    centers = (np.arange(fine) + 0.5) * coarse / fine - 0.5
    distances = np.abs(np.clip(centers, 0, coarse - 1)[:, None] - np.arange(coarse))
    return np.maximum(0, 1 - distances)


def _held_back(data: DataSet, count: int) -> DataSet:
    """A copy of the data in which the last `count` training samples have become the validation part."""
    if count >= len(data.train_x):
        raise SetupError(f"--validation-samples {count} must be fewer than the {len(data.train_x)} training samples")
    return dataclasses.replace(
        data,
        train_x=data.train_x[:-count],
        train_y=data.train_y[:-count],
        validation=Part(data.train_x[-count:], data.train_y[-count:]),
    )


def _noisy(data: DataSet, fraction: float, seed: int) -> np.ndarray:
    """The training labels, with this fraction replaced by random labels."""
    draws = np.random.default_rng([seed, _NOISE])
    replaced = draws.random(len(data.train_y)) < fraction
    return np.where(replaced, draws.integers(data.classes, size=data.train_y.shape), data.train_y)


def steps_per_epoch(samples: int, world_size: int, batch_size: int, passes: int) -> int:
    """The number of optimizer steps in an epoch, which is the same on every rank. An incomplete last step is left out.

    Raises:
        SetupError: if there are not enough samples for a step.
    """
    steps = samples // world_size // (batch_size * passes)
    if steps == 0:
        raise SetupError(
            f"--batch-size {batch_size} (times {passes} backward passes) is more than the {samples // world_size} "
            f"training samples of each rank ({samples} samples on {world_size} ranks); make the batch smaller"
        )
    return steps


def epoch_shard(samples: int, world_size: int, rank: int, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The samples on which `rank` trains in `epoch`: indices of shape (steps, batch).

    All samples are shuffled together and dealt to the ranks like cards. The shards of the ranks therefore do not
    overlap, and with a different number of ranks the same samples come in nearly the same order.
    """
    shard = _shuffle(samples, seed, _SHUFFLES + epoch)[rank::world_size]
    steps = samples // world_size // batch
    return shard[: steps * batch].reshape(steps, batch)


def evaluation_shard(samples: int, world_size: int, rank: int) -> np.ndarray:
    """The test samples that `rank` evaluates. Together, the ranks evaluate each sample exactly once."""
    return np.arange(samples)[rank::world_size]


def _shuffle(count: int, seed: int, stream: int) -> np.ndarray:
    """The numbers below `count` in a random order. The order is the same as with `torch.randperm`, which was used for
    the published results.

    References: Durstenfeld, Algorithm 235: Random permutation, 1964, with the 32-bit numbers of a Mersenne twister.
    """
    key = int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])
    draws = np.random.RandomState(key % 2**32).randint(2**32, size=count, dtype=np.uint32)
    order = np.arange(count)
    for place, draw in enumerate(draws.tolist()):
        chosen = place + draw % (count - place)
        order[place], order[chosen] = order[chosen], order[place]
    return order
