"""What must hold in torch's DistributedDataParallel on every number of ranks, without Horovod."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import linecache
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import SkipTest, mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hvdcomp
from hvdcomp import TwoLevel
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import EXAMPLES
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.torch import CompressedAdam, MuonWithAdamW
from hvdcomp.torch.ddp.group_beside import GroupBeside
from hvdcomp.torch.training import packed, unpacked
from tests.multirank.collectives import nodes_of
from tests.multirank.everywhere import assert_metrics
from tests.multirank.models import WRAPPERS, Branches, batch, small_model, weights
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
from tests.own_mistakes import BEFORE_STEPS, IN_STEPS
from tests.readme import block_with, run

SPECS = ("none", "fp16", "topk:ratio=0.05", "powersgd:rank=2", "qsgd:bits=8,exchange=scatter")


def case_horovod_is_not_imported() -> None:
    model = large_model()
    train(*distribute(model, "topk:ratio=0.05")[:2], steps=2)
    assert not [name for name in sys.modules if name.partition(".")[0] in ("horovod", "mpi4py")]


def case_the_readme_trains() -> None:
    def train_as_before(variables: dict[str, Any]) -> None:
        train(variables["model"], variables["optimizer"], steps=3)

    model = large_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.object(dist, "init_process_group"):  # which these ranks have called
        program = run(block_with("import torch.distributed"), train_as_before, model=model, optimizer=optimizer)
    assert_same_everywhere(model)
    totals = program["compression"].ledger.totals
    assert 0 < 5 * totals.bytes_sent < totals.dense_bytes


@thorough
def case_every_method_keeps_weights_identical() -> None:
    routed = '{"*4*": "topk:ratio=0.05", "numel<2000": "qsgd:bits=8", "*": "powersgd:rank=1"}'
    methods = "qsgd:bits=4,", "efsignsgd:", "fp16:rounding=stochastic,", "eden:bits=1,back=3,"
    scattered = [f"{method}exchange=scatter" for method in methods]
    for spec in [*EXAMPLES, *scattered, routed]:
        model = large_model()
        start = weights(model)
        distributed, optimizer, how = distribute(model, spec, 0 if spec.startswith("dgc") else 0.9)
        train(distributed, optimizer)
        assert_same_everywhere(model)
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
        assert_same_everywhere(model)
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


def case_a_warning_points_to_the_line_of_the_program() -> None:
    """Though autograd calls the hook."""
    distributed, optimizer, _ = distribute(large_model(), "topk:ratio=0.99")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(distributed, optimizer, steps=1)
    said = [one for one in caught if "tensors larger: a rank sends" in str(one.message)]
    assert len(said) == (dist.get_rank() == 0)
    for one in said:
        assert ".backward()" in linecache.getline(one.filename, one.lineno), one


def case_everything_sent_is_the_mean_gradient() -> None:
    results = []
    for how in (None, "topk:ratio=1"):
        model = large_model()
        train(*distribute(model, how)[:2])
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def case_buckets_start_in_the_backward_pass_and_change_nothing() -> None:
    """So do groups: of a method without kernels, and of float64."""
    in_buckets = [(spec, torch.float32) for spec in ("topk:ratio=0.05", "efsignsgd", "powersgd:rank=2")]
    for spec, dtype in (*in_buckets, ("stc:ratio=0.05", torch.float32), ("topk:ratio=0.05", torch.float64)):
        results = []
        for overlap in ("auto", False):
            model = large_model().to(dtype)
            how = hvdcomp.Compression.from_spec(spec, overlap=overlap)
            distributed, optimizer, _ = distribute(model, how)
            binding, early = how._binding, []

            def wait(*_: Any, binding: Any = binding, early: list[int] = early) -> None:
                """Before the last gradients: waits for the ranks' answers, for which a small model may be too quick."""
                while binding._presence_check._started is not None:
                    binding._presence_check.agrees()
                binding.engine.overlap.ready({})
                early.append(len(binding.engine.overlap.started))

            model[1].register_forward_hook(lambda module, given, output, wait=wait: output.register_hook(wait) and None)
            train(distributed, optimizer, steps=8, dtype=dtype)
            started = 1 + (dtype == torch.float64)  # of twice the bytes
            assert early == ([0, 0, 0, *[started] * 5] if overlap else [0] * 8), (spec, dtype, overlap, early)
            assert bool(binding.engine.buckets.tensor_groups) == ((spec, dtype) not in in_buckets)
            assert_same_everywhere(model)
            results.append(weights(model))
        # The last bits of a sum over more than two ranks depend on what travels with it. PowerSGD sums its factors; the
        # groups of float64 have the biases, which are summed, among them.
        sums = spec == "powersgd:rank=2" or dtype == torch.float64
        if not sums or dist.get_world_size() == 2:
            assert torch.equal(*results), (spec, dtype)
        elif dtype == torch.float64:
            torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


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
        assert_same_everywhere(model)
        assert model.never.weight.grad is None
        if spec == "topk:ratio=0.05":
            assert torch.equal(kept[2][0], kept[3][0])
            assert torch.equal(kept[3][0], kept[4][0])
            assert not torch.equal(kept[4][0], kept[5][0])


