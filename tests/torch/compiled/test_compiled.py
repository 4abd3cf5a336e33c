"""The operators of compiled graphs, and the pass over a graph, on one rank in this process."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

import hvdcomp

torch = pytest.importorskip("torch")
funcol = pytest.importorskip("torch.distributed._functional_collectives")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
compiled, opcheck = hvdcomp.compiled, torch.library.opcheck

pytestmark = pytest.mark.usefixtures("one_rank")

STEP = torch.tensor(3)
OP = torch.ops.hvdcomp


def tensors() -> list[Any]:
    """A matrix, its transpose, and a vector."""
    made = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    return [made, made.t(), made[0].clone()]


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "eden:bits=1"])
def test_pytorch_finds_no_fault_with_an_operator(spec: str) -> None:
    """Schema, aliases, fake kernels, static and dynamic shapes."""
    opcheck(OP.allreduce_mean.default, (tensors()[1], spec, STEP, "0", "a", 0))
    if spec == "int8":
        opcheck(OP.allreduce_means.default, (tensors(), spec, STEP, "0", ["a", "b", "c"], 0))
    opcheck(OP.reduce_scatter_mean.default, (tensors()[1], spec, STEP, "0", "a", 0))


def test_pytorch_finds_no_fault_with_the_operator_that_changes_residuals() -> None:
    given = tensors()[::2]
    kept, means = ([torch.zeros_like(tensor) for tensor in given] for _ in range(2))
    opcheck(OP.allreduce_means_with_residuals.default, (given, kept, means, "topk:ratio=0.1", STEP, "0", ["a", "b"], 0))


def test_a_residual_has_what_was_not_sent() -> None:
    tensor, residual = tensors()[0], torch.zeros(40, 50)
    first = compiled.allreduce_mean(tensor, "topk:ratio=0.1", 0, name="a", residual=residual)
    assert torch.equal(first + residual, tensor)
    assert residual.count_nonzero() == 1800
    second = compiled.allreduce_mean(torch.zeros(40, 50), "topk:ratio=0.1", 1, name="a", residual=residual)
    assert torch.equal(first + second + residual, tensor)
    begun_again = torch.zeros(40, 50)
    assert torch.equal(compiled.allreduce_mean(tensor, "topk:ratio=0.1", 2, name="a", residual=begun_again), first)


def test_numbers_that_are_not_finite_reach_every_result_and_no_residual() -> None:
    good, bad = tensors()[0], tensors()[0]
    bad[3, 4] = float("inf")
    residuals = {name: torch.ones(40, 50) for name in "ab"}
    means = compiled.allreduce_means({"a": good, "b": bad}, "topk:ratio=0.1", 0, residuals=residuals)
    assert all(mean.isnan().any() for mean in means.values())
    assert all(torch.equal(residual, torch.ones(40, 50)) for residual in residuals.values())


def test_random_numbers_follow_seed_name_and_step() -> None:
    def mean(name: str = "a", step: Any = 0, seed: int = 0) -> Any:
        return compiled.allreduce_mean(tensors()[0], "eden:bits=1", step, name=name, seed=seed)

    assert torch.equal(mean(), mean(step=torch.tensor(0)))
    for other in (mean(name="b"), mean(step=1), mean(seed=1)):
        assert not torch.equal(mean(), other)


def test_tensors_of_another_shape_may_follow_under_the_same_name() -> None:
    for shape in ((40, 50), (30, 20), (40, 50)):
        tensor = torch.ones(shape)
        assert torch.equal(compiled.allreduce_mean(tensor, "none", 0, name="a"), tensor)


NOT_IN_A_GRAPH = {
    "powersgd:rank=2": "powersgd:rank=2 does not work in a compiled graph, because this method keeps more",
    "dgc:ratio=0.01": "keeps more than a residual from step to step. Use hvdcomp.ddp.register",
    "two_level(powersgd:rank=2)": "keeps more than a residual",
    "topk:ratio=0.1": "at first residual=torch.zeros_like(tensor), or choose a method that keeps nothing",
    '{"a": "efsignsgd", "*": "none"}': "efsignsgd keeps a residual from step to step, but no residual was given",
    "auto": "'auto' is a policy, which makes decisions between steps, but a compiled graph repeats the same step",
    "gravac:loss=0.05": "is a policy",
    "horse": "unknown compressor",
}


@pytest.mark.parametrize("spec", NOT_IN_A_GRAPH)
def test_what_cannot_be_in_a_graph_is_refused_when_the_graph_is_made(spec: str) -> None:
    with pytest.raises(hvdcomp.SpecError) as eager:
        compiled.allreduce_mean(tensors()[0], spec, 0, name="a")
    assert NOT_IN_A_GRAPH[spec] in str(eager.value)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(hvdcomp.SpecError) as traced:
        OP.allreduce_mean(torch.empty(40, 50), spec, STEP, "0", "a", 0)
    assert str(traced.value) == str(eager.value)


def test_a_residual_that_nobody_needs_is_refused() -> None:
    with pytest.raises(hvdcomp.SpecError, match="int8 keeps no residual, so leave out the residuals"):
        compiled.allreduce_mean(tensors()[0], "int8", 0, name="a", residual=torch.zeros(40, 50))


WRONG: dict[str, Callable[[], object]] = {
    r"shape \(2,\) and type torch.int64 on cpu; give a whole number": lambda: compiled.allreduce_mean(
        tensors()[0], "int8", torch.tensor([1, 2]), name="a"
    ),
    "type torch.float32 on cpu; give a whole number": lambda: compiled.allreduce_mean(
        tensors()[0], "int8", torch.tensor(1.0), name="a"
    ),
    "step -1 is not allowed; count the steps from 0": lambda: compiled.allreduce_mean(
        tensors()[0], "int8", -1, name="a"
    ),
    "2 tensors were given with the names a, a; give each tensor a name of its own": lambda: OP.allreduce_means(
        tensors()[:2], "int8", STEP, "0", ["a", "a"], 0
    ),
    "tensor 'a' has the type torch.int32 and is on cpu": lambda: compiled.allreduce_mean(
        torch.ones(3, dtype=torch.int32), "none", 0, name="a"
    ),
    "there is no residual for b; give a residual for each tensor": lambda: compiled.allreduce_means(
        dict(zip("ab", tensors(), strict=False)), "efsignsgd", 0, residuals={"a": torch.zeros(40, 50)}
    ),
    r"the residual of 'a' has shape \(40, 50\) and type torch.bfloat16 on cpu; give a tensor of .* torch.float32": (
        lambda: compiled.allreduce_mean(
            tensors()[0], "efsignsgd", 0, name="a", residual=torch.zeros(40, 50, dtype=torch.bfloat16)
        )
    ),
    r"tensor 'a' has the shape \(\), but the length of its first dimension must be a multiple of the number of ranks, "
    r"1": (lambda: compiled.reduce_scatter_mean(torch.tensor(1.0), "int8", 0, name="a")),
    "no process group with the name 'elsewhere'": lambda: compiled.allreduce_mean(
        tensors()[0], "int8", 0, name="a", group="elsewhere"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(message: str) -> None:
    with pytest.raises(hvdcomp.ConfigurationError, match=message):
        WRONG[message]()


# The pass.


def reduced(tensor: Any, kind: str = "sum") -> Any:
    return funcol.all_reduce(tensor, kind, "0")


def calls_of(module: Any) -> list[str]:
    """The functions that a graph calls, in order, without the selection of results."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function" and node.target != operator.getitem)
    return [str(node.target).removesuffix(".default") for node in nodes]


