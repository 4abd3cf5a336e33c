"""What must hold on every number of ranks and with every controller, through the tape of stock horovod.tensorflow."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

import hvdcomp
from hvdcomp import TwoLevel, state_for
from hvdcomp.compressors import EXAMPLES
from tests.multirank.collectives import nodes_of
from tests.multirank.everywhere import assert_goes_on_with_other_ranks, assert_metrics, halves
from tests.multirank.training_tensorflow import (
    Network,
    TapeTraining,
    assert_like_horovods,
    assert_same_everywhere,
    batch,
    compression,
    gathered,
    loss_of,
    own_generator,
    sgd,
    weights,
)
from tests.multirank.worker import thorough
from tests.readme import block_with, run


def case_weights_are_identical_after_50_steps() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        training = TapeTraining(spec)
        start = training.weights
        first = np.mean([training.step() for _ in range(10)])
        training.run(30)
        last = np.mean([training.step() for _ in range(10)])
        assert_same_everywhere(training.variables)
        assert not np.array_equal(start, training.weights)
        assert last < first, (spec, first, last)
        assert training.compression.ledger.steps == 50, spec
        assert training.traces == 1


def case_the_readme_trains() -> None:
    network = Network()
    inputs, classes = batch(own_generator())
    with tf.GradientTape() as tape:
        loss = loss_of(network(inputs), classes)
    program = run(block_with("DistributedGradientTape"), hvd=hvd, hvdcomp=hvdcomp, tape=tape, tf_keras=tf_keras)
    program["tape"].gradient(loss, network.variables_in_order)
    totals = program["compression"].ledger.totals
    assert 0 < totals.bytes_sent < totals.dense_bytes


@thorough
def case_weights_are_identical_without_a_tf_function() -> None:
    for spec in ("none", "topk:ratio=0.05"):
        eager, graph = TapeTraining(spec, graph=False).run(20), TapeTraining(spec).run(20)
        assert_same_everywhere(eager.variables)
        np.testing.assert_allclose(eager.weights, graph.weights, rtol=1e-4, atol=1e-5)
        assert eager.compression.ledger.steps == 20, spec


@thorough
def case_every_method_keeps_weights_identical() -> None:
    routed = '{"second*": "topk:ratio=0.05", "numel<1100": "qsgd:bits=8", "*": "powersgd:rank=1"}'
    methods = "qsgd:bits=4,", "efsignsgd:", "fp16:rounding=stochastic,", "eden:bits=1,back=3,"
    scattered = [f"{method}exchange=scatter" for method in methods]
    for spec in [*EXAMPLES, *scattered, routed]:
        momentum = 0.0 if spec.startswith("dgc") else 0.9  # which has its own
        training = TapeTraining(spec, optimizer=sgd(0.005, momentum=momentum))
        start = training.weights
        training.run(3)
        assert_same_everywhere(training.variables)
        assert not np.array_equal(start, training.weights), spec


def case_casts_equal_horovods_own() -> None:
    for spec in ("none", "fp16"):
        training = TapeTraining(spec).run(20)
        assert_same_everywhere(training.variables)
        assert (training.compression.ledger.steps, training.traces) == (20, 1), spec
        theirs = TapeTraining(getattr(hvd.Compression, spec)).run(20).weights
        assert_like_horovods(training.weights, theirs, *((1e-4, 1e-5) if spec == "none" else (1e-2, 1e-3)))


def case_everything_sent_is_the_mean_gradient() -> None:
    """With ratio 1 nothing is left out, so that TopK must equal dense training but for the order of additions."""
    ours, theirs = TapeTraining("topk:ratio=1").run(20), TapeTraining(hvd.Compression.none).run(20)
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=1e-3, atol=1e-5)


def case_op_sum() -> None:
    theirs = TapeTraining(hvd.Compression.none).run(10)
    for spec in ("topk:ratio=1", "none"):
        ours = TapeTraining(spec, optimizer=sgd(0.05 / hvd.size()), tape={"op": hvd.Sum}).run(10)
        np.testing.assert_allclose(ours.weights, theirs.weights, rtol=1e-3, atol=1e-5)


def case_a_state_for_other_ranks() -> None:
    for op in (hvd.Average, hvd.Sum):
        training = TapeTraining("topk:ratio=0.05", tape={"op": op}).run(3)
        state = training.compression.state_dict()
        assert_goes_on_with_other_ranks(state, hvd.allgather_object, op == hvd.Sum)
        resumed = TapeTraining("topk:ratio=0.05", tape={"op": op})
        resumed.compression.load_state_dict(state, optimizer=resumed.optimizer)
        assert resumed.compression.state_dict()["own"].get("op") == state["own"].get("op"), "before any step"
    kept = state["own"]["residuals"]["first"]
    # As older states have them.
    tensors = {"first": {**kept, "arrays": [tf.constant(array) for array in kept["arrays"]]}}
    older = {**state, "own": {**state["own"], "rank": 0, "size": 1, "op": None, "residuals": tensors}}
    twice = state_for([older], 0, 2)["own"]["residuals"]["first"]["arrays"][0]
    assert np.array_equal(twice, 2 * kept["arrays"][0])


def case_weights_are_compared_as_they_are_between_steps() -> None:
    """Operations that change weights beside the optimizer's update need no gradient, and could run at any time."""

    class DecayingFirst(TapeTraining):
        def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
            for variable in self.variables:
                variable.assign_sub(1e-4 * variable)
            return super().gradients(tape, loss)

    for spec in ("topk:ratio=0.05", "fp16"):
        for _ in range(2):
            decaying = tf_keras.optimizers.AdamW(1e-3, weight_decay=0.1, jit_compile=False)
            for training in (TapeTraining(spec, optimizer=decaying), DecayingFirst(spec)):
                assert_same_everywhere(training.run(3).variables)


