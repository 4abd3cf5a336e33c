"""The data of the reference training program, held in memory, and how each epoch deals it to the ranks.

Every data set is four tensors. Images are (N, channels, size, size) with integer labels (N,); text is token
ids (N, length) whose targets, the same ids one further, are (N, length). What is trained on and what is
tested on never depends on the seed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvdcomp.train.settings import Settings, SetupError


@dataclass(frozen=True)
class DataSet:
    """Training and test tensors, and what a model must know of them.

    Attributes:
        classes: labels, or the tokens of the vocabulary.
        mean, std: per channel, in the units of the stored images; None for text.
        augment: whether training images are flipped and shifted.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: Tensor | None = None
    std: Tensor | None = None
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

    def to(self, device: torch.device) -> DataSet:
        """The same data with every tensor on `device`."""
        return DataSet(
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
            classes=self.classes,
            mean=None if self.mean is None else self.mean.to(device),
            std=None if self.std is None else self.std.to(device),
            augment=self.augment,
        )

    def model_input(self, x: Tensor) -> Tensor:
        """Stored images as models want them: float, mean 0, standard deviation 1 per channel. Text as it is."""
        if self.mean is None or self.std is None:
            return x
        return (x.float() - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


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
    patterns = _generator(0, 0)
    coarse = torch.randn(classes, 3, 4, 4, generator=patterns)
    pattern = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    draws = _generator(seed, 1)
    labels = torch.randint(classes, (train + test,), generator=draws)
    images = 0.5 * pattern[labels] + torch.randn(train + test, 3, size, size, generator=draws)
    x, y = images.numpy(), labels.numpy()
    return image_data(x[:train], y[:train], x[train:], y[train:], classes=classes)


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
        train_x=torch.from_numpy(train_x),
        train_y=torch.from_numpy(train_y).long(),
        test_x=torch.from_numpy(test_x),
        test_y=torch.from_numpy(test_y).long(),
        classes=classes,
        mean=torch.from_numpy(train_x.mean(axis=(0, 2, 3), dtype=np.float64)).float(),
        std=torch.from_numpy(train_x.std(axis=(0, 2, 3), dtype=np.float64)).float().clamp(min=1e-6),
        augment=augment,
    )


def _noisy(data: DataSet, fraction: float, seed: int) -> Tensor:
    """Training labels of which this fraction was replaced by labels drawn at random."""
    draws = _generator(seed, 2)
    replaced = torch.rand(len(data.train_y), generator=draws) < fraction
    return torch.where(replaced, torch.randint(data.classes, data.train_y.shape, generator=draws), data.train_y)


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


def epoch_shard(samples: int, world_size: int, rank: int, batch: int, seed: int, epoch: int) -> Tensor:
    """The samples that `rank` sees in `epoch`, step by step: indices of shape (steps, batch).

    One shuffle, the same on every rank, is dealt out in turn: the ranks' shards do not overlap, and with
    other ranks the same samples come in nearly the same order.
    """
    order = torch.randperm(samples, generator=_generator(seed, 3 + epoch))
    shard = order[rank::world_size]
    steps = samples // world_size // batch
    return shard[: steps * batch].view(steps, batch)


def evaluation_shard(samples: int, world_size: int, rank: int) -> Tensor:
    """The test samples that `rank` evaluates: together the ranks see each exactly once."""
    return torch.arange(samples)[rank::world_size]


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each image left to right at random and shift it by up to 4 pixels, filling up with zeros.

    References: He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2.
    """
    count, _, height, width = images.shape
    flip = torch.rand(count, generator=generator) < 0.5
    images = torch.where(flip.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count, 1), generator=generator).to(images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    which = torch.arange(count, device=images.device).view(-1, 1, 1)
    # Indexing with the channels in a slice moves them last.
    return padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def _generator(seed: int, stream: int) -> torch.Generator:
    """A private generator; streams of one seed, and neighbouring seeds, draw independently."""
    key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(key) & (2**63 - 1))
