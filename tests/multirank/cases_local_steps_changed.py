"""Ranks that join and leave local steps over torch.distributed while the others train. Those of Horovod: elastic."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.torch import LocalSteps
from tests.multirank.models import batch, small_model, weights
from tests.multirank.training_ddp import own_generator, plain_loss, raised

EVERY = 4


def made(group: Any, **options: Any) -> tuple[Any, LocalSteps]:
    model = small_model()
    optimizer = LocalSteps.compressed(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        EVERY,
        named_parameters=model.named_parameters(),
        communicator=TorchDistributedCommunicator(group),
        **options,
    )
    return model, optimizer


def train(model: Any, optimizer: LocalSteps, generator: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        inputs, classes = batch(generator)
        optimizer.zero_grad()
        plain_loss(model, inputs, classes, 0).backward()
        optimizer.step()


def outer(model: Any, optimizer: LocalSteps) -> bytes:
    with optimizer.outer_weights():
        return weights(model).numpy().tobytes()


def equal_in(group: Any, value: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return all(one == values[0] for one in values)


def residual(optimizer: LocalSteps, name: str = "5.weight") -> torch.Tensor:
    kept: torch.Tensor = optimizer.compression.state_dict()["own"]["residuals"][name]["arrays"][0]
    return kept.clone()


def groups(*members: list[int]) -> list[Any]:
    if dist.get_world_size() != 4:
        raise SkipTest("needs 4 ranks")
    return [dist.new_group(ranks) for ranks in members]


def case_a_rank_joins_and_another_leaves_in_mid_round() -> None:
    for options in ({}, {"fragments": 2, "delay": 1}):
        three, four, others = groups([0, 1, 2], [0, 1, 2, 3], [0, 2, 3])
        rank, generator = dist.get_rank(), own_generator()
        model, optimizer = made(three if rank < 3 else four, **options)
        if rank < 3:
            train(model, optimizer, generator, EVERY + 1)
            before, kept = weights(model), residual(optimizer)
        optimizer.change_ranks(four)
        if rank < 3:
            assert torch.equal(weights(model), before), "they keep their own steps"
        assert equal_in(four, outer(model, optimizer))
        train(model, optimizer, generator, 1)
        if rank < 3 and not options:  # no exchange was made since
            torch.testing.assert_close(residual(optimizer), kept * 4 / 3)
        train(model, optimizer, generator, EVERY)
        assert equal_in(four, outer(model, optimizer))
        if rank != 1:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer.change_ranks(others)
                train(model, optimizer, generator, EVERY)
            assert any("1 of 4 ranks are gone (1)" in str(one.message) for one in told) == (rank == 0)
            assert equal_in(others, outer(model, optimizer))
            optimizer.exchange()
            assert equal_in(others, weights(model).numpy().tobytes())
        dist.barrier()


def case_a_rank_that_fails_is_left_out_and_the_others_go_back() -> None:
    """Rank 3 stops in the middle of a round; the others find out in the exchange, and restore what they saved."""
    everyone, others = groups([0, 1, 2, 3], [0, 1, 2])
    rank, generator = dist.get_rank(), own_generator()
    model, optimizer = made(everyone)
    train(model, optimizer, generator, EVERY + 1)
    if rank < 3:
        saved = [weights(model), {name: one.clone() for name, one in model.state_dict().items()}]
        state = optimizer.state_dict()
        train(model, optimizer, generator, 2)  # lost
        model.load_state_dict(saved[1])
        optimizer.roll_back(state)
        optimizer.change_ranks(others)
        assert torch.equal(weights(model), saved[0])
        train(model, optimizer, generator, EVERY - 1)
        assert optimizer.in_sync
        assert equal_in(others, weights(model).numpy().tobytes())
    dist.barrier()


def case_a_rank_that_lags_is_left_out_and_comes_back_later() -> None:
    for options in ({}, {"fragments": 2, "delay": 1}):
        four, three, again = groups([0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3])
        rank, generator = dist.get_rank(), own_generator()
        model, optimizer = made(four, **options)
        train(model, optimizer, generator, EVERY + 1)
        if rank < 3:
            optimizer.change_ranks(three)
            train(model, optimizer, generator, 2 * EVERY + 1)
        before, kept = weights(model), residual(optimizer)
        optimizer.change_ranks(again)
        assert equal_in(again, outer(model, optimizer))
        assert torch.equal(weights(model), before) == (rank < 3), "the rank that lagged begins with the outer weights"
        assert rank < 3 or weights(model).numpy().tobytes() == outer(model, optimizer)
        train(model, optimizer, generator, 1)
        if not options:  # no exchange was made since
            torch.testing.assert_close(residual(optimizer), kept * (4 / 3 if rank < 3 else 1))
        train(model, optimizer, generator, EVERY)
        assert equal_in(again, outer(model, optimizer))
        optimizer.exchange()
        assert equal_in(again, weights(model).numpy().tobytes())
        dist.barrier()


def case_a_rank_that_lags_within_a_round_keeps_its_steps() -> None:
    four, again = groups([0, 1, 2, 3], [0, 1, 2, 3])
    rank, generator = dist.get_rank(), own_generator()
    model, optimizer = made(four, compressor=hvdcomp.NoCompression())
    train(model, optimizer, generator, EVERY)
    anchors = weights(model)
    train(model, optimizer, generator, 1 if rank == 3 else EVERY - 1)
    before = weights(model)
    optimizer.change_ranks(again)
    assert torch.equal(weights(model), before)
    moved = [torch.empty_like(before) for _ in range(4)]
    optimizer.exchange()
    assert optimizer.in_sync
    dist.all_gather(moved, before)
    torch.testing.assert_close(weights(model), sum(moved) / 4)
    assert not torch.equal(weights(model), anchors)
    train(model, optimizer, generator, EVERY)
    assert optimizer.in_sync
    assert equal_in(again, weights(model).numpy().tobytes())


def case_a_group_that_begins_with_a_new_rank_is_refused() -> None:
    three, four = groups([1, 2, 3], [0, 1, 2, 3])
    rank = dist.get_rank()
    model, optimizer = made(three if rank else four)
    if rank:
        train(model, optimizer, own_generator(), 2)
    told = raised(hvdcomp.ConfigurationError, lambda: optimizer.change_ranks(four))
    assert "has not made a step" in told, told
