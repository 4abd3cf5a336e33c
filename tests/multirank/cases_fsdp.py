"""Gradients between the replicas of models in FSDP2, on half of the ranks each; one rank each with two ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hvdcomp
from tests.multirank.everywhere import assert_metrics
from tests.multirank.models import WRAPPERS, batch
from tests.multirank.training_ddp import (
    assert_same_everywhere,
    gathered,
    large_model,
    own_generator,
    plain_loss,
    raised,
)
from tests.multirank.worker import thorough

Compile = functools.partial[Any]
SPECS = (
    "none", "fp16", "topk:ratio=0.05", "powersgd:rank=2", "qsgd:bits=8,exchange=scatter", "efsignsgd",
    "eden:bits=1,scaled=True",
)  # fmt: skip


def mesh_of_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def sharded_without_root(mesh: DeviceMesh) -> Any:
    """The model, each layer with parameters sharded by itself."""
    model = large_model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return model


def sharded(mesh: DeviceMesh) -> Any:
    """The model, each layer with parameters sharded by itself, and the whole."""
    return fully_shard(sharded_without_root(mesh), mesh=mesh)


def distribute(how: str | hvdcomp.Compression, momentum: float = 0.9) -> tuple[Any, torch.optim.Optimizer, Any]:
    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    compression = hvdcomp.Compression.from_spec(how) if isinstance(how, str) else how
    hvdcomp.fsdp.register(model, compression, mesh["replicate"], optimizer)
    return model, optimizer, compression


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 6, passes: int = 1) -> None:
    """On this rank's own data. Of several passes only the last exchanges gradients."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(1, passes + 1):
            inputs, classes = batch(generator)
            model.set_requires_gradient_sync(number == passes)
            plain_loss(model, inputs, classes, step).backward()
        optimizer.step()


def in_tensor_parallel(mesh: DeviceMesh) -> Any:
    model = large_model()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def weights(model: Any) -> torch.Tensor:
    """All of them, gathered from the shards of this replica."""
    return torch.cat([one.full_tensor().detach().reshape(-1).double() for one in model.parameters()])


def case_every_method_keeps_replicas_identical() -> None:
    for spec in SPECS:
        model, optimizer, how = distribute(spec)
        start = weights(model)
        train(model, optimizer)
        assert_same_everywhere(weights(model))
        assert not torch.equal(start, weights(model)), spec
        assert how.ledger.steps == 6, spec


def case_none_gives_what_hsdp_gives() -> None:
    ours, optimizer, _ = distribute("none")
    train(ours, optimizer)
    theirs = sharded(mesh_of_ranks())
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=0.9))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-7)


