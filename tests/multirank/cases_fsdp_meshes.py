"""Models on a mesh that has a dimension of replicas, as trainers make them: FSDP leaves these to hvdcomp."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdcomp
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.torch.fsdp.checks import parameter_groups
from tests.multirank.cases_fsdp import weights
from tests.multirank.collectives import nodes_of
from tests.multirank.training_ddp import assert_same_everywhere, own_generator, raised
from tests.two_hops import stated

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # PyTorch before 2.9
    replicate = None

NAMES = ("replicate", "shard")
Shape = tuple[int, ...]


def shapes() -> list[Shape]:
    """Meshes of all ranks with at least two replicas; one dimension is for `replicate`."""
    ranks = dist.get_world_size()
    found: list[Shape] = [(2, ranks // 2), (ranks, 1), *([] if replicate is None else [(ranks,)])]
    return sorted(set(found))


def mesh_of(shape: Shape) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])


def parallelized(shape: Shape, layers: Sequence[torch.nn.Module], **options: Any) -> Any:
    """The layers in a model, in the order of a trainer: the mesh is its own, and it returns the model."""
    wrap = functools.partial(fully_shard if len(shape) == 2 else replicate, mesh=mesh_of(shape), **options)
    model = torch.nn.Sequential(*layers)
    for layer in model:
        if list(layer.parameters()):
            wrap(layer)
    return wrap(model)


def layers(width: int = 48) -> list[torch.nn.Module]:
    torch.manual_seed(7)
    linear = torch.nn.Linear
    return [linear(33, width), torch.nn.ReLU(), linear(width, width), torch.nn.ReLU(), linear(width, 7)]


def register(model: Any, spec: str = "none", **options: Any) -> hvdcomp.Compression:
    how = hvdcomp.Compression.from_spec(spec, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if "policy" in options else None  # which follows its rate
    hvdcomp.fsdp.register(model, how, optimizer=optimizer)
    return how


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([one.grad.full_tensor().reshape(-1) for one in model.parameters()])


def steps(model: Any, count: int, generator: torch.Generator) -> Iterator[None]:
    """Steps of SGD, on this rank's own data; it comes back after each, before the gradients are cleared."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 33, generator=generator)).square().mean().backward()
        optimizer.step()
        yield


def train(model: Any, count: int = 3, generator: torch.Generator | None = None) -> None:
    for _ in steps(model, count, generator or own_generator()):
        pass


class MultiplyingReduceScatter:
    """FSDP's reduce-scatter as on NCCL, which can multiply by a factor; Gloo cannot."""

    def __init__(self, factor: float | None) -> None:
        self._factor = factor

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            input_tensor, op = input_tensor * (1 / (self._factor or 1)), dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)


