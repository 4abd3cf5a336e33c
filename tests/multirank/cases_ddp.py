"""What must hold in torch's DistributedDataParallel on every number of ranks, without Horovod."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp import TwoLevel
from hvdcomp.compressors import EXAMPLES
from tests.multirank.collectives import nodes_of
from tests.multirank.everywhere import assert_metrics
from tests.multirank.models import Branches, batch, small_model, weights
from tests.multirank.training_ddp import (
    assert_same_everywhere,
    distribute,
    gathered,
    large_model,
    own_generator,
    plain_loss,
    raised,
    train,
)
from tests.multirank.worker import thorough

SPECS = ("none", "fp16", "topk:ratio=0.05", "powersgd:rank=2", "qsgd:bits=8,exchange=scatter")


def case_horovod_is_not_imported() -> None:
    model = large_model()
    train(*distribute(model, "topk:ratio=0.05")[:2], steps=2)
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


@thorough
def case_every_method_keeps_weights_identical() -> None:
    routed = '{"*5*": "topk:ratio=0.05", "numel<2000": "qsgd:bits=8", "*": "powersgd:rank=1"}'
    for spec in [*EXAMPLES, "qsgd:bits=4,exchange=scatter", "efsignsgd:exchange=scatter", routed]:
        model = large_model()
        start = weights(model)
        distributed, optimizer, how = distribute(model, spec, 0 if spec.startswith("dgc") else 0.9)
        train(distributed, optimizer)
        assert_same_everywhere(weights(model))
        assert not torch.equal(start, weights(model)), spec
        assert how is not None
        assert how.ledger.steps == 6, spec


def case_two_levels_keep_weights_identical() -> None:
    """With two nodes of half the ranks each."""
    for spec in TwoLevel.examples:
        model = large_model()
        distributed, optimizer, how = distribute(model, spec)
        with nodes_of(max(1, dist.get_world_size() // 2)):
            train(distributed, optimizer)
        assert_same_everywhere(weights(model))
        assert how is not None
        assert (how.ledger.totals.bytes_in_node > 0) == (dist.get_world_size() > 2), spec


def case_none_equals_ddp_without_a_hook() -> None:
    results = []
    for how in (None, "none"):
        model = large_model()
        train(*distribute(model, how)[:2])
        results.append(weights(model))
    assert torch.equal(*results)


def case_fp16_equals_the_hook_of_torch() -> None:
    ours, theirs = large_model(), large_model()
    train(*distribute(ours, "fp16")[:2])
    distributed, optimizer, _ = distribute(theirs)
    distributed.register_comm_hook(None, fp16_compress_hook)
    train(distributed, optimizer)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-2, atol=1e-4)


def case_everything_sent_is_the_mean_gradient() -> None:
    results = []
    for how in (None, "topk:ratio=1"):
        model = large_model()
        train(*distribute(model, how)[:2])
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def case_buckets_start_in_the_backward_pass_and_change_nothing() -> None:
    for spec in ("topk:ratio=0.05", "efsignsgd", "powersgd:rank=2"):
        results = []
        for overlap in (True, False):
            model = large_model()
            how = hvdcomp.Compression.from_spec(spec, overlap=overlap)
            distributed, optimizer, _ = distribute(model, how)
            binding, early = how._binding, []

            def wait(*_: Any, binding: Any = binding, early: list[int] = early) -> None:
                """Before the last gradients: waits for the ranks' answers, for which a small model may be too quick."""
                while binding._everyone._asked is not None:
                    binding._everyone.agrees()
                binding.engine.overlap.ready("", torch.empty(0))
                early.append(len(binding.engine.overlap.started))

            model[1].register_forward_hook(lambda module, given, output, wait=wait: output.register_hook(wait) and None)
            train(distributed, optimizer, steps=8)
            assert early == ([0, 0, 0, *[1] * 5] if overlap else [0] * 8), (spec, overlap, early)
            assert_same_everywhere(weights(model))
            results.append(weights(model))
        if spec != "powersgd:rank=2" or dist.get_world_size() == 2:  # sums over more ranks have an order
            assert torch.equal(*results), spec


def case_unused_parameters() -> None:
    """What no rank uses has no gradient, and what it left to be sent stays."""

    def loss_of(model: Any, inputs: torch.Tensor, classes: torch.Tensor, step: int) -> torch.Tensor:
        order = "l" if step in (2, 3) else ["lr", "r"][(dist.get_rank() + step) % 2]
        residual = binding.engine.states["right.weight"].memory if binding is not None else ()
        kept.append([one.clone() for one in residual])
        return torch.nn.functional.cross_entropy(model(inputs, order), classes)

    for spec in SPECS:
        model, kept, binding = Branches(), [], None
        distributed, optimizer, how = distribute(model, spec, find_unused_parameters=True)
        assert how is not None
        binding = how._binding
        train(distributed, optimizer, steps=8, loss_of=loss_of)
        assert_same_everywhere(weights(model))
        assert model.never.weight.grad is None
        if spec == "topk:ratio=0.05":
            assert torch.equal(kept[2][0], kept[3][0])
            assert torch.equal(kept[3][0], kept[4][0])
            assert not torch.equal(kept[4][0], kept[5][0])