def divide_by(model: Any, factor: float | None) -> None:
    """`set_gradient_divide_factor` of all modules, as torchtitan calls it."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and factor is not None:
            module.set_gradient_divide_factor(factor)
            # Gloo has no reduce-scatter that multiplies. (PyTorch divides twice by the factor if one rank has it all.)
            module.set_force_sum_reduction_for_comms(dist.get_world_size() > 2)


def case_the_users_divisor_gives_what_hsdp_gives() -> None:
    for factor in (None, 1.0, 7.0):
        passes: list[list[torch.Tensor]] = []
        for ours in (True, False):
            mesh, generator = mesh_of_ranks(), own_generator()
            model = sharded(mesh["shard"] if ours else mesh)
            if ours:
                hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("none"), mesh["replicate"])
            divide_by(model, factor)
            passes.append([])
            for _ in range(4):  # adds to gradients that are exchanged already
                plain_loss(model, *batch(generator), 0).backward()
                passes[-1].append(torch.cat([one.grad.full_tensor().reshape(-1) for one in model.parameters()]))
        if factor != 7.0:
            assert torch.equal(passes[0][0], passes[1][0]), factor  # what follows is rounded otherwise
        torch.testing.assert_close(*passes, rtol=1e-5, atol=1e-6)


def case_residuals_follow_the_users_divisor() -> None:
    """What was sent and what is left are together what there was, in sums over all ranks, whatever these are divided
    by, and so in a training that goes on from a checkpoint with another divisor."""
    ranks, mesh = dist.get_world_size(), mesh_of_ranks()

    def made() -> tuple[Any, hvdcomp.Compression]:
        torch.manual_seed(7)
        model = fully_shard(torch.nn.Linear(64, 64, bias=False), mesh=mesh["shard"])
        how = hvdcomp.Compression.from_spec("topk:ratio=0.1", memory="error_feedback")
        hvdcomp.fsdp.register(model, how, mesh["replicate"])
        return model, how

    model, how = made()
    generator, there, sent = own_generator(), torch.zeros(64), torch.zeros(64, 64)
    for step, factor in enumerate((None, 1.0, 1.0, 7.0, 0.5)):
        divide_by(model, factor)
        if step == 3:
            state = how.state_dict()
            model, how = made()
            divide_by(model, factor)
            how.load_state_dict(state)
        model.zero_grad()
        inputs = torch.randn(8, 64, generator=generator)
        model(inputs).sum().backward()
        there += inputs.sum(0)
        sent += model.weight.grad.full_tensor() * (ranks if factor is None else factor)
    (kept,) = how.state_dict()["own"]["residuals"]["weight"]["arrays"]
    left = model.weight.full_tensor().new_zeros(64, 64)
    place, rows = mesh["shard"].get_local_rank(), len(kept)
    left[place * rows : (place + 1) * rows] = kept.reshape(rows, 64) * 0.5 / 2  # of two replicas
    for one in (there, left):
        dist.all_reduce(one)
    assert left.abs().max() > 1
    torch.testing.assert_close(sent + left, there.expand(64, 64), rtol=1e-4, atol=1e-3)


def case_everything_sent_is_the_mean_gradient() -> None:
    results = []
    for spec in ("none", "topk:ratio=1"):
        model, optimizer, _ = distribute(spec)
        train(model, optimizer, steps=4, passes=2)
        assert_same_everywhere(weights(model))
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def case_bytes_are_those_of_a_shard() -> None:
    model, optimizer, how = distribute("topk:ratio=0.05")
    train(model, optimizer, steps=2)
    whole = sum(parameter.numel() for parameter in model.parameters())
    shards = dist.get_world_size() // 2
    assert abs(how.ledger.last.dense_bytes - 4 * whole / shards) < 0.01 * 4 * whole
    assert_metrics(how, dense_bytes=how.ledger.last.dense_bytes)


def case_a_policy_and_a_checkpoint() -> None:
    def made() -> hvdcomp.Compression:
        return hvdcomp.Compression.from_spec(
            "topk:ratio=0.1", policy="accordion:low=0.1,high=0.02,interval=1", steps_per_epoch=2
        )

    model, optimizer, how = distribute(made())
    train(model, optimizer, steps=6)
    assert_same_everywhere(weights(model))
    state = how.state_dict()
    again = made()
    again.load_state_dict(state)
    model, optimizer, _ = distribute(again)
    assert again._binding.engine.step_number == 6
    assert again.levels or again._binding.engine.planner.level is not None
    train(model, optimizer, steps=2)
    assert_same_everywhere(weights(model))


def case_what_cannot_be_is_refused_on_every_rank() -> None:
    def refused(*arguments: Any, **options: Any) -> str:
        return raised(hvdcomp.ConfigurationError, lambda: hvdcomp.fsdp.register(*arguments, **options))

    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"])

    def made(**options: Any) -> hvdcomp.Compression:
        return hvdcomp.Compression.from_spec("topk:ratio=0.05", **options)

    assert "mesh['replicate']" in refused(model, made(), mesh)
    assert "fully_shard" in refused(large_model(), made(), mesh["replicate"])
    assert "from_spec" in refused(model, "topk", mesh["replicate"])
    other_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert "have different parts of the parameter" in refused(sharded(other_mesh), made(), mesh["replicate"])
    if dist.get_world_size() == 4:
        assert "have different parts of the parameter" in refused(model, made(), mesh["shard"])
        crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
        straight = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        told = refused(sharded(straight["shard"]), made(), crossed["replicate"])
        assert "have different parts of the parameters (in the order of the ranks" in told, told
        tensors = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        told = refused(in_tensor_parallel(tensors), made(), mesh["replicate"])
        assert "have different parts of the parameter" in told, told
        assert "tensor parallelism" in refused(in_tensor_parallel(tensors), hvdcomp.Compression(hvdcomp.Int4()))
    ignoring = large_model()
    fully_shard(ignoring, mesh=mesh["shard"], ignored_params={ignoring[0].bias})
    assert "ignored_params" in refused(ignoring, made(), mesh["replicate"])
    frozen = large_model()
    frozen[0].bias.requires_grad_(False)
    fully_shard(frozen, mesh=mesh["shard"], ignored_params={frozen[0].bias})
    hvdcomp.fsdp.register(frozen, made(), mesh["replicate"])
    assert "as optimizer, which is not an optimizer" in refused(model, made(), mesh["replicate"], model)
    assert "pass a mesh to hvdcomp.fsdp.register" in refused(model, made(process_set=object()), mesh["replicate"])
    of_one = made(process_set=object()) if mesh["replicate"].get_local_rank() else made()
    told = raised(hvdcomp.RankMismatchError, lambda: hvdcomp.fsdp.register(model, of_one, mesh["replicate"]))
    assert "rank 0: no error; rank 1: process_set works only with Horovod" in told, told
    told = refused(sharded_without_root(mesh["shard"]), made(), mesh["replicate"])
    assert "0, 2, 4 and 1 more are sharded separately" in told, told
    if dist.get_world_size() == 4:
        growing = hvdcomp.Compression(hvdcomp.Int8(), policy=hvdcomp.AccordionBatchSize(low=8, high=16, steps=3))
        told = refused(model, growing, mesh["replicate"])
        assert "accordion_batch_size:steps=3" in told, told
        assert "knows only the norm of its own shard's gradients" in told, told
        told = refused(model, made(grad_scaler=torch.amp.GradScaler("cpu")), mesh["replicate"])
        assert "Train in bfloat16" in told, told
    optimizer = hvdcomp.torch.CompressedAdam(model.parameters(), freeze_after=4, local_steps=4)
    told = refused(model, made(), mesh["replicate"], optimizer)
    assert "CompressedAdam does not work with FSDP, with or without local steps" in told, told
    assert "DistributedDataParallel" in told, told
    how = hvdcomp.Compression.from_spec('{"blocks.4.*": "topk:ratio=0.05", "*": "none"}')
    told = raised(hvdcomp.SpecError, lambda: hvdcomp.fsdp.register(model, how, mesh["replicate"]))
    wanted = "none of the 8 tensors has a name that matches 'blocks.4.*' (the nearest names are '4.bias', '4.weight'"
    assert wanted in told, told


def case_the_exchange_of_a_module_overlaps_the_backward_pass_of_the_next() -> None:
    """Buckets start between the backward passes of modules, in one order on all ranks, and change nothing."""
    results = []
    for overlap in (True, False):
        least = 400_000 if overlap else None
        how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap, bucket_bytes=least)
        model, optimizer, _ = distribute(how)
        events = record_events(model, how)
        train(model, optimizer, steps=3)
        results.append(weights(model))
        assert_same_everywhere(weights(model))
        *_, last = " ".join(events).split("backward of 6")  # of the last step
        early = "backward of 4 sent backward of 2 sent backward of 0 sent"
        assert last.split() == (early if overlap else "backward of 4 backward of 2 backward of 0 sent").split(), last
    assert torch.equal(*results)


def record_events(model: Any, how: hvdcomp.Compression) -> list[str]:
    """What happens on this rank from now on: the beginnings of layers' backward passes, and of gathers."""
    binding: Any = how._binding
    events: list[str] = []
    start = binding.communicator.start_allgather

    def starts(*arguments: Any) -> Any:
        events.append("sent")
        return start(*arguments)

    binding.communicator.start_allgather = starts
    for number in (0, 2, 4, 6):

        def begins(gradient: torch.Tensor, number: int = number) -> None:
            while binding._presence_check._started is not None:  # a small model may be quicker than the ranks' answers
                binding._presence_check.agrees()
            binding.engine.overlap.ready({})
            events.append(f"backward of {number}")

        # What ReLU made of it, as the output of an FSDP module belongs to FSDP.
        after = model[min(number + 1, 6)]
        after.register_forward_hook(lambda module, given, output, begins=begins: output.register_hook(begins) and None)
    return events


