"""A pass over the graph of a training step. The pass replaces the all-reduces of gradients by compressed means.

Tools that trace a training step, such as `make_fx` and `torch.compile`, write an all-reduce as two nodes:
`_c10d_functional.all_reduce` begins it, and `wait_tensor` ends it. A mean is a sum with a division by the number of
ranks before or after the sum. The pass finds these nodes, and replaces them by one node of
`hvdcomp.torch.compiled.operators`.

Tensors that are reduced one after the other share a node, so their collectives are fused. Tensors can share a node if
no node between them uses a mean or may change a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.compiled.exchange import group_of, method_of

NamesOfReduces = Callable[[Node], str | None]
"""The name of the tensor that a node `all_reduce` gets, or None if it is to stay uncompressed."""

_STEP = "hvdcomp_step"  # the name of the buffer that contains the step number
_DIVISIONS = ("div", "true_divide", "truediv")
_FACTORS = ("mul", "multiply")
_FOUND_BY = ("val", "example_value")  # the names under which tracers store an example of a node's result


@dataclass
class _Reduce:
    """An all-reduce in a graph.

    Attributes:
        start: the node that begins the all-reduce.
        divides: whether the node before `start` divides by the number of ranks.
        result: the node whose value is replaced.
        factor: the mean times this number is the value of `result`.
        name: the name of the tensor.
    """

    start: Node
    divides: bool
    result: Node
    factor: int
    name: str

    @property
    def tensor(self) -> Node:
        """The node of the tensor whose mean is computed. The tensor may be the result of another all-reduce, which was
        replaced."""
        (summand,) = self.start.all_input_nodes
        return summand.all_input_nodes[0] if self.divides else summand


def replace_reduces(
    module: GraphModule,
    spec: str,
    step: torch.Tensor | Node,
    group_name: str,
    seed: int,
    least: int,
    name_of: NamesOfReduces,
) -> list[str]:
    """Replaces the all-reduces of one process group. The arguments are those of
    `hvdcomp.compiled.compress_all_reduces`.

    Returns:
        The names of the tensors that are compressed, in the order of the graph.
    """
    method_of(spec, residuals=False)
    graph, size = module.graph, group_of(group_name).size()
    found: dict[Node, _Reduce] = {}
    for node in graph.nodes:
        if _calls(node, "all_reduce") and _may_replace(node, group_name, least) and (name := name_of(node)) is not None:
            found[node] = _reduce(node, name, size, {reduce.result for reduce in found.values()})
    names = [reduce.name for reduce in found.values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"several all-reduces got the name {', '.join(twice)}; give each a name of its own")
    if not found:
        return []
    step = step if isinstance(step, Node) else _node_of(module, step)
    for reduces, place in _together(graph, found):
        _put(graph, reduces, place, spec, step, group_name, seed)
    for reduce in found.values():
        _erase(graph, reduce)
    graph.lint()
    module.recompile()
    return names


def compile_by(backend: str, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph from Dynamo with a backend of `torch.compile`. inputs: example inputs."""
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend(backend)(module, list(inputs))
    return compiled


def _may_replace(node: Node, group_name: str, least: int) -> bool:
    """Whether an all-reduce is a sum or a mean in this process group and has at least `least` numbers."""
    _, kind, group = node.args
    example, ends = _example(node), list(node.users)
    if kind not in ("sum", "avg") or group != group_name or len(ends) != 1 or not _calls(ends[0], "wait_tensor"):
        return False
    return example is not None and example.dtype.is_floating_point and example.numel() >= least


def _reduce(start: Node, name: str, size: int, results: Set[Node]) -> _Reduce:
    """Describes the all-reduce that a node begins.

    Args:
        results: the results of other all-reduces. Such a node may be the division of another sum.
    """
    (wait,) = start.users
    if start.args[1] == "avg":
        return _Reduce(start, False, wait, 1, name)
    (summand,), after = start.all_input_nodes, list(wait.users)
    if _is_division(summand, size) and summand not in results:
        return _Reduce(start, True, wait, 1, name)
    if len(after) == 1 and _is_division(after[0], size):
        return _Reduce(start, False, after[0], 1, name)
    return _Reduce(start, False, wait, size, name)