def case_static_graph() -> None:
    results, bytes_sent = [], []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        distributed, optimizer, how = distribute(model, "topk:ratio=0.05", **options)
        train(
            distributed, optimizer,
            loss_of=lambda m, x, y, step: torch.nn.functional.cross_entropy(m(x, "lr"), y),
        )  # fmt: skip
        assert_same_everywhere(model)
        assert how is not None
        assert set(how.ledger.last.tensors) == {"left.weight", "left.bias", "right.weight", "right.bias"}
        results.append(weights(model))
        bytes_sent.append(how.ledger.last.bytes_sent)
    assert torch.equal(*results)
    # Only a graph that is not static needs, in each step, the flags of the parameters that were used.
    assert bytes_sent[0] - bytes_sent[1] == 4 * len(list(model.parameters()))


class Checkpointed(torch.nn.Module):
    """Of two element types, with rows that may be sparse, a layer that is made again in the backward pass, and one that
    is never used."""

    def __init__(self, sparse: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(50, 64, sparse=sparse)
        self.middle, self.norm = torch.nn.Linear(64, 256, dtype=torch.bfloat16), torch.nn.LayerNorm(256)
        self.out, self.never = torch.nn.Linear(256, 50), torch.nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.in_the_middle, self.words(words), use_reentrant=self.reentrant))

    def in_the_middle(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.middle(inputs.bfloat16()).float())


def case_a_static_graph_in_several_buckets() -> None:
    """In whose first pass DDP says of every bucket that it is the first and not the last."""
    for sparse, reentrant in ((False, True), (True, False)):
        results = []
        for how in (None, "none", "topk:ratio=1"):
            model = Checkpointed(sparse, reentrant)
            distributed, optimizer, ours = distribute(model, how, momentum=0, static_graph=True, bucket_cap_mb=0.05)
            generator = own_generator()
            for step in range(6):
                optimizer.zero_grad()
                for last in (False, True) if step > 2 else (True,):  # PyTorch 2.13 fails in a first pass in no_sync()
                    words = torch.randint(0, 50, (32,), generator=generator)
                    with contextlib.nullcontext() if last else distributed.no_sync():
                        torch.nn.functional.cross_entropy(distributed(words), (words + 1) % 50).backward()
                optimizer.step()
            assert_same_everywhere(model)
            assert ours is None or ours.ledger.steps == 6
            results.append(weights(model))
        if dist.get_world_size() == 2:  # sums over more ranks have an order
            assert torch.equal(results[0], results[1])
        for other in results[1:]:
            torch.testing.assert_close(results[0], other, rtol=1e-2, atol=2e-3)  # bfloat16 rounds elsewhere


def case_gradients_of_several_passes_are_exchanged_once() -> None:
    results = []
    for how in (None, "topk:ratio=1", "none"):
        model = large_model()
        distributed, optimizer, compression = distribute(model, how)
        train(distributed, optimizer, steps=4, passes=3)
        assert_same_everywhere(model)
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
            assert_same_everywhere(model)
            assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
    for spec in SPECS:
        model = small_model().to(memory_format=torch.channels_last)
        for as_view in (False, True):
            distributed, optimizer, _ = distribute(model, spec, gradient_as_bucket_view=as_view)
            train(distributed, optimizer, steps=3)
            assert_same_everywhere(model)


