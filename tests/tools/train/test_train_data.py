"""The data of `hvdcomp train`: what is loaded, how damaged files are refused, how epochs are dealt to the ranks."""

from __future__ import annotations

import pickle
import random
import re
import struct
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.tools.train import data as data_module
from hvdcomp.tools.train import data_cifar, data_criteo, data_heavy_tails, data_mnist1d, data_shapes, data_text
from hvdcomp.tools.train.data import epoch_shard, evaluation_shard, load_data, steps_per_epoch
from hvdcomp.tools.train.dataset import DataSet, augment
from hvdcomp.tools.train.options import SetupError, TrainingOptions


def _load(**options: object) -> DataSet:
    return load_data(TrainingOptions(**options).resolved())  # type: ignore[arg-type]


# -- how an epoch is dealt


@given(
    samples=st.integers(1, 300),
    world_size=st.integers(1, 7),
    batch=st.integers(1, 20),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(1, 500),
)
def test_shards_of_an_epoch(samples: int, world_size: int, batch: int, seed: int, epoch: int) -> None:
    if samples // world_size < batch:
        with pytest.raises(SetupError, match=f"--batch-size {batch} .* on {world_size} ranks"):
            steps_per_epoch(samples, world_size, batch, passes=1)
        return
    steps = steps_per_epoch(samples, world_size, batch, passes=1)
    shards = [epoch_shard(samples, world_size, rank, batch, seed, epoch) for rank in range(world_size)]
    assert all(shard.shape == (steps, batch) for shard in shards)
    seen = np.concatenate([shard.flatten() for shard in shards]).tolist()
    assert len(set(seen)) == len(seen), "no sample is seen twice"
    assert set(seen) <= set(range(samples))
    assert samples - len(seen) < world_size * (batch + 1), "little is left out"
    # A step of all ranks together is a step of one rank with the global batch.
    alone = epoch_shard(samples, 1, 0, batch * world_size, seed, epoch)
    for step in range(min(steps, len(alone))):
        assert {i for shard in shards for i in shard[step].tolist()} == set(alone[step].tolist())


def test_epochs_and_seeds_differ() -> None:
    first = epoch_shard(100, 2, 0, 10, seed=0, epoch=1)
    assert np.array_equal(first, epoch_shard(100, 2, 0, 10, seed=0, epoch=1))
    assert not np.array_equal(first, epoch_shard(100, 2, 0, 10, seed=0, epoch=2))
    assert not np.array_equal(first, epoch_shard(100, 2, 0, 10, seed=1, epoch=1))


@given(count=st.integers(0, 2000), seed=st.integers(0, 2**31 - 1), stream=st.integers(0, 500))
def test_shuffles_are_those_of_torch(count: int, seed: int, stream: int) -> None:
    """Published results were trained in this order."""
    torch = pytest.importorskip("torch")
    key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(int(key) % 2**63))
    assert data_module._shuffle(count, seed, stream).tolist() == expected.tolist()


def test_shuffles_leave_the_global_generator_alone() -> None:
    np.random.seed(5)
    expected = np.random.rand(3)
    np.random.seed(5)
    epoch_shard(100, 2, 0, 10, seed=0, epoch=1)
    _load(data="synthetic", image_size=8, label_noise=0.5)
    assert np.array_equal(np.random.rand(3), expected)


@given(samples=st.integers(0, 100), world_size=st.integers(1, 8))
def test_evaluation_covers_each_sample_once(samples: int, world_size: int) -> None:
    seen = np.concatenate([evaluation_shard(samples, world_size, rank) for rank in range(world_size)])
    assert sorted(seen.tolist()) == list(range(samples))


# -- built-in data


def test_digits_split_is_stratified_and_fixed() -> None:
    pytest.importorskip("sklearn")
    data = _load(data="digits", seed=1)
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    shares = np.bincount(data.test_y) / (np.bincount(data.test_y) + np.bincount(data.train_y))
    assert np.abs(shares - 0.2).max() < 0.005
    assert np.array_equal(data.train_x, _load(data="digits", seed=2).train_x)
    seen = data.model_input(data.train_x)
    assert abs(seen.mean()) < 1e-4
    assert seen.std() == pytest.approx(1, abs=1e-3)