def case_static_graph() -> None:
    results = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        distributed, optimizer, how = distribute(model, "topk:ratio=0.05", **options)
        train(
            distributed, optimizer,
            loss_of=lambda m, x, y, step: torch.nn.functional.cross_entropy(m(x, "lr"), y),
        )  # fmt: skip
        assert_same_everywhere(weights(model))
        assert how is not None
        assert set(how.ledger.last.tensors) == {"left.weight", "left.bias", "right.weight", "right.bias"}
        results.append(weights(model))
    assert torch.equal(*results)


def case_gradients_of_several_passes_are_exchanged_once() -> None:
    results = []
    for how in (None, "topk:ratio=1", "none"):
        model = large_model()
        distributed, optimizer, compression = distribute(model, how)
        train(distributed, optimizer, steps=4, passes=3)
        assert_same_everywhere(weights(model))
        assert compression is None or compression.ledger.steps == 4
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    assert torch.equal(results[0], results[2])


def case_element_types_and_layouts() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for spec in SPECS:
            model = small_model(dtype)
            distributed, optimizer, _ = distribute(model, spec)
            train(distributed, optimizer, steps=3, dtype=dtype)
            assert_same_everywhere(weights(model))
            assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
    for spec in SPECS:
        model = small_model().to(memory_format=torch.channels_last)
        for as_view in (False, True):
            distributed, optimizer, _ = distribute(model, spec, gradient_as_bucket_view=as_view)
            train(distributed, optimizer, steps=3)
            assert_same_everywhere(weights(model))


def case_several_models_in_one_backward_pass() -> None:
    models = [large_model(), large_model()]
    both = [distribute(model, "topk:ratio=0.05") for model in models]
    generator = own_generator()
    for _ in range(4):
        inputs, classes = batch(generator)
        for _, optimizer, _ in both:
            optimizer.zero_grad()
        sum(plain_loss(distributed, inputs, classes, 0) for distributed, _, _ in both).backward()
        for _, optimizer, _ in both:
            optimizer.step()
    for model in models:
        assert_same_everywhere(weights(model))
    assert torch.equal(weights(models[0]), weights(models[1]))


def case_a_process_group_of_some_ranks() -> None:
    if dist.get_world_size() < 4:
        raise SkipTest("needs 4 ranks")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    model = large_model()
    train(*distribute(model, "topk:ratio=0.05", process_group=mine)[:2])
    everyone = [torch.empty_like(weights(model)) for _ in range(4)]
    dist.all_gather(everyone, weights(model))
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])


class Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(100, 16, sparse=True)
        self.out = torch.nn.Linear(16, 100)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words))


