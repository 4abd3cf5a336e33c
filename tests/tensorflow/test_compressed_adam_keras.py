"""CompressedAdam of Keras against the algorithm in plain NumPy, and against AdamW. Real ranks: `multirank`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")
tf_keras = pytest.importorskip("tf_keras")

from hvdcomp import EDEN, Compression, ConfigurationError, EFSignSGD, SpecError, TopK  # noqa: E402
from hvdcomp.bindings.adam import refreshes_among  # noqa: E402
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.tensorflow import CompressedAdam, serve_simulated  # noqa: E402

RANKS, FREEZE_AFTER, STEPS = 2, 4, 11
SHAPE = (24, 60)
RATE, BETAS, EPS, DECAY, FLOOR = 3e-3, (0.9, 0.95), 1e-8, 0.1, 0.01
SETTINGS = {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": EPS, "weight_decay": DECAY, "jit_compile": False}
DUE = {4, 6, 10}  # of 0, 1, 2, 4, 6, 10, 14, ..., those that come after `FREEZE_AFTER`


def start_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def gradient_of(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """A part that all ranks and steps share, and noise of each."""
    shared = np.random.default_rng(5).normal(size=shape)
    return (shared + np.random.default_rng([rank, step]).normal(size=shape)).astype(np.float32)


def refreshing(**options: Any) -> CompressedAdam:
    return CompressedAdam(RATE, **SETTINGS, freeze_after=FREEZE_AFTER, refreshes_per_gap=2, **options)


def train(compressor: Any, optimizer: Callable[[], Any]) -> list[tuple[list[np.ndarray], Any, Any]]:
    """Trains a matrix and a vector on each rank, in a graph; the weights, the optimizer and the compression of each."""

    def work(communicator: SimulatedCommunicator) -> tuple[list[np.ndarray], Any, Any]:
        variables = [tf.Variable(start_of(shape), name=name) for name, shape in (("matrix", SHAPE), ("vector", (7,)))]
        one, ours = optimizer(), Compression(compressor, variables=variables)
        if hasattr(one, "build"):  # else it is of an older Keras
            one.build(variables)
        exchange = serve_simulated(ours, variables, communicator, one)
        shapes = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]

        @tf.function(input_signature=[shapes])
        def update(means: list[Any]) -> None:
            one.apply_gradients(zip(means, variables, strict=True))

        for step in range(STEPS):
            means = exchange([gradient_of(communicator.rank, step, tuple(one.shape)) for one in variables])
            update([tf.convert_to_tensor(mean) for mean in means])
        return [variable.numpy() for variable in variables], one, ours

    return SimulatedGroup(RANKS).run(work)


def top(x: np.ndarray) -> np.ndarray:
    sent = np.zeros_like(x)
    places = np.argsort(-np.abs(x), axis=None, kind="stable")[: x.size // 20]
    sent.flat[places] = x.flat[places]
    return sent


def sign(x: np.ndarray) -> np.ndarray:
    return np.abs(x).mean() * np.where(x >= 0, 1, -1)


def stated(w: np.ndarray, c: Callable[[np.ndarray], np.ndarray], refreshes: Set[int]) -> np.ndarray:
    """1-bit Adam with AdamW's decay and any C, and 0/1 Adam's refreshes of v. refreshes: T_v, of steps from 0 on."""
    b1, b2 = BETAS
    w = w.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    rests = [np.zeros_like(w) for _ in range(RANKS)]
    adapted = 0
    for t in range(STEPS):
        own = [gradient_of(rank, t, w.shape).astype(np.float64) for rank in range(RANKS)]
        if t == FREEZE_AFTER:
            v = np.maximum(v, FLOOR * v.mean())
        if t < FREEZE_AFTER or t in refreshes:
            g = sum(own) / RANKS
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            adapted += 1
            if t >= FREEZE_AFTER:
                v = np.maximum(v, FLOOR * v.mean())
        else:
            momenta = [b1 * m + (1 - b1) * g + d for g, d in zip(own, rests, strict=True)]
            sent = [c(one) for one in momenta]
            rests = [one - s for one, s in zip(momenta, sent, strict=True)]
            m = sum(sent) / RANKS
        w = w - RATE * DECAY * w
        w = w - RATE * (m / (1 - b1 ** (t + 1))) / (np.sqrt(v / (1 - b2**adapted)) + EPS)
    return w


@pytest.mark.parametrize(
    ("compressor", "c"),
    [(TopK(0.05), top), (EFSignSGD(), sign)],
    ids=["topk", "efsignsgd"],
)
def test_refreshes_are_the_algorithm(compressor: Any, c: Any) -> None:
    done = train(compressor, refreshing)
    for place, (shape, own) in enumerate(((SHAPE, c), ((7,), lambda x: x))):
        np.testing.assert_allclose(done[0][0][place], stated(start_of(shape), own, DUE), rtol=2e-5, atol=2e-5)
        assert done[0][0][place].tobytes() == done[1][0][place].tobytes()
    dense, whole = 4 * (np.prod(SHAPE) + 7), FREEZE_AFTER + len(DUE)
    sent = done[0][2].ledger.totals.bytes_sent - whole * dense
    assert 0 <= sent < (STEPS - whole) * dense * 0.25


def test_noise_that_would_grow_without_end_in_momenta_is_refused() -> None:
    """`tests.torch.optimizers.test_compressed_adam` shows that it grows."""
    with pytest.raises(SpecError, match="eden:bits=1 does not work with CompressedAdam without error feedback"):
        train(EDEN(bits=1), refreshing)
    for optimizer in (refreshing, lambda: refreshing(warm_up="int4")):
        done = train(EDEN(bits=2), optimizer)
        assert done[0][0][0].tobytes() == done[1][0][0].tobytes()


def test_with_a_refresh_in_every_step_and_nothing_lost_it_is_adamw() -> None:
    found = []
    ours = CompressedAdam(RATE, **SETTINGS, freeze_after=1, floor=0.0, refreshes_per_gap=STEPS)
    for optimizer in (ours, tf_keras.optimizers.AdamW(RATE, **SETTINGS)):
        variable = tf.Variable(start_of(SHAPE))
        for step in range(STEPS):
            optimizer.apply_gradients([(tf.constant(gradient_of(0, step, SHAPE)), variable)])
        found.append(variable.numpy())
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-7)
    assert ours.frozen


@pytest.mark.parametrize("per_gap", [1, 3, 16])
def test_a_graph_knows_the_schedule(per_gap: int) -> None:
    optimizer = CompressedAdam(freeze_after=5, refreshes_per_gap=per_gap, jit_compile=False)
    asked = tf.function(optimizer.sends_momenta)
    for step in (*range(60), 2**20, 16 * 2**20):
        optimizer.iterations.assign(step)
        due = refreshes_among(step + 1, per_gap) > refreshes_among(step, per_gap)
        assert optimizer.refreshes == (due and step >= 5), step
        assert bool(asked()) == (step >= 5 and not due), step


def test_its_settings_are_kept() -> None:
    again = tf_keras.optimizers.deserialize(tf_keras.optimizers.serialize(refreshing()))
    assert (again.freeze_after, again.refreshes_per_gap) == (FREEZE_AFTER, 2)
    config = refreshing().get_config()
    del config["refreshes_per_gap"]  # as an earlier version wrote it
    assert CompressedAdam.from_config(config).refreshes_per_gap is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refreshes_per_gap": 0}, "refreshes_per_gap=0 is not allowed. The gap between two refreshes"),
        ({"local_steps": 4}, "local_steps=4 is not allowed in Keras.*train in PyTorch"),
        ({"local_steps": "many"}, "local_steps='many' is not allowed in Keras"),
        ({"amsgrad": True}, "amsgrad=True is not allowed"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CompressedAdam(freeze_after=5, **options)


@pytest.mark.usefixtures("at_one_rate")
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: tf_keras.optimizers.AdamW(RATE, jit_compile=False), "AdamW learns badly with topk:ratio=0.05. "),
        (lambda: tf_keras.optimizers.Adafactor(RATE, jit_compile=False), None),  # its trainings show no harm
        (lambda: tf_keras.optimizers.legacy.RMSprop(RATE), "RMSprop keeps a second moment"),
        (lambda: tf_keras.optimizers.Lion(RATE, jit_compile=False), None),
        (lambda: tf_keras.optimizers.SGD(RATE, momentum=0.9, jit_compile=False), None),
    ],
)
def test_what_an_optimizer_learns_badly_with_is_warned_of(optimizer: Callable[[], Any], said: str | None) -> None:
    messages = warnings_of(optimizer)
    assert len(messages) == (said is not None)
    assert all(str(said) in message for message in messages)


def test_lion_is_known_by_its_class() -> None:
    (message,) = warnings_of(lambda: tf_keras.optimizers.Lion(RATE, jit_compile=False))
    assert message.startswith("Lion learns badly with topk:ratio=0.05. ")
    assert "docs/optimizers.md" in message


def warnings_of(optimizer: Callable[[], Any]) -> list[str]:
    """The warnings of harm in a training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(TopK(0.05), optimizer)
    return [str(one.message) for one in caught if " badly with " in str(one.message)]
