"""Overlap with the backward pass through stock horovod.torch: buckets start in its hooks, and nothing else changes."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvdcomp
from hvdcomp import TwoLevel
from hvdcomp.compressors.bucket import LEAST_BYTES
from tests.multirank.calibrations import made_up_calibration
from tests.multirank.collectives import nodes_of
from tests.multirank.training import assert_same_everywhere, batch, compression, own_generator, raised, small_model
from tests.multirank.worker import thorough

BYTES = 20_000  # less than the larger linear layer, which has gradients before the convolution has
GATHERED = ("topk:ratio=0.05", "qsgd:bits=4", "efsignsgd", "dgc:ratio=0.05")
OTHERS = ("powersgd:rank=2", "randomk:ratio=0.1")
SCATTERED = "qsgd:bits=8,exchange=scatter"  # who owns an element, and rounds it again, depends on its bucket

Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, int], torch.Tensor]
Before = Callable[[hvdcomp.Compression, int], None]


def plain_loss(model: torch.nn.Module, inputs: torch.Tensor, classes: torch.Tensor, step: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(inputs), classes)


def loss_without_last_layer(model: Any, inputs: torch.Tensor, classes: torch.Tensor, step: int) -> torch.Tensor:
    """In some steps the last layer has no gradient, on this rank or on all: Horovod then takes zeros."""
    if step in (3, 6) or (step == 5 and hvd.rank() == 0):
        return model[:-1](inputs).square().mean()
    return plain_loss(model, inputs, classes, step)


def change_nothing(how: hvdcomp.Compression, step: int) -> None:
    pass


def lower_level(how: hvdcomp.Compression, step: int) -> None:
    how.set_level(0.05 if step < 4 else 0.01)


def wait_for_answers(model: torch.nn.Module, how: hvdcomp.Compression) -> None:
    """Lets the backward pass wait, before its last gradients, for the ranks' answers whether they make the step: else
    it is a matter of speed whether a bucket starts in the pass of a model so small."""

    def wait(*_: Any) -> None:
        while how._binding is not None and how._binding._presence_check._started is not None:
            how._binding._presence_check.agrees()

    model[1].register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)


def optimizer_of(
    model: torch.nn.Module, how: hvdcomp.Compression, momentum: float = 0.0, passes: int = 1, **distributed: Any
) -> Any:
    wait_for_answers(model, how)
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum), named_parameters=model.named_parameters(),
        compression=how, backward_passes_per_step=passes, **distributed,
    )  # fmt: skip


def trained(
    spec: str,
    overlap: bool,
    *,
    loss_of: Loss = plain_loss,
    steps: int = 8,
    passes: int = 1,
    before: Before = change_nothing,
    distributed: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, list[int]]:
    """The weights after some steps, and how many buckets had started in each when its backward pass was over."""
    model = small_model()
    how = compression(spec, model, overlap=overlap, bucket_bytes=BYTES, **options)
    momentum = 0 if spec.startswith("dgc") else 0.9  # which has its own
    optimizer = optimizer_of(model, how, momentum, passes, **(distributed or {}))
    generator, started = own_generator(), []
    for step in range(steps):
        before(how, step)
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(model, *batch(generator), step).backward()
        started.append(len(how._binding.engine.overlap.started))
        optimizer.step()
    vector = torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])
    assert_same_everywhere(torch.nan_to_num(vector))
    return vector, started


def compare(spec: str, **options: Any) -> list[int]:
    """Trains with and without overlap; how many buckets started early."""
    with_overlap, started = trained(spec, True, **options)
    without, none = trained(spec, False, **options)
    assert not any(none)
    if spec in GATHERED or hvd.size() == 2:
        assert torch.equal(with_overlap, without), (spec, options)
    else:  # sums over more ranks are made in an order that depends on what travels together
        torch.testing.assert_close(with_overlap, without, rtol=1e-4, atol=1e-6)
    return started


def case_every_kind_of_method_starts_in_the_backward_pass() -> None:
    for spec in (*GATHERED[::2], *OTHERS):
        assert compare(spec) == [0, 0, *[1] * 6], spec
    assert trained(SCATTERED, True)[1] == [0, 0, *[1] * 6]


@thorough
def case_the_other_gathered_methods_do_so_too() -> None:
    for spec in GATHERED[1::2]:
        assert compare(spec) == [0, 0, *[1] * 6], spec


@thorough
def case_two_levels_start_in_the_backward_pass() -> None:
    """On two nodes of half the ranks each, also with missing gradients and changes of level.

    Which ranks work on a tensor depends on its bucket, so the weights are compared to those of the same buckets that
    start at the end.
    """

    def compare_to_late_start(spec: str, before: Before = change_nothing, **options: Any) -> list[int]:
        def start_none(how: hvdcomp.Compression, step: int) -> None:
            before(how, step)
            if how._binding is not None:
                how._binding.engine.expect = lambda *_: None

        early, started = trained(spec, True, before=before, **options)
        late, none = trained(spec, True, before=start_none, **options)
        assert not any(none), spec
        different = (early != late).nonzero().flatten().tolist()
        assert not different, f"{spec}: {len(different)} of {len(early)} elements differ, such as {different[:8]}"
        return started

    with nodes_of(max(1, hvd.size() // 2)):
        for spec in TwoLevel.examples:
            assert compare_to_late_start(spec) == [0, 0, *[1] * 6], spec
        some = "two_level(topk:ratio=0.05)"
        assert compare_to_late_start(some, loss_of=loss_without_last_layer)[7] == 1
        assert compare_to_late_start(some, before=lower_level) == [0, 0, 1, 1, 0, 1, 1, 1]


def case_missing_gradients_wait_for_the_end() -> None:
    started = compare("topk:ratio=0.05", loss_of=loss_without_last_layer)
    assert [number for step, number in enumerate(started) if step in (3, 6)] == [0, 0]
    assert started[5] == (hvd.rank() != 0)
    assert started[7] == 1


def case_several_passes_groups_and_sums() -> None:
    for options in ({"passes": 2}, {"distributed": {"groups": 2}}, {"distributed": {"op": hvd.Sum}}):
        assert any(compare("topk:ratio=0.05", steps=4, **options)), options


@thorough
def case_levels_change_and_policies_look() -> None:
    assert compare("topk:ratio=0.1", before=lower_level) == [0, 0, 1, 1, 0, 1, 1, 1]
    for policy in ("accordion:low=0.2,high=0.02,interval=1", "gravac:min=2,max=64,window=3"):
        compare("topk:ratio=0.1", policy=policy, steps_per_epoch=2)


def case_a_step_that_does_not_count_changes_nothing() -> None:
    def loss_of(model: Any, inputs: torch.Tensor, classes: torch.Tensor, step: int) -> torch.Tensor:
        loss = plain_loss(model, inputs, classes, step)
        return loss * float("nan") if step == 4 and hvd.rank() == 1 else loss

    def check(spec: str) -> None:
        model = small_model()
        how = compression(spec, model, overlap=True, bucket_bytes=BYTES)
        optimizer = optimizer_of(model, how)
        generator = own_generator()
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, *batch(generator), step).backward()
            kept = [bytes(str(how._binding.engine.states[name].memory), "utf8") for name in how._binding.engine.states]
            optimizer.synchronize()
            finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
            assert finite == (step != 4)
            after = [bytes(str(how._binding.engine.states[name].memory), "utf8") for name in how._binding.engine.states]
            assert (kept == after) == (step == 4)
            if finite:
                with optimizer.skip_synchronize():
                    optimizer.step()
        assert_same_everywhere(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))

    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        check(spec)
    with nodes_of(max(1, hvd.size() // 2)):
        check("two_level(topk:ratio=0.05)")


def case_ranks_that_differ_or_join_are_told_and_the_next_training_is_not_disturbed() -> None:
    """One rank has another level; then it makes no step at all. The others then start nothing in their hooks."""
    for joins in (False, True):
        model = small_model()
        how = compression("topk:ratio=0.05", model, overlap=True, bucket_bytes=BYTES)
        optimizer, generator = optimizer_of(model, how), own_generator()
        for step in range(5):
            alone = step == 4 and hvd.rank() == 0
            if alone and joins:
                break
            how.set_level(0.01 if alone else 0.05)
            optimizer.zero_grad()
            plain_loss(model, *batch(generator), 0).backward()
            assert bool(how._binding.engine.overlap.started) == (step in (2, 3))
            if step < 4:
                optimizer.step()
        else:
            said = ""
            try:
                optimizer.step()
            except (hvdcomp.ConfigurationError, hvdcomp.RankMismatchError) as error:
                said = str(error)
            assert ("hvd.join()" if joins else "levels") in said
        if joins:
            hvd.join()
        del model, how, optimizer
        gc.collect()  # with Horovod's hooks
    trained("topk:ratio=0.05", True)


def case_two_trainings_may_be_under_way_at_once() -> None:
    """As of a generator and a discriminator: both backward passes come before both steps."""

    def trained_together(overlap: bool) -> list[torch.Tensor]:
        trainings = []
        for name in ("one", "other"):
            model = small_model()
            named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
            how = hvdcomp.Compression.from_spec(
                "topk:ratio=0.05", named_parameters=named, overlap=overlap, bucket_bytes=BYTES
            )
            plain = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=how)
            wait_for_answers(model, how)
            trainings.append((model, how, optimizer))
        generator = own_generator()
        for step in range(5):
            for model, _, optimizer in trainings:
                optimizer.zero_grad()
                plain_loss(model, *batch(generator), step).backward()
            started = [len(how._binding.engine.overlap.started) for _, how, _ in trainings]
            assert started == ([1, 1] if overlap and step > 1 else [0, 0])
            for _, _, optimizer in trainings:
                optimizer.step()
        return [torch.cat([one.detach().reshape(-1) for one in model.parameters()]) for model, _, _ in trainings]

    for found, expected in zip(trained_together(True), trained_together(False), strict=True):
        assert_same_everywhere(found)
        assert torch.equal(found, expected)


@thorough
def case_rank_0s_calibration_says_how_much_is_sent_by_itself() -> None:
    """Only rank 0 has the file. The model is so small that nothing would start early by default."""
    torch.manual_seed(0)
    widths = (64, 512, 512, 512, 10)
    model = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(widths)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        if hvd.rank() == 0:
            shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
            known = made_up_calibration("topk:ratio=0.05", shapes)
            for cost in known["network"].values():
                cost["bytes_per_s"] = 1e5
            known["models"]["small"]["ready"] = [[0.5, 0.1], [1, 1]]
            file.write_text(json.dumps(known))
        policy = f"auto:calibration={hvd.broadcast_object(str(file))}"
        how = compression("topk:ratio=0.05", model, policy=policy)
        optimizer = optimizer_of(model, how)
        generator, started = torch.Generator().manual_seed(hvd.rank()), []
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            started.append(len(how._binding.engine.overlap.started))
            optimizer.step()
    assert how._binding.engine.overlap.least_bytes == LEAST_BYTES
    assert started == [0, 0, 2, 2, 2, 2], started
    assert_same_everywhere(torch.cat([one.detach().reshape(-1).double() for one in model.parameters()]))


def case_settings_of_overlap_are_compared() -> None:
    model = small_model()
    how = compression("topk:ratio=0.05", model, bucket_bytes=BYTES + hvd.rank())
    optimizer = optimizer_of(model, how)
    message = raised(hvdcomp.RankMismatchError, lambda: plain_loss(model, *batch(own_generator()), 0).backward())
    assert "bucket_bytes" in message
    del optimizer