def case_gradients_of_bfloat16_are_exchanged_in_buckets() -> None:
    """Those of all matrices in one, of norms, which are of float32, in another; and what is lost comes later."""
    for spec in ("topk:ratio=0.05", "efsignsgd", "powersgd:rank=2"):
        model = large_model().bfloat16()
        model[6].float()
        model.insert(6, torch.nn.Identity())
        model[6].register_forward_hook(lambda module, given, output: output.float())
        distributed, optimizer, how = distribute(model, spec, momentum=0)
        train(distributed, optimizer, steps=6, dtype=torch.bfloat16)
        assert how is not None
        engine = how._binding.engine
        types = {name: one.dtype for name, one in engine.tensors.items()}
        assert {*types.values()} == {"float32", "bfloat16"}
        grouped = {name: group.bucket.dtype for group in engine.buckets.with_kernels for name in group.names}
        assert grouped == types, spec
        assert_same_everywhere(model)
        kept = [one for state in engine.states.values() for one in state.memory]
        assert kept
        assert all(one.dtype == torch.float32 and one.any() for one in kept)


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
        assert_same_everywhere(model)
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
        distributed, optimizer, ours = distribute(model, how, momentum=0)
        generator = own_generator()
        for _ in range(4):
            words = torch.randint(0, 100, (32,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(distributed(words), (words + 1) % 100).backward()
            optimizer.step()
        if ours is not None:
            rows = 4 * len(words.unique()) * 16 + 8 * len(words.unique())  # values in float32, numbers of rows in int64
            counted = ours.ledger.last.tensors["words.weight"]
            assert (counted.bytes_sent, counted.dense_bytes) == (rows, rows)
            others = [cost for name, cost in ours.ledger.last.tensors.items() if name != "words.weight"]
            assert ours.ledger.last.dense_bytes == rows + sum(cost.dense_bytes for cost in others)
            assert ours.ledger.last.bytes_sent >= rows + sum(cost.bytes_sent for cost in others)
        assert_same_everywhere(model)
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-7)


@contextlib.contextmanager
def only_rank_0_starts_early() -> Iterator[None]:
    """On rank 0 the ranks' answers are there at once, so that buckets start as soon as they can; on the others not
    before the end of the backward pass."""

    def is_done(communicator: TorchDistributedCommunicator, started: Any) -> bool:
        if dist.get_rank():
            return False
        communicator.wait(started)
        return True

    with mock.patch.object(TorchDistributedCommunicator, "is_done", is_done):
        yield


def started_early(module: torch.nn.Module, how: hvdcomp.Compression) -> list[int]:
    """The number of buckets that have started when the gradient of a module's output is there, in each step."""
    early: list[int] = []

    def note(gradient: torch.Tensor) -> None:
        early.append(len(how._binding.engine.overlap.started))

    module.register_forward_hook(lambda module, given, output: output.register_hook(note) and None)
    return early


class Towers(torch.nn.Module):
    """Two models as one, of which a forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList([large_model(), large_model()])

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        return self.towers[number](inputs)


def case_a_model_begins_its_step_in_the_middle_of_another() -> None:
    """In one backward pass: that of the second tower, of the other model, of the first tower."""
    results = []
    for overlap in ("auto", False):
        towers, other = Towers(), large_model()
        made = [hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap) for _ in range(2)]
        both = [distribute(one, how) for one, how in zip((towers, other), made, strict=True)]
        early = started_early(other[-1], made[0])
        generator = own_generator()
        with only_rank_0_starts_early():
            for _ in range(6):
                inputs, classes = batch(generator)
                for _, optimizer, _ in both:
                    optimizer.zero_grad()
                middle = both[1][0]
                outputs = both[0][0](inputs, 0), middle(inputs), both[0][0](inputs, 1)
                sum(torch.nn.functional.cross_entropy(one, classes) for one in outputs).backward()
                for _, optimizer, _ in both:
                    optimizer.step()
        assert any(early) == (overlap == "auto" and dist.get_rank() == 0), early
        for model in (towers, other):
            assert_same_everywhere(model)
            results.append(weights(model))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


class Averaged(torch.autograd.Function):
    """Gives in the backward pass the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


def case_a_layer_has_collectives_of_its_own_in_the_backward_pass() -> None:
    results = []
    for overlap in ("auto", False):
        model = large_model()
        how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap)
        distributed, optimizer, _ = distribute(model, how)
        early = started_early(model[1], how)
        model[1].register_forward_hook(lambda module, given, output: Averaged.apply(output))
        with only_rank_0_starts_early():
            train(distributed, optimizer)
        assert any(early) == (overlap == "auto" and dist.get_rank() == 0), early
        assert_same_everywhere(model)
        results.append(weights(model))
    assert torch.equal(*results)


def case_the_group_of_a_model_that_is_dropped_is_used_again() -> None:
    kept: list[Any] = []

    def dropped() -> GroupBeside:
        group = kept.pop()[2]._binding._beside
        gc.collect()
        return group

    def registered() -> GroupBeside:
        kept.append(distribute(large_model(), "topk:ratio=0.05"))
        return kept[-1][2]._binding._beside

    first, second = registered(), registered()
    assert first is not second
    train(*kept[-1][:2], steps=5)
    groups = len(dist.distributed_c10d._world.pg_names)
    assert dropped() is second
    second = registered()
    assert len(dist.distributed_c10d._world.pg_names) == groups
    if dist.get_rank() == 0:
        dropped()
    assert registered() not in (first, second)  # which another rank still uses
    kept.clear()
    gc.collect()
    for _ in range(3):
        last = registered()
        train(*kept[-1][:2], steps=1)
    with mock.patch.object(Ledger, "record_timed", side_effect=ArithmeticError("a bug")):
        raised(ArithmeticError, lambda: train(*kept[-1][:2], steps=1))
    assert dropped() is last
    assert registered() is not last  # of which some rank may have started more collectives than another


def case_sparse_gradients_do_not_meet_buckets_that_start_early() -> None:

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.words = torch.nn.Embedding(100, 64, sparse=True)
            self.layers = large_model()

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.layers(self.words(words))

    results = []
    for overlap in ("auto", False):
        model = Words()
        how = hvdcomp.Compression.from_spec("topk:ratio=0.05", overlap=overlap)
        distributed, optimizer, _ = distribute(model, how)
        generator, early = own_generator(), started_early(model.words, how)
        with only_rank_0_starts_early():
            for _ in range(6):
                words = torch.randint(0, 100, (32,), generator=generator)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(distributed(words), words % 40).backward()
                optimizer.step()
        assert any(early) == (overlap == "auto" and dist.get_rank() == 0), early
        assert_same_everywhere(model)
        results.append(weights(model))
    assert torch.equal(*results)


