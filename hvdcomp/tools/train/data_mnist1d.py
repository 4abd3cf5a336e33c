"""MNIST-1D: signals of 40 points. Each signal is a digit that is drawn as a line, shifted, stretched, and covered with
noise.

The package `mnist1d` generates the signals, so nothing is downloaded, and there can be enough test samples for a
comparison.

References: Greydanus and Kobak, Scaling Down Deep Learning with MNIST-1D, 2024, section 2.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import zipfile
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from hvdcomp.files import replace_files
from hvdcomp.tools.cache import cache_folder
from hvdcomp.tools.train.dataset import DataSet, labeled_data
from hvdcomp.tools.train.options import SetupError

TRAIN, VALIDATION, TEST = 4000, 2000, 10_000
_SEED = 42  # the seed of the published set; the split does not depend on the seed of a run


@functools.cache
def load() -> DataSet:
    """The signals (N, 1, 40) with their labels. The training part consists of the 4,000 published signals. The other
    parts are larger than the published parts.

    Generating the signals takes some seconds, so they are kept in the cache folder.

    Raises:
        SetupError: if the package is not installed.
    """
    try:
        versions = "-".join(map(version, ("mnist1d", "numpy", "scipy")))
    except PackageNotFoundError:
        raise SetupError("--data mnist1d needs the package of its generator: pip install 'hvdcomp[mnist1d]'") from None
    file = cache_folder() / "data" / f"mnist1d-{TRAIN + VALIDATION + TEST}-{_SEED}-{versions}.npz"
    try:
        with np.load(file) as kept:
            drawn = {name: kept[name] for name in ("x", "y", "x_test", "y_test")}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):  # there is no file, or it is damaged
        drawn = _draw()
        content = io.BytesIO()
        np.savez(content, **drawn)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):  # the folder may not be writable
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_files({file: content.getvalue()})
    x, other_x = (drawn[name].astype(np.float32)[:, None] for name in ("x", "x_test"))
    y, other_y = drawn["y"], drawn["y_test"]
    return labeled_data(
        x,
        y,
        other_x[VALIDATION:],
        other_y[VALIDATION:],
        classes=10,
        validation=(other_x[:VALIDATION], other_y[:VALIDATION]),
    )


def _draw() -> dict[str, np.ndarray]:
    from mnist1d.data import get_dataset_args, make_dataset

    settings = get_dataset_args()
    settings.num_samples, settings.seed = TRAIN + VALIDATION + TEST, _SEED
    settings.train_split = TRAIN / settings.num_samples
    # The package uses the global random generators, so their states are restored afterwards.
    before = random.getstate(), np.random.get_state()
    try:
        drawn = make_dataset(settings)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    return {name: drawn[name] for name in ("x", "y", "x_test", "y_test")}