class _LateOnRank0(torch.autograd.Function):
    """A backward pass that rank 0 makes so slowly that the ranks' presences are known by its end."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            time.sleep(0.2)
        return gradient


def case_two_models_in_one_backward_pass_keep_their_gradients_apart() -> None:
    class Layers(torch.nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self[1](_LateOnRank0.apply(self[0](inputs)))

    mesh, results = mesh_of_ranks(), []
    for together in (True, False):
        torch.manual_seed(7)
        models = [Layers(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2))) for _ in range(2)]
        for model in models:
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh["shard"])
            how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=together, bucket_bytes=2**16)
            hvdcomp.fsdp.register(model, how, mesh["replicate"])
        generator = own_generator()
        for _ in range(4):  # buckets start early from the third step on
            for model in models:
                model.zero_grad()
            losses = [model(torch.randn(8, 256, generator=generator)).square().mean() for model in models]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
        results.append([parameter.grad.full_tensor() for model in models for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def case_a_module_may_be_used_twice() -> None:
    class Twice(torch.nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self[1](self[0](inputs))
            return self[4](self[3](self[2](torch.relu(self[2](hidden)))))

    results = []
    for overlap in (True, False):
        torch.manual_seed(7)
        linear = torch.nn.Linear
        model = Twice(linear(64, 512), torch.nn.ReLU(), linear(512, 512), torch.nn.ReLU(), linear(512, 40))
        mesh = mesh_of_ranks()
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh["shard"])
        how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap, bucket_bytes=100_000)
        hvdcomp.fsdp.register(model, how, mesh["replicate"])
        train(model, torch.optim.SGD(model.parameters(), lr=0.02), steps=4)
        assert_same_everywhere(weights(model))
        results.append(weights(model))
    assert torch.equal(*results)


def fail(model: Any, behind: int = 1) -> None:
    """A backward pass that raises where it leaves a layer's output, with the gradients of all later layers there."""

    def stop(_: torch.Tensor) -> None:
        raise RuntimeError("stopped")

    hook = model[behind].register_forward_hook(lambda module, given, output: output.register_hook(stop) and None)
    assert "stopped" in raised(RuntimeError, lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.02), 1))
    hook.remove()
    model.reset_iter_state()


