"""Steps by itself of each replica of a model that FSDP2 shards; of two ranks each is a replica, of four each pair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.torch import LocalSteps
from hvdcomp.torch.local_steps.binding import local_part
from tests.multirank.cases_fsdp import mesh_of_ranks, sharded, weights
from tests.multirank.cases_fsdp_meshes import mesh_of, replicate
from tests.multirank.models import batch
from tests.multirank.training_ddp import assert_same_everywhere, gathered, large_model, own_generator, raised

EVERY = 3
Wrap = Callable[..., LocalSteps]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


SHARDS, HSDP = "shards", "HSDP"
"""Whether the model's own mesh has the shards only, or the replicas too."""


def made(wrap: Wrap = LocalSteps.compressed, way: str = SHARDS, **options: Any) -> tuple[Any, LocalSteps, DeviceMesh]:
    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"] if way == SHARDS else mesh)
    replicas = {"mesh": mesh["replicate"]} if way == SHARDS else {"model": model}
    return model, wrap(adamw(model), EVERY, **replicas, **options), mesh


def backward(model: Any, generator: torch.Generator) -> None:
    inputs, classes = batch(generator)
    torch.nn.functional.cross_entropy(model(inputs), classes).backward()


def train(model: Any, optimizer: LocalSteps, generator: torch.Generator, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, generator)
        optimizer.step()


def case_it_is_what_whole_models_do() -> None:
    for wrap, options in (
        (LocalSteps, {}),
        (LocalSteps, {"fragments": 2, "delay": 1, "local_share": 0.5}),
        # Blocks that fit into shards, so that a shard has the blocks of the whole: the last bias has 20 in each of two.
        (LocalSteps.compressed, {"compressor": hvdcomp.Int8(block=4)}),
    ):
        model, optimizer, mesh = made(wrap, **options)
        whole = large_model()
        across = TorchDistributedCommunicator(mesh["replicate"].get_group())
        its = wrap(adamw(whole), EVERY, communicator=across, **options)
        ours, theirs = own_generator(), own_generator()
        for _ in range(3 * EVERY):
            train(model, optimizer, ours)
            its.zero_grad()
            backward(whole, theirs)
            for parameter in whole.parameters():
                dist.all_reduce(parameter.grad, group=mesh["shard"].get_group())
                parameter.grad /= mesh["shard"].size()
            its.step()
        expected = torch.cat([one.detach().reshape(-1).double() for one in whole.parameters()])
        torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-4)  # a rounding may go the other way


def case_replicas_differ_between_two_exchanges_and_are_equal_after_each() -> None:
    for spec in (hvdcomp.EFSignSGD(), hvdcomp.ChunkedTopK(chunk=8, k=1, values="sign"), hvdcomp.TopK(0.05)):
        model, optimizer, mesh = made(compressor=spec)
        generator = own_generator()
        for step in range(1, 2 * EVERY + 2):
            train(model, optimizer, generator)
            of_replicas = {vector.numpy().tobytes() for vector in gathered(weights(model))}
            assert len(of_replicas) == (1 if step % EVERY == 0 else mesh["replicate"].size()), (spec, step)
            with optimizer.outer_weights():
                assert_same_everywhere(weights(model))
        optimizer.exchange()
        assert_same_everywhere(weights(model))


def case_a_mesh_with_replicas_gives_the_same_bits() -> None:
    for wrap, options in ((LocalSteps, {}), (LocalSteps.compressed, {})):
        results = []
        for way in (SHARDS, HSDP):
            model, optimizer, _ = made(wrap, way, **options)
            train(model, optimizer, own_generator(), 2 * EVERY + 1)
            results.append(torch.cat([one.detach().to_local().reshape(-1) for one in model.parameters()]))
        assert torch.equal(*results), wrap