def test_synthetic_is_learnable_and_seeded() -> None:
    data = _load(data="synthetic", image_size=16, seed=3)
    assert data.train_x.shape == (2000, 3, 16, 16)
    assert np.array_equal(data.train_x, _load(data="synthetic", image_size=16, seed=3).train_x)
    assert not np.array_equal(data.train_x, _load(data="synthetic", image_size=16, seed=4).train_x)
    # The means of the classes, learned from the training images, tell the test images apart.
    means = np.stack([data.train_x[data.train_y == label].mean(axis=0) for label in range(10)])
    distances = ((data.test_x[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == data.test_y).mean() > 0.9


@pytest.mark.parametrize(("model", "name"), [("cnn", "shapes"), ("encoder", "sorting"), ("mlp", "heavy-tails")])
def test_generated_data_are_the_same_for_every_seed_and_no_sample_is_in_two_parts(model: str, name: str) -> None:
    data = _load(model=model, data=name, seed=3)
    assert data.validation is not None
    parts = [data.train_x, data.validation.x, data.test_x]
    samples = np.concatenate([part.reshape(len(part), -1) for part in parts])
    assert len(np.unique(samples, axis=0)) == len(samples)
    loader = data_module.__dict__[f"data_{name.replace('-', '_')}"].load
    loader.cache_clear()
    again = _load(model=model, data=name, seed=4)
    assert again is not data, "drawn anew"
    for one, other in ((data.train_x, again.train_x), (data.train_y, again.train_y), (data.test_y, again.test_y)):
        np.testing.assert_array_equal(one, other)


def test_shapes_are_whole_where_the_label_says_so_and_pieces_are_small() -> None:
    draws = np.random.default_rng(0)
    labels = np.arange(10).repeat(50)
    whole = data_shapes._drawn(labels, (7.5, 7.5), draws)
    sizes = whole.sum((1, 2)).reshape(10, 50).mean(1)
    disc, ring, square, frame = sizes[:4]
    low, high = data_shapes._RADII
    squared_radius = (high**3 - low**3) / (high - low) / 3  # its mean
    assert disc == pytest.approx(0.8 * np.pi * squared_radius, rel=0.1)
    assert ring < disc
    assert frame < square == pytest.approx(2.25 * squared_radius, rel=0.1)
    turned = [len(np.unique(whole[labels == label].reshape(50, -1), axis=0)) for label in range(10)]
    assert min(turned[2:]) > 25, "angles and sizes differ"
    windows = data_shapes._windows(2000, draws)
    assert set(windows.sum((1, 2))) == {25}
    assert windows.any(0).all(), "they are everywhere"
    data = _load(model="cnn", data="shapes")
    assert (data.channels, data.size, data.classes) == (1, 16, 10)
    assert np.bincount(data.train_y).min() > 1000


def test_numbers_to_sort_have_the_same_numbers_in_order_as_targets() -> None:
    data = _load(model="encoder", data="sorting")
    assert (data.has_tokens, data.size, data.classes) == (True, 16, 64)
    assert (np.diff(data.train_y) >= 0).all()
    for x, y in zip(data.train_x[:20].tolist(), data.train_y[:20].tolist(), strict=True):
        assert sorted(x) == y != x


def test_half_of_the_features_of_a_regression_have_outliers() -> None:
    data = _load(model="mlp", data="heavy-tails")
    assert (data.channels, data.size, data.classes) == (16, 1, 1)
    x, y = data.model_input(data.train_x)[:, :, 0, 0], data.train_y
    assert (x.dtype, y.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose([x.mean(0).max(), x.std(), y.mean(), y.std()], [0, 1, 0, 1], atol=1e-3)
    largest = abs(x).max(0)
    assert largest[:8].min() > 15 > 6 > largest[8:].max()
    # There is something to learn, and it is not linear.
    rows = np.c_[x, np.ones(len(x))]
    fitted = rows @ np.linalg.lstsq(rows, y, rcond=None)[0]
    assert 0.3 < ((y - fitted) ** 2).mean() < 0.9
    heavy = data.train_x[:, :8, 0, 0]
    np.testing.assert_allclose((np.log1p(abs(heavy)) / data_heavy_tails._GROWTH).mean(0), (2 / np.pi) ** 0.5, atol=0.02)


def test_samples_and_label_noise() -> None:
    whole = _load(data="synthetic", image_size=8)
    part = _load(data="synthetic", image_size=8, samples=50)
    assert np.array_equal(part.train_x, whole.train_x[:50])
    assert np.array_equal(part.test_x, whole.test_x)
    noisy = _load(data="synthetic", image_size=8, label_noise=0.5)
    assert np.array_equal(noisy.test_y, whole.test_y)
    # Of the replaced labels one in ten is drawn as it was.
    assert (noisy.train_y != whole.train_y).mean() == pytest.approx(0.45, abs=0.05)
    with pytest.raises(SetupError, match="--samples 3000 is more than the 2000 training samples of --data synthetic"):
        _load(data="synthetic", image_size=8, samples=3000)


@pytest.mark.parametrize(("unit", "vocabulary"), [("char", range(60, 300)), ("word", range(1000, 10_001))])
def test_standard_library_text(unit: str, vocabulary: range) -> None:
    data = data_text.standard_library(50_000 if unit == "char" else 200_000, unit, 20)
    assert data.has_tokens
    assert data.classes in vocabulary
    assert data.size == 20
    assert np.array_equal(data.train_x[0, 1:], data.train_y[0, :-1]), "targets are the inputs one further"
    assert np.array_equal(data.train_x[1:, 0], data.train_y[:-1, -1]), "sequences follow each other"
    assert int(data.test_x.min()) >= 0
    assert int(data.test_x.max()) < data.classes
    assert len(data.test_x) / len(data.train_x) == pytest.approx(1 / 9, rel=0.1)
    again = data_text.standard_library(50_000 if unit == "char" else 200_000, unit, 20)
    assert np.array_equal(again.train_x, data.train_x)


def test_standard_library_cannot_be_longer_than_it_is() -> None:
    with pytest.raises(SetupError, match=r"--text-size 10000000000 is too large: the standard library in .* has"):
        data_text.standard_library(10**10, "char", 20)


def test_bytes_of_the_standard_library_are_in_one_part_only() -> None:
    data = data_text.bytes_of_standard_library(200_000, 64)
    assert (data.classes, data.has_tokens, data.train_x.shape) == (256, True, (3124, 64))
    assert data.validation is not None
    parts = {"train": data.train_x, "validation": data.validation.x, "test": data.test_x}
    texts = {name: part.astype(np.uint8).tobytes() for name, part in parts.items()}
    assert all(len(text) > 50_000 for text in texts.values())
    for name, text in texts.items():
        middle = text[20_000:20_200]  # long enough to be nowhere else by chance
        assert [other for other, where in texts.items() if middle in where] == [name]
    assert np.array_equal(data.validation.x[:, 1:], data.validation.y[:, :-1]), "targets are the inputs one further"


def test_too_many_bytes_of_the_standard_library() -> None:
    with pytest.raises(SetupError, match=r"--text-size 10000000000 is too large: .* has \d+ bytes"):
        data_text.bytes_of_standard_library(10**10, 64)


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No signals of MNIST-1D are kept; the folder where they will be."""
    pytest.importorskip("mnist1d", reason="mnist1d is not installed: pip install 'hvdcomp[mnist1d]'")
    monkeypatch.setenv("HVDCOMP_CACHE", str(tmp_path / "cache"))
    data_mnist1d.load.cache_clear()
    yield tmp_path / "cache" / "data"
    data_mnist1d.load.cache_clear()


def test_mnist1d_is_as_published_and_leaves_the_global_generators_alone(nothing_kept: Path) -> None:
    random.seed(5)
    np.random.seed(5)
    data = _load(model="cnn1d", data="mnist1d")
    assert (random.random(), np.random.random()) == (0.6229016948897019, 0.22199317108973948)
    assert data.validation is not None
    assert (data.train_x.shape, data.validation.x.shape, data.test_x.shape) == (
        (4000, 1, 40),
        (2000, 1, 40),
        (10_000, 1, 40),
    )
    assert all(np.bincount(part).min() > 0.08 * len(part) for part in (data.train_y, data.validation.y, data.test_y))
    inputs = data.model_input(data.train_x)
    assert (inputs.mean(), inputs.std()) == (pytest.approx(0, abs=1e-4), pytest.approx(1, abs=1e-4))


@pytest.mark.parametrize("damage", [None, b"", b"PK damaged"])
def test_signals_of_mnist1d_are_drawn_once_and_again_if_the_file_is_damaged(
    damage: bytes | None, nothing_kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = []

    def draw() -> dict[str, np.ndarray]:
        draws.append(generator := np.random.default_rng(len(draws)))
        rows = {"x": 4000, "x_test": 12_000}
        signals = {name: generator.normal(size=(count, 40)) for name, count in rows.items()}
        return signals | {f"y{name[1:]}": generator.integers(10, size=count) for name, count in rows.items()}

    monkeypatch.setattr(data_mnist1d, "_draw", draw)
    first = data_mnist1d.load()
    (file,) = nothing_kept.iterdir()
    if damage is not None:
        file.write_bytes(damage)
    data_mnist1d.load.cache_clear()
    second = data_mnist1d.load()
    assert len(draws) == (1 if damage is None else 2)
    assert np.array_equal(first.train_x, second.train_x) == (damage is None)
    assert [file] == list(nothing_kept.iterdir())


def test_signals_of_mnist1d_need_no_folder_that_can_be_written(
    nothing_kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_kept.parent.write_text("a file")
    drawn = {"x": np.ones((4000, 40)), "x_test": np.zeros((12_000, 40))}
    drawn |= {"y": np.arange(4000) % 10, "y_test": np.arange(12_000) % 10}
    monkeypatch.setattr(data_mnist1d, "_draw", lambda: drawn)
    assert data_mnist1d.load().train_x.shape == (4000, 1, 40)


def test_validation_samples_are_held_back_from_the_training() -> None:
    whole = _load(data="digits")
    data = _load(data="digits", validation_samples=100)
    assert data.validation is not None
    assert np.array_equal(np.concatenate([data.train_x, data.validation.x]), whole.train_x)
    assert np.array_equal(np.concatenate([data.train_y, data.validation.y]), whole.train_y)
    assert len(data.validation.x) == 100
    assert np.array_equal(data.test_x, whole.test_x)
    with pytest.raises(SetupError, match="--validation-samples 1437 must be fewer than the 1437 training samples"):
        _load(data="digits", validation_samples=1437)


# -- augmentation


def test_augmentation_shifts_and_flips_whole_images() -> None:
    images = np.arange(1, 1 + 6 * 3 * 32 * 32, dtype=np.float32).reshape(6, 3, 32, 32)
    augmented = augment(images, np.random.default_rng(0))
    assert augmented.shape == images.shape
    assert augmented.dtype == images.dtype
    for before, after in zip(images, augmented, strict=True):
        padded = np.pad(before, ((0, 0), (4, 4), (4, 4)))
        flipped = padded[:, :, ::-1]
        places = [source[:, y : y + 32, x : x + 32] for source in (padded, flipped) for y in range(9) for x in range(9)]
        assert sum(np.array_equal(after, place) for place in places) == 1


@pytest.mark.parametrize("size", [4, 7, 32])
def test_patterns_are_interpolated_between_the_centres_of_pixels(size: int) -> None:
    weights = data_module._interpolation(4, size)
    assert weights.sum(axis=1) == pytest.approx(np.ones(size))
    centers = (np.arange(size) + 0.5) * 4 / size - 0.5
    assert weights @ np.arange(4) == pytest.approx(np.clip(centers, 0, 3)), "a slope stays one"


# -- CIFAR


class _Python2Pickler(pickle._Pickler):
    """Writes as Python 2 did, when CIFAR was published: bytes as its `str`, NumPy under its old name."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, value: bytes) -> None:
        self.write(
            b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
        )
        self.memoize(value)

    dispatch[bytes] = save_string


def _published(batch: object) -> bytes:
    buffer = BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(batch)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def _batch(label_key: bytes, classes: int, count: int, seed: int) -> dict[bytes, object]:
    draws = np.random.default_rng(seed)
    return {
        b"data": draws.integers(0, 256, (count, 3072), dtype=np.uint8),
        label_key: draws.integers(0, classes, count).tolist(),
        b"batch_label": b"a batch",
    }


def _write_cifar10(folder: Path, write: Callable[[object], bytes] = _published) -> Path:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir()
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (inner / name).write_bytes(write(_batch(b"labels", 10, 4, seed)))
    return inner


@pytest.mark.parametrize("write", [_published, lambda batch: pickle.dumps(batch, protocol=2), pickle.dumps])
def test_cifar10_python(tmp_path: Path, write: Callable[[object], bytes]) -> None:
    inner = _write_cifar10(tmp_path, write)
    for place in (tmp_path, inner):
        data = data_cifar.load(place, "cifar10")
        assert data.train_x.shape == (20, 3, 32, 32)
        assert data.test_x.shape == (4, 3, 32, 32)
        assert data.classes == 10
        assert data.augment
        second = _batch(b"labels", 10, 4, 1)
        assert data.train_y[4:8].tolist() == second[b"labels"]
        assert np.array_equal(data.train_x[4], second[b"data"][0].reshape(3, 32, 32))
        assert abs(data.model_input(data.train_x).mean()) < 1e-4


def test_cifar100_python_and_binary_agree(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "cifar-100-binary").mkdir()
    for seed, name in enumerate(["train", "test"]):
        batch = _batch(b"fine_labels", 100, 6, seed)
        (tmp_path / "cifar-100-python" / name).write_bytes(_published({**batch, b"coarse_labels": [0] * 6}))
        labels = np.array(batch[b"fine_labels"], dtype=np.uint8)[:, None]
        rows = np.concatenate([np.full_like(labels, 7), labels, batch[b"data"]], axis=1)
        (tmp_path / "binary" / "cifar-100-binary" / f"{name}.bin").write_bytes(rows.tobytes())
    python = data_cifar.load(tmp_path, "cifar100")
    binary = data_cifar.load(tmp_path / "binary", "cifar100")
    assert python.classes == 100
    for name in ("train_x", "train_y", "test_x", "test_y", "mean", "std"):
        assert np.array_equal(getattr(python, name), getattr(binary, name))


def _short_labels(batch: dict[bytes, object]) -> bytes:
    return _published({**batch, b"labels": [1]})


def _wrong_label(batch: dict[bytes, object]) -> bytes:
    return _published({**batch, b"labels": [1, 2, 3, 10]})


def _wrong_shape(batch: dict[bytes, object]) -> bytes:
    return _published({**batch, b"data": np.zeros((4, 3000), dtype=np.uint8)})


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda batch: _published(batch)[:-2000], "."),
        (lambda batch: b"", "EOFError"),
        (lambda batch: b"<html>not found</html>", "UnpicklingError"),
        (lambda batch: _published([1, 2]), "TypeError"),
        (lambda batch: _published({b"labels": [1]}), r"KeyError: b'data'"),
        (_short_labels, "1 labels for 4 images"),
        (_wrong_label, "label 10; expected labels from 0 to 9"),
        (_wrong_shape, r"uint8 \(4, 3000\); expected .*3072"),
    ],
)
def test_damaged_cifar_is_named(tmp_path: Path, damage: Callable[[object], bytes], found: str) -> None:
    path = _write_cifar10(tmp_path) / "data_batch_3"
    path.write_bytes(damage(_batch(b"labels", 10, 4, 2)))
    with pytest.raises(SetupError, match=f"{re.escape(str(path))} is not a file of CIFAR-10, or is damaged: .*{found}"):
        data_cifar.load(tmp_path, "cifar10")


