"""The binding of the unmodified `hvd.DistributedGradientTape` and `hvd.DistributedOptimizer` of horovod.tensorflow.

Horovod always traces its functions that average gradients. So Horovod calls `compress` and `decompress` while a graph
is made, not while the graph runs. Therefore the first `compress` of a list of gradients adds two operations to the
graph. These operations call Python functions in each step:

- The first operation begins a step: it sets the plan and starts the presence check. This operation needs no gradient,
  so it can run before the backward pass.
- The second operation gets all gradients of the list as arrays, runs the engine, and returns the means. The arrays are
  NumPy arrays or, on a GPU, PyTorch tensors.

Levels, policies and residuals exist only in Python, as with PyTorch, so nothing is traced again when they change.
Horovod itself gets a number in place of each gradient. No result depends on the operation that allreduces this number,
so TensorFlow removes the operation from the graph. If the compressor only casts, and no policy may change this, Horovod
itself allreduces the cast gradients when they become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcomp.arrays.tensorflow_tensors import in_graph
from hvdcomp.arrays.types import AnyArray
from hvdcomp.bindings import elastic
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.horovod_tensorflow import HorovodTensorFlowCommunicator
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.policies import changes_batch_size
from hvdcomp.tensorflow.callbacks import as_callback
from hvdcomp.tensorflow.caller import GradientsCall, gradients_call
from hvdcomp.tensorflow.compressed_adam import CompressedAdam
from hvdcomp.tensorflow.names import by_name
from hvdcomp.tensorflow.optimizer import ScaledRate
from hvdcomp.tensorflow.placement import device_of
from hvdcomp.tensorflow.training import TensorFlowTraining, is_readable


@dataclass
class _Ticket:
    """The context that Horovod passes from `compress` to `decompress`.

    Attributes:
        result: the mean gradient, as a tensor of the graph that calls Horovod; None if Horovod itself allreduces the
            gradient.
        dtype: the element type of the gradient.
    """

    result: tf.Tensor | None
    dtype: tf.DType


@dataclass
class _Traced:
    """The operations in a graph for one list of gradients.

    Attributes:
        gradients: the list of gradients that the step compresses.
        names: the names of the compressed gradients, by position.
        begun: the output of the graph operation that begins a step.
        results: the mean gradients, by position; empty if Horovod itself allreduces the gradients.
    """

    gradients: Sequence[Any]
    names: dict[int, str]
    begun: tf.Tensor
    results: dict[int, tf.Tensor]

    def position(self, tensor: tf.Tensor) -> int | None:
        return next((place for place in self.names if self.gradients[place] is tensor), None)


class TensorFlowBinding(TensorFlowTraining):
    """Ties one `Compression` to the tapes or the optimizer of one training run.

    Args:
        setup: the `Compression`, and what the user passed to it. `setup.parameters` is a mapping of variables by name,
            or a function that returns such a mapping. If it is None, the binding uses the variables of the list of
            gradients that contains `tensor`. `setup.grad_scaler` and `setup.optimizer` are Keras objects. If one of
            them is None, the binding uses the Keras object that calls Horovod.
        tensor: the gradient to compress; None before the first step.

    Raises:
        ConfigurationError: if there are no variables, or the variables are not known yet.
    """

    broadcast = "hvd.broadcast_variables(model.variables, root_rank=0)"

    def __init__(self, setup: Setup, tensor: tf.Tensor | None = None) -> None:
        variables = _known_variables(setup.parameters, tensor)
        self._names = {variable.ref(): name for name, variable in variables.items()}
        self._traced: _Traced | None = None
        self._facts_of_call: dict[str, Any] = {}
        self._summed = False  # whether Horovod adds gradients instead of averaging them
        self._trained: set[str] = set()  # the names of variables that had a gradient in any trace
        self._lists = 0  # number of lists of gradients that were traced for the latest function
        self._steps_per_call = 1
        communicator = HorovodTensorFlowCommunicator(setup.process_set)
        if communicator.world_size > 1 or elastic.may_change():
            self._on_device = device_of(variables.values(), warns=communicator.rank == 0)
        with _refused_on_every_rank(communicator, np.zeros((0,), np.float32)):
            super().__init__(setup, variables, communicator)

    def connect(self, communicator: Ranks) -> None:
        assert isinstance(communicator, HorovodTensorFlowCommunicator)
        communicator.on_device = self._on_device
        super().connect(communicator)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, _Ticket]:
        # With one rank, and on ranks outside the process set, Horovod exchanges nothing, but still traces this branch.
        if self.communicator.world_size == 1 and not elastic.may_change():
            if not self.communicator.included:
                self._check(gradients_call(tensor))
            return tensor, _Ticket(None, tensor.dtype)
        if self._traced is None or (position := self._traced.position(tensor)) is None:
            self._traced = self._trace(gradients_call(tensor))
            position = self._traced.position(tensor)
            assert position is not None
        traced = self._traced
        if traced.results:
            return traced.begun, _Ticket(traced.results[position], tensor.dtype)
        with tf.control_dependencies([traced.begun]):
            wire = self.engine.plan[traced.names[position]].wire_dtype(tensor.dtype.name)
            return tf.cast(tensor, wire), _Ticket(None, tensor.dtype)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ticket: _Ticket) -> tf.Tensor:
        if ticket.result is None:
            return tf.cast(tensor, ticket.dtype)
        return tf.identity(ticket.result)

    # Methods that are called while a graph is made.

    def _trace(self, call: GradientsCall) -> _Traced:
        """Adds the operations for a list of gradients to the graph that passes this list to Horovod."""
        self._check(call)
        if self._optimizer is None:
            self._optimizer = call.optimizer
            if isinstance(self._optimizer, CompressedAdam):
                b1 = float(self._optimizer.beta_1)
                self.setup.compression.settings.require_momenta(self._optimizer.compressor_before, 1, b1)
        if self._grad_scaler is None:
            self._grad_scaler = call.loss_scale_optimizer
        names = {
            place: self._name(call.variables[place])
            for place, gradient in enumerate(call.gradients)
            if isinstance(gradient, tf.Tensor)
        }
        self._facts_of_call = {"op": call.op, "prescale_factor": call.prescale_factor}
        self._summed = call.op == hvd.Sum
        graph = _graph_of_call()
        again = self._traced is not None and _outermost(self._traced.begun.graph) is _outermost(graph)
        self._lists = self._lists + 1 if again else 1
        self._steps_per_call = self._lists * call.steps_per_execution
        self._trained.update(names.values())
        settings = self.setup.compression.settings
        if changes_batch_size(settings.policy) and self._scaled is None:
            with tf.init_scope():
                self._scaled = ScaledRate(self._known_optimizer())
        freezes = isinstance(self._optimizer, CompressedAdam)
        casting = settings.policy is None and self.engine.passthrough and not freezes
        gradients = [call.gradients[place] for place in names]
        # Horovod compresses each gradient in a separate branch of the graph, and a branch cannot use the results of
        # another branch. Therefore the operations are added to the graph that contains all branches.
        with graph.as_default():
            if casting:
                compressed = set(names.values())
                begun = self._begun(lambda _: self._begin_casts(compressed))
                return _Traced(call.gradients, names, begun, {})
            self.refuse_predivision(1.0 / call.prescale_factor)
            # An operation of the graph reads the number of steps, because this operation certainly runs before the
            # optimizer counts the current step.
            begun = self._begun(self._begin, self._optimizer.iterations if freezes else 0)
            with tf.control_dependencies([begun]):
                ordered = list(names.values())
                put = in_graph if self._on_device is None else self._on_device.in_graph
                results = put(as_callback(lambda *arrays: self._step(ordered, arrays)), gradients, "hvdcomp_step")
        return _Traced(call.gradients, names, begun, dict(zip(names, results, strict=True)))

    def _begun(self, begin: Callable[[Any], int], number: Any = 0) -> tf.Tensor:
        """Adds the operation that begins a step to the graph that is being made. The operation calls the function
        `begin` with `number`.

        The operation compares weights, but TensorFlow does not see that Python reads them. TensorFlow keeps the order
        of the program only between operations that refer to the same variable. Therefore the graph reads each variable
        twice. The operation waits for the first reads, and so it also waits for earlier changes of the weights. The
        second reads wait for the operation. Later changes, such as the weight decay of Keras, wait for the second
        reads.
        """
        variables = [variable for variable in self._variables.values() if is_readable(variable)]
        # The operation is placed on the CPU, so that its result is not copied to a GPU.
        with tf.control_dependencies(_reads(variables)), tf.device("CPU:0"):
            begun = tf.py_function(as_callback(begin), [tf.identity(number)], tf.int64, name="hvdcomp_begin")
        with tf.control_dependencies([begun]):
            _reads(variables)
        return begun

    def _name(self, variable: tf.Variable) -> str:
        name = self._names.get(variable.ref())
        if name is not None:
            return name
        source = "variables of hvdcomp.Compression"
        if self.setup.parameters is None:
            source = f"{len(self._variables)} variables that hvdcomp.Compression found in the first list of gradients"
        raise ConfigurationError(
            f"a gradient of {variable.name!r} arrived, but this variable is not among the {source}; pass all trained "
            "variables, hvdcomp.Compression(..., variables=model.trainable_variables). For several models, join their "
            "lists of variables into one list"
        )

    def _check(self, call: GradientsCall) -> None:
        if call.op not in (hvd.Average, hvd.Sum):
            op = "hvd.Adasum" if call.op == hvd.Adasum else call.op
            raise ConfigurationError(
                f"gradient compression works only with op=hvd.Average and op=hvd.Sum, not with op={op}"
            )
        if self.setup.process_set is not None and call.process_set != self.setup.process_set:
            raise ConfigurationError(
                f"hvdcomp.Compression was given process set {self.setup.process_set}, but Horovod has "
                f"{call.process_set}; give both the same process set"
            )
        if self.setup.process_set is None and call.process_set.process_set_id != 0:
            raise ConfigurationError(
                f"Horovod averages over process set {call.process_set}; pass the same process set to "
                "hvdcomp.Compression(..., process_set=...)"
            )

    # Methods that are called while a graph runs.

    def _begin(self, steps_made: Any = 0) -> int:
        """Begins a step. If a rank cannot begin the step, an error is raised on all ranks. If only some ranks began the
        step, Horovod would wait for the other ranks forever."""
        self.steps_made = int(steps_made)
        if self.is_stale:
            self.follow_ranks()
        alone = self.communicator.world_size == 1  # true if all other ranks of an elastic job have left
        if alone:
            self.agree_with_new_ranks()
        else:
            self.begin()
        if self._scaled is not None:
            self._scaled.begin_step()
        if not alone:
            started = self.communicator.start_allreduce(np.array([self.presence]), "sum", "hvdcomp.presence")
            self.check_presence(int(self.communicator.wait(started)[0]))
        return self.engine.step_number

    def _step(self, names: list[str], gradients: Sequence[AnyArray]) -> list[AnyArray]:
        ranks = self.communicator.world_size
        if ranks == 1:
            return list(gradients)
        means = self.means_of(names, gradients)
        return [mean * ranks for mean in means] if self._summed else means

    def _begin_casts(self, names: Set[str]) -> int:
        if self.is_stale or not self.has_agreed:
            self._begin()  # the ranks compare their settings
        if self.communicator.world_size == 1:
            return self.engine.step_number
        self.engine.enter_casts(names)
        return self.engine.step_number

    # Methods of `Training`.

    @property
    def is_summed(self) -> bool:
        return self._summed

    def facts(self) -> dict[str, Any]:
        return self._facts_of_call

    def trained(self) -> Set[str]:
        return self._trained

    @property
    def steps_before_broadcast(self) -> int:
        """The number of steps that may be made before weights are broadcast.

        Horovod's examples, and its Keras callback, broadcast the weights after the first batch. In Keras, this means
        after the first call of Keras's training function, which may make several steps. The weights may change during
        this call.
        """
        return self._steps_per_call

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Horovod's elastic state for Keras saves the weights that a worker has when it joins, and restores these
        # weights if a failure occurs before the first commit. Therefore the binding keeps the matching first state.
        self._first_state = self._first_state or state
        with tf.init_scope():  # TensorFlow may be tracing the first step
            super().load_state_dict(state)
        self._summed = self._summed or state["own"].get("op") == "sum"  # with one rank, `_trace` does not set it


@contextmanager
def _refused_on_every_rank(communicator: Ranks, like: AnyArray) -> Iterator[None]:
    """Raises an error on every rank if an error occurs on one rank. The function `refused_on_every_rank` does the same,
    but this function also works while a graph is created. In sessions of TensorFlow 1, the ranks do not exchange
    errors."""
    with tf.init_scope():
        alone = communicator.world_size == 1 or not communicator.included or not tf.executing_eagerly()
        with nullcontext() if alone else refused_on_every_rank(communicator, like):
            yield


def _known_variables(variables: Any, tensor: tf.Tensor | None) -> dict[str, tf.Variable]:
    if isinstance(variables, Mapping):
        return dict(variables)
    if variables is not None:
        return by_name(variables())
    if tensor is None:
        raise ConfigurationError(
            "before the first step, hvdcomp.Compression cannot find out which variables are trained; pass "
            "variables=model.trainable_variables"
        )
    return by_name(gradients_call(tensor).variables)


def _reads(variables: Iterable[tf.Variable]) -> list[tf.Tensor]:
    """Operations that read variables without copying them."""
    return [
        tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype) for variable in variables
    ]


def _graph_of_call() -> Any:
    """The graph in which Horovod got the gradients. If Horovod compresses the current gradient in a branch, the graph
    that contains the branch."""
    branch = tf.compat.v1.get_default_graph()
    return getattr(branch, "outer_graph", None) or branch


def _outermost(graph: Any) -> Any:
    """The graph of the function that the user calls. The outermost graph contains the graphs of the functions that this
    function calls."""
    outer = getattr(graph, "outer_graph", None)
    return _outermost(outer) if hasattr(outer, "outer_graph") else graph
