"""The data of the reference training program, held in memory, and how each epoch deals it to the ranks.

All of it is NumPy, so that every framework trains on the same batches in the same order. Every data set is four
arrays. Images are (N, channels, size, size) with integer labels (N,); text is token
ids (N, length) whose targets, the same ids one further, are (N, length). What is trained on and what is
tested on never depends on the seed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from hvdcomp.train.settings import Settings, SetupError

# Numbers of what is drawn at random from one seed; the shuffles of the epochs take those that follow.
_PATTERNS, _IMAGES, _NOISE, _SHUFFLES = 0, 1, 2, 3


@dataclass(frozen=True)
class DataSet:
    """Training and test arrays, and what a model must know of them.

    Attributes:
        classes: labels, or the tokens of the vocabulary.
        mean, std: per channel, in the units of the stored images; None for text.
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

    @property
    def is_text(self) -> bool:
        return self.mean is None

    @property
    def channels(self) -> int:
        return 0 if self.is_text else self.train_x.shape[1]

    @property
    def size(self) -> int:
        """Height and width of an image in pixels, or the length of a sequence in tokens."""
        return self.train_x.shape[-1]

    def model_input(self, x: np.ndarray) -> np.ndarray:
        """Stored images as models want them: float, mean 0, standard deviation 1 per channel. Text as it is."""
        if self.mean is None or self.std is None:
            return x
        return (x.astype(np.float32) - self.mean[:, None, None]) / self.std[:, None, None]

    def training_batch(self, samples: np.ndarray, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of these training samples, augmented by `draws` where the data set is."""
        x = self.train_x[samples]
        return self.model_input(augment(x, draws) if self.augment else x), self.train_y[samples]

    def test_batch(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of these test samples."""
        return self.model_input(self.test_x[samples]), self.test_y[samples]


def load_data(settings: Settings) -> DataSet:
    """Load the data named in `settings`, cut to `samples`, with its label noise.

    Raises:
        SetupError: a file is missing or damaged, or there are fewer samples than asked for.
    """
    from hvdcomp.train import data_cifar, data_text

    loaders = {
        "digits": lambda: digits(),
        "synthetic": lambda: synthetic(settings.image_size, settings.seed),
        "cifar10": lambda: data_cifar.load(settings.data_dir, "cifar10"),
        "cifar100": lambda: data_cifar.load(settings.data_dir, "cifar100"),
        "stdlib-text": lambda: data_text.standard_library(
            settings.text_size, settings.text_unit, settings.sequence_length
        ),
        "wikitext2": lambda: data_text.load(settings.data_dir, "wikitext2", settings.sequence_length),
        "ptb": lambda: data_text.load(settings.data_dir, "ptb", settings.sequence_length),
    }
    data = loaders[settings.data]()
    if settings.samples is not None:
        if settings.samples > len(data.train_x):
            raise SetupError(
                f"--samples {settings.samples}: --data {settings.data} has {len(data.train_x)} to train on"
            )
        data = dataclasses.replace(
            data, train_x=data.train_x[: settings.samples], train_y=data.train_y[: settings.samples]
        )
    if settings.label_noise:
        data = dataclasses.replace(data, train_y=_noisy(data, settings.label_noise, settings.seed))
    return data


def digits() -> DataSet:
    """The 1797 scanned 8x8 digits that come with scikit-learn, one fifth of each class kept for testing.

    Raises:
        SetupError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SetupError("--data digits needs scikit-learn: pip install 'hvdcomp[train]'") from None
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return image_data(train_x, train_y, test_x, test_y, classes=10)


def synthetic(size: int, seed: int, train: int = 2000, test: int = 500, classes: int = 10) -> DataSet:
    """RGB images of noise, each with the smooth pattern of its class in it, too faint for one pixel to tell.

    The patterns are the same for every seed; the seed draws the images.
    """
    coarse = np.random.default_rng([0, _PATTERNS]).standard_normal((classes, 3, 4, 4))
    along = _interpolation(4, size)
    pattern = along @ coarse @ along.T
    draws = np.random.default_rng([seed, _IMAGES])
    y = draws.integers(classes, size=train + test)
    noise = draws.standard_normal((train + test, 3, size, size), dtype=np.float32)
    x = 0.5 * pattern[y].astype(np.float32) + noise
    return image_data(x[:train], y[:train], x[train:], y[train:], classes=classes)


def _interpolation(coarse: int, fine: int) -> np.ndarray:
    """Weights (fine, coarse) that interpolate between the centres of pixels; beyond the outer ones is no change."""
    centres = (np.arange(fine) + 0.5) * coarse / fine - 0.5
    distances = np.abs(np.clip(centres, 0, coarse - 1)[:, None] - np.arange(coarse))
    return np.maximum(0, 1 - distances)


def image_data(
    train_x: np.ndarray,
    train_y: np.ndarray,
    test_x: np.ndarray,
    test_y: np.ndarray,
    classes: int,
    augment: bool = False,
) -> DataSet:
    """A data set from arrays of images (N, channels, size, size) and labels (N,), scaled by the training part."""
    return DataSet(
        train_x=train_x,
        train_y=train_y.astype(np.int64),
        test_x=test_x,
        test_y=test_y.astype(np.int64),
        classes=classes,
        mean=train_x.mean(axis=(0, 2, 3), dtype=np.float64).astype(np.float32),
        std=np.maximum(train_x.std(axis=(0, 2, 3), dtype=np.float64), 1e-6).astype(np.float32),
        augment=augment,
    )


def _noisy(data: DataSet, fraction: float, seed: int) -> np.ndarray:
    """Training labels of which this fraction was replaced by labels drawn at random."""
    draws = np.random.default_rng([seed, _NOISE])
    replaced = draws.random(len(data.train_y)) < fraction
    return np.where(replaced, draws.integers(data.classes, size=data.train_y.shape), data.train_y)


def steps_per_epoch(samples: int, world_size: int, batch_size: int, passes: int) -> int:
    """Optimizer steps of an epoch, the same on every rank; what does not fill a last step is left out.

    Raises:
        SetupError: not even one step's batches can be filled.
    """
    steps = samples // world_size // (batch_size * passes)
    if steps == 0:
        raise SetupError(
            f"--batch-size {batch_size} (times {passes} backward passes) is more than the {samples // world_size} "
            f"of {samples} training samples that each of {world_size} ranks sees; make it smaller"
        )
    return steps


def epoch_shard(samples: int, world_size: int, rank: int, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The samples that `rank` sees in `epoch`, step by step: indices of shape (steps, batch).

    One shuffle, the same on every rank, is dealt out in turn: the ranks' shards do not overlap, and with
    other ranks the same samples come in nearly the same order.
    """
    shard = _shuffle(samples, seed, _SHUFFLES + epoch)[rank::world_size]
    steps = samples // world_size // batch
    return shard[: steps * batch].reshape(steps, batch)


def evaluation_shard(samples: int, world_size: int, rank: int) -> np.ndarray:
    """The test samples that `rank` evaluates: together the ranks see each exactly once."""
    return np.arange(samples)[rank::world_size]


def augment(images: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Flip each image left to right at random and shift it by up to 4 pixels, filling up with zeros.

    References: He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2.
    """
    count, _, height, width = images.shape
    flip = draws.random((count, 1, 1, 1)) < 0.5
    images = np.where(flip, images[..., ::-1], images)
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    top, left = draws.integers(9, size=(count, 1)), draws.integers(9, size=(count, 1))
    rows, columns = top + np.arange(height), left + np.arange(width)
    which = np.arange(count)[:, None, None]
    # Indexing with the channels in a slice moves them last.
    return padded[which, :, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2)


def _shuffle(count: int, seed: int, stream: int) -> np.ndarray:
    """The numbers below `count` in random order: the one of `torch.randperm`, with which results were published.

    References: Durstenfeld, Algorithm 235: Random permutation, 1964, with the 32-bit numbers of a Mersenne twister.
    """
    key = int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])
    draws = np.random.RandomState(key % 2**32).randint(2**32, size=count, dtype=np.uint32)
    order = np.arange(count)
    for place, draw in enumerate(draws.tolist()):
        other = place + draw % (count - place)
        order[place], order[other] = order[other], order[place]
    return order