def case_loss_scaler_skips_the_step_everywhere() -> None:
    for spec, given_to_register in (("topk:ratio=0.05", False), ("powersgd:rank=2", True)):
        model = large_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        how = hvdcomp.Compression.from_spec(spec, grad_scaler=None if given_to_register else scaler)
        distributed, optimizer, _ = distribute(model)
        hvdcomp.ddp.register(distributed, how, optimizer, scaler if given_to_register else None)
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
        assert scaler.get_scale() == how.state_dict()["own"]["loss_scale"] == 512.0
        assert_same_everywhere(model)


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
            assert_same_everywhere(model)
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
    assert_same_everywhere(model)
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
        told = told.replace(", or another version of hvdcomp saved it", "")
        assert "not a state of hvdcomp.Compression (None)" in told


def case_a_distributed_checkpoint_has_what_each_rank_has_left_to_send() -> None:
    folder = gathered(mkdtemp())[0]
    first = large_model()
    distributed, optimizer, how = distribute(first, "topk:ratio=0.05", momentum=0)
    train(distributed, optimizer, steps=4)
    assert how is not None
    state = how.state_dict()
    dcp.save({"model": first.state_dict(), "sent": {"by": hvdcomp.dcp.by_rank(how)}}, checkpoint_id=folder)

    rest = large_model()
    dcp.load({"model": rest.state_dict()}, checkpoint_id=folder)
    goes_on = hvdcomp.Compression.from_spec("topk:ratio=0.05")
    again, optimizer_again, _ = distribute(rest, goes_on, momentum=0)
    hvdcomp.dcp.load(goes_on, folder, "sent.by")
    assert goes_on.state_dict()["own"]["rank"] == dist.get_rank()
    for name, kept in goes_on.state_dict()["own"]["residuals"].items():
        assert torch.equal(kept["arrays"][0], state["own"]["residuals"][name]["arrays"][0])
    train(distributed, optimizer, steps=3)
    train(again, optimizer_again, steps=3)
    torch.testing.assert_close(weights(rest), weights(first), rtol=1e-4, atol=1e-6)
    if dist.get_world_size() == 2:
        assert torch.equal(weights(rest), weights(first))
    for key in ("compression", "model"):
        fresh = hvdcomp.Compression.from_spec("topk:ratio=0.05")
        message = raised(hvdcomp.ConfigurationError, lambda key=key, fresh=fresh: hvdcomp.dcp.load(fresh, folder, key))
        assert "hvdcomp.dcp.by_rank" in message


def case_a_distributed_checkpoint_of_other_ranks() -> None:
    """Saved by one rank more than there are, as far as `torch.distributed.checkpoint` can tell."""
    folder = gathered(mkdtemp())[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    distributed, optimizer, how = distribute(large_model(), "topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    assert how is not None
    states = gathered(how.state_dict())
    saves = range(rank, ranks + 1, ranks)
    mine = {f"rank{old}": packed(hvdcomp.state_for(states, old, ranks + 1)) for old in saves}
    dcp.save({"compression": mine}, checkpoint_id=folder)
    again = hvdcomp.Compression.from_spec("topk:ratio=0.05")
    distribute(large_model(), again)
    hvdcomp.dcp.load(again, Path(folder))

    def left(of: list[Any]) -> torch.Tensor:
        return sum(one["own"]["residuals"]["0.weight"]["arrays"][0] for one in of) / len(of)

    torch.testing.assert_close(left(gathered(again.state_dict())), left(states))
    grouped = {name: unpacked(data) for name, data in mine.items()}
    for one in grouped.values():
        one["own"]["size"] = 1
    dcp.save({"compression": {name: packed(one) for name, one in grouped.items()}}, checkpoint_id=f"{folder}/groups")
    message = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.dcp.load(again, f"{folder}/groups"))
    assert f"{ranks + 1} ranks, which exchanged in groups of 1" in message, message


def case_different_settings_are_named_on_every_rank() -> None:
    specs = ("topk:ratio=0.01", "topk:ratio=0.02")
    distributed, optimizer, _ = distribute(large_model(), specs[min(dist.get_rank(), 1)])
    told = raised(hvdcomp.RankMismatchError, lambda: train(distributed, optimizer, steps=1))
    assert all(word in told for word in (*specs, "rank 0")), told


def stepping_in_backward() -> torch.nn.Module:
    """A model with an optimizer in its backward pass."""
    model = large_model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.02})
    return model


