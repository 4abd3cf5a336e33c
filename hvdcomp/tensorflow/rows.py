"""`RowExchange` averages `tf.IndexedSlices`, the gradients of embedding tables. Each rank sends each row only once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcomp.communicators.horovod_tensorflow import HorovodTensorFlowCommunicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.exchange.rows import EmbeddingTable, RowMeans, Rows, wire_name
from hvdcomp.tensorflow.callbacks import as_callback
from hvdcomp.tensorflow.names import by_name

_ON_HOST = np.zeros(0, np.float32)


class RowExchange:
    """Makes Horovod's tape or optimizer exchange `tf.IndexedSlices` (gradients of embeddings) row by row. Dense
    gradients are exchanged as before.

        rows = hvdcomp.tensorflow.RowExchange()  # once, on every rank
        tape = rows.serve(hvd.DistributedGradientTape(tape, compression=compression))          # in a loop, or
        optimizer = rows.serve(hvd.DistributedOptimizer(optimizer, compression=compression))   # for Keras fit

    Without RowExchange, Horovod gathers the slices of all ranks. A row that is looked up several times is sent several
    times. With RowExchange, each rank first adds up the slices of a row. The result is the same mean (or sum, with
    op=hvd.Sum), except for rounding. The result is a `tf.IndexedSlices` in which each row occurs once, sorted by id.
    `hvdcomp.exchange.rows` describes the exchange. The exchange runs on the host, after the exchange of dense
    gradients.

    Args:
        wire_dtype: the element type in which rows and means are sent, which is tf.bfloat16, tf.float16 or tf.int8. With
            tf.int8, the largest magnitude of each row is also sent, and the error of an element is at most 1/254 of
            this magnitude. The mean is rounded in the same way a second time. Rounding errors are not kept for later
            steps. Default: the gradient's own type.

    Attributes:
        ledger: the ledger, with the bytes of each step as in `Compression.ledger`, but without times. The ledger is
            empty if there is only one rank. The dense bytes are the bytes of whole tables.

    Raises:
        ConfigurationError: if wire_dtype is any other type.
    """

    def __init__(self, *, wire_dtype: tf.DType | None = None) -> None:
        self._wire = wire_name(wire_dtype)
        self._means: RowMeans | None = None
        self._tables: dict[str, EmbeddingTable] = {}
        self._ranks: HorovodTensorFlowCommunicator | None = None

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self._means is None else self._means.ledger

    def serve(self, distributed: Any) -> Any:
        """Makes a tape or optimizer of Horovod use this exchange, and returns the tape or optimizer. The argument
        `distributed` is an hvd.DistributedGradientTape, or the result of hvd.DistributedOptimizer.

        Raises:
            ConfigurationError: if the argument is any other object; if `serve` was already called with this object; or
                with op=hvd.Adasum, or backward_passes_per_step above 1.
        """
        reduce_dense: Any = getattr(distributed, "_allreduce_grads", None)
        settings = _settings_of(reduce_dense)
        if "process_set" not in settings:
            raise ConfigurationError(
                f"RowExchange.serve was given a {type(distributed).__name__}; pass the tape or optimizer that "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer returned, and call serve only once"
            )
        if settings["op"] not in (hvd.Average, hvd.Sum):
            raise ConfigurationError(
                "RowExchange works only with op=hvd.Average and op=hvd.Sum, not with op=hvd.Adasum"
            )
        if getattr(distributed, "_agg_helper", None) is not None:
            raise ConfigurationError(
                "RowExchange works only with backward_passes_per_step=1, because Horovod adds up the gradients of "
                "several passes as whole (dense) tables"
            )
        if self._ranks is None:
            self._ranks = HorovodTensorFlowCommunicator(settings["process_set"])

        def reduce(gradients: Sequence[Any], variables: Sequence[Any], *options: Any) -> list[Any]:
            assert self._ranks is not None
            places = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
            if not places or self._ranks.world_size == 1:
                return list(reduce_dense(gradients, variables, *options))
            dense_places = [place for place in range(len(gradients)) if place not in places]
            means: dict[int, Any] = {}
            if dense_places:
                dense = [gradients[place] for place in dense_places]
                trained = [variables[place] for place in dense_places]
                means |= zip(dense_places, reduce_dense(dense, trained, *options), strict=True)
            # The dense gradients and the slices are exchanged one after the other, because together they may need more
            # threads than TensorFlow has.
            with tf.control_dependencies([mean for mean in means.values() if mean is not None]):
                slices = [gradients[place] for place in places]
                tables = [variables[place] for place in places]
                means |= zip(places, self._reduce_slices(slices, tables, settings["op"]), strict=True)
            return [means[place] for place in range(len(gradients))]

        distributed._allreduce_grads = reduce
        return distributed

    def _reduce_slices(self, gradients: Sequence[Any], variables: Sequence[Any], op: int) -> list[Any]:
        """Adds the exchange to the current graph. In eager mode, runs the exchange."""
        tables = {
            name: EmbeddingTable(variable.dtype.name, variable.shape[0], variable.shape[1:].num_elements())
            for name, variable in by_name(variables).items()
        }
        if self._tables not in ({}, tables):
            raise ConfigurationError(
                f"RowExchange exchanges {', '.join(self._tables)}, but was called for {', '.join(tables)}; use a "
                "separate RowExchange for each tape or optimizer"
            )
        self._tables = tables
        assert self._ranks is not None
        factor = self._ranks.world_size if op == hvd.Sum else 1
        with tf.device("CPU:0"):
            pairs = zip(gradients, tables.values(), strict=True)
            inputs = [part for gradient, table in pairs for part in _ids_and_rows(gradient, table)]
            exchange = as_callback(self._exchange)
            means = tf.numpy_function(exchange, inputs, [part.dtype for part in inputs], name="hvdcomp_rows")
        results = []
        for gradient, ids, values in zip(gradients, means[::2], means[1::2], strict=True):
            values = tf.reshape(values, [-1, *gradient.values.shape[1:]])
            ids = tf.cast(ids, gradient.indices.dtype)
            results.append(tf.IndexedSlices(values * factor, ids, gradient.dense_shape))
        return results

    def _exchange(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Exchanges rows. Returns the ids and the mean rows of each table."""
        if self._means is None:
            assert self._ranks is not None
            self._means = RowMeans(self._ranks, self._tables, self._wire, _ON_HOST)
        rows = [Rows(ids, values) for ids, values in zip(arrays[::2], arrays[1::2], strict=True)]
        means = self._means.exchange(rows, [True] * len(rows))
        return [part for mean in means if mean is not None for part in mean]


def _settings_of(reduce: Any) -> dict[str, Any]:
    """Reads the settings from the closure of Horovod's function that averages gradients."""
    function = getattr(reduce, "python_function", reduce)  # the Python function that tf.function has wrapped
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _ids_and_rows(slices: tf.IndexedSlices, table: EmbeddingTable) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids of a gradient without duplicates, and for each id the sum of its rows. The sums are an array of shape (n,
    columns)."""
    ids, places = tf.unique(tf.cast(slices.indices, tf.int64))
    rows = tf.math.unsorted_segment_sum(slices.values, places, tf.size(ids))
    return ids, tf.reshape(rows, [-1, table.columns])