def case_sparse_gradients_are_reduced_as_they_are() -> None:
    results = []
    for how in (None, "none", "topk:ratio=1"):
        model = Embedded()
        distributed, optimizer, _ = distribute(model, how, momentum=0)
        generator = own_generator()
        for _ in range(4):
            words = torch.randint(0, 100, (32,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(distributed(words), (words + 1) % 100).backward()
            optimizer.step()
        assert_same_everywhere(weights(model))
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-7)


def case_loss_scaler_skips_the_step_everywhere() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        model = large_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        how = hvdcomp.Compression.from_spec(spec, grad_scaler=scaler)
        distributed, optimizer, _ = distribute(model, how)
        generator = own_generator()
        for step in range(6):
            optimizer.zero_grad()
            inputs, classes = batch(generator)
            loss = plain_loss(distributed, inputs, classes, step)
            if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            start = weights(model)
            scaler.step(optimizer)
            assert torch.equal(start, weights(model)) == (step == 3)
            scaler.update()
            assert_metrics(how, dense_bytes=4 * start.numel())
        assert scaler.get_scale() == 512.0
        assert_same_everywhere(weights(model))


def case_levels_change_between_steps() -> None:
    for spec, levels in (("topk:ratio=0.05", (0.5, 0.01)), ("powersgd:rank=2", (4, 1))):
        model = large_model()
        distributed, optimizer, how = distribute(model, spec)
        assert how is not None
        for level in (how.level, *levels):
            how.set_level(level)
            train(distributed, optimizer, steps=3)
            assert set(how.levels.values()) == {level}
            assert how.metrics()[f"hvdcomp/mean_{how.settings.compressor.level_name}"] == level
            assert_same_everywhere(weights(model))
        how.set_level(levels[dist.get_rank() % 2])
        told = raised(hvdcomp.RankMismatchError, lambda model=distributed, by=optimizer: train(model, by, steps=1))
        assert "levels" in told


def case_a_policy_decides_on_rank_0() -> None:
    model = large_model()
    how = hvdcomp.Compression.from_spec(
        "powersgd:rank=4", policy="accordion:low=4,high=1,interval=1", steps_per_epoch=2
    )
    distributed, optimizer, _ = distribute(model, how)
    train(distributed, optimizer, steps=12)
    assert_same_everywhere(weights(model))
    found = gathered(how.levels)
    assert all(one == found[0] for one in found)
    assert found[0]


def case_a_checkpoint_goes_on_bit_for_bit() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        whole = large_model()
        distributed, optimizer, _ = distribute(whole, spec, momentum=0)
        generator = own_generator()
        train(distributed, optimizer, steps=8, generator=generator)

        first = large_model()
        distributed, optimizer, how = distribute(first, spec, momentum=0)
        generator = own_generator()
        train(distributed, optimizer, steps=4, generator=generator)
        assert how is not None
        state = how.state_dict()
        for load_first in (True, False):
            rest = large_model()
            rest.load_state_dict(first.state_dict())
            goes_on = hvdcomp.Compression.from_spec(spec)
            if load_first:
                goes_on.load_state_dict(state)
            distributed, optimizer, _ = distribute(rest, goes_on, momentum=0)
            if not load_first:
                goes_on.load_state_dict(state)
            ahead = torch.Generator()
            ahead.set_state(generator.get_state())
            train(distributed, optimizer, steps=4, generator=ahead)
            if dist.get_world_size() == 2:
                assert torch.equal(weights(whole), weights(rest)), (spec, load_first)
            torch.testing.assert_close(weights(whole), weights(rest), rtol=1e-4, atol=1e-6)
        told = raised(hvdcomp.ConfigurationError, lambda how=goes_on, state=state: how.load_state_dict(state))
        assert "before the first step" in told
        name, kept = next(iter(state["own"]["residuals"].items()))
        kept["arrays"] = [one[1:] for one in kept["arrays"]]
        goes_on = hvdcomp.Compression.from_spec(spec)
        goes_on.load_state_dict(state)  # which only the model can tell
        told = raised(hvdcomp.ConfigurationError, lambda how=goes_on: distribute(large_model(), how, momentum=0))
        assert f"the residual of {name} has the shape" in told
        told = raised(hvdcomp.ConfigurationError, lambda how=goes_on: how.load_state_dict(None))
        assert "not a state of hvdcomp.Compression (None)" in told.replace(", or one of another version", "")


def case_different_settings_are_named_on_every_rank() -> None:
    specs = ("topk:ratio=0.01", "topk:ratio=0.02")
    distributed, optimizer, _ = distribute(large_model(), specs[min(dist.get_rank(), 1)])
    told = raised(hvdcomp.RankMismatchError, lambda: train(distributed, optimizer, steps=1))
    assert all(word in told for word in (*specs, "rank 0")), told


def case_what_cannot_be_is_refused_on_every_rank() -> None:
    def refused(how: Any, model: Any = None, **options: Any) -> str:
        return raised(hvdcomp.ConfigurationError, lambda: distribute(model or large_model(), how, **options))

    def made(**options: Any) -> hvdcomp.Compression:
        return hvdcomp.Compression.from_spec("topk:ratio=0.05", **options)

    assert "bucket_cap_mb" in refused(made(bucket_bytes=10**6))
    assert "static_graph" in refused(made(overlap=True), find_unused_parameters=True)
    assert "process_group" in refused(made(process_set=object()))
    assert "lack 0.weight" in refused(made(named_parameters=list(large_model()[0].named_parameters())))
    used = made()
    distribute(large_model(), used)
    assert "one for each model" in refused(used)
    for wrong in (torch.nn.Linear(2, 2), "model"):
        message = raised(hvdcomp.ConfigurationError, lambda wrong=wrong: hvdcomp.ddp.register(wrong, made()))
        assert type(wrong).__name__ in message
    distributed = DistributedDataParallel(large_model())
    message = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.ddp.register(distributed, "topk:ratio=0.05"))
    assert "from_spec" in message
    message = raised(hvdcomp.ConfigurationError, lambda: used.compress(torch.ones(2)))
    assert "without hvd.DistributedOptimizer" in message


def case_one_rank_alone_is_not_left_waiting() -> None:
    """Only the last rank has an error in `register`; the others meet it in their first step."""
    last = dist.get_rank() == dist.get_world_size() - 1
    how = hvdcomp.Compression.from_spec("topk:ratio=0.05", bucket_bytes=10**6 if last else None)

    def register_and_train() -> None:
        distributed, optimizer, _ = distribute(large_model(), how)
        train(distributed, optimizer, steps=1)

    assert "bucket_cap_mb" in raised(hvdcomp.RankMismatchError, register_and_train)


def case_join_is_refused() -> None:
    distributed, optimizer, _ = distribute(large_model(), "topk:ratio=0.05")

    def train_joined() -> None:
        with distributed.join():
            train(distributed, optimizer, steps=2)

    assert "same number of batches" in raised(hvdcomp.ConfigurationError, train_joined)


def case_a_model_that_is_dropped_is_freed() -> None:
    model = large_model()
    distributed, optimizer, how = distribute(model, "topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    gone = weakref.ref(model)
    del model, distributed, optimizer, how
    gc.collect()
    assert gone() is None
