"""`RowExchange`: the mean of `tf.IndexedSlices`, as embedding tables have them, of which each row travels once."""

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
from hvdcomp.exchange.rows import RowMeans, Rows, Table, wire_name
from hvdcomp.tensorflow.names import by_name

_ON_HOST = np.zeros(0, np.float32)


class RowExchange:
    """Lets Horovod's tape or optimizer exchange `tf.IndexedSlices` row by row, and all else as before.

        rows = hvdcomp.tensorflow.RowExchange()  # once, on every rank
        tape = rows.serve(hvd.DistributedGradientTape(tape, compression=compression))          # in a loop, or
        optimizer = rows.serve(hvd.DistributedOptimizer(optimizer, compression=compression))   # for Keras fit

    Horovod gathers the slices of all ranks as they are, so that a row that was looked up often travels as often. Here a
    rank adds up the slices of a row before. The result is the same mean (or sum, with op=hvd.Sum), but for last bits:
    `tf.IndexedSlices` in which each row is once, in the order of their ids. `hvdcomp.exchange.rows` says how they
    travel. They are exchanged on the host, after the other gradients.

    Args:
        wire_dtype: in which rows and means travel: tf.bfloat16 or tf.float16; or tf.int8, with the largest magnitude of
            each row beside it, of which an element is off by 1/254 at most, and a mean again. What is rounded away is
            lost. Default: as they are.

    Attributes:
        ledger: bytes of each step, as of `Compression.ledger`, without times; empty with one rank. The dense bytes are
            the whole tables'.

    Raises:
        ConfigurationError: for another wire_dtype.
    """

    def __init__(self, *, wire_dtype: tf.DType | None = None) -> None:
        self._wire = wire_name(wire_dtype)
        self._means: RowMeans | None = None
        self._tables: dict[str, Table] = {}
        self._ranks: HorovodTensorFlowCommunicator | None = None

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self._means is None else self._means.ledger

    def serve(self, distributed: Any) -> Any:
        """Changes what hvd.DistributedGradientTape or hvd.DistributedOptimizer returned, and returns it.

        Raises:
            ConfigurationError: for anything else, or what was served before; with op=hvd.Adasum or
                backward_passes_per_step above 1.
        """
        reduce_others: Any = getattr(distributed, "_allreduce_grads", None)
        told = _settings_of(reduce_others)
        if "process_set" not in told:
            raise ConfigurationError(
                f"RowExchange.serve was given a {type(distributed).__name__}; give it, once, what "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer returns"
            )
        if told["op"] not in (hvd.Average, hvd.Sum):
            raise ConfigurationError("RowExchange works with op=hvd.Average and op=hvd.Sum, not hvd.Adasum")
        if getattr(distributed, "_agg_helper", None) is not None:
            raise ConfigurationError(
                "RowExchange works with backward_passes_per_step=1: Horovod adds up several passes in whole tables"
            )
        if self._ranks is None:
            self._ranks = HorovodTensorFlowCommunicator(told["process_set"])

        def reduce(gradients: Sequence[Any], variables: Sequence[Any], *options: Any) -> list[Any]:
            assert self._ranks is not None
            places = [place for place, one in enumerate(gradients) if isinstance(one, tf.IndexedSlices)]
            if not places or self._ranks.world_size == 1:
                return list(reduce_others(gradients, variables, *options))
            others = [place for place in range(len(gradients)) if place not in places]
            means: dict[int, Any] = {}
            if others:
                dense, trained = [gradients[one] for one in others], [variables[one] for one in others]
                means |= zip(others, reduce_others(dense, trained, *options), strict=True)
            # At the same time they would wait in more threads than TensorFlow may have.
            with tf.control_dependencies([mean for mean in means.values() if mean is not None]):
                slices, tables = [gradients[one] for one in places], [variables[one] for one in places]
                means |= zip(places, self._reduce_slices(slices, tables, told["op"]), strict=True)
            return [means[place] for place in range(len(gradients))]

        distributed._allreduce_grads = reduce
        return distributed

    def _reduce_slices(self, gradients: Sequence[Any], variables: Sequence[Any], op: int) -> list[Any]:
        """Puts the exchange into the graph that is being made; run eagerly, makes it."""
        tables = {
            name: Table(one.dtype.name, one.shape[0], one.shape[1:].num_elements())
            for name, one in by_name(variables).items()
        }
        if self._tables not in ({}, tables):
            raise ConfigurationError(
                f"RowExchange serves {', '.join(self._tables)}, and was called for {', '.join(tables)}; give each tape "
                "or optimizer a RowExchange of its own"
            )
        self._tables = tables
        assert self._ranks is not None
        factor = self._ranks.world_size if op == hvd.Sum else 1
        with tf.device("CPU:0"):
            given = [part for one, table in zip(gradients, tables.values(), strict=True) for part in _own(one, table)]
            means = tf.numpy_function(self._exchange, given, [one.dtype for one in given], name="hvdcomp_rows")
        results = []
        for one, ids, values in zip(gradients, means[::2], means[1::2], strict=True):
            values = tf.reshape(values, [-1, *one.values.shape[1:]])
            results.append(tf.IndexedSlices(values * factor, tf.cast(ids, one.indices.dtype), one.dense_shape))
        return results

    def _exchange(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The ids and mean rows of each table."""
        if self._means is None:
            assert self._ranks is not None
            self._means = RowMeans(self._ranks, self._tables, self._wire, _ON_HOST)
        given = [Rows(ids, values) for ids, values in zip(arrays[::2], arrays[1::2], strict=True)]
        means = self._means.exchange(given, [True] * len(given))
        return [part for mean in means if mean is not None for part in mean]


def _settings_of(reduce: Any) -> dict[str, Any]:
    """What Horovod's function that averages gradients was made with."""
    function = getattr(reduce, "python_function", reduce)  # of the tf.function
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _own(slices: tf.IndexedSlices, table: Table) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids of a gradient, each once, and its rows (n, columns)."""
    ids, places = tf.unique(tf.cast(slices.indices, tf.int64))
    rows = tf.math.unsorted_segment_sum(slices.values, places, tf.size(ids))
    return ids, tf.reshape(rows, [-1, table.columns])