def case_what_cannot_be_is_refused_on_every_rank() -> None:
    def refused(how: Any, model: Any = None, **options: Any) -> str:
        return raised(hvdcomp.ConfigurationError, lambda: distribute(model or large_model(), how, **options))

    def made(**options: Any) -> hvdcomp.Compression:
        return hvdcomp.Compression.from_spec("topk:ratio=0.05", **options)

    assert "bucket_cap_mb" in refused(made(bucket_bytes=10**6))
    assert "static_graph" in refused(made(overlap=True), find_unused_parameters=True)
    assert "process_group" in refused(made(process_set=object()))
    assert "lacks 0.weight" in refused(made(named_parameters=list(large_model()[0].named_parameters())))
    assert "find_unused_parameters=True" in refused(
        made(), skip_all_reduce_unused_params=True, find_unused_parameters=True
    )
    assert "optimizer.step()" in refused(made(), stepping_in_backward())
    assert "complex64" in refused(made(), torch.nn.Linear(64, 40, dtype=torch.complex64))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert "ddp_optimizer" in refused(made())
    hooked = DistributedDataParallel(large_model())
    hooked.register_comm_hook(None, fp16_compress_hook)
    message = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.ddp.register(hooked, made()))
    assert "accepts only one communication hook" in message
    used = made()
    distribute(large_model(), used)
    assert "a separate Compression for each model" in refused(used)
    for wrong in (torch.nn.Linear(2, 2), "model"):
        message = raised(hvdcomp.ConfigurationError, lambda wrong=wrong: hvdcomp.ddp.register(wrong, made()))
        assert type(wrong).__name__ in message
    distributed = DistributedDataParallel(large_model())
    message = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.ddp.register(distributed, "topk:ratio=0.05"))
    assert "from_spec" in message
    message = raised(
        hvdcomp.ConfigurationError,
        lambda: hvdcomp.ddp.register(distributed, made(), distributed),  # as the optimizer
    )
    assert "DistributedDataParallel as optimizer, which is not an optimizer" in message, message
    message = raised(hvdcomp.ConfigurationError, lambda: hvdcomp.ddp.register(distributed, made(), grad_scaler=1024.0))
    assert "grad_scaler=1024.0 is not a loss scaler" in message, message
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
    wrong, right = (json.dumps({pattern: "topk:ratio=0.05", "*": "none"}) for pattern in ("blocks.2.*", "2.*"))
    how = hvdcomp.Compression.from_spec(wrong if last else right)
    assert "'blocks.2.*'" in raised(hvdcomp.RankMismatchError, register_and_train)


def case_a_pattern_that_matches_no_tensor() -> None:
    for spec in ('{"blocks.2.*": "topk:ratio=0.05", "*": "none"}', 'two_level({"blocks.2.*": "topk:ratio=0.05"})'):
        told = raised(hvdcomp.SpecError, lambda spec=spec: distribute(large_model(), spec))
        wanted = "none of the 8 tensors has a name that matches 'blocks.2.*' (the nearest names are '2.bias', '2.weig"
        assert wanted in told, told
    model = large_model()
    model[2].requires_grad_(False)
    distributed, optimizer, how = distribute(model, '{"2.*": "topk:ratio=0.05", "*": "none"}')  # a layer that is frozen
    train(distributed, optimizer, steps=1)
    assert how is not None
    assert not how.levels


def case_a_rank_that_makes_no_more_steps_is_noticed() -> None:
    """By the others' next step, while that rank is in a collective of its own."""
    distributed, optimizer, _ = distribute(large_model(), "topk:ratio=0.05")
    train(distributed, optimizer, steps=5)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, dtype=torch.int64))
    else:
        with pytest.raises(hvdcomp.ConfigurationError, match=r"this step: the other ranks took part in a different"):
            train(distributed, optimizer, steps=1)


def case_join_is_refused() -> None:
    distributed, optimizer, how = distribute(large_model(), "topk:ratio=0.05")

    def train_joined() -> None:
        with distributed.join():
            train(distributed, optimizer, steps=2)

    assert "same number of batches" in raised(hvdcomp.ConfigurationError, train_joined)
    assert how is not None
    message = raised(hvdcomp.ConfigurationError, lambda: how._binding.check_presence(0))
    assert "only 0 of" in message
    assert "hvd" not in message