# The newer names of two functions whose older ones warn.
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
reduce_scatters = getattr(funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced)


def scattered(tensor: Any, kind: str = "sum") -> Any:
    return reduce_scatter(tensor, kind, 0, "0")


ONE = "hvdcomp.allreduce_means"
PART = "hvdcomp.reduce_scatter_mean"
TWO = "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor"
MEANS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "divided after": (lambda x: reduced(x) / 1, [ONE]),
    "multiplied after": (lambda x: reduced(x) * 1.0, [ONE]),
    "divided before": (lambda x: reduced(x / 1), [ONE]),
    "average": (lambda x: reduced(x, "avg"), [ONE]),
    "sum": (lambda x: reduced(x), [ONE]),
    "other divisor": (lambda x: reduced(x) / 3, [ONE, "aten.div.Tensor"]),
    "maximum": (lambda x: reduced(x, "max"), [*TWO]),
    "small": (lambda x: reduced(x[0]), ["aten.select.int", *TWO]),
    "whole numbers": (lambda x: reduced(x.int()), ["aten._to_copy", *TWO]),
    "coalesced": (lambda x: [one / 1 for one in funcol.all_reduce_coalesced([x, x.t()], "sum", "0")], ["aten.t", ONE]),
    "reduce-scatter": (lambda x: scattered(x) / 1, [PART]),
    "reduce-scatter of a mean": (lambda x: scattered(reduced(x) / 1) / 3, [ONE, PART, "aten.div.Tensor"]),
    "mean of a reduce-scatter": (lambda x: reduced(scattered(x, "avg") / 1), [PART, ONE]),
    "small reduce-scatter": (
        lambda x: scattered(x[0]),
        ["aten.select.int", "_c10d_functional.reduce_scatter_tensor", "_c10d_functional.wait_tensor"],
    ),
    "reduce-scatters, coalesced": (
        lambda x: reduce_scatters([x, x * 2], "sum", [0, 0], "0"),
        ["aten.mul.Tensor", PART, PART],
    ),
    "other group": (lambda x: funcol.all_reduce(x, "sum", torch.distributed.new_group([0])), [*TWO]),
}


