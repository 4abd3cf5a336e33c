"""Element types, loss scales, and gradients that are not finite, with the tape of stock horovod.tensorflow."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

from tests.multirank.training_tensorflow import Network, TapeTraining, assert_same_everywhere, residuals, sgd


def case_element_types() -> None:
    # How the methods reckon in each of them is tested in `tests.compressors.test_every_compressor`.
    methods = {
        "float64": ("none", "fp16", "topk:ratio=0.05"),
        "float16": ("none", "powersgd:rank=2"),
        "bfloat16": ("fp16", "topk:ratio=0.05"),
    }
    for dtype, specs in methods.items():
        for spec in specs:
            training = TapeTraining(spec, model=Network(dtype), optimizer=PlainSGD(0.01))
            start = training.weights
            training.run(4)
            assert_same_everywhere(training.variables)
            assert not np.array_equal(start, training.weights), (dtype, spec)


class PlainSGD:
    """Subtracts the gradient times a rate; works with every element type."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def apply_gradients(self, pairs: Any) -> None:
        for gradient, variable in pairs:
            assert gradient.dtype == variable.dtype
            variable.assign_sub(tf.cast(self.rate, variable.dtype) * gradient)


class Poisoned(TapeTraining):
    """The loss is infinite on the last rank where `poison` says so."""

    def __init__(self, how: Any, **options: Any) -> None:
        self.found_inf = tf.Variable(1.0, trainable=False)
        super().__init__(how, **options)

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        with tape:
            loss = loss * self.found_inf
        self.seen = super().gradients(tape, loss)
        return [tf.where(tf.math.is_finite(gradient), gradient, 0.0) for gradient in self.seen]


def case_non_finite_gradients_are_seen_by_all_and_change_nothing() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2", "randomk:ratio=0.1"):
        training = Poisoned(spec, graph=False).run(3)
        before = residuals(training.compression)
        training.found_inf.assign(np.inf if hvd.rank() == hvd.size() - 1 else 1.0)
        training.step()
        assert not any(np.isfinite(gradient).all() for gradient in training.seen)
        after = residuals(training.compression)
        assert before.keys() == after.keys()
        assert len(before) > 0
        assert all(np.array_equal(before[key], after[key]) for key in before)
        training.found_inf.assign(1.0)
        assert_same_everywhere(training.run(2).variables)


class LossScaled(TapeTraining):
    """A tape in a LossScaleOptimizer, whose loss scale grows every third finite step."""

    def __init__(self, how: str, graph: bool = True, scale: float = 1024.0, growth: int = 3) -> None:
        scaler = tf_keras.mixed_precision.LossScaleOptimizer(sgd(), initial_scale=scale, dynamic_growth_steps=growth)
        self.found_inf = tf.Variable(1.0, trainable=False)
        super().__init__(how, graph=graph, optimizer=scaler, grad_scaler=scaler)

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        with tape:
            loss = self.optimizer.get_scaled_loss(loss) * self.found_inf
        return self.optimizer.get_unscaled_gradients(super().gradients(tape, loss))


def case_an_overflow_on_one_rank_is_skipped_everywhere() -> None:
    for spec in ("topk:ratio=0.05", "none"):
        training = LossScaled(spec)
        scales = []
        for step in range(10):
            training.found_inf.assign(np.inf if step == 3 and hvd.rank() == 0 else 1.0)
            start, kept = training.weights, residuals(training.compression) if step else {}
            training.step()
            assert np.array_equal(start, training.weights) == (step == 3), step
            if step == 3 and spec != "none":
                after = residuals(training.compression)
                scale = scales[-1] / scales[-2]  # residuals follow the loss scale of the step
                assert kept
                assert scale == 2
                assert all(np.array_equal(kept[key] * scale, after[key]) for key in kept if ".memory." in key)
            scales.append(float(training.optimizer.loss_scale))
        assert scales[2:7] == [2048.0, 1024.0, 1024.0, 1024.0, 2048.0], scales
        assert_same_everywhere(training.variables)
        assert_same_everywhere(np.array(scales))


def case_residuals_follow_the_loss_scale() -> None:
    """Training at a loss scale that changes gives what training at one scale gives: powers of two round alike."""
    changing, constant = (LossScaled("topk:ratio=0.05", scale=4.0, growth=growth) for growth in (2, 10**6))
    assert np.array_equal(changing.run(9).weights, constant.run(9).weights)
    assert float(changing.optimizer.loss_scale) == 4.0 * 2**4
