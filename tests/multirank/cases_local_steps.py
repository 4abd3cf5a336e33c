"""Steps of each rank alone between two exchanges, over torch.distributed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.torch import LocalSteps
from tests.multirank.models import batch, small_model, weights
from tests.multirank.training_ddp import assert_same_everywhere, gathered, own_generator, plain_loss, raised
from tests.readme import block_with, run

PAGE = Path(__file__).parents[2] / "docs" / "local-steps.md"
EVERY = 3


def made(spec: str = "topk:ratio=0.05", seed: int = 7, **options: Any) -> tuple[torch.nn.Module, LocalSteps, Any]:
    """A model, AdamW in LocalSteps, and a schedule."""
    model = small_model()
    with torch.no_grad():
        model[5].bias += seed - 7
    compression = hvdcomp.Compression.from_spec(spec, named_parameters=model.named_parameters())
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = LocalSteps(inner, **{"every": EVERY, **options}, compression=compression)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)


def train(model: Any, optimizer: LocalSteps, scheduler: Any, generator: torch.Generator, steps: int = 1) -> None:
    for step in range(steps):
        inputs, classes = batch(generator)
        optimizer.zero_grad()
        plain_loss(model, inputs, classes, step).backward()
        optimizer.step()
        scheduler.step()


def differ(model: Any) -> bool:
    return len({vector.numpy().tobytes() for vector in gathered(weights(model))}) > 1


def case_weights_are_the_same_after_each_exchange_and_differ_in_between() -> None:
    signs = "efsignsgd:exchange=scatter", "chunkedtopk:chunk=8,k=1,values=sign"
    for spec in ("none", "fp16", "topk:ratio=0.05", "powersgd:rank=2", "int4", *signs):
        model, optimizer, scheduler = made(spec)
        start, generator = weights(model), own_generator()
        for step in range(1, 10):
            train(model, optimizer, scheduler, generator)
            assert optimizer.in_sync == (step % EVERY == 0)
            assert differ(model) == (not optimizer.in_sync), (spec, step)
        train(model, optimizer, scheduler, generator)
        optimizer.exchange()
        assert_same_everywhere(model)
        assert not torch.equal(start, weights(model)), spec
        ledger = optimizer.compression.ledger
        assert ledger.steps == 11, spec
        if spec != "none":
            assert 0 < ledger.totals.bytes_sent < ledger.totals.dense_bytes / EVERY, spec


def case_one_step_averaged_is_the_mean_of_the_weights() -> None:
    model, optimizer, scheduler = made("none", every=1, outer_lr=1, outer_momentum=0)
    train(model, optimizer, scheduler, own_generator())
    alone = small_model()
    inner = torch.optim.AdamW(alone.parameters(), lr=2e-3)
    inputs, classes = batch(own_generator())
    plain_loss(alone, inputs, classes, 0).backward()
    inner.step()
    mean = torch.stack(gathered(weights(alone))).mean(0)
    torch.testing.assert_close(weights(model), mean, rtol=1e-5, atol=1e-7)


def case_it_goes_on_bit_for_bit_between_two_exchanges() -> None:
    results = []
    for stop in (None, 4):
        parts, generator = made(), own_generator()
        if stop is not None:
            train(*parts, generator, stop)
            states = copy.deepcopy([one.state_dict() for one in parts])
            parts = made()
            for one, state in zip(parts, states, strict=True):
                one.load_state_dict(state)
            assert differ(parts[0])
        train(*parts, generator, 12 - (stop or 0))
        assert_same_everywhere(parts[0])
        results.append(weights(parts[0]))
    assert torch.equal(*results)


def case_rounds_are_as_rank_0_decides_and_go_on_bit_for_bit() -> None:
    """By the drift alone, since the times of the ranks are others in each run."""
    results = []
    for stop in (None, 21):
        rule = "auto:start=2,share=1e-9"
        parts, generator, seen = made(every=rule), own_generator(), []
        if stop is not None:
            train(*parts, generator, stop)
            states = copy.deepcopy([one.state_dict() for one in parts])
            parts = made(every=rule)
            for one, state in zip(parts, states, strict=True):
                one.load_state_dict(state)
            assert not parts[1].in_sync
        for _ in range(stop or 0, 40):
            train(*parts, generator)
            seen.append(parts[1].every)
            assert differ(parts[0]) == (not parts[1].in_sync)
        assert_same_everywhere(torch.tensor(seen, dtype=torch.float32))
        results.append((weights(parts[0]), seen))
    (whole, lengths), (resumed, lengths_after) = results
    assert torch.equal(whole, resumed)
    assert lengths[21:] == lengths_after
    assert len(set(lengths)) > 2, lengths


def case_rounds_are_short_where_the_exchange_takes_little_time() -> None:
    model, optimizer, scheduler = made(every="auto:start=4,share=0.999")
    train(model, optimizer, scheduler, own_generator(), 30)
    assert optimizer.every == 1
    assert_same_everywhere(model)


def case_a_node_averages_in_each_step_and_steps_alone_among_nodes() -> None:
    """Two nodes of two: DistributedDataParallel in the node, LocalSteps across, as the page says."""
    if dist.get_world_size() != 4:
        raise SkipTest("needs 4 ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "in_node"))
    across, within = mesh["nodes"].get_group(), mesh["in_node"].get_group()
    model, optimizer, _ = made("efsignsgd", communicator=TorchDistributedCommunicator(across))
    stated, its_optimizer, _ = made("efsignsgd", communicator=TorchDistributedCommunicator(across))
    ddp = DistributedDataParallel(model, process_group=within)
    generator = own_generator()
    for step in range(1, 3 * EVERY + 1):
        inputs, classes = batch(generator)
        for trained, its in ((ddp, optimizer), (stated, its_optimizer)):
            its.zero_grad()
            plain_loss(trained, inputs, classes, step).backward()
            for parameter in stated.parameters() if trained is stated else ():
                dist.all_reduce(parameter.grad, group=within)
                parameter.grad /= 2
            its.step()
        assert torch.equal(weights(model), weights(stated)), step
        vectors = gathered(weights(model))
        assert torch.equal(vectors[0], vectors[1])
        assert torch.equal(vectors[2], vectors[3])
        assert torch.equal(vectors[0], vectors[2]) == optimizer.in_sync == (step % EVERY == 0)


def case_what_is_not_finite_on_one_rank_stops_all() -> None:
    model, optimizer, scheduler = made()
    generator = own_generator()
    train(model, optimizer, scheduler, generator, EVERY + 1)
    anchors = torch.cat([one.reshape(-1) for one in optimizer.state_dict()["local_steps"]["anchors"]]).clone()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[5].weight[0, 0] = torch.nan
    train(model, optimizer, scheduler, generator)  # alone: nobody learns of it
    told = raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, scheduler, generator))
    assert ("on this rank in 1." in told or "on this rank in 5." in told) == (dist.get_rank() == 1), told
    now = torch.cat([one.reshape(-1) for one in optimizer.state_dict()["local_steps"]["anchors"]])
    assert torch.equal(anchors, now)
    assert_same_everywhere(now)


def case_ranks_that_were_told_different_things_are_refused() -> None:
    rank = dist.get_rank()
    for word, options in (
        ("every", {"every": 2 + rank}),
        ("outer lr", {"outer_lr": 0.5 + rank}),
        ("the same random seed", {"seed": 7 + rank}),
        ("compressor", {"spec": f"topk:ratio=0.0{1 + rank}"}),
    ):
        told = raised(hvdcomp.RankMismatchError, lambda given=options: train(*made(**given), own_generator()))
        assert word in told, told


def case_a_group_that_one_rank_adds_before_the_first_step_is_refused_on_all() -> None:
    model, optimizer, scheduler = made()
    if dist.get_rank() == 1:
        optimizer.inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    told = raised(hvdcomp.RankMismatchError, lambda: train(model, optimizer, scheduler, own_generator()))
    assert "add all parameter groups to the inner optimizer before you pass" in told, told


def case_muon_of_its_page_steps_alone_and_goes_on_bit_for_bit() -> None:
    if not hasattr(torch.optim, "Muon"):
        raise SkipTest("this PyTorch has no Muon")
    block = block_with("MuonWithAdamW", PAGE.with_name("muon.md"))

    def made_by_the_page() -> tuple[torch.nn.Module, LocalSteps, Any]:
        model = small_model()
        optimizer = run(block, hvdcomp=hvdcomp, model=model)["optimizer"]
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    results = []
    for stop in (12, 6):
        parts, generator = made_by_the_page(), own_generator()
        for step in range(1, stop + 1):
            train(*parts, generator)
            assert parts[1].in_sync == (not differ(parts[0])) == (step % 4 == 0)
        if stop < 12:
            states = copy.deepcopy([one.state_dict() for one in parts])
            parts = made_by_the_page()
            for one, state in zip(parts, states, strict=True):
                one.load_state_dict(state)
            train(*parts, generator, 12 - stop)
        assert_same_everywhere(parts[0])
        results.append(weights(parts[0]))
    assert torch.equal(*results)
    assert not torch.equal(results[0], weights(small_model()))
    names = [name for group in parts[1].param_groups for name in group["param_names"]]
    assert names == ["5.weight", "1.weight", "1.bias", "5.bias", "7.weight", "7.bias"]
    assert parts[1].compression.state_dict()["shared"]["tensors"].keys() == set(names)


def case_compressed_steps_are_as_their_page_says() -> None:
    """In DistributedDataParallel with its all-reduce turned off, an exchange after every step, and signs of chunks."""
    if not hasattr(torch.optim, "Muon"):
        raise SkipTest("this PyTorch has no Muon")
    page = PAGE.with_name("compressed-steps.md")
    model: Any = DistributedDataParallel(small_model())
    run(block_with("noop_hook", page), model=model)
    made_by_page = run(block_with("every=4)\n", page), hvdcomp=hvdcomp, model=model.module)
    compressed = run(block_with("one_of_eight", page), hvdcomp=hvdcomp, optimizer=made_by_page["optimizer"].inner)
    for optimizer in (made_by_page["optimizer"], compressed["optimizer"]):
        generator = own_generator()
        for step in range(1, 10):
            inputs, classes = batch(generator)
            optimizer.zero_grad()
            plain_loss(model, inputs, classes, step).backward()
            optimizer.step()
            assert optimizer.in_sync == (not differ(model.module)) == (step % 4 == 0)
        optimizer.exchange()
        assert_same_everywhere(model.module)
        totals = optimizer.compression.ledger.totals
        assert 90 * totals.bytes_sent < totals.dense_bytes


def case_the_page_trains() -> None:
    program, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    variables: dict[str, Any] = {}
    # which these ranks have called, and will
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(compile(program, str(PAGE), "exec"), variables)
    assert_same_everywhere(variables["model"])
    assert variables["loss"].item() < 1.5
    totals = variables["compression"].ledger.totals
    assert 40 * totals.bytes_sent < totals.dense_bytes
