"""A pass that changes the graph of a training step. The pass replaces the all-reduces and reduce-scatters of gradients
with compressed means.

Tools that trace a training step, such as `make_fx` and `torch.compile`, represent an all-reduce as two nodes:
`_c10d_functional.all_reduce`, which begins it, and `wait_tensor`. Reduce-scatters look the same. A coalesced collective
begins several reductions in one node, and a `getitem` node picks the result of each reduction. A mean is a sum with a
division by the number of ranks before or after it. The pass finds these nodes, and replaces them with nodes that call
the operators of `hvdcomp.torch.compiled.operators`.

The pass replaces consecutive all-reduces with one node, so that their tensors share collectives. A node between two
all-reduces prevents this if the node uses a mean or may change a tensor. The pass replaces each reduce-scatter with a
separate node, at the position where the graph began the reduce-scatter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hvdcomp.compressors import Compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.compiled.exchange import group_of, info_of, method_of, require_reduce_scatter

NamesOfReductions = Callable[[Node], str | None]
"""A function that returns the name of the tensor that a node reduces, or None to leave this tensor uncompressed."""

_ALL_REDUCES = ("all_reduce", "all_reduce_coalesced")
_REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_STEP = "hvdcomp_step"  # the buffer with the step
_DIVISIONS = ("div", "true_divide", "truediv")
_FACTORS = ("mul", "multiply")
_FOUND_BY = ("val", "example_value")  # the names under which tracers store an example of a node's result


@dataclass
class _Reduction:
    """The reduction of one tensor in a graph.

    Attributes:
        start: the node that begins the reduction, perhaps together with other reductions.
        begun: the node whose result `wait_tensor` waits for. This node is `start`, or the node that picks the result of
            this tensor from several results.
        divides: whether the node `summand`, whose value is reduced, is a division by the number of ranks.
        result: the node whose value is replaced with the compressed mean.
        factor: the number by which the mean must be multiplied to give the value of `result`.
        name: the name of the tensor.
    """

    start: Node
    begun: Node
    divides: bool
    result: Node
    factor: int
    name: str

    @property
    def summand(self) -> Node:
        """The node whose value is added up over the ranks. This node may be the result of a reduction that was
        replaced."""
        return _summand(self.start, self.begun)

    @property
    def wait(self) -> Node:
        return next(iter(self.begun.users))

    @property
    def tensor(self) -> Node:
        """The node whose value is averaged over the ranks."""
        return self.summand.all_input_nodes[0] if self.divides else self.summand


def replace_reductions(
    module: GraphModule,
    spec: str,
    step: torch.Tensor | Node,
    group_name: str,
    seed: int,
    least: int,
    name_of: NamesOfReductions,
) -> list[str]:
    """Replaces the reductions of one process group. The arguments are those of `hvdcomp.compiled.compress_reductions`.

    Returns:
        The names of the tensors that are compressed, in the order of the graph.
    """
    method = method_of(spec, residuals=False)
    graph, size = module.graph, group_of(group_name).size()
    found: dict[Node, list[_Reduction]] = {}
    results: set[Node] = set()
    for start in graph.nodes:
        for begun in _begun_by(start, group_name):
            if _may_replace(start, begun, least, size) and (name := name_of(begun)) is not None:
                reduction = _reduction(start, begun, name, size, results)
                results.add(reduction.result)
                found.setdefault(start, []).append(reduction)
    names = [reduction.name for reductions in found.values() for reduction in reductions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"several tensors have the name {', '.join(twice)}; give each tensor a different name")
    scattered = {start: reductions for start, reductions in found.items() if _calls(start, *_REDUCE_SCATTERS)}
    for reductions in scattered.values():
        _require_reduce_scatter(method, reductions, size)
    if not found:
        return []
    step = step if isinstance(step, Node) else _node_of(module, step)
    arguments = spec, step, group_name
    for together, place in _together(graph, {start: found[start] for start in found if start not in scattered}):
        _put_all_reduces(graph, together, place, arguments, seed)
    for start, reductions in scattered.items():
        _put_reduce_scatters(graph, reductions, start, arguments, seed)
    for start, reductions in found.items():
        _erase(graph, start, reductions)
    graph.lint()
    module.recompile()
    return names


def compile_by(backend: str, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph from Dynamo with a backend of `torch.compile`. `inputs` are example inputs."""
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend(backend)(module, list(inputs))
    return compiled


