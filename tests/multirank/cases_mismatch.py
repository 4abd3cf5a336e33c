"""Ranks that differ, and uses of PyTorch that would leave them with different weights: work, or are refused by all."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import horovod.torch as hvd
import torch

import hvdcomp
from hvdcomp import kernels
from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator
from tests.multirank.training import (
    assert_same_everywhere,
    batch,
    compression,
    distribute,
    own_generator,
    raised,
    small_model,
    train,
    weights,
)
from tests.multirank.worker import thorough

SPECS = ("none", "topk:ratio=0.05")  # what Horovod carries itself, and what the engine does


def mismatch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> str:
    """What all ranks are told in the first step; none of them makes it."""
    start = weights(model)
    message = raised(hvdcomp.RankMismatchError, lambda: train(model, optimizer, steps=1, passes=passes))
    assert torch.equal(start, weights(model))
    return message


def on_last_rank() -> bool:
    return hvd.rank() == hvd.size() - 1


# Ranks that differ.


def case_one_layer_more() -> None:
    for spec in SPECS:
        model = small_model()
        if on_last_rank():
            model.append(torch.nn.Linear(40, 40))
        message = mismatch(model, distribute(model, compression(spec, model)))
        assert "parameter 8.weight: None on rank" in message, message
        assert "float32 (40, 40)" in message, message


def case_one_wider_layer() -> None:
    for spec in SPECS:
        model = small_model()
        if on_last_rank():
            model[5], model[7] = torch.nn.Linear(512, 48), torch.nn.Linear(48, 40)
        message = mismatch(model, distribute(model, compression(spec, model)))
        assert "parameter 5.weight: float32 (32, 512) on rank" in message, message


def case_a_layer_frozen_on_one_rank() -> None:
    for spec in SPECS:
        model = small_model()
        model[1].requires_grad_(not on_last_rank())
        message = mismatch(model, distribute(model, compression(spec, model)))
        assert "parameter 1.weight: float32 (128, 1, 3, 3) on rank 0" in message, message
        assert "None on rank" in message, message


def case_kernels_on_all_ranks_but_one() -> None:
    last = hvd.size() - 1
    told = {
        "off": [f"none on rank {last}. ", "HVDCOMP_KERNELS=off on every rank"],
        "wrong": [f"rank {last}: HVDCOMP_KERNELS='wrong' is unknown"],
    }
    try:
        for spec, (value, parts) in product(SPECS, told.items()):
            os.environ["HVDCOMP_KERNELS"] = value if on_last_rank() else ""
            kernels.reset()
            model = small_model()
            message = mismatch(model, distribute(model, compression(spec, model)))
            assert all(part in message for part in parts), message
    finally:
        del os.environ["HVDCOMP_KERNELS"]
        kernels.reset()


def case_another_number_of_passes_or_operation() -> None:
    for spec in SPECS:
        model = small_model()
        passes = 2 if on_last_rank() else 1
        optimizer = distribute(model, compression(spec, model), backward_passes_per_step=passes)
        assert "backward_passes_per_step: 1 on rank" in mismatch(model, optimizer, passes)
        model = small_model()
        optimizer = distribute(model, compression(spec, model), op=hvd.Sum if on_last_rank() else hvd.Average)
        assert "op: Average on rank" in mismatch(model, optimizer)


def case_a_name_that_one_compression_was_not_given() -> None:
    model = small_model()
    named = list(model.named_parameters())
    how = hvdcomp.Compression.from_spec("topk:ratio=0.05", named_parameters=named[:-1] if on_last_rank() else named)
    message = mismatch(model, distribute(model, how))
    assert "was not given: [] on rank 0" in message, message
    assert "['7.bias'] on rank" in message, message


def case_an_error_that_one_rank_meets_when_it_binds() -> None:
    model = small_model()
    named = list(model.named_parameters()) * (2 if on_last_rank() else 1)
    how = hvdcomp.Compression(hvdcomp.TopK(0.05), named_parameters=lambda: named)
    message = mismatch(model, distribute(model, how))
    assert "names in named_parameters must be unique" in message, message
    assert "no error; rank" in message, message


def case_a_pattern_that_matches_no_tensor() -> None:
    right, wrong = (json.dumps({pattern: "topk:ratio=0.05", "*": "none"}) for pattern in ("5.*", "blocks.5.*"))
    for spec in (wrong, f"two_level({wrong})"):
        model = small_model()
        start = weights(model)
        optimizer = distribute(model, compression(spec, model))
        message = raised(hvdcomp.SpecError, lambda m=model, o=optimizer: train(m, o, steps=1))
        told = "none of the 6 tensors has a name that matches 'blocks.5.*' (the nearest names are '5.bias', '5.weight'"
        assert told in message, message
        assert torch.equal(start, weights(model))
    model = small_model()
    message = mismatch(model, distribute(model, compression(wrong if on_last_rank() else right, model)))
    assert "no error; rank" in message, message
    assert "'blocks.5.*'" in message, message


def case_other_weights_at_the_start() -> None:
    for spec in SPECS:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(64, 40)
        message = mismatch(model, distribute(model, compression(spec, model)))
        assert "weights of weight: " in message, message
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in message, message
        model = torch.nn.Linear(64, 40)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, distribute(model, compression(spec, model)), steps=2)
        assert_same_everywhere(model)


@thorough
def case_settings_of_any_length() -> None:
    rules = {f"5{'*' * stars}": "topk:ratio=0.01" for stars in range(1, 201)}
    model = small_model()
    train(model, distribute(model, compression(json.dumps(rules | {"*": "topk:ratio=0.05"}), model)), steps=2)
    assert_same_everywhere(model)
    model = small_model()
    last = {"*": "topk:ratio=0.04" if on_last_rank() else "topk:ratio=0.05"}
    message = mismatch(model, distribute(model, compression(json.dumps(rules | last), model)))
    assert "topk:ratio=0.04" in message, message
    assert len(message) < 600, message


def case_payloads_of_different_length() -> None:
    communicator = HorovodTorchCommunicator()
    array = torch.zeros(10 + on_last_rank(), dtype=torch.uint8)
    message = raised(
        hvdcomp.RankMismatchError, lambda: communicator.wait(communicator.start_allgather(array, "test.lengths"))
    )
    assert f"sent {array.numel()} bytes in test.lengths" in message, message


# What PyTorch allows, and what would make weights drift apart.


def case_a_layer_that_was_frozen_when_wrapped() -> None:
    for spec, way_out in product(SPECS, (False, True)):
        model = small_model()
        model[1].requires_grad_(False)
        how = compression(spec, model)
        optimizer = distribute(model, how)
        train(model, optimizer, steps=2)
        model[1].requires_grad_(True)
        if way_out:  # that the message names
            del optimizer, how
            gc.collect()
            train(model, distribute(model, compression(spec, model)), steps=2)
            assert_same_everywhere(model)
        else:
            start = weights(model)
            message = raised(hvdcomp.ConfigurationError, lambda m=model, o=optimizer: train(m, o, steps=1))
            assert "gradients of 1.weight, 1.bias" in message, message
            assert torch.equal(start, weights(model))


def case_a_layer_that_one_rank_thaws() -> None:
    model = small_model()
    model[1].requires_grad_(False)
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    train(model, optimizer, steps=2)
    model[1].requires_grad_(on_last_rank())
    message = raised(hvdcomp.RankMismatchError, lambda: train(model, optimizer, steps=1))
    assert "no error; rank" in message, message
    assert "gradients of 1.weight, 1.bias" in message, message


def case_a_parameter_group_that_comes_later() -> None:
    for spec in SPECS:
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        train(model, optimizer, steps=1)
        head = torch.nn.Linear(40, 8)
        optimizer.add_param_group({"params": head.parameters()})
        message = raised(hvdcomp.ConfigurationError, lambda m=model, o=optimizer: train(m, o, steps=1))
        assert "gradients of (8, 40), (8,)" in message, message


def case_a_step_with_a_closure() -> None:
    def closure_of(model: torch.nn.Module, optimizer: Any, synchronize: bool) -> Callable[[], torch.Tensor]:
        generator = own_generator()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            inputs, classes = batch(generator)
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            if synchronize:
                optimizer.synchronize()
            return loss

        return closure

    for steps_before in (0, 1):
        model = small_model()
        optimizer = distribute(model, compression("topk:ratio=0.05", model))
        train(model, optimizer, steps=steps_before)
        start = weights(model)
        closure = closure_of(model, optimizer, synchronize=False)
        message = raised(hvdcomp.ConfigurationError, lambda o=optimizer, c=closure: o.step(c))
        assert "loss = closure(); optimizer.step()" in message, message
        assert torch.equal(start, weights(model))
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    for _ in range(3):  # the way out that the message names
        with optimizer.skip_synchronize():
            optimizer.step(closure_of(model, optimizer, synchronize=True))
    assert_same_everywhere(model)


# Where the names come from.


def case_names_that_horovod_has() -> None:
    reference = small_model()
    train(reference, distribute(reference, compression("powersgd:rank=2", reference)), steps=5)
    plain = hvdcomp.Compression(hvdcomp.PowerSGD(rank=2))
    ways: list[tuple[hvdcomp.Compression, bool]] = [
        (plain, True),
        (copy.deepcopy(plain), True),
        (pickle.loads(pickle.dumps(compression("powersgd:rank=2", small_model()))), True),
        (hvdcomp.Compression(hvdcomp.PowerSGD(rank=2)), False),
    ]
    for how, named in ways:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        names = {"named_parameters": model.named_parameters()} if named else {}
        train(model, hvd.DistributedOptimizer(optimizer, compression=how, **names), steps=5)
        assert_same_everywhere(model)
        if named:  # random choices depend on names
            assert torch.equal(weights(model), weights(reference))
    message = raised(hvdcomp.ConfigurationError, lambda: copy.deepcopy(plain))
    assert "state_dict()" in message, message


def case_names_from_a_function() -> None:
    model = small_model()
    how = hvdcomp.Compression(hvdcomp.TopK(0.05), named_parameters=model.named_parameters)
    train(model, distribute(model, how), steps=2)
    assert_same_everywhere(model)
    assert set(how.levels) == {"1.weight", "5.weight", "7.weight"}


# What Horovod cannot call, and one thing given twice.


def case_a_description_in_place_of_a_compression() -> None:
    for given, words in (
        (hvdcomp.TopK(0.01), "compression=hvdcomp.Compression(hvdcomp.TopK(ratio=0.01"),
        (hvdcomp.PowerSGD, "compression=hvdcomp.Compression.from_spec('powersgd:rank="),
        (hvdcomp.Compression, "compression=hvdcomp.Compression.from_spec('topk:ratio=0.01')"),
    ):
        model = small_model()
        optimizer = distribute(model, given)
        message = raised(hvdcomp.ConfigurationError, lambda m=model, o=optimizer: train(m, o, steps=1))
        assert words in message, message


def case_an_optimizer_wrapped_twice() -> None:
    model = small_model()
    shared = compression("topk:ratio=0.05", model)
    optimizers = [distribute(model, shared), distribute(model, shared)]
    message = raised(hvdcomp.ConfigurationError, lambda: train(model, optimizers[0], steps=1))
    assert "Wrap an optimizer only once" in message, message
    del shared, optimizers  # which wait for a step that never comes
    model = small_model()
    optimizers = [distribute(model, compression("topk:ratio=0.05", model)) for _ in range(2)]
    message = raised(hvdcomp.ConfigurationError, lambda: train(model, optimizers[0], steps=1))
    assert "Wrap an optimizer only once" in message, message


def case_two_optimizers_that_share_a_compression() -> None:
    models = [small_model(), small_model()]
    named = [(f"{place}.{name}", one) for place, model in enumerate(models) for name, one in model.named_parameters()]
    shared = hvdcomp.Compression(hvdcomp.TopK(0.05), named_parameters=named)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=shared) for model in models
    ]
    train(models[0], optimizers[0], steps=1)
    message = raised(hvdcomp.ConfigurationError, lambda: train(models[1], optimizers[1], steps=1))
    assert "make a Compression for each" in message, message


def case_two_models_with_equal_names_in_one_backward_pass() -> None:
    models = [small_model(), small_model()]
    optimizers = [distribute(model, compression("topk:ratio=0.05", model)) for model in models]
    inputs, classes = batch(own_generator())
    loss = sum(torch.nn.functional.cross_entropy(model(inputs), classes) for model in models)
    message = raised(hvdcomp.ConfigurationError, loss.backward)
    assert "hvdcomp.Compression, named_parameters=" in message, message
    del optimizers


def case_two_models_with_equal_names_whose_steps_follow_both_backward_passes() -> None:
    def train_both(names: tuple[str, str], spec: str, step_between: bool = False) -> None:
        inputs, classes = batch(own_generator())
        models, optimizers = [small_model(), small_model()], []
        for prefix, model in zip(names, models, strict=True):
            named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
            how = hvdcomp.Compression.from_spec(spec, named_parameters=named)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=how))
        try:
            for _ in range(2):
                for model, optimizer in zip(models, optimizers, strict=True):
                    torch.nn.functional.cross_entropy(model(inputs), classes).backward()
                    if step_between:
                        optimizer.step()
                if not step_between:
                    for optimizer in optimizers:
                        optimizer.step()
        except hvdcomp.ConfigurationError:
            optimizers[0].synchronize()
            raise
        assert_same_everywhere(torch.cat([*map(weights, models)]))

    for spec in SPECS:
        message = raised(hvdcomp.ConfigurationError, lambda spec=spec: train_both(("", ""), spec))
        assert "both wait for optimizer.step() after their backward passes" in message, message
        train_both(("", "second."), spec)  # the ways out
        train_both(("", ""), spec, step_between=True)


def case_in_an_elastic_job_an_error_of_one_rank_is_told_to_all() -> None:
    """Where ranks agree on a state first, if they may have changed."""
    model = small_model()
    rules = {"0.weight" if hvd.rank() else "no.such": "topk:ratio=0.05", "*": "none"}
    how = compression(json.dumps(rules), model)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        assert "no.such" in mismatch(model, distribute(model, how))
    finally:
        del os.environ["HOROVOD_ELASTIC"]
