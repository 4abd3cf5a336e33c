"""`tf.IndexedSlices` by `RowExchange`, beside Horovod's own gathering of them; the other gradients compressed."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from horovod.tensorflow.keras import DistributedOptimizer

import hvdcomp
from hvdcomp.tensorflow import RowExchange
from tests.multirank.training_tensorflow import assert_same_everywhere, gathered, own_generator, raised, sgd, weights

ROWS, COLUMNS, LOOKUPS = 500, 12, 64


class Clicks:
    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        shapes = {"items": (ROWS, COLUMNS), "boxes": (40, 3, 4), "layer": (COLUMNS, 100)}
        self.variables = [
            tf.Variable(rng.normal(0, 0.3, shape), dtype=tf.float32, name=name) for name, shape in shapes.items()
        ]

    def __call__(self, ids: Any) -> tf.Tensor:
        items, boxes, layer = self.variables
        boxed = tf.reshape(tf.gather(boxes, ids % 40), [-1, COLUMNS])
        return (tf.gather(items, ids) + boxed) @ layer


def looked_up(generator: np.random.Generator) -> np.ndarray:
    """Ids of which some occur several times, on this rank and on others."""
    return np.concatenate([generator.integers(20, size=LOOKUPS), generator.integers(ROWS, size=8)]).astype(np.int32)


def gradients_of(model: Clicks, ids: np.ndarray, rows: RowExchange | None, **options: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(ids)))
    tape = hvd.DistributedGradientTape(tape, **options)
    return (tape if rows is None else rows.serve(tape)).gradient(loss, model.variables)


def stated_bytes(ids: np.ndarray, value_bytes: int = 4, scale_bytes: int = 0) -> int:
    """That this rank hands over: counts, ids, and rows, either all to all ranks, or to owners and back."""
    size, row_bytes = hvd.size(), COLUMNS * value_bytes + scale_bytes
    most_ids, most, to_owners, back = np.zeros(size, int), 0, np.zeros((size, size), int), 0
    for modulus in (ROWS, 40):
        own = [np.unique(one % modulus) for one in gathered(ids)]
        union = np.unique(np.concatenate(own))
        most_ids += [len(one) for one in own]
        to_owners += [np.bincount(np.searchsorted(union, one) % size, minlength=size) for one in own]
        back += -(-len(union) // size)
    most = most_ids.max()
    owners = most > to_owners.max() + back
    assert owners == (size > 2)
    return 16 + 2 * most + row_bytes * (size * to_owners.max() + back if owners else most)


def case_the_mean_is_that_of_horovod_in_the_bytes_of_the_formula() -> None:
    model, generator = Clicks(), own_generator()
    for op in (hvd.Average, hvd.Sum):
        for graph in (False, True):
            rows, ids = RowExchange(), looked_up(generator)

            def ours(rows: RowExchange = rows, ids: np.ndarray = ids, op: int = op) -> list[Any]:
                return gradients_of(model, ids, rows, op=op)

            found = tf.function(ours)() if graph else ours()
            expected = gradients_of(model, ids, None, op=op)
            for one, theirs in zip(found, expected, strict=True):
                assert type(one) is type(theirs)
                dense = tf.convert_to_tensor(one).numpy()
                assert_same_everywhere(dense)
                np.testing.assert_allclose(dense, tf.convert_to_tensor(theirs), rtol=1e-5, atol=1e-9)
            np.testing.assert_array_equal(found[0].indices, np.unique(np.concatenate(gathered(ids))))
            totals = rows.ledger.totals
            assert totals.bytes_sent == stated_bytes(ids)
            assert totals.dense_bytes == 4 * (ROWS * COLUMNS + 40 * COLUMNS)
            assert rows.ledger.tensors.keys() == {"items", "boxes"}


def case_rows_travel_rounded() -> None:
    model, ids = Clicks(), looked_up(own_generator())
    expected = gradients_of(model, ids, None)
    for wire, value_bytes, scale_bytes in ((tf.bfloat16, 2, 0), (tf.int8, 1, 4)):
        rows = RowExchange(wire_dtype=wire)
        found = gradients_of(model, ids, rows)
        assert rows.ledger.totals.bytes_sent == stated_bytes(ids, value_bytes, scale_bytes)
        dense = tf.convert_to_tensor(found[0]).numpy()
        assert_same_everywhere(dense)
        theirs = tf.convert_to_tensor(expected[0]).numpy()
        largest = max(abs(tf.convert_to_tensor(one)).numpy().max() for one in (theirs, hvd.size() * theirs))
        assert 0 < abs(dense - theirs).max() < largest / 100


def case_a_loop_trains_with_layers_compressed() -> None:
    results = []
    for how in ("none", "topk:ratio=1"):
        for rows in (None, RowExchange()):
            model, generator, optimizer = Clicks(), own_generator(), sgd(0.1, momentum=0.0)
            compression = hvdcomp.Compression.from_spec(how, variables=model.variables)
            optimizer.build(model.variables)

            @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32)])
            def step(ids: Any, told: Any = (model, rows, optimizer, compression)) -> None:
                model, rows, by, how = told
                gradients = gradients_of(model, ids, rows, compression=how)
                by.apply_gradients(zip(gradients, model.variables, strict=True))

            for _ in range(6):
                step(looked_up(generator))
            assert_same_everywhere(model.variables)
            assert compression.ledger.steps == 6
            results.append(weights(model.variables))
    for one in results[1:]:
        np.testing.assert_allclose(one, results[0], rtol=1e-4, atol=1e-6)


def case_keras_fit() -> None:
    found = []
    for rows in (None, RowExchange()):
        tf_keras.utils.set_random_seed(3)
        model = tf_keras.Sequential([tf_keras.layers.Embedding(ROWS, COLUMNS), tf_keras.layers.Dense(100)])
        model.build((None,))
        compression = hvdcomp.Compression(hvdcomp.TopK(ratio=1.0), variables=model.trainable_variables)
        optimizer = DistributedOptimizer(sgd(0.1, momentum=0.0), compression=compression)
        if rows is not None:
            assert rows.serve(optimizer) is optimizer
        model.compile(optimizer, "mse", jit_compile=False)
        ids = looked_up(own_generator())
        model.fit(ids, np.zeros((len(ids), 100), np.float32), batch_size=24, epochs=2, verbose=0, shuffle=False)
        assert_same_everywhere(model.trainable_variables)
        found.append(weights(model.trainable_variables))
        assert rows is None or rows.ledger.steps == 6
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)


def case_what_does_not_fit_is_refused() -> None:
    for given, message in (
        (tf.GradientTape(), "pass the tape or optimizer that hvd.Dist"),
        (
            RowExchange().serve(hvd.DistributedGradientTape(tf.GradientTape())),
            "pass the tape or optimizer that hvd.Dist",
        ),
        (hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum), "not with op=hvd.Adasum"),
        (DistributedOptimizer(sgd(), backward_passes_per_step=2), "backward_passes_per_step=1"),
    ):
        assert message in raised(hvdcomp.ConfigurationError, lambda given=given: RowExchange().serve(given))
    rows = RowExchange(wire_dtype=tf.float16 if hvd.rank() == 1 else None)
    told = raised(Exception, lambda: gradients_of(Clicks(), looked_up(own_generator()), rows))
    assert "wire_dtype of RowExchange" in told