def _begun_by(start: Node, group_name: str) -> list[Node]:
    """The nodes whose values are the results of the reductions that `start` begins in this process group. `wait_tensor`
    waits for these nodes.
    """
    if not _calls(start, *_ALL_REDUCES, *_REDUCE_SCATTERS):
        return []
    given, kind, *_, group = start.args
    if kind not in ("sum", "avg") or group != group_name:
        return []
    if isinstance(given, Node):
        return [start]
    picks = [pick for pick in start.users if pick.target is operator.getitem]
    places = {pick.args[1] for pick in picks}
    return picks if len(places) == len(start.users) else []  # no picks if another node uses the whole list


def _summand(start: Node, begun: Node) -> Node:
    """The node whose value is added up over the ranks."""
    given: Any = start.args[0]
    summand: Node = given if begun is start else given[begun.args[1]]
    return summand


def _may_replace(start: Node, begun: Node, least: int, size: int) -> bool:
    """Whether a reduction may be replaced: its tensor has floating-point elements, at least `least` of them, and only
    one `wait_tensor` uses its result."""
    example, ends = _example(begun), list(begun.users)
    if example is None or not example.dtype.is_floating_point or len(ends) != 1 or not _calls(ends[0], "wait_tensor"):
        return False
    return example.numel() * (size if _calls(start, *_REDUCE_SCATTERS) else 1) >= least  # each rank gets only a part


def _reduction(start: Node, begun: Node, name: str, size: int, results: Set[Node]) -> _Reduction:
    """Describes the reduction of one tensor in the graph.

    Args:
        results: the results of all-reduces that were found before. If `summand` is one of these results, the division
            in `summand` belongs to the earlier all-reduce.
    """
    (wait,), summand = begun.users, _summand(start, begun)
    if start.args[1] == "avg":
        return _Reduction(start, begun, False, wait, 1, name)
    if _is_division(summand, size) and summand not in results:
        return _Reduction(start, begun, True, wait, 1, name)
    after = list(wait.users)
    if len(after) == 1 and _is_division(after[0], size):
        return _Reduction(start, begun, False, after[0], 1, name)
    return _Reduction(start, begun, False, wait, size, name)


def _require_reduce_scatter(method: Compressor, reductions: Sequence[_Reduction], size: int) -> None:
    """Raises SpecError if a reduce-scatter cannot use the method of its tensor."""
    for reduction in reductions:
        example = _example(reduction.begun)
        assert example is not None
        shape = (example.shape[0] * size, *example.shape[1:])
        require_reduce_scatter(method, info_of(reduction.name, shape, example.dtype))


def _together(graph: torch.fx.Graph, found: dict[Node, list[_Reduction]]) -> Iterator[tuple[list[_Reduction], Node]]:
    """Yields each group of all-reduces that share a node, and the node before which the shared node is inserted."""
    waiting: list[_Reduction] = []
    own: set[Node] = set()  # nodes that the pass replaces
    results: set[Node] = set()
    for node in list(graph.nodes):
        if waiting and node not in own and (results.intersection(node.all_input_nodes) or _ends_a_run(node)):
            yield waiting, node
            waiting, own, results = [], set(), set()
        for reduction in found.get(node, ()):
            waiting.append(reduction)
            own |= {node, reduction.begun, reduction.wait, reduction.result}
            results.add(reduction.result)


def _put_all_reduces(
    graph: torch.fx.Graph, reductions: list[_Reduction], place: Node, arguments: tuple[Any, ...], seed: int
) -> None:
    """Inserts nodes that compute the means of some tensors, before the node `place`. These means replace the results of
    all-reduces."""
    tensors, names = [one.tensor for one in reductions], [one.name for one in reductions]
    with graph.inserting_before(place):
        operation = torch.ops.hvdcomp.allreduce_means.default
        means = graph.call_function(operation, (tensors, *arguments, names, seed))
        for key in _FOUND_BY:
            if key in reductions[0].begun.meta:
                means.meta[key] = [one.begun.meta[key] for one in reductions]
        for number, reduction in enumerate(reductions):
            _use(graph, graph.call_function(operator.getitem, (means, number)), reduction)


