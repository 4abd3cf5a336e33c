"""Compressed means inside of compiled and traced graphs, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hvdcomp
from hvdcomp import compiled
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.torch.compiled import exchange
from tests.multirank.collectives import nodes_of
from tests.multirank.models import batch
from tests.multirank.training_ddp import assert_same_everywhere, own_generator, raised
from tests.multirank.worker import thorough

STEPS = 4
RATE = 0.02
SHAPES = {"0.weight": (64, 100), "0.bias": (100,), "2.weight": (2000,)}
BY_NAME = '{"*.bias": "none", "*": "eden:bits=2"}'
FEEDBACK = '{"*.bias": "none", "*": "efsignsgd"}'

# The newer names of two functions whose older ones warn.
all_gather: Callable[..., Any] = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter: Callable[..., Any] = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)

Tensors = Mapping[str, torch.Tensor]
Means = Callable[[Tensors, torch.Tensor], Tensors]
"""The means of gradients in a step, by name."""


def own_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = own_generator()
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def as_the_engine(spec: str, dtype: torch.dtype) -> None:
    """Compares several steps with those of an engine, with its residuals."""
    communicator, method = TorchDistributedCommunicator(), parse_compressor(spec)
    infos = [TensorInfo(name, shape, str(dtype).removeprefix("torch.")) for name, shape in SHAPES.items()]
    engine = Engine(communicator, infos, method, seed=5, min_numel=0, min_ndim=0)
    kept_in = torch.float64 if dtype == torch.float64 else torch.float32
    zeros = {name: torch.zeros(shape, dtype=kept_in) for name, shape in SHAPES.items()}
    keeps = any(not isinstance(leaf.default_memory, hvdcomp.NoMemory) for leaf in method.leaves())
    residuals = zeros if keeps else None
    for step in range(STEPS):
        tensors = {name: tensor * (step + 1) for name, tensor in own_tensors(dtype).items()}
        engine.begin()
        expected = engine.step(tensors)
        means = compiled.allreduce_means(tensors, spec, step, seed=5, residuals=residuals)
        for name, mean in means.items():
            assert_same_everywhere(mean)
            assert torch.equal(mean, expected[name]), (spec, dtype, step, name)
        for name, residual in (residuals or {}).items():
            kept = engine.states[name].memory
            assert torch.equal(residual, kept[0].view_as(residual) if kept else torch.zeros_like(residual)), name


def case_the_bits_of_the_engine() -> None:
    for spec in ("none", "fp16", "int8", "eden:exchange=scatter", BY_NAME, "int4", "topk:ratio=0.05", FEEDBACK):
        as_the_engine(spec, torch.float32)
    as_the_engine("topk:ratio=0.05", torch.bfloat16)


@thorough
def case_the_bits_of_the_engine_by_other_methods() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        for spec in ("none", "qsgd:bits=4", "eden:bits=1", "int4:rounding=stochastic", "efsignsgd", "signsgd", "int4"):
            as_the_engine(spec, dtype)


def case_one_tensor_as_among_several() -> None:
    tensors = own_tensors()
    together = compiled.allreduce_means(tensors, "eden", 3)
    for name, tensor in tensors.items():
        assert torch.equal(compiled.allreduce_mean(tensor, "eden", 3, name=name), together[name])


def case_what_differs_is_refused_on_every_rank() -> None:
    def refused(of_rank_0: str) -> str:
        spec = "int8" if dist.get_rank() else of_rank_0
        return raised(
            hvdcomp.RankMismatchError, lambda: compiled.allreduce_mean(torch.ones(64, 64), spec, 0, name="differs")
        )

    assert "method: eden on rank 0, int8 on rank 1" in refused("eden")
    assert "rank 0: topk:ratio=0.1 keeps a residual from step to step" in refused("topk:ratio=0.1")


def case_a_group_of_some_ranks() -> None:
    """Each rank is in a group of its own with the next, or alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    own = pairs[rank // 2]
    expected = torch.full((64, 64), rank // 2 * 2 + 0.5)
    for group in (own, own.group_name):
        mean = compiled.allreduce_mean(torch.full((64, 64), float(rank)), "none", 0, name="pairs", group=group)
        assert torch.equal(mean, expected)


# Whole training steps.


def own_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 40))


