"""Sorting: random sequences of 16 numbers below 64. The targets are the same numbers in ascending order.

Each number and each target is a token. The model predicts the number at each place of the sorted sequence. The
sequences are the same for every seed of a run.
"""

from __future__ import annotations

import functools

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, in_parts

TRAIN, VALIDATION, TEST = 32_000, 2_000, 4_000
LENGTH, NUMBERS = 16, 64
_SEED = 42


@functools.cache
def load() -> DataSet:
    """The sequences (N, 16) with their targets (N, 16)."""
    x = np.random.default_rng(_SEED).integers(NUMBERS, size=(TRAIN + VALIDATION + TEST, LENGTH))
    train, validation, test = in_parts(x, np.sort(x, axis=1), TRAIN, VALIDATION)
    return DataSet(*train, *test, classes=NUMBERS, validation=validation)