@thorough
def case_groups() -> None:
    reference = TapeTraining("topk:ratio=0.05").run(8).weights
    model = Network()
    for options in ({"groups": 2}, {"num_groups": 2}, {"groups": [model.variables_in_order[:3]]}):
        training = TapeTraining("topk:ratio=0.05", tape=options, model=model if "groups" in options else None)
        for variable, fresh in zip(training.variables, Network().variables_in_order, strict=True):
            variable.assign(fresh)
        training.run(8)
        assert_same_everywhere(training.variables)
        assert np.array_equal(training.weights, reference), options
        assert training.compression.ledger.steps == 8, options
    ours = TapeTraining("fp16", tape={"groups": 2}).run(8)
    assert_same_everywhere(ours.variables)
    assert ours.compression.ledger.steps == 8


class Embedded:
    """Two embeddings, whose gradients are IndexedSlices, and a matrix."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        shapes = {"first": (100, 16), "second": (100, 16), "out": (16, 100)}
        self.variables_in_order = [
            tf.Variable(rng.normal(0, 0.3, shape), dtype=tf.float32, name=name) for name, shape in shapes.items()
        ]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        first, second, out = self.variables_in_order
        words = tf.cast(tf.abs(inputs[:, 0]) * 30, tf.int32)
        return (tf.gather(first, words) + 0.5 * tf.gather(second, words)) @ out


def _train_embedded(how: Any, **tape: Any) -> np.ndarray:
    training = TapeTraining(how, model=Embedded(), optimizer=sgd(0.1, momentum=0.0), tape=tape).run(8)
    assert_same_everywhere(training.variables)
    return training.weights


def case_indexed_slices_pass_through() -> None:
    expected = _train_embedded(hvd.Compression.none)
    assert_like_horovods(_train_embedded("none"), expected)
    for spec in ("topk:ratio=1", "powersgd:rank=16"):
        np.testing.assert_allclose(_train_embedded(spec), expected, rtol=1e-3, atol=1e-5)


@thorough
def case_sparse_as_dense() -> None:
    expected = _train_embedded(hvd.Compression.none, sparse_as_dense=True)
    for spec in ("topk:ratio=1", "none"):
        np.testing.assert_allclose(_train_embedded(spec, sparse_as_dense=True), expected, rtol=1e-4, atol=1e-6)
    training = TapeTraining("topk:ratio=0.1", model=Embedded(), tape={"sparse_as_dense": True}).run(3)
    assert all(state.memory for state in training.binding.engine.states.values())


class Partly(TapeTraining):
    """Some variables have no gradient, as the case that calls says."""

    missing: tuple[int, ...] = ()

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        present = [variable for place, variable in enumerate(self.variables) if place not in self.missing]
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self._tape)
        gradients = tape.gradient(loss, [*present, *self.unused])
        assert gradients[len(present) :] == [None] * len(self.unused)
        found = iter(gradients)
        return [tf.zeros_like(v) if place in self.missing else next(found) for place, v in enumerate(self.variables)]

    def __init__(self, how: Any, **options: Any) -> None:
        model = Network()
        self.unused = [tf.Variable(tf.ones((40, 40)), name="never")]
        if isinstance(how, str):
            how = compression(how, [*model.variables_in_order, *self.unused])
        super().__init__(how, model=model, **options)


def case_gradients_that_are_none() -> None:
    for spec, graph in (("none", False), ("topk:ratio=1", True), ("topk:ratio=1", False)):
        ours, theirs = Partly(spec, graph=graph), Partly(hvd.Compression.none, graph=graph)
        ours.missing = theirs.missing = (1,)
        start = ours.weights
        assert_same_everywhere(ours.run(4).variables)
        np.testing.assert_allclose(ours.weights, theirs.run(4).weights, rtol=1e-3, atol=1e-5)
        assert not np.array_equal(ours.weights, start)


def case_local_sources_stay_local() -> None:
    class Local(TapeTraining):
        def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
            tape = hvd.DistributedGradientTape(tape, compression=self.compression)
            tape.register_local_source(self.model.second)
            return tape.gradient(loss, self.variables)

    ours, theirs = Local("topk:ratio=1").run(6), Local(hvd.Compression.none).run(6)
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=1e-3, atol=1e-5)
    assert_same_everywhere(ours.variables[:2])
    own = gathered(weights([ours.model.second]))
    assert not np.array_equal(own[0], own[-1])
    assert not ours.binding.engine.states["second"].memory


def case_process_sets() -> None:
    sets = halves(hvd)
    mine = sets[0] if sets[0].included() else sets[1]
    for spec in ("topk:ratio=0.05", "none"):
        training = TapeTraining(spec, process_set=mine, tape={"process_set": mine}).run(6)
        everyone = gathered(training.weights)
        first = 0 if mine is sets[0] else hvd.size() // 2
        assert all(np.array_equal(everyone[first], everyone[rank]) for rank in mine.ranks)
        assert not np.array_equal(everyone[0], everyone[-1])
        assert training.compression.ledger.steps == (6 if mine.size() > 1 else 0)
    for process_set in sets:
        hvd.remove_process_set(process_set)


@thorough
def case_two_levels_keep_weights_identical() -> None:
    """With two nodes of half the ranks each."""
    for spec in TwoLevel.examples:
        training = TapeTraining(spec, optimizer=sgd(0.005))
        start = training.weights
        with nodes_of(max(1, hvd.size() // 2)):
            training.run(4)
        assert_same_everywhere(training.variables)
        assert not np.array_equal(start, training.weights), spec
        assert (training.compression.ledger.totals.bytes_in_node > 0) == (hvd.size() > 2), spec


def case_steps_in_a_loop_inside_of_a_graph() -> None:
    for spec in ("none", "topk:ratio=0.05"):
        one_by_one, looped = TapeTraining(spec, graph=False).run(6), TapeTraining(spec, graph=False)
        batches = [batch(looped.generator) for _ in range(6)]
        inputs, classes = (tf.constant(np.stack(part)) for part in zip(*batches, strict=True))
        looped.traces = 0

        @tf.function
        def run(inputs: tf.Tensor, classes: tf.Tensor, looped: TapeTraining = looped) -> None:
            for step in tf.range(3):
                looped._train(inputs[step], classes[step])

        run(inputs[:3], classes[:3])
        run(inputs[3:], classes[3:])
        assert looped.traces == 1
        assert looped.compression.ledger.steps == 6
        assert_same_everywhere(looped.variables)
        np.testing.assert_allclose(looped.weights, one_by_one.weights, rtol=1e-4, atol=1e-6)


@thorough
def case_two_tapes_in_one_step() -> None:
    """Two networks with a compression each, trained in one function."""
    trainings = [TapeTraining("topk:ratio=0.1"), TapeTraining("powersgd:rank=1")]
    alone = [TapeTraining("topk:ratio=0.1").run(8), TapeTraining("powersgd:rank=1").run(8)]

    @tf.function
    def step(inputs: tf.Tensor, classes: tf.Tensor) -> None:
        for training in trainings:
            training._train(inputs, classes)

    generator = own_generator()
    for _ in range(8):
        step(*map(tf.constant, batch(generator)))
    for together, single in zip(trainings, alone, strict=True):
        assert_same_everywhere(together.variables)
        assert together.compression.ledger.steps == 8
        np.testing.assert_allclose(together.weights, single.weights, rtol=1e-4, atol=1e-6)


def case_levels_change_between_steps_without_a_new_trace() -> None:
    for spec, levels in (("topk:ratio=0.05", (0.5, 0.01)), ("powersgd:rank=2", (4, 1))):
        training = TapeTraining(spec)
        sizes = []
        for level in (training.compression.level, *levels):
            training.compression.set_level(level)
            training.run(3)
            sizes.append(training.compression.ledger.last.bytes_sent)
            assert_metrics(training.compression, dense_bytes=4 * training.weights.size)
        assert sizes[1] > sizes[0] > sizes[2]
        assert training.traces == 1
        assert_same_everywhere(training.variables)


def case_warm_up_schedule() -> None:
    training = TapeTraining("topk:ratio=0.01", policy="warmup:dense_steps=2,levels=0.5|0.1,steps=2")
    sizes = []
    for _ in range(8):
        training.step()
        sizes.append(training.compression.ledger.last.bytes_sent)
    assert sizes[1] >= sizes[2] == sizes[3] > sizes[4] == sizes[5] > sizes[6] == sizes[7]
    assert training.traces == 1
    assert_same_everywhere(training.variables)


@thorough
def case_the_same_seed_gives_the_same_run() -> None:
    results = []
    for seed in (1, 1, 2):
        before = np.random.get_state()[1].tolist()
        results.append(TapeTraining("qsgd:bits=4", seed=seed).run(5).weights)
        assert np.random.get_state()[1].tolist() == before
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


@thorough
def case_the_optimizer_of_tensorflow_1() -> None:
    """In a tf.function, through hvd.DistributedOptimizer of horovod.tensorflow."""
    model = Network()
    how = compression("topk:ratio=0.05", model.variables_in_order)
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.05), compression=how)

    @tf.function
    def step(inputs: tf.Tensor, classes: tf.Tensor) -> None:
        pairs = optimizer.compute_gradients(lambda: loss_of(model(inputs), classes), var_list=model.variables_in_order)
        optimizer.apply_gradients(pairs)

    start, generator = weights(model.variables_in_order), own_generator()
    for _ in range(10):
        step(*map(tf.constant, batch(generator)))
    assert_same_everywhere(model.variables_in_order)
    assert not np.array_equal(start, weights(model.variables_in_order))
    assert how.ledger.steps == 10


def case_steps_in_a_session_of_tensorflow_1() -> None:
    """Nobody outside of a session can read its variables, so that the ranks do not compare them."""
    variable = tf.compat.v1.get_variable
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        matrix = variable("matrix", initializer=tf.zeros((4, 300)), use_resource=True)
        reference = variable("reference", initializer=tf.zeros((4, 300)), use_resource=False)
        how = compression("topk:ratio=1.0", [matrix, reference])
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), compression=how)
        loss = tf.reduce_sum(matrix + 2 * reference) * (1 + hvd.rank())
        step = optimizer.minimize(loss, var_list=[matrix, reference])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step)
        mean = (1 + hvd.size()) / 2
        np.testing.assert_allclose(session.run(matrix), -3 * mean)
        np.testing.assert_allclose(session.run(reference), -6 * mean)
    assert how.ledger.steps == 3
