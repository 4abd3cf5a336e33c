"""Gradients that go from TensorFlow to PyTorch and its kernels for devices, and back: on the CPU, by the same lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcomp.kernels import cuda
from tests.multirank.training_tensorflow import (
    Network,
    TapeTraining,
    assert_same_everywhere,
    residuals,
    sgd,
)
from tests.multirank.worker import thorough


@contextmanager
def on_device() -> Iterator[None]:
    """Within it, what is on the CPU counts as on a device."""
    os.environ["TRITON_INTERPRET"] = "1"
    if not cuda.available():
        raise SkipTest(cuda.why_not())
    import torch

    torch.set_num_threads(1)
    with cuda.serving_host():
        yield


def _train(spec: str, steps: int = 3, **options: Any) -> TapeTraining:
    """Three steps are few, but the kernels' interpreter is slow."""
    return TapeTraining(spec, optimizer=sgd(0.05, momentum=0.0), **options).run(steps)


def _assert_on_device(training: TapeTraining) -> None:
    import torch

    engine = training.binding.engine
    assert {group.bucket.device for group in engine.buckets.with_kernels} == {torch.device("cpu")}
    assert isinstance(engine.found_inf, torch.Tensor)


def _assert_same_residuals(one: TapeTraining, other: TapeTraining) -> None:
    first, second = (training.compression.state_dict()["own"]["residuals"] for training in (one, other))
    assert first.keys() == second.keys()
    for name, kept in first.items():
        for mine, theirs in zip(kept["arrays"], second[name]["arrays"], strict=True):
            assert isinstance(mine, np.ndarray)
            np.testing.assert_array_equal(mine.reshape(-1), theirs.reshape(-1), err_msg=name)


@thorough
def case_the_bits_of_the_host() -> None:
    for spec in ("topk:ratio=0.05", "qsgd:bits=4"):
        host = _train(spec)
        with on_device():
            device = _train(spec)
            _assert_on_device(device)
            _assert_same_residuals(device, host)
        assert_same_everywhere(device.variables)
        assert np.array_equal(device.weights, host.weights), spec
        assert device.traces == 1


@thorough
def case_several_rounds_and_a_tensor_in_no_bucket() -> None:
    """The same within the order of additions: PowerSGD has two rounds, and sidco no kernels for devices."""
    spec = '{"first": "powersgd:rank=2", "second": "sidco:ratio=0.1", "*": "fp16"}'
    host = _train(spec)
    with on_device():
        device = _train(spec)
        _assert_on_device(device)
        grouped = {name for group in device.binding.engine.buckets.with_kernels for name in group.names}
        assert grouped == {"first", "first_bias", "second_bias"}
    assert_same_everywhere(device.variables)
    np.testing.assert_allclose(device.weights, host.weights, rtol=1e-4, atol=1e-5)


@thorough
def case_a_sum_in_float16() -> None:
    for dtype in ("float16", "bfloat16"):
        with on_device():
            training = _train("topk:ratio=0.05", model=Network(dtype), tape={"op": hvd.Sum})
            assert_same_everywhere(training.variables)
        host = _train("topk:ratio=0.05", model=Network(dtype), tape={"op": hvd.Sum})
        assert np.array_equal(training.weights, host.weights), dtype


@thorough
def case_a_checkpoint_goes_from_device_to_host_and_back() -> None:
    straight = _train("topk:ratio=0.05", steps=5)
    model = Network()
    with on_device():
        first = _train("topk:ratio=0.05", steps=2, model=model)
        state = first.compression.state_dict()
    second = TapeTraining("topk:ratio=0.05", optimizer=sgd(0.05, momentum=0.0), model=model)
    second.compression.load_state_dict(state)
    second.generator = first.generator
    second.run(1)
    state = second.compression.state_dict()
    with on_device():
        third = TapeTraining("topk:ratio=0.05", optimizer=sgd(0.05, momentum=0.0), model=model)
        third.compression.load_state_dict(state)
        third.generator = second.generator
        third.run(2)
        _assert_on_device(third)
        kept = residuals(third.compression)
    assert kept
    assert np.array_equal(third.weights, straight.weights)


@thorough
def case_a_result_may_be_kept() -> None:
    """What a step has returned stays as it is while later steps run."""
    with on_device():
        training = TapeTraining("topk:ratio=0.05")

        @tf.function
        def means(inputs: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(training.model(inputs) ** 2)
            return training.gradients(tape, loss)

        rng = np.random.default_rng(3)
        kept = [means(tf.constant(rng.normal(size=(4, 64)), tf.float32)) for _ in range(3)]
        before = [[np.array(one) for one in step] for step in kept]
        for _ in range(2):
            means(tf.constant(rng.normal(size=(4, 64)), tf.float32))
        for step, was in zip(kept, before, strict=True):
            for one, expected in zip(step, was, strict=True):
                np.testing.assert_array_equal(one, expected)