class _Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.marker,)  # type: ignore[return-value]


def test_cifar_pickles_cannot_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = _write_cifar10(tmp_path) / "test_batch"
    path.write_bytes(pickle.dumps({b"data": _Harmful(marker), b"labels": []}))
    with pytest.raises(SetupError, match=r"test_batch .* hvdcomp refuses to read the file"):
        data_cifar.load(tmp_path, "cifar10")
    assert not marker.exists()


def test_missing_cifar_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"contains no CIFAR-10; it must contain the folder cifar-10-batches-py .* t"):
        data_cifar.load(tmp_path, "cifar10")
    missing = _write_cifar10(tmp_path) / "data_batch_5"
    missing.unlink()
    with pytest.raises(SetupError, match=f"{re.escape(str(missing))} is missing; CIFAR-10 consists of data_batch_1"):
        data_cifar.load(tmp_path, "cifar10")


def test_damaged_binary_cifar_is_named(tmp_path: Path) -> None:
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(bytes(3073))
    with pytest.raises(SetupError, match=r"train.bin is not .*: 3073 bytes; expected rows of 3074 bytes"):
        data_cifar.load(tmp_path, "cifar100")


# -- Criteo


def _criteo_lines(count: int) -> list[list[str]]:
    """The fields of lines, of which each fifth but the label is missing."""
    draws = random.Random(1)
    lines = []
    for number in range(count):
        fields = [str(draws.randrange(-2, 5000)) for _ in range(13)]
        fields += [f"{draws.randrange(2**32):08x}" for _ in range(26)]
        lines.append([str(number % 2), *(field if draws.random() > 0.2 else "" for field in fields)])
    return lines