def divide_by(model: Any, factor: float | None) -> None:
    """What torchtitan does with the factor 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(MultiplyingReduceScatter(factor))
            if factor is not None:
                module.set_gradient_divide_factor(factor)


def case_gradients_are_those_of_fsdp_bit_for_bit() -> None:
    """The sum of two replicas has no order. Gloo's order of more follows from places in its buffer; so their gradients
    are whole numbers here, whose sums are exact."""
    for shape in shapes():
        for factor in (None, 1.0, 7.0):
            passes: list[list[torch.Tensor]] = []
            for ours in (True, False):
                model, generator = parallelized(shape, layers()), own_generator()
                if ours:
                    register(model)
                divide_by(model, factor)
                for parameter in model.parameters():
                    if shape[0] > 2:
                        parameter.detach().to_local().fill_(1)
                passes.append([])
                for number in range(3):  # the last adds to gradients that are exchanged already
                    if number == 1:
                        model.zero_grad()
                    inputs = torch.randn(8, 33, generator=generator)
                    if shape[0] > 2:
                        inputs = 7 * (2 * inputs).round().abs()
                    model(inputs).sum().backward()
                    passes[-1].append(gradient(model))
            assert passes[0][0].abs().max() > 0
            # What is added to is exchanged again, and rounded otherwise.
            assert all(map(torch.equal, *(one[:2] for one in passes))), (shape, factor)
            torch.testing.assert_close(*passes, rtol=1e-5, atol=1e-5)


def case_fsdp_sends_nothing_between_replicas_any_more() -> None:
    shape = (dist.get_world_size(), 1)
    for ours in (True, False):
        model = parallelized(shape, layers())
        if ours:
            register(model, "topk:ratio=0.1", min_numel=1)
        train(model, 1)
        with CommDebugMode() as seen:
            train(model, 1)
        sums = sum(count for name, count in seen.get_comm_counts().items() if "reduce" in str(name))
        # Of ours, one is the check that all ranks make the step, and one may be of the biases, which are sent dense.
        assert sums == 3 if not ours else sums <= 2, seen.get_comm_counts()


def case_everything_but_the_exchange_stays_hsdp() -> None:
    """Optimizers, clipping, mixed precision and resharding see a model on a mesh of two dimensions."""
    ranks = dist.get_world_size()
    settings: dict[str, dict[str, Any]] = {
        "nothing": {},
        "sums of bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "kept after the forward pass": {"reshard_after_forward": False},
        "resharded to fewer": {"reshard_after_forward": ranks // 2} if ranks == 4 else {},
    }
    for name, options in settings.items():
        results = []
        for ours in (True, False):
            model = parallelized((2, ranks // 2), layers(), **options)
            if ours:
                register(model)
            assert all(one.device_mesh.ndim == 2 for one in model.parameters())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            generator = own_generator()
            for step in range(4):
                if step == 2:  # after a step, in which FSDP has taken what it reads only once
                    model.set_reshard_after_forward(True)
                optimizer.zero_grad()
                before = model[0].weight
                loss = model(torch.randn(8, 33, generator=generator)).square().mean()
                if "reshard_after_forward" not in options or step >= 2:  # FSDP sees no other mesh to reshard to
                    assert model[0].weight is before
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            results.append(weights(model))
            assert_same_everywhere(results[-1])
        tolerance = 2e-2 if "bfloat16" in name else 0  # FSDP adds up bfloat16, and hvdcomp what FSDP made of it
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def case_passes_without_allreduce_are_exchanged_later() -> None:
    for shape in shapes():
        results = []
        for ours in (True, False):
            model, generator = parallelized(shape, layers()), own_generator()
            how = register(model) if ours else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(2):
                optimizer.zero_grad()
                for last in (False, False, True):
                    model.set_requires_all_reduce(last)
                    loss = model(torch.randn(8, 33, generator=generator)).square().mean()
                    with contextlib.nullcontext() if last else CommDebugMode() as seen:
                        loss.backward()
                    if how is not None and not last:
                        assert not any("allreduce" in str(name) for name in seen.get_comm_counts())
                        assert not how._binding._ready  # else nothing could start before the end of the last pass
                optimizer.step()
            assert how is None or how.ledger.steps == 2
            results.append(weights(model))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def case_a_single_replica_gets_exact_gradients() -> None:
    """Nobody would receive what is compressed: also of casts, of policies and after a restart with residuals."""
    shape = (1, dist.get_world_size())
    policy = {"policy": "accordion:low=0.1,high=0.02,interval=1", "steps_per_epoch": 2}
    expected = parallelized(shape, layers())
    train(expected)
    for spec, options in (("topk:ratio=0.1", {}), ("int4", {}), ("bf16", {}), ("topk:ratio=0.1", policy)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            how = register(model := parallelized(shape, layers()), spec, min_numel=1, **options)
        assert any("has a single replica" in str(one.message) for one in told) == (dist.get_rank() == 0)
        train(model)
        assert torch.equal(weights(model), weights(expected)), (spec, options)
        assert not how.state_dict()["own"]["residuals"]


def top_k(x: np.ndarray, count: int) -> np.ndarray:
    """The largest elements of each vector, and zeros."""
    chosen, sent = np.argsort(-np.abs(x), -1)[..., :count], np.zeros_like(x)
    np.put_along_axis(sent, chosen, np.take_along_axis(x, chosen, -1), -1)
    return sent


def case_one_rank_warns_of_a_method_that_harms_adam() -> None:
    for shape in shapes():
        model = parallelized(shape, layers())
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("topk:ratio=0.01"), optimizer=adam)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(model, 1)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, [str(one.message) for one in told if "AdamW learns badly" in str(one.message)])
        assert [len(found) for found in said] == [1, *[0] * (len(said) - 1)], (shape, said)


def case_both_dimensions_are_compressed_as_numpy_states() -> None:
    """Each replica's reduce-scatter is quantized, and what a rank gets of it is sparsified between the replicas."""
    if dist.get_world_size() < 4:
        raise SkipTest("two replicas of two ranks each")
    rows, columns, ratio, ranks = 8, 50, 0.1, 2
    length = rows // ranks * columns
    rank = dist.get_rank()
    for spec, factor in itertools.product(("int4", "int8:rounding=stochastic"), (None, 1.0, 7.0)):
        torch.manual_seed(7)
        model = parallelized((2, ranks), [torch.nn.Linear(columns, rows, bias=False)])
        if factor is not None:
            for module in model.modules():
                module.set_gradient_divide_factor(factor)
        between = hvdcomp.Compression.from_spec(f"topk:ratio={ratio}", min_numel=1)
        within = hvdcomp.Compression.from_spec(spec, memory="error_feedback", min_numel=1)
        with nodes_of(1):
            hvdcomp.fsdp.register(model, between, shards=within)
        method = parse_compressor(spec)
        assert isinstance(method, Gathering)
        kept = np.zeros((2, ranks, 1, ranks, length), np.float32)  # of each replica
        left = np.zeros((2, ranks, length), np.float32)  # of each replica and place
        for step in range(3):
            model.zero_grad()
            every = [np.random.default_rng([step, one]).normal(size=(rows, columns)) for one in range(4)]
            given = np.stack(every).astype(np.float32).reshape(2, ranks, ranks, length)
            own = torch.from_numpy(given.reshape(4, rows, columns)[rank])
            (model(torch.eye(columns)).t() * own).sum().backward()
            means = np.empty_like(left)
            for replica in range(2):
                got, kept[replica] = stated(method, list(given[replica]), kept[replica], step, "0", seed=replica)
                # What FSDP divides the sum by; without a factor it is the mean of the replicas' means.
                scale = np.float32(1 if factor is None else 2 * (ranks / factor))
                means[replica] = np.stack(got) * scale
            x = means + left
            sent = top_k(x, int(ratio * length))
            left = x - sent
            expected = (sent[0] + sent[1]).reshape(rows, columns) / 2
            np.testing.assert_array_equal(gradient(model).reshape(rows, columns).numpy(), expected)
        (arrays,) = within.state_dict()["own"]["residuals"].values()
        replica, place = divmod(rank, ranks)
        np.testing.assert_array_equal(arrays["arrays"][0].numpy()[0], kept[replica, place, 0, 1 - place])
        assert within.ledger.steps == between.ledger.steps == 3