def step_with(means: Means) -> Callable[..., torch.Tensor]:
    """A training step by SGD with momentum: forward pass, backward pass, exchange and optimizer."""
    model = own_model()

    def step(
        weights: Tensors, momenta: Tensors, inputs: torch.Tensor, classes: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        def loss_of(weights: Tensors) -> torch.Tensor:
            outputs = torch.func.functional_call(model, dict(weights), (inputs,))
            return torch.nn.functional.cross_entropy(outputs, classes)

        gradients, loss = torch.func.grad_and_value(loss_of)(weights)
        for name, mean in means(gradients, number).items():
            momenta[name].mul_(0.9).add_(mean)
            weights[name].add_(momenta[name], alpha=-RATE)
        return loss

    return step


def trained(step: Callable[..., torch.Tensor], number: torch.Tensor | int = 0) -> tuple[list[float], torch.Tensor]:
    """The losses of this rank, and the weights after `STEPS` steps, which are the same on all ranks."""
    number = torch.tensor(0) if isinstance(number, int) else number
    weights = {name: parameter.detach().clone() for name, parameter in own_model().named_parameters()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    generator, losses = own_generator(), []
    for _ in range(STEPS):
        losses.append(float(step(weights, momenta, *batch(generator), number)))
        number += 1
    vector = torch.cat([weight.flatten() for weight in weights.values()])
    assert_same_everywhere(vector)
    return losses, vector


def by_the_operator(spec: str, with_residuals: bool = False) -> Means:
    shapes = {name: parameter.shape for name, parameter in own_model().named_parameters()}
    residuals = {name: torch.zeros(shape) for name, shape in shapes.items()} if with_residuals else None
    return lambda gradients, step: compiled.allreduce_means(gradients, spec, step, residuals=residuals)


def losses_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of `STEPS` steps that are not compiled."""
    generator, losses = own_generator(), []
    for _ in range(STEPS):
        inputs, classes = batch(generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_ddp(spec: str) -> tuple[list[float], torch.Tensor]:
    """The same training in DistributedDataParallel, by hvdcomp's hook."""
    model = torch.nn.parallel.DistributedDataParallel(own_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    hvdcomp.ddp.register(model, hvdcomp.Compression.from_spec(spec, min_numel=0, min_ndim=0), optimizer)
    losses = losses_of(model, optimizer)
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal(given: tuple[list[float], torch.Tensor], expected: tuple[list[float], torch.Tensor]) -> None:
    """Asserts equal losses and weights, bit for bit."""
    assert given[0] == expected[0]
    assert torch.equal(given[1], expected[1])


def compile_whole(step: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    """The step as one graph, which is compiled once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(step, fullgraph=True, backend=backend)


def assert_compiled_once() -> None:
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def case_a_training_in_ddp_has_the_same_bits() -> None:
    assert_equal(trained(step_with(by_the_operator("eden"))), in_ddp("eden"))
    assert_equal(trained(step_with(by_the_operator("efsignsgd", with_residuals=True))), in_ddp("efsignsgd"))


def case_a_whole_step_in_one_graph() -> None:
    """With residuals: the graph changes them in place."""
    expected = trained(step_with(by_the_operator(FEEDBACK, with_residuals=True)))
    step = compile_whole(step_with(by_the_operator(FEEDBACK, with_residuals=True)))
    assert_equal(trained(step), expected)
    assert_compiled_once()


def summed(gradients: Tensors, step: torch.Tensor) -> Tensors:
    """Means of PyTorch, in each of the forms that traces have: the first two divide after the sum and before it."""
    size = dist.get_world_size()
    first, second, *others = gradients
    means = {first: funcol.all_reduce(gradients[first], "sum", dist.group.WORLD) / size}
    means[second] = funcol.all_reduce(gradients[second] / size, "sum", dist.group.WORLD)
    for name in others:
        total = gradients[name].clone()
        dist.all_reduce(total)
        means[name] = total * (1 / size)
    return means


def named() -> Callable[[Any], str]:
    """Names for the all-reduces of `summed`, in the order in which they are seen."""
    names, seen = [name for name, _ in own_model().named_parameters()], {}
    return lambda node: seen.setdefault(node, names[len(seen)])


def case_a_traced_step() -> None:
    """A graph of `make_fx`, whose all-reduces the pass replaces."""
    number = torch.tensor(0)
    weights = {name: parameter.detach().clone() for name, parameter in own_model().named_parameters()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    example = weights, momenta, *batch(own_generator()), torch.tensor(0)
    plain = make_fx(step_with(lambda gradients, step: only_functional(gradients)))(*example)
    assert_equal(trained(plain), trained(step_with(lambda gradients, step: only_functional(gradients))))
    names = compiled.compress_reductions(plain, "eden", number, least=0, name_of=named())
    assert sorted(names) == sorted(weights)
    assert_equal(trained(plain, number), trained(step_with(by_the_operator("eden"))))
    assert number == STEPS


def only_functional(gradients: Tensors) -> Tensors:
    """`summed` without PyTorch's collective in place, which `make_fx` does not trace."""
    size = dist.get_world_size()
    return {
        name: funcol.all_reduce(gradient / size, "sum", dist.group.WORLD)
        if place % 2
        else funcol.all_reduce(gradient, "sum", dist.group.WORLD) / size
        for place, (name, gradient) in enumerate(gradients.items())
    }


def case_the_all_reduces_of_a_compiled_step() -> None:
    number = torch.tensor(0)
    backend = compiled.backend("eden", number, then="aot_eager", least=0, name_of=named())
    step = compile_whole(step_with(summed), backend)
    assert_equal(trained(step, number), trained(step_with(by_the_operator("eden"))))
    assert_compiled_once()


def coalesced(gradients: Tensors, step: torch.Tensor) -> Tensors:
    """Means of PyTorch, in one collective."""
    sums = funcol.all_reduce_coalesced(list(gradients.values()), "sum", dist.group.WORLD)
    return {name: total / dist.get_world_size() for name, total in zip(gradients, sums, strict=True)}


def case_an_all_reduce_of_several_tensors() -> None:
    """In a graph of `make_fx`, and one of Dynamo."""
    expected = trained(step_with(by_the_operator("eden")))
    weights = {name: parameter.detach().clone() for name, parameter in own_model().named_parameters()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    number = torch.tensor(0)
    traced = make_fx(step_with(coalesced))(weights, momenta, *batch(own_generator()), torch.tensor(0))
    compiled.compress_reductions(traced, "eden", number, least=0, name_of=named())
    assert_equal(trained(traced, number), expected)
    number = torch.tensor(0)
    backend = compiled.backend("eden", number, then="aot_eager", least=0, name_of=named())
    assert_equal(trained(compile_whole(step_with(coalesced), backend), number), expected)


# Reduce-scatters.


def loss_of(weight: torch.Tensor, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(inputs @ weight.t(), classes)


def sharded_step(shard: torch.Tensor, inputs: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of SGD on this rank's rows of a matrix, as traces of sharded trainings have it."""
    weight = all_gather(shard, 0, dist.group.WORLD)
    gradient, loss = torch.func.grad_and_value(loss_of)(weight, inputs, classes)
    mean = reduce_scatter(gradient, "sum", 0, dist.group.WORLD) / dist.get_world_size()
    return loss, shard.add(mean, alpha=-RATE)


def matrix() -> torch.Tensor:
    """Its rows are divided by each number of ranks."""
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(3))


def in_fsdp(spec: str) -> tuple[list[float], torch.Tensor]:
    """The losses, and this rank's rows after `STEPS` steps."""
    model = torch.nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        model.weight.copy_(matrix())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec(spec, min_numel=0))
    losses = losses_of(model, optimizer)
    return losses, model.weight.detach().to_local()


def case_reduce_scatters_have_the_bits_of_fsdp() -> None:
    ranks = dist.get_world_size()
    ways = [("none", 1), ("int8", ranks), ("int8", 1), ("eden", 1), ("int4:rounding=stochastic", 1)]
    for spec, places in [*ways, *([("int8", 2)] if ranks == 4 else [])]:
        exchange._nodes.clear()  # they know the nodes of the cluster from before
        with nodes_of(places):
            expected = in_fsdp(spec)
            shard, number = matrix().chunk(ranks)[dist.get_rank()], torch.tensor(0)
            traced = make_fx(sharded_step)(shard, *batch(own_generator()))
            names = compiled.compress_reductions(traced, spec, number, name_of=lambda node: "model")
            assert names == ["model"]
            generator, losses = own_generator(), []
            for _ in range(STEPS):
                loss, shard = traced(shard, *batch(generator))
                losses.append(float(loss))
                number += 1
        assert losses == expected[0], (spec, places)
        assert torch.equal(shard, expected[1]), (spec, places)


def case_the_reduce_scatters_of_sharded_tensors() -> None:
    """PyTorch makes them in the backward pass of what `torch.compile` compiles: not Dynamo, so not in its graph."""
    ranks, number, seen = dist.get_world_size(), torch.tensor(0), []
    mesh = init_device_mesh("cpu", (ranks,))

    def rewritten(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(compiled.compress_reductions(module, "int8", number, name_of=lambda node: "weight"))
        return make_boxed_func(module.forward)

    def loss(shard: DTensor, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        whole = shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])
        return loss_of(whole, inputs, classes) / ranks

    with nodes_of(1):
        shard = distribute_tensor(matrix(), mesh, [Shard(0)]).requires_grad_()
        inputs, classes = batch(own_generator())
        compiled_loss = compile_whole(loss, aot_autograd(fw_compiler=rewritten, bw_compiler=rewritten))
        compiled_loss(shard, inputs, classes).backward()
        assert seen == ["weight"]
        weight = matrix().requires_grad_()
        (loss_of(weight, inputs, classes) / ranks).backward()
        expected = compiled.reduce_scatter_mean(weight.grad, "int8", 0, name="weight") * ranks
    assert torch.equal(shard.grad.to_local(), expected)
    assert not torch.equal(expected, compiled.reduce_scatter_mean(weight.grad, "none", 0, name="weight") * ranks)


@thorough
def case_steps_that_inductor_compiles() -> None:
    """It rounds otherwise than PyTorch does without it, so another compiled step is the comparison."""
    plain = trained(compile_whole(step_with(summed), "inductor"))
    number = torch.tensor(0)
    replaced = compile_whole(step_with(summed), compiled.backend("none", number, least=0, name_of=named()))
    torch.testing.assert_close(trained(replaced, number)[1], plain[1], rtol=1e-5, atol=1e-6)
    for spec, with_residuals in (("eden", False), (FEEDBACK, True)):
        step = compile_whole(step_with(by_the_operator(spec, with_residuals)), "inductor")
        weights = trained(step)[1]
        assert_compiled_once()
        expected = trained(step_with(by_the_operator(spec, with_residuals)))
        torch.testing.assert_close(weights, expected[1], rtol=0.02, atol=0.002)


@thorough
def case_a_number_as_the_step_compiles_twice() -> None:
    means = by_the_operator("eden")
    step = compile_whole(lambda gradients, number: means(gradients, number))
    for number in range(STEPS):
        expected = means(own_tensors(), torch.tensor(number))
        found = step(own_tensors(), number)
        assert all(torch.equal(found[name], mean) for name, mean in expected.items()), number
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