def _write_criteo(folder: Path, lines: list[list[str]]) -> Path:
    path = folder / "train.txt"
    path.write_text("".join("\t".join(fields) + "\n" for fields in lines))
    return path


def test_criteo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_criteo, "_CHUNK", 16)
    lines = _criteo_lines(70)
    _write_criteo(tmp_path, lines)
    data = _load(model="dlrm", data="criteo", data_dir=tmp_path, table_rows=50)
    x = [
        [
            *(np.log1p(max(0, int(field))) if field else 0 for field in fields[1:14]),
            *(1 + int(field, 16) % 49 if field else 0 for field in fields[14:]),
        ]
        for fields in lines
    ]
    y = [int(fields[0]) for fields in lines]
    for part, places in (
        ((data.train_x, data.train_y), slice(60)),
        (data.validation, slice(60, None, 2)),
        (data.test, slice(61, None, 2)),
    ):
        np.testing.assert_allclose(part[0], np.array(x)[places], rtol=1e-6)
        assert part[1].tolist() == y[places]
    assert (data.channels, data.size, data.classes) == (39, 50, 2)
    first = _load(model="dlrm", data="criteo", data_dir=tmp_path, table_rows=50, samples=30)
    assert [len(part) for part in (first.train_x, first.validation.x, first.test_x)] == [30, 3, 2]
    np.testing.assert_array_equal(np.concatenate([first.train_x, first.validation.x[:1]]), data.train_x[:31])
    with pytest.raises(SetupError, match=r"--samples 61 is more than the 60 training samples of --data criteo"):
        _load(model="dlrm", data="criteo", data_dir=tmp_path, samples=61)