def pending(how: hvdcomp.Compression, model: Any, replicas: int) -> dict[str, torch.Tensor]:
    """What the mean over the replicas still lacks of each parameter, put together from all ranks."""
    own = how.state_dict()["own"]
    found = {}
    for name, parameter in model.named_parameters():
        left = torch.zeros(parameter.shape)
        if name in own["residuals"]:
            _, start, sizes = own["boxes"][name]
            place = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
            left[place] = own["residuals"][name]["arrays"][-1]
        dist.all_reduce(left)
        found[name] = left / replicas
    return found


def case_what_was_sent_and_what_is_left_are_all_there_was() -> None:
    for shape in shapes():
        for spec in ("int4", "topk:ratio=0.1"):
            model = parallelized(shape, [torch.nn.Linear(64, 64, bias=False)])
            how = register(model, spec, memory="error_feedback")
            generator, there, sent = own_generator(), torch.zeros(64), torch.zeros(64, 64)
            for _ in range(4):
                model.zero_grad()
                inputs = torch.randn(8, 64, generator=generator)
                model(inputs).sum().backward()
                there += inputs.sum(0)
                sent += gradient(model).reshape(64, 64)
                assert_same_everywhere(gradient(model))
            dist.all_reduce(there)
            (left,) = pending(how, model, shape[0]).values()
            assert left.abs().max() > 0.01
            expected = there.expand(64, 64) / dist.get_world_size()
            torch.testing.assert_close(sent + left, expected, rtol=1e-4, atol=1e-4)


def common_folder() -> Path:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(str(name[0]))


