"""Steps by itself of each replica of a model that FSDP2 shards; of two ranks each is a replica, of four each pair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.torch import LocalSteps
from tests.multirank.cases_fsdp import mesh_of_ranks, sharded, weights
from tests.multirank.models import batch
from tests.multirank.training_ddp import assert_same_everywhere, gathered, large_model, own_generator, raised

EVERY = 3
Wrap = Callable[..., LocalSteps]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def made(wrap: Wrap = LocalSteps.compressed, **options: Any) -> tuple[Any, LocalSteps, DeviceMesh]:
    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"])
    return model, wrap(adamw(model), EVERY, mesh=mesh["replicate"], **options), mesh


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
        (LocalSteps.compressed, {"compressor": hvdcomp.Int8(block=32)}),  # blocks of rows, in shards as in the whole
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


def case_it_continues_bit_for_bit() -> None:
    results = []
    for stop in (8, 5):
        model, optimizer, _ = made()
        generator = own_generator()
        train(model, optimizer, generator, stop)
        if stop < 8:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            model, optimizer, _ = made()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, generator, 8 - stop)
        results.append(weights(model))
    assert torch.equal(*results)


def case_a_wrong_mesh_is_refused() -> None:
    mesh = mesh_of_ranks()
    model = sharded(mesh["shard"])
    told = raised(hvdcomp.ConfigurationError, lambda: LocalSteps(adamw(model)))
    assert "give LocalSteps mesh=mesh['replicate']" in told, told
    told = raised(hvdcomp.ConfigurationError, lambda: LocalSteps(adamw(model), mesh=mesh))
    assert "the dimension of the replicas" in told, told
    everyone = sharded(mesh_of_ranks())
    assert isinstance(next(everyone.parameters()), DTensor)
    told = raised(hvdcomp.ConfigurationError, lambda: LocalSteps(adamw(everyone), mesh=mesh["replicate"]))
    assert "so these ranks have different parts" in told, told