def case_a_backward_pass_that_raises_changes_nothing() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise SkipTest("FSDP itself does not go on after such a pass")
    results = []
    for fails in (False, True):
        model, optimizer, how = distribute("topk:ratio=0.05")
        for _ in range(2):
            train(model, optimizer, steps=2)
            if fails:
                fail(model)
        train(model, optimizer, steps=2)
        assert_same_everywhere(weights(model))
        assert how.ledger.steps == 6
        results.append(weights(model))
    assert torch.equal(*results)

    # A bucket starts early on some ranks before others, whose collectives of any kind would then meet it: so that this
    # test can go on, the pass fails before the first bucket is full.
    model, optimizer, _ = distribute(hvdcomp.Compression.from_spec("topk:ratio=0.05", bucket_bytes=300_000))
    train(model, optimizer, steps=2)
    fail(model, behind=5)
    assert "overlap=False" in raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))


def case_several_groups_of_parameters_step_at_their_own_rates() -> None:
    mesh, results = mesh_of_ranks(), []
    for ours in (True, False):
        model = sharded(mesh["shard"] if ours else mesh)
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": rest}], lr=0.02)
        if ours:
            hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("none"), mesh["replicate"], optimizer)
        train(model, optimizer)
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def case_wrappers_change_neither_routing_nor_weights() -> None:
    results = []
    for way, wrap in WRAPPERS.items():
        mesh = mesh_of_ranks()
        model = wrap(sharded(mesh["shard"]))
        how = hvdcomp.Compression.from_spec('{"4.weight": "topk:ratio=0.05", "*": "none"}')
        hvdcomp.fsdp.register(model, how, mesh["replicate"])
        train(model, torch.optim.SGD(model.parameters(), lr=0.02), steps=3)
        assert set(how.levels) == {"4.weight"}, (way, how.levels)
        results.append(weights(model))
        assert torch.equal(results[0], results[-1]), way


