"""Heavy tails: a regression on rows of 16 features. Eight of the features, and the noise in the target, have outliers.

Each feature is computed from a normally distributed number z. Eight features are z itself. The other eight are sign(z)
(exp(1.2 |z|) - 1). In the training part, the largest values of these eight features are 25 to 67 times their standard
deviation. The target is a smooth random function of all z, plus noise from Student's t distribution with 3 degrees of
freedom. The rows are the same for every seed of a run.
"""

from __future__ import annotations

import functools

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, in_parts, scales_of

TRAIN, VALIDATION, TEST = 40_000, 4_000, 8_000
FEATURES = 16
_SEED = 42
_GROWTH = 1.2  # the factor of |z| in the exponent
_DEGREES, _NOISE = 3, 0.1  # degrees of freedom, and the scale of the noise; the function has standard deviation 1


@functools.cache
def load() -> DataSet:
    """Creates the rows as images (N, 16, 1, 1) of one pixel, whose channels are the features. The targets (N,) are
    float32, with mean 0 and standard deviation 1 in the training part."""
    draws, count = np.random.default_rng(_SEED), TRAIN + VALIDATION + TEST
    z = draws.standard_normal((count, FEATURES))
    y = _smooth_function(z, draws) + _NOISE * draws.standard_t(_DEGREES, count)
    y = ((y - y[:TRAIN].mean()) / y[:TRAIN].std()).astype(np.float32)
    x = z.copy()
    heavy = z[:, : FEATURES // 2]
    x[:, : FEATURES // 2] = np.sign(heavy) * np.expm1(_GROWTH * abs(heavy))
    train, validation, test = in_parts(x.astype(np.float32)[:, :, None, None], y, TRAIN, VALIDATION)
    mean, std = scales_of(train.x)
    return DataSet(*train, *test, classes=1, mean=mean, std=std, validation=validation)


def _smooth_function(z: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """The outputs (N,) of a network with random weights and two hidden layers. The standard deviation of the outputs is
    1."""
    hidden = z
    for gain, width in ((1.5, 32), (2.0, 16)):
        weights = draws.standard_normal((hidden.shape[1], width)) / np.sqrt(hidden.shape[1])
        hidden = np.tanh(gain * hidden @ weights)
    outputs = hidden @ draws.standard_normal(hidden.shape[1])
    return outputs / outputs.std()