@pytest.mark.parametrize("case", MEANS)
def test_the_pass_finds_means(case: str) -> None:
    function, expected = MEANS[case]
    traced = make_fx(function)(tensors()[0])
    found = compiled.compress_reductions(traced, "int8", torch.tensor(0))
    assert (calls_of(traced), bool(found)) == (expected, bool({ONE, PART}.intersection(expected)))


def test_reduces_share_a_node_until_a_mean_is_used() -> None:
    def step(*given: Any) -> Any:
        means = [reduced(tensor * 2) / 1 for tensor in given]
        loss = reduced(given[0].sum())
        return loss, [mean + 1 for mean in means], reduced(means[0])

    given = [torch.full((40, 50), value) for value in (1.0, 2.0, 4.0)]
    traced, step_number = make_fx(step)(*given), torch.tensor(0)
    names = compiled.compress_reductions(traced, "int8", step_number, name_of=lambda node: f"tensor of {node.name}")
    assert names == [f"tensor of {name}" for name in ("all_reduce", "all_reduce_1", "all_reduce_2", "all_reduce_4")]
    calls = calls_of(traced)
    assert calls.count(ONE) == 2
    assert calls.index(ONE) < calls.index("aten.add.Tensor") < calls.index(ONE, calls.index(ONE) + 1)
    assert calls.count(TWO[0]) == 1, "the loss"
    loss, means, again = traced(*given)
    assert loss == 2000
    torch.testing.assert_close([*means, again], [torch.full((40, 50), value) for value in (3.0, 5.0, 9.0, 2.0)])
    assert traced.hvdcomp_step is step_number


def test_a_tensor_that_changes_afterwards_is_reduced_before() -> None:
    def step(tensor: Any) -> Any:
        mean = reduced(tensor)
        tensor.add_(1)
        return mean * 5, tensor

    traced = make_fx(step)(torch.ones(40, 50))
    compiled.compress_reductions(traced, "none", torch.tensor(0))
    assert calls_of(traced) == [ONE, "aten.add_.Tensor", "aten.mul.Tensor"]
    assert traced(torch.ones(40, 50))[0].unique().tolist() == [5]