def case_a_layer_unfrozen_later_is_refused() -> None:
    mesh = mesh_of_ranks()
    model = large_model()
    model[0].requires_grad_(False)
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    hvdcomp.fsdp.register(model, hvdcomp.Compression.from_spec("topk:ratio=0.05"), mesh["replicate"])
    train(model, optimizer, steps=2)
    model[0].requires_grad_(True)
    assert "0.weight, 0.bias" in raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))


def case_a_head_added_later_is_refused() -> None:
    mesh = mesh_of_ranks()
    for alone in (False, True):
        for kept_whole in (False, True):
            model, optimizer, _ = distribute("topk:ratio=0.05")
            train(model, optimizer, steps=1)
            if alone:  # then no gradient is handed over
                model.requires_grad_(False)
            head = torch.nn.Linear(40, 40)
            model.append(head if kept_whole else fully_shard(head, mesh=mesh["shard"]))
            told = raised(hvdcomp.ConfigurationError, functools.partial(train, model, optimizer, 1))
            assert "7.weight, 7.bias are not exchanged" in told, told


def compiled_layers(model: Any, compile_: Compile, shard: Callable[[Any], Any]) -> Any:
    for number in (0, 2, 4, 6):
        model[number] = shard(compile_(model[number]))
    return shard(model)


def sharded_layers(model: Any, shard: Callable[[Any], Any]) -> Any:
    for number in (0, 2, 4, 6):
        shard(model[number])
    return model


def compiled_in_place(model: Any, compile_: Compile, shard: Callable[[Any], Any]) -> Any:
    shard(sharded_layers(model, shard)).compile(**compile_.keywords)
    return model


COMPILED: dict[str, Callable[[Any, Compile, Callable[[Any], Any]], Any]] = {
    "compile(fully_shard(model))": lambda model, compile_, shard: compile_(shard(sharded_layers(model, shard))),
    "fully_shard(compile(model))": lambda model, compile_, shard: shard(compile_(sharded_layers(model, shard))),
    "fully_shard(model).compile()": compiled_in_place,
    "fully_shard(compile(layer))": compiled_layers,
    "compile(step)": lambda model, compile_, shard: shard(sharded_layers(model, shard)),
}