def case_of_replicate_each_rank_is_a_replica() -> None:
    """Steps of whole models, which no mesh knows, give the same bits."""
    if replicate is None:
        raise SkipTest("this PyTorch has no replicate of FSDP2")
    for wrap in (LocalSteps, LocalSteps.compressed):
        results = []
        for wraps in (True, False):
            model: Any = large_model()
            if wraps:
                replicate(model, mesh=mesh_of((dist.get_world_size(),)))
            optimizer = wrap(adamw(model), EVERY, model=model if wraps else None)
            train(model, optimizer, own_generator(), 2 * EVERY + 1)
            results.append(torch.cat([local_part(one).reshape(-1) for one in model.parameters()]))
        assert torch.equal(*results), wrap


def case_fsdp_averages_nothing_between_replicas_any_more() -> None:
    mesh = mesh_of_ranks()
    model = sharded(mesh)
    generator = own_generator()
    for leaves in (False, True):
        if leaves:
            LocalSteps.compressed(adamw(model), EVERY, model=model)
            LocalSteps.compressed(adamw(model), EVERY, model=model)  # another one of the same model
        backward(model, generator)  # of the first pass, FSDP counts other collectives
        with CommDebugMode() as seen:
            backward(model, generator)
        sums = sum(count for name, count in seen.get_comm_counts().items() if "allreduce" in str(name))
        assert (sums > 0) != leaves, seen.get_comm_counts()


def case_it_continues_bit_for_bit() -> None:
    for way in (SHARDS, HSDP):
        results = []
        for stop in (8, 5):
            model, optimizer, _ = made(way=way)
            generator = own_generator()
            train(model, optimizer, generator, stop)
            if stop < 8:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                model, optimizer, _ = made(way=way)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                train(model, optimizer, generator, 8 - stop)
            results.append(weights(model))
        assert torch.equal(*results)


def refused(model: Any, /, **options: Any) -> str:
    return raised(hvdcomp.ConfigurationError, lambda: LocalSteps(adamw(model), **options))


def case_a_wrong_mesh_is_refused() -> None:
    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"])
    assert "use LocalSteps(..., mesh=mesh['replicate'])" in refused(model)
    assert "the dimension of the replicas" in refused(model, mesh=mesh)
    assert "FSDP averages their gradients in every step" in refused(sharded(mesh), mesh=mesh["replicate"])
    if dist.get_world_size() == 4:
        other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
        assert "so these ranks have different parts" in refused(sharded(other["shard"]), mesh=mesh["replicate"])
        crossed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
        told = refused(model, mesh=crossed["replicate"])
        assert "was given to LocalSteps have different parts of the parameters" in told, told


def case_a_wrong_model_is_refused() -> None:
    mesh = mesh_of_ranks()
    model = sharded(mesh)
    across = TorchDistributedCommunicator(mesh["replicate"].get_group())
    assert "leave out the communicator" in refused(model, model=model, communicator=across)
    assert "as the argument model that is not sharded" in refused(model, model=large_model())
    assert "as the argument model that has no replicas" in refused(model, model=sharded(mesh["shard"]))
    assert "8 of the optimizer's 8 parameters" in (told := refused(large_model(), model=model)), told
    if dist.get_world_size() == 4:
        assert "leave out the mesh argument" in refused(model, model=model, mesh=mesh["shard"])
    compression = hvdcomp.Compression(hvdcomp.SignSGD())
    assert "has no magnitude" in refused(model, model=model, compression=compression)
    hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()))  # no refusal has left the replicas to LocalSteps
    assert "was already given to hvdcomp.fsdp.register" in refused(model, model=model)
    of_local_steps = sharded(mesh)
    LocalSteps(adamw(of_local_steps), model=of_local_steps)
    told = raised(
        hvdcomp.ConfigurationError,
        lambda: hvdcomp.fsdp.register(of_local_steps, hvdcomp.Compression(hvdcomp.Int4())),
    )
    assert "was already given to LocalSteps" in told, told


def case_a_model_that_only_one_rank_forgot_is_refused_on_every_rank() -> None:
    mesh = mesh_of_ranks()
    model = sharded(mesh)
    replicas = {"model": model} if mesh["replicate"].get_local_rank() else {"mesh": mesh["replicate"]}
    told = raised(hvdcomp.RankMismatchError, lambda: LocalSteps(adamw(model), **replicas))
    assert "FSDP averages their gradients in every step" in told, told