def frozen_at_first(how: str, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model in DDP, whose first layer was frozen when that was made."""
    model = large_model()
    model[0].requires_grad_(False)
    return distribute(model, how, **options)


def case_what_is_unfrozen_or_added_later_is_refused() -> None:
    for how in ("topk:ratio=0.05", "none"):
        distributed, optimizer, _ = frozen_at_first(how)
        train(distributed, optimizer, steps=2)
        distributed.module[0].requires_grad_(True)
        message = raised(hvdcomp.ConfigurationError, lambda model=distributed, by=optimizer: train(model, by, steps=1))
        words = ("0.weight, 0.bias", "would become different", "find_unused_parameters")
        assert all(word in message for word in words), message

    model = large_model()
    distributed = DistributedDataParallel(model)
    hvdcomp.ddp.register(distributed, hvdcomp.Compression.from_spec("topk:ratio=0.05"))  # without its optimizer
    optimizer = torch.optim.SGD(distributed.parameters(), lr=0.02)
    train(distributed, optimizer, steps=2)
    model.append(torch.nn.Linear(40, 40))
    optimizer.add_param_group({"params": model[-1].parameters()})
    message = raised(hvdcomp.ConfigurationError, lambda: train(distributed, optimizer, steps=1))
    assert "7.weight, 7.bias" in message, message


def case_a_group_added_later_is_refused() -> None:
    """Of parameters outside of the model, too; those of another model that hvdcomp serves are averaged."""
    distributed, optimizer, _ = distribute(large_model(), "topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    other, _, _ = distribute(small_model(), "topk:ratio=0.05")
    optimizer.add_param_group({"params": other.parameters()})
    train(distributed, optimizer, steps=2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    message = raised(hvdcomp.ConfigurationError, lambda: train(distributed, optimizer, steps=1))
    assert "a parameter of shape (3,)" in message, message


def case_what_ddp_was_told_to_ignore_is_left_alone() -> None:
    model = large_model()
    model[0].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    distributed, optimizer, how = distribute(model, "topk:ratio=0.05")
    model[0].requires_grad_(True)
    train(distributed, optimizer, steps=2)
    assert how is not None
    assert how.ledger.steps == 2
    assert_same_everywhere(model[2:])


def case_what_ddp_ignores_may_step_in_the_backward_pass() -> None:
    """As torchrec's tables do."""
    model = large_model()
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.02})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    before = model[0].weight.clone()
    distributed, optimizer, _ = distribute(model, "topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    assert not torch.equal(model[0].weight, before)
    assert_same_everywhere(model[2:])


def case_only_what_was_unfrozen_later_is_refused() -> None:
    """DDP hands over no gradient then, and says nothing."""
    distributed, optimizer, _ = frozen_at_first("topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    distributed.requires_grad_(False)
    distributed.module[0].requires_grad_(True)
    message = raised(hvdcomp.ConfigurationError, lambda: train(distributed, optimizer, steps=1))
    assert "0.weight, 0.bias" in message, message


def case_a_layer_unfrozen_on_one_rank_is_refused_on_all() -> None:
    distributed, optimizer, _ = frozen_at_first("topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    distributed.module[0].requires_grad_(dist.get_rank() == 0)
    message = raised(hvdcomp.RankMismatchError, lambda: train(distributed, optimizer, steps=1))
    assert "rank 0: DistributedDataParallel does not average the gradients of 0.weight, 0.bias" in message, message


def case_an_unfrozen_model_goes_on_in_a_new_ddp() -> None:
    """As the message says, with the same optimizer."""
    distributed, optimizer, how = frozen_at_first("topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    model = distributed.module
    del distributed, how
    gc.collect()
    model[0].requires_grad_(True)
    again = DistributedDataParallel(model, bucket_cap_mb=1.5)
    hvdcomp.ddp.register(again, hvdcomp.Compression.from_spec("topk:ratio=0.05"), optimizer)
    start = weights(model)
    train(again, optimizer, steps=3)
    assert_same_everywhere(model)
    assert not torch.equal(start[:1000], weights(model)[:1000])


def case_a_copy_is_averaged_without_the_hook() -> None:
    """As copies are with any hook; and takes one of its own."""
    for options in ({}, {"find_unused_parameters": True}):
        distributed, optimizer, _ = distribute(large_model(), "topk:ratio=0.05", **options)
        train(distributed, optimizer, steps=2)
        file = io.BytesIO()
        torch.save(distributed, file)
        file.seek(0)
        averaged = torch.optim.swa_utils.AveragedModel(distributed)
        copies = [copy.deepcopy(distributed), torch.load(file, weights_only=False), averaged.module]
        results = []
        for one in (DistributedDataParallel(copy.deepcopy(distributed.module)), *copies):
            train(one, torch.optim.SGD(one.parameters(), lr=0.02), steps=2)
            results.append(weights(one))
        # Sums of more than two ranks depend on where an element lies in its bucket, and a copy has buckets of its own.
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)

        again = hvdcomp.Compression.from_spec("topk:ratio=0.05")
        hvdcomp.ddp.register(copies[0], again)
        for one in (distributed, copies[0]):
            train(one, torch.optim.SGD(one.parameters(), lr=0.02), steps=2)
            assert_same_everywhere(one)
        assert again.ledger.steps == 2


class Gated(torch.nn.Module):
    """A branch behind a factor that starts at zero, as in LoRA: the first gradients of its weights are zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branch, self.out = torch.nn.Linear(64, 64), torch.nn.Linear(64, 40)
        self.factor = torch.nn.Parameter(torch.zeros(64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(inputs + self.factor * self.branch(inputs))


def case_zeros_are_no_sign_of_a_parameter_that_is_not_used() -> None:
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        for spec in ("topk:ratio=0.05", "none"):
            model = Gated()
            distributed, optimizer, how = distribute(model, spec, **options)
            train(distributed, optimizer, steps=1)
            assert how is not None
            assert set(how.ledger.last.tensors) == set(dict(model.named_parameters())), (options, spec)
            train(distributed, optimizer, steps=3)
            assert_same_everywhere(model)


def case_fp16_is_divided_after_the_sum() -> None:
    """As by Horovod: divided before, what is small loses bits on every rank."""
    model = large_model()
    plain = copy.deepcopy(model)
    inputs, classes = batch(own_generator())
    distributed, _, _ = distribute(model, "fp16")
    for one in (plain, distributed):
        (torch.nn.functional.cross_entropy(one(inputs), classes) / 1000).backward()
    ranks = dist.get_world_size()
    errors = torch.zeros(2, dtype=torch.float64)
    for given, got in zip(plain.parameters(), model.parameters(), strict=True):
        everyone = [torch.empty_like(given.grad) for _ in range(ranks)]
        dist.all_gather(everyone, given.grad)
        if ranks <= 2:  # sums over more ranks have an order
            total = sum(one.half() for one in everyone)
            assert torch.equal(got.grad, (total * (1 / ranks)).float())
        exact = sum(one.double() for one in everyone) / ranks
        before = sum((one / ranks).half() for one in everyone)
        errors += torch.stack([(mean.double() - exact).abs().sum() for mean in (got.grad, before)])
    assert ranks <= 2 or errors[0] < 0.9 * errors[1], errors


def case_a_model_that_is_dropped_is_freed() -> None:
    model = large_model()
    distributed, optimizer, how = distribute(model, "topk:ratio=0.05")
    train(distributed, optimizer, steps=2)
    gone = weakref.ref(model)
    del model, distributed, optimizer, how
    gc.collect()
    assert gone() is None


# Names.


def case_wrappers_change_neither_routing_nor_weights_nor_checkpoints() -> None:
    spec = '{"4.weight": "topk:ratio=0.05", "[26].*": "randomk:ratio=0.1", "*": "none"}'  # randomk chooses by name
    state: dict[str, Any] = {}

    def trained(wrap: Callable[[Any], Any], wrap_again: Callable[[Any], Any] = WRAPPERS["nothing"]) -> torch.Tensor:
        nonlocal state
        how = hvdcomp.Compression.from_spec(spec)
        how.load_state_dict(state)
        model = wrap(large_model())
        distributed = wrap_again(DistributedDataParallel(model, bucket_cap_mb=1.5))
        optimizer = torch.optim.SGD(distributed.parameters(), lr=0.02)
        hvdcomp.ddp.register(distributed, how, optimizer)
        train(distributed, optimizer, steps=2)
        assert set(how.levels) == {"2.weight", "4.weight", "6.weight"}, how.levels
        state = state or how.state_dict()
        return weights(model)

    trained(WRAPPERS["nothing"])
    expected = trained(WRAPPERS["nothing"])
    for way, wrap in WRAPPERS.items():
        assert torch.equal(trained(wrap), expected), way
    assert torch.equal(trained(WRAPPERS["nothing"], WRAPPERS["torch.compile"]), expected)


def case_muon_keeps_weights_identical() -> None:
    if not hasattr(torch.optim, "Muon"):
        raise SkipTest("this PyTorch has no Muon")
    torch.manual_seed(7)
    # In two of DDP's buckets. No matrix is large on both sides, because Muon is slow without bfloat16 instructions.
    sizes = ((64, 96), (96, 64), (64, 5000), (5000, 40))
    start = torch.nn.Sequential(*(layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.ReLU())))
    for spec in ("none", "powersgd:rank=2"):
        model = copy.deepcopy(start)
        distributed = DistributedDataParallel(model, bucket_cap_mb=1)
        optimizer = MuonWithAdamW(distributed, 1e-3)
        assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight", "4.weight"]
        ours = hvdcomp.Compression.from_spec(spec)
        hvdcomp.ddp.register(distributed, ours, optimizer)
        train(distributed, optimizer, steps=4)
        assert_same_everywhere(model)
        assert not torch.equal(weights(model), weights(start))
        assert ours.ledger.steps == 4


def case_local_steps_end_with_equal_weights() -> None:
    for how in ("efsignsgd", "none"):
        model = large_model()
        distributed = DistributedDataParallel(model, bucket_cap_mb=1.5)
        optimizer = CompressedAdam(model.parameters(), 1e-5, freeze_after=4, warm_up="int8", local_steps=4)
        ours = hvdcomp.Compression.from_spec(how)
        hvdcomp.ddp.register(distributed, ours, optimizer)
        train(distributed, optimizer, steps=10)
        assert not optimizer.in_sync
        assert len({tuple(one[:8].tolist()) for one in gathered(weights(model))}) == dist.get_world_size()
        train(distributed, optimizer, steps=2)
        assert optimizer.in_sync
        assert_same_everywhere(model)
        assert ours.ledger.steps == 12
        plain = ours.ledger.last
        train(distributed, optimizer, steps=1)
        assert (ours.ledger.last.bytes_sent, ours.ledger.last.dense_bytes) == (0, plain.dense_bytes), how


def case_refreshes_are_of_all_ranks_and_uncompressed() -> None:
    model = large_model()
    distributed = DistributedDataParallel(model, bucket_cap_mb=1.5)
    optimizer = CompressedAdam(model.parameters(), 1e-5, freeze_after=3, warm_up="int8", refreshes_per_gap=2)
    ours = hvdcomp.Compression.from_spec("efsignsgd")
    hvdcomp.ddp.register(distributed, ours, optimizer)
    train(distributed, optimizer, steps=4)
    for due in (True, False, True):  # steps 4, 5 and 6, from 0
        assert optimizer.refreshes == due
        train(distributed, optimizer, steps=1)
        assert (ours.ledger.last.bytes_sent >= ours.ledger.last.dense_bytes) == due
    assert_same_everywhere(model)
    moments = [state["exp_avg_sq"].reshape(-1).double() for state in optimizer.state.values()]
    assert_same_everywhere(1 / torch.cat(moments))  # of what is unused, a moment is infinite


def case_local_steps_are_of_all_that_the_model_trains() -> None:
    def register(parameters: Callable[[Any], Any], **options: Any) -> str:
        model = large_model()
        distributed = DistributedDataParallel(model, **options)
        optimizer = CompressedAdam(parameters(model), freeze_after=4, local_steps=4)
        how = hvdcomp.Compression.from_spec("efsignsgd")
        return raised(hvdcomp.ConfigurationError, lambda: hvdcomp.ddp.register(distributed, how, optimizer))

    assert "does not train 0.weight, 0.bias" in register(lambda m: m[2:].parameters())
    assert "find_unused_parameters=True" in register(lambda m: m.parameters(), find_unused_parameters=True)


def case_momenta_stay_out_of_gradients_that_no_rank_has() -> None:
    """Which DistributedDataParallel leaves as they are, in the storage of its buckets."""
    model = Branches()
    distributed = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = CompressedAdam(model.parameters(), 1e-3, freeze_after=2)
    hvdcomp.ddp.register(distributed, hvdcomp.Compression.from_spec("efsignsgd", min_numel=1), optimizer)
    for step in range(6):
        inputs, classes = batch(own_generator())
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.cross_entropy(distributed(inputs, "lr" if step < 4 else "l"), classes).backward()
        if step >= 4:
            assert not model.right.weight.grad.any()
        optimizer.step()
    assert optimizer.frozen
    assert_same_everywhere(model)


def case_a_backward_pass_inside_of_autocast() -> None:
    for spec in ("atomo:rank=2", "powersgd:rank=2"):
        results = []
        for inside in (False, True):
            model = large_model()
            distributed, optimizer, _ = distribute(model, spec)
            for _ in range(3):
                inputs, classes = batch(own_generator())
                optimizer.zero_grad()
                loss = plain_loss(distributed, inputs, classes, 0)
                with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                    loss.backward()
                optimizer.step()
            assert_same_everywhere(model)
            results.append(weights(model))
        torch.testing.assert_close(*results, rtol=0.02, atol=0.02)  # PyTorch's own part of the pass has 16 bits


def case_roll_back_is_refused_with_the_way_out() -> None:
    model = large_model()
    distributed, optimizer, how = distribute(model, "topk:ratio=0.05")
    assert how is not None
    train(distributed, optimizer, steps=1)
    how.roll_back(how.state_dict())
    message = raised(hvdcomp.ConfigurationError, lambda: train(distributed, optimizer, steps=1))
    assert "Restart all ranks" in message


def case_a_state_that_does_not_fit_one_rank_is_refused_on_all() -> None:
    model = large_model()
    distributed, optimizer, how = distribute(model, "topk:ratio=0.05")
    assert how is not None
    train(distributed, optimizer, steps=1)
    state = how.state_dict()
    other = hvdcomp.Compression.from_spec("topk:ratio=0.05" if dist.get_rank() == 0 else "topk:ratio=0.1")
    other.load_state_dict(state)
    again = DistributedDataParallel(model, bucket_cap_mb=1.5)

    def register_and_train() -> None:
        hvdcomp.ddp.register(again, other, optimizer)
        train(again, optimizer, steps=1)

    assert "written with compressor topk:ratio=0.05" in raised(hvdcomp.RankMismatchError, register_and_train)


def case_an_error_of_a_policy_reaches_all_ranks() -> None:
    with mock.patch.object(hvdcomp.Accordion, "update", side_effect=ArithmeticError("a bug")):
        how = hvdcomp.Compression.from_spec("powersgd:rank=2", policy="accordion:low=2,high=1,steps=2")
        distributed, optimizer, _ = distribute(large_model(), how)
        message = raised(hvdcomp.ConfigurationError, lambda: train(distributed, optimizer, steps=6))
    assert "the policy accordion" in message
    assert "failed on rank 0: ArithmeticError('a bug')" in message


def case_mistakes_in_own_compressors_are_named_on_every_rank() -> None:
    for kind in (*BEFORE_STEPS, *IN_STEPS):
        said = "nothing"
        try:
            model = DistributedDataParallel(torch.nn.Linear(6, 4, bias=False))
            hvdcomp.ddp.register(model, hvdcomp.Compression(kind(), min_numel=0))
            model(torch.randn(3, 6)).sum().backward()
        except (hvdcomp.ConfigurationError, hvdcomp.RankMismatchError) as error:
            said = str(error)
        assert kind.says in said, (kind, said)
        assert "mine, tensor 'weight' of shape [4, 6]: " in said