def case_a_training_goes_on_on_another_mesh() -> None:
    ranks = dist.get_world_size()
    hybrid, policy = (2, ranks // 2), {"policy": "accordion:low=0.1,high=0.02,interval=1", "steps_per_epoch": 2}
    ways: list[tuple[str, dict[str, Any], Shape, list[Shape]]] = [
        *(("topk:ratio=0.1", {}, before, [*shapes(), (1, ranks)]) for before in shapes()),
        ("powersgd:rank=2", {}, hybrid, [(ranks, 1)]),  # whose warm starts have the shapes of shards
        ("dgc:ratio=0.05", {}, hybrid, [(ranks, 1)]),  # with two residuals of each parameter
        ("topk:ratio=0.1", policy, hybrid, [(ranks, 1)]),
    ]
    for spec, options, before, afters in ways:
        model = parallelized(before, layers())
        how = register(model, spec, min_numel=1, **options)
        train(model)
        lacking, folder = pending(how, model, before[0]), common_folder()
        assert any(one.abs().max() > 0 for one in lacking.values())
        dcp.save({"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=folder)
        for after in afters:
            fresh = parallelized(after, layers())
            dcp.load({"model": (loaded := fresh.state_dict())}, checkpoint_id=folder)
            fresh.load_state_dict(loaded)
            again = register(fresh, spec, min_numel=1, **options)
            hvdcomp.dcp.load(again, folder)
            for name, left in pending(again, fresh, after[0]).items():
                torch.testing.assert_close(left, lacking[name], rtol=1e-5, atol=1e-7)
            train(fresh, 2)
            assert_same_everywhere(weights(fresh))
            assert again.ledger.steps == again._binding.engine.step_number == 5
    dropped = register(parallelized((1, ranks), layers()), "topk:ratio=0.1", min_numel=1, **options)
    hvdcomp.dcp.load(dropped, folder, residuals="drop")
    assert not dropped.state_dict()["own"]["residuals"]
    assert dropped._binding.engine.step_number == 3


def case_on_the_same_mesh_it_goes_on_bit_for_bit() -> None:
    for shape in shapes():
        results = []
        for stops in (False, True):
            model, generator = parallelized(shape, layers()), own_generator()
            how, optimizer = register(model, "topk:ratio=0.1", min_numel=1), None
            for step in range(6):
                if stops and step == 3:
                    folder = common_folder()
                    dcp.save({"compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=folder)
                    saved = model.state_dict()
                    model = parallelized(shape, layers())
                    model.load_state_dict(saved)
                    how, optimizer = register(model, "topk:ratio=0.1", min_numel=1), None
                    hvdcomp.dcp.load(how, folder)
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
                optimizer.zero_grad()
                model(torch.randn(8, 33, generator=generator)).square().mean().backward()
                optimizer.step()
            results.append(weights(model))
        assert torch.equal(*results), shape


class Block(torch.nn.Module):
    """Two layers that tensor parallelism cuts, and two that its ranks have whole: a norm and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.plain = torch.nn.Linear(32, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.second(torch.relu(self.first(self.norm(self.plain(inputs)))))


def in_tensor_parallel(shape: Shape, names: tuple[str, ...]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model: Any = torch.nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(block, mesh=mesh[names[:-1]])
    return fully_shard(model, mesh=mesh[names[:-1]])


def case_beside_tensor_parallelism_only_replicas_exchange() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("two replicas of two ranks each")
    shape, names = (2, 1, 2), (*NAMES, "tensor")
    for spec in ("none", "topk:ratio=0.1", "int4", "bf16"):
        results = []
        for ours in (True, False):
            model = in_tensor_parallel(shape, names)
            how = register(model, spec, min_numel=1, min_ndim=1) if ours else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            replica = model[0].plain.weight.device_mesh.get_coordinate()[0]
            generator = torch.Generator().manual_seed(replica)  # tensor parallel ranks have the same data
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 32, generator=generator)).square().mean().backward()
                optimizer.step()
            results.append(weights(model))
            # What all ranks have whole, in the ranks' own copies of it; `full_tensor` takes one rank's.
            copies = [one.to_local().reshape(-1) for name, one in model.named_parameters() if "plain" in name]
            assert_same_everywhere(torch.cat(copies).detach())
            assert_same_everywhere(results[-1])
            if how is not None and spec.startswith("topk"):
                assert set(how.levels) == {
                    f"{block}.{layer}" for block in (0, 1) for layer in ("first.weight", "first.bias", "second.weight")
                }
        if spec == "none":
            assert torch.equal(*results)
        else:
            assert not torch.equal(*results)
            torch.testing.assert_close(*results, rtol=0.1, atol=0.1)


class MixtureOfExperts(torch.nn.Module):
    """A dense layer, and the experts of this rank: a part of the weights of all experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.dense = torch.nn.Linear(32, 32)
        self.experts = torch.nn.Parameter(distribute_tensor(torch.randn(4, 32, 32), mesh, [Shard(0)]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, experts = self.dense(inputs), self.experts
        own = experts.to_local() if isinstance(experts, DTensor) else experts
        return torch.relu(hidden) @ own.mean(0)


def case_experts_on_a_mesh_of_their_own_exchange_with_the_same_replicas() -> None:
    """As in torchtitan: one call of `fully_shard`, with a mesh for each kind of parameter."""
    if dist.get_world_size() < 4 or not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise SkipTest("two replicas of two ranks each, in a PyTorch that has meshes of parameters")
    dense = mesh_of((2, 2))
    sparse = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "expert_shard", "expert"))
    for spec in ("none", "topk:ratio=0.1"):
        results = []
        for ours in (True, False):
            model: Any = MixtureOfExperts(sparse["expert"])
            of_experts = _fsdp_common.HSDPMeshInfo(sparse["replicate", "expert_shard"], 1, 0)
            of_dense = _fsdp_common.HSDPMeshInfo(dense, 1, 0)

            def placed(parameter: Any, experts: Any = model.experts, infos: Any = (of_experts, of_dense)) -> Any:
                return _fsdp_common.ShardPlacementResult(Shard(0), infos[0 if parameter is experts else 1])

            fully_shard(model, mesh=dense, shard_placement_fn=placed)
            how = register(model, spec, min_numel=1) if ours else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = own_generator()
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 32, generator=generator)).square().mean().backward()
                optimizer.step()
            results.append(weights(model))
            assert_same_everywhere(results[-1])
            assert how is None or spec == "none" or how.levels.keys() == {"dense.weight", "experts"}
        assert torch.equal(*results) == (spec == "none")


def case_dimensions_of_a_larger_mesh_may_be_named() -> None:
    """`dp_mesh_dims`: parameters are on the whole mesh before FSDP shards them over some of its dimensions."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        raise SkipTest("this PyTorch takes no names of dimensions")
    ranks = dist.get_world_size()
    mesh, whole = mesh_of((2, ranks // 2)), [Replicate(), Replicate()]
    for spec in ("none", "topk:ratio=0.1"):
        results = []
        for ours in (True, False):
            model = distribute_module(torch.nn.Sequential(*layers()), mesh)
            for module in (*model, model):
                if list(module.parameters()):
                    fully_shard(module, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims("shard", "replicate"))
            if ours:
                register(model, spec, min_numel=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            generator = own_generator()
            for _ in range(3):
                optimizer.zero_grad()
                inputs = DTensor.from_local(torch.randn(8, 33, generator=generator), mesh, [Shard(0), Shard(0)])
                model(inputs).square().mean().redistribute(placements=whole).to_local().backward()
                optimizer.step()
            results.append(weights(model))
            assert_same_everywhere(results[-1])
        assert torch.equal(*results) == (spec == "none")


def case_boxes_are_what_ranks_have() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("dimensions of two ranks each")
    for shape in ((2, 1, 2), (1, 2, 2)):
        model = in_tensor_parallel(shape, (*NAMES, "tensor"))
        how = register(model, "topk:ratio=0.1")
        boxes = how.state_dict()["own"]["boxes"]
        for name, parameter in model.named_parameters():
            whole, start, sizes = boxes[name]
            assert whole == list(parameter.shape)
            place = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
            assert torch.equal(parameter.full_tensor()[place], parameter.to_local()), (shape, name)


def case_residuals_of_tensor_parallelism_go_on_on_another_mesh() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("two replicas of two ranks each")

    def made(shape: Shape) -> tuple[Any, hvdcomp.Compression]:
        if len(shape) == 3:
            model = in_tensor_parallel(shape, (*NAMES, "tensor"))
        else:
            model = parallelized(shape, [Block(), Block()])
        return model, register(model, "topk:ratio=0.1", min_numel=1)

    model, how = made((2, 1, 2))
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    for _ in range(2):
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
    dcp.save({"compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=(folder := common_folder()))
    before = pending(how, model, 2)
    for shape in ((1, 2, 2), (2, 2), (4, 1)):
        model, how = made(shape)
        hvdcomp.dcp.load(how, folder)
        for name, left in pending(how, model, shape[0]).items():
            assert left.any() == ("first.weight" in name or "second.weight" in name), name
            torch.testing.assert_close(left, before[name], rtol=1e-5, atol=1e-7)


def case_what_cannot_be_is_refused_on_every_rank() -> None:
    def refused(model: Any, *arguments: Any, **options: Any) -> str:
        how = hvdcomp.Compression.from_spec("topk:ratio=0.1")
        call: Callable[[], None] = functools.partial(hvdcomp.fsdp.register, model, how, *arguments, **options)
        return raised(hvdcomp.ConfigurationError, call)

    ranks = dist.get_world_size()
    mesh = mesh_of((2, ranks // 2))
    model = parallelized((2, ranks // 2), layers())
    assert "replicas exchange no weights" in refused(model, weights=hvdcomp.Int8())
    if ranks == 4:
        assert "leave out the mesh argument" in refused(model, mesh["shard"])
    hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("none"), mesh["replicate"])  # the same, by name
    assert "before. Call register once for each model" in refused(model)
    mixed = torch.nn.Sequential(*layers())
    fully_shard(mixed[0], mesh=mesh["shard"])
    fully_shard(mixed, mesh=mesh)
    assert "call fully_shard with the same replicas for all modules" in refused(mixed)
    with torch.device("meta"):
        empty = layers()
    assert "is on the meta device" in refused(parallelized((2, ranks // 2), empty))
    register(model := parallelized((2, ranks // 2), layers()))
    model.load_state_dict(model.state_dict(), assign=True)
    told = raised(hvdcomp.ConfigurationError, lambda: train(model, 1))
    assert "load_state_dict(assign=True) replaces parameters" in told, told
    register(model := parallelized((2, ranks // 2), layers()))
    model.set_requires_gradient_sync(False)
    model(torch.randn(8, 33)).sum().backward()
    model.set_requires_gradient_sync(True)
    (group,) = parameter_groups(model[0])  # what a pipeline does at the end of its microbatches
    assert "torch.distributed.pipelining" in raised(hvdcomp.ConfigurationError, group.post_backward)
    how = register(model := parallelized((2, ranks // 2), layers()), "topk:ratio=0.1", min_numel=1)
    train(model, 1)
    states = gathered_states(how)
    other = register(parallelized((2, ranks // 2), layers()), "topk:ratio=0.1", min_numel=1)
    if ranks == 4:
        wrong = states[dist.get_rank() ^ 1]  # of the other shard
        told = raised(hvdcomp.ConfigurationError, lambda: other.load_state_dict(wrong))
        assert "If the mesh has changed, use hvdcomp.dcp" in told, told
    other.load_state_dict(states[dist.get_rank()])


def case_what_fsdp_offers_works_with_both_dimensions_compressed() -> None:
    """Compared with FSDP alone, up to the errors of int8."""
    if dist.get_world_size() < 4:
        raise SkipTest("two replicas of two ranks each")
    settings: dict[str, dict[str, Any]] = {
        "several passes": {},
        "sums of bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "sums of float16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        "kept after the forward pass": {"reshard_after_forward": False},
    }
    for name, options in settings.items():
        results = []
        for ours in (True, False):
            model, generator = parallelized((2, 2), layers(), **options), own_generator()
            if ours:
                within, between = (hvdcomp.Compression.from_spec("int8", min_numel=1) for _ in range(2))
                with nodes_of(1):
                    hvdcomp.fsdp.register(model, between, shards=within)
            for _ in range(2):
                model.zero_grad()
                for last in (False, True) if name == "several passes" else (True,):
                    model.set_requires_all_reduce(last)
                    model(torch.randn(8, 33, generator=generator)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            results.append(gradient(model))
            assert_same_everywhere(results[-1])
        off = (results[0] - results[1]).norm() / results[1].norm()
        assert 0 < off < 0.02, (name, off)
        assert within.ledger.last is not None
        assert within.ledger.last.bytes_sent < within.ledger.last.dense_bytes


def case_what_cannot_be_in_both_dimensions_is_refused_on_every_rank() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def refused(model: Any, shards: Any, kind: type[Exception] = hvdcomp.ConfigurationError) -> str:
        how = hvdcomp.Compression.from_spec("topk:ratio=0.1")
        return raised(kind, lambda: hvdcomp.fsdp.register(model, how, shards=shards))

    def quantized(spec: str = "int8") -> hvdcomp.Compression:
        return hvdcomp.Compression.from_spec(spec)

    assert "without replicas. Pass the compression" in refused(fully_shard(torch.nn.Linear(8, 8)), quantized())
    for shape in ((ranks, 1), *([] if replicate is None else [(ranks,)])):
        assert "each replica is on a single rank" in refused(parallelized(shape, layers()), quantized())
    model = parallelized((2, ranks // 2) if ranks == 4 else (1, 2), layers())
    assert "given Int8" in refused(model, hvdcomp.Int8())
    assert "topk:ratio=0.1 does not work in FSDP's reduce-scatter" in refused(model, quantized("topk:ratio=0.1"))
    how = quantized()
    told = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.fsdp.register(model, how, shards=how))
    assert "already used by a training" in told
    if ranks == 4:
        model = parallelized((2, 2), layers())
        told = refused(model, quantized("topk:ratio=0.1" if rank == 3 else "int8"), hvdcomp.RankMismatchError)
        assert "topk:ratio=0.1 does not work in FSDP's reduce-scatter" in told, told
        told = refused(model, quantized("int4" if rank > 1 else "int8"), hvdcomp.RankMismatchError)
        assert "shards: compressor: int8 on rank 0, int4 on rank 1" in told, told
        model = in_tensor_parallel((1, 2, 2), (*NAMES, "tensor"))
        assert "train without tensor parallelism" in refused(model, quantized())


def case_residuals_of_both_dimensions_go_on_on_another_mesh() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("two replicas of two ranks each")

    def made(shape: Shape | None) -> tuple[Any, hvdcomp.Compression]:
        within = hvdcomp.Compression.from_spec("int4", memory="error_feedback", min_numel=1)
        if shape is None:
            model = fully_shard(torch.nn.Sequential(*layers()))
            hvdcomp.fsdp.register(model, within)
        else:
            model = fully_shard(torch.nn.Sequential(*layers()), mesh=mesh_of(shape))
            hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("none"), shards=within)
        return model, within

    def lacking(how: hvdcomp.Compression, shape: Shape | None) -> torch.Tensor:
        """What the mean gradient lacks, by element of the flat gradient's first parameter, `0.weight`."""
        replicas = shape[0] if shape else 1
        reducer, length = how._binding.engine, -(-48 // how._binding.engine.communicator.world_size) * 33
        whole = torch.zeros(reducer.communicator.world_size, length)
        for arrays in reducer.states.values():  # none in a replica that no old one continues in
            whole[reducer.owners] = arrays[0][:, :length]
        dist.all_reduce(whole)
        return whole.reshape(-1)[: 48 * 33] / replicas / reducer.levels.across.size

    ways: list[tuple[Shape | None, list[Shape | None]]] = [(None, [(2, 2)]), ((2, 2), [(2, 2), (1, 4), None])]
    with nodes_of(1):
        for before, afters in ways:
            model, how = made(before)
            train(model)
            left, folder = lacking(how, before), common_folder()
            dcp.save({"model": model.state_dict(), "compression": hvdcomp.dcp.by_rank(how)}, checkpoint_id=folder)
            assert left.abs().max() > 0
            for after in afters:
                fresh, again = made(after)
                dcp.load({"model": (loaded := fresh.state_dict())}, checkpoint_id=folder)
                fresh.load_state_dict(loaded)
                hvdcomp.dcp.load(again, folder)
                torch.testing.assert_close(lacking(again, after), left, rtol=1e-5, atol=1e-7)
                train(fresh, 1)
                assert_same_everywhere(weights(fresh))
                assert again.ledger.steps == 4
        of_other_replica = gathered_states(how)[dist.get_rank() ^ 2]
        _, again = made((2, 2))
        told = raised(hvdcomp.ConfigurationError, lambda: again.load_state_dict(of_other_replica))
        assert f"in replica {1 - dist.get_rank() // 2} of 2, but was given to rank" in told, told


def gathered_states(how: hvdcomp.Compression) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, how.state_dict())
    return everyone


def case_bytes_are_those_of_a_shard() -> None:
    ranks = dist.get_world_size()
    how = register(model := parallelized((2, ranks // 2), layers()), "topk:ratio=0.1", min_numel=1)
    train(model, 2)
    own = sum(math.prod(one.to_local().shape) for one in model.parameters())
    assert how.ledger.last is not None
    assert how.ledger.last.dense_bytes == 4 * own