def _together(graph: torch.fx.Graph, found: dict[Node, _Reduce]) -> Iterator[tuple[list[_Reduce], Node]]:
    """Yields the all-reduces that share a new node, and the node before which to insert it."""
    waiting: list[_Reduce] = []
    own: set[Node] = set()  # the nodes that the pass replaces
    results: set[Node] = set()
    for node in list(graph.nodes):
        if waiting and node not in own and (results.intersection(node.all_input_nodes) or _ends_a_run(node)):
            yield waiting, node
            waiting, own, results = [], set(), set()
        if (reduce := found.get(node)) is not None:
            waiting.append(reduce)
            own |= {node, *node.users, reduce.result}
            results.add(reduce.result)


def _put(
    graph: torch.fx.Graph, reduces: list[_Reduce], place: Node, spec: str, step: Node, group_name: str, seed: int
) -> None:
    """Inserts the node that computes the means of some tensors before another node."""
    with graph.inserting_before(place):
        means = graph.call_function(
            torch.ops.hvdcomp.allreduce_means.default,
            ([reduce.tensor for reduce in reduces], spec, step, group_name, [reduce.name for reduce in reduces], seed),
        )
        for key in _FOUND_BY:
            if key in reduces[0].start.meta:
                means.meta[key] = [reduce.start.meta[key] for reduce in reduces]
        for number, reduce in enumerate(reduces):
            found_by = {key: value for key, value in reduce.start.meta.items() if key in _FOUND_BY}
            mean = graph.call_function(operator.getitem, (means, number))
            mean.meta.update(found_by)
            if reduce.factor != 1:
                mean = graph.call_function(torch.ops.aten.mul.Tensor, (mean, reduce.factor))
                mean.meta.update(found_by)
            reduce.result.replace_all_uses_with(mean)


def _erase(graph: torch.fx.Graph, reduce: _Reduce) -> None:
    """Removes the nodes of an all-reduce from the graph. Also removes the divisions by the number of ranks if nothing
    else uses the results."""
    (wait,) = reduce.start.users
    (summand,) = reduce.start.all_input_nodes
    for node in dict.fromkeys((reduce.result, wait, reduce.start)):
        graph.erase_node(node)
    if reduce.divides and not summand.users:
        graph.erase_node(summand)


def _node_of(module: GraphModule, step: torch.Tensor) -> Node:
    """Registers the step number as a buffer of the module, and returns a node that reads the buffer."""
    if getattr(module, _STEP, step) is not step:
        raise ConfigurationError(
            "this graph has compressed all-reduces with another step; give the same tensor for all process groups"
        )
    module.register_buffer(_STEP, step, persistent=False)
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        return module.graph.get_attr(_STEP)


# Functions that recognize nodes.


def _calls(node: Node, name: str) -> bool:
    """Whether a node calls the functional collective of this name. The node may also name an overload."""
    called = getattr(torch.ops._c10d_functional, name)
    return node.op == "call_function" and node.target in (called, called.default)


def _is_division(node: Any, size: int) -> bool:
    """Whether a node divides a tensor by this number, or multiplies it by the inverse of this number."""
    if not isinstance(node, Node) or node.op == "placeholder" or len(node.args) != 2 or node.kwargs:
        return False
    tensor, number = node.args
    if not isinstance(tensor, Node) or not isinstance(number, int | float):
        return False
    before, after = _example(tensor), _example(node)
    if before is None or after is None or before.dtype != after.dtype:  # a division of integers gives another type
        return False
    called = _called(node)
    return (called in _DIVISIONS and number == size) or (called in _FACTORS and number == 1 / size)


def _called(node: Node) -> str:
    """The name of the function, operator or method that a node calls, without the overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _ends_a_run(node: Node) -> bool:
    """Whether a node may change a tensor that an earlier node has computed, or is the last node."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return False
    if _calls(node, "all_reduce") or _calls(node, "wait_tensor"):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable


def _example(node: Node) -> torch.Tensor | None:
    """A tensor with the shape and type of the node's result; None if the tracer has not stored one."""
    examples = (node.meta.get(key) for key in _FOUND_BY)
    return next((example for example in examples if isinstance(example, torch.Tensor)), None)