def test_small_tensors_stay_in_a_coalesced_all_reduce() -> None:
    """Also where the small tensors are the mean of another, or share a division with others."""

    def step(large: Any, small: Any) -> Any:
        divided = [small / 1, large / 1, small * 2, reduced(large)[:2]]
        return funcol.all_reduce_coalesced(divided, "sum", "0"), divided[1] + 1

    given = [torch.full((40, 50), 3.0), torch.full((7,), 5.0)]
    traced = make_fx(step)(*given)
    names = compiled.compress_reductions(traced, "none", torch.tensor(0))
    assert names == ["all_reduce", "getitem_1"]
    assert calls_of(traced).count("_c10d_functional.all_reduce_coalesced") == 1
    (left,) = (node for node in traced.graph.nodes if "all_reduce_coalesced" in node.name)
    assert [example.shape for example in left.meta["val"]] == [(7,), (7,), (2, 50)]
    (small, large, doubled, mean), used = traced(*given)
    assert [tensor.unique().tolist() for tensor in (small, large, doubled, mean, used)] == [[5], [3], [10], [3], [4]]


def test_a_list_of_results_that_is_used_as_a_whole_stays() -> None:
    traced = make_fx(lambda x: funcol.all_reduce_coalesced([x, x * 2], "sum", "0"))(tensors()[0])
    start = next(node for node in traced.graph.nodes if "all_reduce_coalesced" in node.name)
    output = traced.graph.output_node()
    output.args = ([start, *output.all_input_nodes],)
    assert compiled.compress_reductions(traced, "none", torch.tensor(0)) == []


def test_a_reduce_scatter_needs_a_quantizer() -> None:
    traced = make_fx(lambda x: (reduced(x), scattered(x * 2)))(tensors()[0])
    for spec in ("signsgd", "two_level(int8)", '{"reduce*": "signsgd", "*": "int8"}'):
        with pytest.raises(hvdcomp.SpecError, match=r"reduce-scatter of 'reduce_scatter_tensor', .*let name_of return"):
            compiled.compress_reductions(traced, spec, torch.tensor(0))
    names = compiled.compress_reductions(traced, '{"all*": "signsgd", "*": "int8"}', torch.tensor(0))
    assert names == ["all_reduce", "reduce_scatter_tensor"]


def test_the_step_may_be_a_node_of_the_graph() -> None:
    traced = make_fx(lambda tensor, step: reduced(tensor))(tensors()[0], STEP)
    placeholder = [node for node in traced.graph.nodes if node.op == "placeholder"][1]
    compiled.compress_reductions(traced, "eden:bits=1", placeholder)
    for step in (STEP, STEP + 1):
        expected = compiled.allreduce_mean(tensors()[0], "eden:bits=1", step, name="all_reduce")
        assert torch.equal(traced(tensors()[0], step), expected)


def test_what_the_pass_refuses() -> None:
    traced = make_fx(lambda x: (reduced(x), reduced(x * 2)))(tensors()[0])
    with pytest.raises(hvdcomp.ConfigurationError, match="several tensors have the name same"):
        compiled.compress_reductions(traced, "int8", torch.tensor(0), name_of=lambda node: "same")
    with pytest.raises(hvdcomp.SpecError, match="at first residual="):
        compiled.compress_reductions(traced, "topk:ratio=0.1", torch.tensor(0))
    assert compiled.compress_reductions(traced, "int8", torch.tensor(0), name_of=lambda node: None) == []
    first = next(node for node in traced.graph.nodes if "all_reduce" in node.name)
    keep = lambda node: node.name if node is first else None  # noqa: E731
    assert compiled.compress_reductions(traced, "int8", torch.tensor(0), name_of=keep) == [first.name]
    with pytest.raises(hvdcomp.ConfigurationError, match="use a different tensor as step; give the same tensor"):
        compiled.compress_reductions(traced, "int8", torch.tensor(0))
