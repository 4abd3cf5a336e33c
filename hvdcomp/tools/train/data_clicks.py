"""Clicks: synthetic samples with dense features and with ids of rows in tables. Only a few ids are frequent.

As in Criteo's data, a sample has 13 numbers and an id for each table. There are 8 tables. Ids follow Zipf's law: 1 % of
the rows get about 90 % of the accesses. Each row has a score. The probability of a click grows with the scores of the
sample's rows, and with a weighted sum of its 13 numbers. The data are the same for every seed of a run.

References: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

from __future__ import annotations

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, in_parts
from hvdcomp.tools.train.models import DLRM_SIZE

TRAIN, VALIDATION, TEST = 32_000, 8_000, 8_000
_SEED = 42
_EXPONENT = 1.3  # the exponent of Zipf's law


def zipf(draws: np.ndarray, rows: int) -> np.ndarray:
    """Turns uniform draws from [0, 1) into ids below `rows` that follow Zipf's law. The shape of the array does not
    change."""
    frequencies = np.cumsum(1 / np.arange(1, rows + 1) ** _EXPONENT)
    return np.searchsorted(frequencies / frequencies[-1], draws)


def load(rows: int) -> DataSet:
    """Creates samples of shape (N, 13 + 8) in float32. The numbers come before the ids. The ids are small enough to be
    exact in float32. Labels are 0 or 1.

    Args:
        rows: number of rows of each embedding table.
    """
    size = DLRM_SIZE
    draws, count = np.random.default_rng(_SEED), TRAIN + VALIDATION + TEST
    ids = zipf(draws.random((count, size.tables)), rows)
    dense = draws.standard_normal((count, size.dense))
    scores = draws.standard_normal((size.tables, rows))
    logits = dense @ draws.standard_normal(size.dense) / 3 + scores[np.arange(size.tables), ids].sum(1) / 2
    y = (draws.random(count) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    x = np.concatenate([dense, ids], 1).astype(np.float32)
    train, validation, test = in_parts(x, y, TRAIN, VALIDATION)
    columns = x.shape[1]
    return DataSet(
        *train,
        *test,
        classes=2,
        mean=np.zeros(columns, np.float32),
        std=np.ones(columns, np.float32),
        validation=validation,
        table_rows=rows,
    )