def _put_reduce_scatters(
    graph: torch.fx.Graph, reductions: list[_Reduction], place: Node, arguments: tuple[Any, ...], seed: int
) -> None:
    """Inserts nodes that compute this rank's parts of the means of some tensors, before the node `place`. These parts
    replace the results of reduce-scatters."""
    with graph.inserting_before(place):
        for reduction in reductions:
            operation = torch.ops.hvdcomp.reduce_scatter_mean.default
            _use(graph, graph.call_function(operation, (reduction.tensor, *arguments, reduction.name, seed)), reduction)


def _use(graph: torch.fx.Graph, mean: Node, reduction: _Reduction) -> None:
    """Uses a mean in place of the result of a reduction."""
    found_by = {key: value for key, value in reduction.begun.meta.items() if key in _FOUND_BY}
    mean.meta.update(found_by)
    if reduction.factor != 1:
        mean = graph.call_function(torch.ops.aten.mul.Tensor, (mean, reduction.factor))
        mean.meta.update(found_by)
    reduction.result.replace_all_uses_with(mean)


def _erase(graph: torch.fx.Graph, start: Node, reductions: Sequence[_Reduction]) -> None:
    """Removes the nodes of replaced reductions from the graph, and also their divisions if nothing else uses them."""
    divisions = dict.fromkeys(one.summand for one in reductions if one.divides)
    for reduction in reductions:
        for node in dict.fromkeys((reduction.result, reduction.wait, reduction.begun)):
            if node is not start:
                graph.erase_node(node)
    if start.users:
        _keep_used(start)
    else:
        graph.erase_node(start)
    for division in divisions:
        if not division.users:
            graph.erase_node(division)


def _keep_used(start: Node) -> None:
    """Removes tensors from a collective of several tensors, if no node picks their results any more."""
    users: list[Any] = list(start.users)
    picks = {pick.args[1]: pick for pick in users}
    tensors: Any = start.args[0]
    start.args = ([tensors[place] for place in sorted(picks)], *start.args[1:])
    for key in _FOUND_BY:
        if key in start.meta:
            start.meta[key] = [start.meta[key][place] for place in sorted(picks)]
    for number, place in enumerate(sorted(picks)):
        picks[place].args = (start, number)


def _node_of(module: GraphModule, step: torch.Tensor) -> Node:
    """Registers the step number as a buffer of the module, and returns a node that reads the buffer."""
    if getattr(module, _STEP, step) is not step:
        raise ConfigurationError(
            "this graph already has compressed reductions that use a different tensor as step; give the same tensor "
            "for all process groups"
        )
    module.register_buffer(_STEP, step, persistent=False)
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        return module.graph.get_attr(_STEP)


# Functions that recognize nodes.


def _calls(node: Node, *names: str) -> bool:
    """Whether a node calls one of these functional collectives, with or without the name of its overload."""
    called = [getattr(torch.ops._c10d_functional, name) for name in names]
    return node.op == "call_function" and any(node.target in (one, one.default) for one in called)


def _is_division(node: Any, size: int) -> bool:
    """Whether a node divides a tensor by this number, or multiplies it by the inverse of this number."""
    if not isinstance(node, Node) or node.op == "placeholder" or len(node.args) != 2 or node.kwargs:
        return False
    tensor, number = node.args
    if not isinstance(tensor, Node) or not isinstance(number, int | float):
        return False
    before, after = _example(tensor), _example(node)
    if before is None or after is None or before.dtype != after.dtype:  # a division of integers gives a different type
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
    if _calls(node, *_ALL_REDUCES, *_REDUCE_SCATTERS, "wait_tensor"):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable


def _example(node: Node) -> torch.Tensor | None:
    """A tensor with the shape and type of the node's result; None if the tracer has not stored such a tensor."""
    examples = (node.meta.get(key) for key in _FOUND_BY)
    return next((example for example in examples if isinstance(example, torch.Tensor)), None)