@pytest.mark.parametrize(
    ("place", "field", "found"),
    [
        (0, "2", "field 1 is '2'"),
        (0, "", "field 1 is ''"),
        (13, "1.5", "field 14 is '1.5'"),
        (14, "68fd1e64f", "field 15 is '68fd1e64f'"),
        (39, "0x1f", "field 40 is '0x1f'"),
        (39, "1\t2", "41 fields instead of 40"),
    ],
)
def test_damaged_criteo_is_named_with_the_line(tmp_path: Path, place: int, field: str, found: str) -> None:
    lines = _criteo_lines(9)
    lines[6][place] = field
    path = _write_criteo(tmp_path, lines)
    with pytest.raises(SetupError, match=re.escape(f"{path}, line 7: {found}; expected a label of 0 or 1, then")):
        data_criteo.load(tmp_path, 100, None)


def test_missing_criteo_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not contain the Criteo data; it must contain the file train\.txt of"):
        data_criteo.load(tmp_path, 100, None)
    path = _write_criteo(tmp_path, _criteo_lines(2))
    with pytest.raises(SetupError, match=f"{re.escape(str(path))} has 2 lines, and --data criteo needs at least three"):
        data_criteo.load(tmp_path, 100, None)


# -- WikiText-2 and PTB

_WIKI = " \n = A heading = \n \n the cat <unk> the mat . \n the dog , the cat \n"