def compiled_trainings(
    register: Callable[[Any], hvdcomp.Compression], backend: str, ways: Iterable[str] = COMPILED, **options: Any
) -> None:
    """Asserts that a training is the same however it is compiled.

    Args:
        register: lets hvdcomp serve a model.
        ways: from `COMPILED`.
        options: for `fully_shard`.
    """
    compile_, shard = functools.partial(torch.compile, backend=backend), functools.partial(fully_shard, **options)
    results = []
    for way in ("not compiled", *ways):
        torch._dynamo.reset()
        made = COMPILED.get(way, COMPILED["compile(step)"])
        model = made(large_model(), compile_, shard)
        how = register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        def step(
            inputs: torch.Tensor,
            classes: torch.Tensor,
            model: Any = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            optimizer.zero_grad()
            plain_loss(model, inputs, classes, 0).backward()
            optimizer.step()

        make_step, generator = compile_(step) if way == "compile(step)" else step, own_generator()
        for _ in range(4):
            make_step(*batch(generator))
        assert_same_everywhere(weights(model))
        assert how.ledger.steps == 4, way
        assert any("4.weight" in name or name.startswith("4") for name in how.plan), (way, how.plan.keys())
        results.append(weights(model))
        if backend == "eager":
            assert torch.equal(results[0], results[-1]), way
        torch.testing.assert_close(results[0], results[-1], rtol=1e-3, atol=1e-4)


def compiled_with_replicas(backend: str, ways: Iterable[str] = COMPILED) -> None:
    mesh = mesh_of_ranks()

    def register(model: Any) -> hvdcomp.Compression:
        how = hvdcomp.Compression.from_spec("topk:ratio=0.5", bucket_bytes=400_000)
        hvdcomp.fsdp.register(model, how, mesh["replicate"])
        return how

    compiled_trainings(register, backend, ways, mesh=mesh["shard"])


def case_a_compiled_step_is_the_same() -> None:
    compiled_with_replicas("eager", ["compile(step)"])


@thorough
def case_compiled_trainings_are_the_same() -> None:
    compiled_with_replicas("eager")


@thorough
def case_trainings_compiled_by_inductor_are_the_same_but_for_rounding() -> None:
    compiled_with_replicas("inductor")


class Experts(torch.nn.Module):
    """Of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(256, 256, bias=False)

    def forward(self, inputs: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.head(_LateOnRank0.apply(self.experts[chosen](inputs)))


def case_replicas_with_gradients_of_different_modules_are_refused() -> None:
    mesh, generator = mesh_of_ranks(), own_generator()
    for overlap in (True, False):
        model: Any = Experts()
        for layer in (*model.experts, model.head, model):
            fully_shard(layer, mesh=mesh["shard"])
        how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap, bucket_bytes=2**16)
        hvdcomp.fsdp.register(model, how, mesh["replicate"])

        def step(chosen: int, model: Any = model) -> None:
            model.zero_grad()
            model(torch.randn(8, 256, generator=generator), chosen).square().mean().backward()

        for chosen in (0, 1, 0, 1):
            step(chosen)
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == (name == f"experts.{1 - chosen}.weight")
        assert how.ledger.steps == 4
        told = raised(hvdcomp.RankMismatchError, lambda: step(mesh["replicate"].get_local_rank()))
        assert "of experts.0.weight, experts.1.weight in this step" in told, told
        if overlap:
            assert "overlap=False" in raised(hvdcomp.ConfigurationError, lambda: step(0))
        else:
            step(0)
            assert how.ledger.steps == 5


def case_activation_checkpoints_make_one_step_or_are_refused() -> None:
    class Checkpointed(torch.nn.Sequential):
        reentrant = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self:
                inputs = checkpoint(layer, inputs, use_reentrant=self.reentrant)
            return inputs

    mesh = mesh_of_ranks()
    torch.manual_seed(7)
    model: Any = Checkpointed(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["shard"])
    hvdcomp.fsdp.register(model, how := hvdcomp.Compression.from_spec("topk:ratio=0.05"), mesh["replicate"])
    inputs = torch.randn(8, 64, requires_grad=True)
    for step in range(4):
        outputs = model(inputs) if step < 2 else checkpoint(model, inputs, use_reentrant=True)
        outputs.square().mean().backward()
        assert how.ledger.steps == step + 1
    model.reentrant = True
    loss = model(inputs).square().mean()
    assert "use_reentrant=False" in raised(hvdcomp.ConfigurationError, loss.backward)


def case_a_rank_may_have_no_elements() -> None:
    mesh = mesh_of_ranks()
    torch.manual_seed(7)
    model: Any = fully_shard(torch.nn.Linear(64, 1, bias=False), mesh=mesh["shard"])
    how = hvdcomp.Compression.from_spec("topk:ratio=1", min_numel=1)
    hvdcomp.fsdp.register(model, how, mesh["replicate"])
    generator = own_generator()
    for _ in range(2):
        model.zero_grad()
        inputs = torch.randn(8, 64, generator=generator)
        model(inputs).sum().backward()
    every = torch.stack(gathered(inputs))
    torch.testing.assert_close(model.weight.grad.full_tensor(), every.sum(1).mean(0, keepdim=True))
    assert how.state_dict()["own"]["rank"] == mesh["replicate"].get_local_rank()