def test_wikitext(tmp_path: Path) -> None:
    inner = tmp_path / "wikitext-2"
    inner.mkdir()
    (inner / "wiki.train.tokens").write_text(_WIKI, encoding="utf-8")
    (inner / "wiki.test.tokens").write_text(" the zebra \n the cat \n", encoding="utf-8")
    for place in (tmp_path, inner):
        data = data_text.load(place, "wikitext2", 4)
        words = {"<unk>", "<eos>", "=", "A", "heading", "the", "cat", "mat", ".", "dog", ","}
        assert data.classes == len(words)
        assert data.train_x.shape == (4, 4)
        # <unk> is 0; then by frequency: <eos> five times, "the" four times.
        assert data.train_x[0, 0] == 1
        assert data.test_x.tolist() == [[2, 0, 1, 2]], "a word that training lacks is <unk>"
        assert data.validation is None
    (inner / "wiki.valid.tokens").write_text(" the mat \n the cat \n", encoding="utf-8")
    validation = data_text.load(tmp_path, "wikitext2", 4).validation
    assert validation is not None
    assert validation.x.shape == (1, 4)


def test_ptb(tmp_path: Path) -> None:
    inner = tmp_path / "simple-examples" / "data"
    inner.mkdir(parents=True)
    (inner / "ptb.train.txt").write_text(" no it was n't black monday \n but while N points fell \n")
    (inner / "ptb.test.txt").write_text(" it was N \n")
    data = data_text.load(tmp_path, "ptb", 3)
    assert data.train_x.shape == (4, 3)
    assert data.test_x.shape == (1, 3)
    assert data.classes == 13


def test_missing_or_damaged_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"contains no WikiText-2; it must .*wiki.train.tokens and wiki.test.tokens"):
        data_text.load(tmp_path, "wikitext2", 4)
    train, test = tmp_path / "wiki.train.tokens", tmp_path / "wiki.test.tokens"
    train.write_text(_WIKI)
    with pytest.raises(SetupError, match=f"{re.escape(str(test))} is missing"):
        data_text.load(tmp_path, "wikitext2", 4)
    test.write_bytes(b"the \xff\xfe cat")
    with pytest.raises(SetupError, match=f"{re.escape(str(test))} is damaged: expected UTF-8"):
        data_text.load(tmp_path, "wikitext2", 4)
    test.write_text("\n\n")
    with pytest.raises(SetupError, match=f"{re.escape(str(test))} is empty"):
        data_text.load(tmp_path, "wikitext2", 4)
    test.write_text("the cat")
    with pytest.raises(SetupError, match=r"wiki.test.tokens: a text of 3 tokens is too short for .* 4; give"):
        data_text.load(tmp_path, "wikitext2", 4)
