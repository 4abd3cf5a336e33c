"""What must hold on every number of ranks and with every controller, through stock horovod.torch."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic  # noqa: F401 - makes hvd.elastic
import numpy as np
import torch

import hvdcomp
from hvdcomp import TwoLevel
from hvdcomp.compressors import EXAMPLES
from hvdcomp.torch import CompressedAdam, LocalSteps
from tests.captured import REFUSED, as_captured
from tests.multirank.collectives import nodes_of
from tests.multirank.everywhere import assert_goes_on_with_other_ranks, assert_metrics, halves
from tests.multirank.models import WRAPPERS, Branches
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
from tests.readme import block_with, run

SPECS = ["none", "fp16", "bf16", "topk:ratio=0.05", "randomk:ratio=0.1", "powersgd:rank=2"]


def case_weights_are_identical_after_50_steps() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        model = small_model()
        start = weights(model)
        how = compression(spec, model)
        train(model, distribute(model, how))
        assert_same_everywhere(model)
        assert not torch.equal(start, weights(model))
        assert how.ledger.steps == 50, spec


def case_local_steps() -> None:
    model = small_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = LocalSteps(inner, 3, compression=compression("topk:ratio=0.05", model))
    for step in range(1, 7):
        train(model, optimizer, 1)
        differ = {vector.tobytes() for vector in hvd.allgather_object(weights(model).numpy())}
        assert (len(differ) == 1) == optimizer.in_sync == (step % 3 == 0), step
    assert_same_everywhere(model)
    assert optimizer.compression.ledger.steps == 6


def case_a_step_is_refused_while_a_graph_is_captured() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model))
    with as_captured():
        assert REFUSED in raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))


def case_the_readme_trains() -> None:
    model = small_model()
    block = block_with("import horovod.torch")
    program = run(block, lambda variables: train(model, variables["optimizer"], steps=3), model=model)
    assert_same_everywhere(model)
    totals = program["compression"].ledger.totals
    assert 0 < 5 * totals.bytes_sent < totals.dense_bytes


def case_every_method_keeps_weights_identical() -> None:
    routed = '{"*5*": "topk:ratio=0.05", "numel<2000": "qsgd:bits=8", "*": "powersgd:rank=1"}'
    methods = "qsgd:bits=4,", "efsignsgd:", "fp16:rounding=stochastic,", "eden:bits=1,back=3,"
    scattered = [f"{method}exchange=scatter" for method in methods]
    for spec in [*EXAMPLES, *scattered, routed]:
        model = small_model()
        start = weights(model)
        momentum = 0 if spec.startswith("dgc") else 0.9  # which has its own
        train(model, distribute(model, compression(spec, model), 0.005, momentum), steps=3)
        assert_same_everywhere(model)
        assert not torch.equal(start, weights(model)), spec


def case_none_equals_horovods_own() -> None:
    ours, theirs = small_model(), small_model()
    how = compression("none", ours)
    train(ours, distribute(ours, how), steps=20)
    train(theirs, distribute(theirs, hvd.Compression.none), steps=20)
    assert_same_everywhere(ours)
    assert how.ledger.steps == 20
    if hvd.size() == 2:
        assert torch.equal(weights(ours), weights(theirs))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)


def case_fp16_equals_horovods_own() -> None:
    ours, theirs = small_model(), small_model()
    train(ours, distribute(ours, compression("fp16", ours)), steps=20)
    train(theirs, distribute(theirs, hvd.Compression.fp16), steps=20)
    if hvd.size() == 2:
        assert torch.equal(weights(ours), weights(theirs))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-2, atol=1e-3)


def case_everything_sent_is_the_mean_gradient() -> None:
    """With ratio 1 nothing is left out, so that TopK must equal dense training but for the order of additions."""
    ours, theirs = small_model(), small_model()
    train(ours, distribute(ours, compression("topk:ratio=1", ours)), steps=20)
    train(theirs, distribute(theirs, hvd.Compression.none), steps=20)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-5)


def case_op_sum() -> None:
    for spec in ["topk:ratio=1", "none"]:
        ours, theirs = small_model(), small_model()
        rate = 0.05 / hvd.size()
        train(ours, distribute(ours, compression(spec, ours), rate, op=hvd.Sum), steps=10)
        train(theirs, distribute(theirs, hvd.Compression.none, 0.05), steps=10)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-5)


def case_a_state_for_other_ranks() -> None:
    for op in (hvd.Average, hvd.Sum):
        model = small_model()
        how = compression("topk:ratio=0.05", model)
        train(model, distribute(model, how, op=op), steps=3)
        assert_goes_on_with_other_ranks(how.state_dict(), hvd.allgather_object, op == hvd.Sum)


def case_hooks_in_different_order_and_missing_gradients() -> None:
    orders = ["lr", "rl", "l", "rll"]  # rank 2 has no gradient on the right; nobody has one for `never`
    for spec in SPECS:
        model = Branches()
        how = compression(spec, model)
        optimizer = distribute(model, how)
        generator = own_generator()
        for step in range(12):
            optimizer.zero_grad()
            inputs, classes = batch(generator)
            order = orders[(hvd.rank() + step) % 4] if hvd.size() > 2 else ["lr", "r"][(hvd.rank() + step) % 2]
            torch.nn.functional.cross_entropy(model(inputs, order), classes).backward()
            optimizer.step()
            assert how.ledger.last.dense_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
        assert_same_everywhere(model)


def case_backward_passes_per_step() -> None:
    for spec in SPECS:
        model = small_model()
        how = compression(spec, model)
        optimizer = distribute(model, how, 0.01, backward_passes_per_step=3)
        train(model, optimizer, steps=6, passes=3)
        optimizer.set_backward_passes_per_step(2)
        train(model, optimizer, steps=6, passes=2)
        assert_same_everywhere(model)
        assert how.ledger.steps == 12


def case_groups() -> None:
    reference = small_model()
    train(reference, distribute(reference, compression("topk:ratio=0.05", reference)), steps=10)
    for form in ("number", "list"):
        model = small_model()
        groups = 2 if form == "number" else [list(model.parameters())[:3]]
        train(model, distribute(model, compression("topk:ratio=0.05", model), groups=groups), steps=10)
        assert_same_everywhere(model)
        assert torch.equal(weights(model), weights(reference)), form
    for spec in ("none", "fp16"):
        model = small_model()
        train(model, distribute(model, compression(spec, model), groups=2), steps=10)
        assert_same_everywhere(model)


def case_gradient_clipping() -> None:
    for spec in ("topk:ratio=0.05", "none"):
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        generator = own_generator()
        for _ in range(5):
            optimizer.zero_grad()
            inputs, classes = batch(generator)
            (100 * torch.nn.functional.cross_entropy(model(inputs), classes)).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            assert norm <= 0.1001
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_same_everywhere(model)


class Embedded(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Embedding(100, 16, sparse=sparse)
        self.second = torch.nn.Embedding(100, 16, sparse=sparse)
        self.out = torch.nn.Linear(16, 100)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(words) + 0.5 * self.second(words))


def _train_embedded(sparse: bool, spec: str | None, **options: object) -> torch.Tensor:
    model = Embedded(sparse)
    how = compression(spec, model) if spec else hvd.Compression.none
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=how, **options
    )
    generator = own_generator()
    for _ in range(8):
        optimizer.zero_grad()
        words = torch.randint(0, 100, (32,), generator=generator)
        torch.nn.functional.cross_entropy(model(words), (words + 1) % 100).backward()
        optimizer.step()
    assert_same_everywhere(model)
    return weights(model)


def case_sparse_embedding_gradients_pass_through() -> None:
    expected = _train_embedded(True, None)
    torch.testing.assert_close(_train_embedded(True, "topk:ratio=1"), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(_train_embedded(True, "none"), expected, rtol=1e-4, atol=1e-6)


def case_sparse_as_dense() -> None:
    expected = _train_embedded(False, None)
    for spec in ("topk:ratio=1", "none"):
        result = _train_embedded(True, spec, sparse_as_dense=True)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def case_what_is_cast_is_counted_by_tensor_and_not_kept() -> None:
    for sparse, (spec, element) in product((False, True), (("none", 4), ("fp16", 2))):
        model = Embedded(sparse)
        how = compression(spec, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=how, sparse_as_dense=sparse
        )
        numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
        for _ in range(4):
            words = torch.randint(0, 100, (32,), generator=own_generator())
            torch.nn.functional.cross_entropy(model(words), (words + 1) % 100).backward()
            optimizer.step()
            assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
            last = how.ledger.last
            assert {name: cost.dense_bytes for name, cost in last.tensors.items()} == {
                name: 4 * numel for name, numel in numels.items()
            }
            gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
            optimizer.zero_grad()  # sets them to None
            assert not any(gradient() is not None for gradient in gradients)
        assert how.ledger.totals.bytes_sent == 4 * last.bytes_sent == 4 * element * sum(numels.values())


def case_gradients_of_two_layouts_are_counted_by_tensor() -> None:
    model = small_model().to(memory_format=torch.channels_last)  # that of the convolution is not contiguous
    how = compression("none", model)
    train(model, distribute(model, how), steps=4)
    last = how.ledger.last
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    assert {name: cost.bytes_sent for name, cost in last.tensors.items()} == sizes


def case_element_types() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for spec in SPECS:
            model = small_model(dtype)
            train(model, distribute(model, compression(spec, model), 0.01), steps=4, dtype=dtype)
            assert_same_everywhere(model)
            assert all(parameter.grad.dtype == dtype for parameter in model.parameters())


@thorough
def case_channels_last() -> None:
    for spec in SPECS:
        model, plain = small_model().to(memory_format=torch.channels_last), small_model()
        train(model, distribute(model, compression(spec, model)), steps=5)
        train(plain, distribute(plain, compression(spec, plain)), steps=5)
        assert_same_everywhere(model)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-3, atol=1e-4)


def case_process_set() -> None:
    sets = halves(hvd)
    mine = sets[0] if sets[0].included() else sets[1]
    model = small_model()
    how = compression("topk:ratio=0.05", model, process_set=mine)
    optimizer = distribute(model, how, process_set=mine)
    if mine.size() > 1:  # with one rank Horovod still runs its hooks here, because the world is larger
        train(model, optimizer, steps=10)
        gathered = hvd.allgather(weights(model).reshape(1, -1), name="test.set", process_set=mine)
        assert all(torch.equal(gathered[0], row) for row in gathered)
        message = None
        other = small_model()
        wrong = distribute(other, compression("topk:ratio=0.05", other, process_set=sets[0]), process_set=sets[1])
        try:
            train(other, wrong, steps=1) if sets[1].included() else None
        except hvdcomp.ConfigurationError as error:
            message = str(error)
        assert sets[1].included() == (message is not None)
    else:
        train(model, optimizer, steps=10)
    everyone = hvd.allgather(weights(model).reshape(1, -1), name="test.sets")
    assert not torch.equal(everyone[0], everyone[-1])
    for process_set in sets:
        hvd.remove_process_set(process_set)


def case_two_levels_keep_weights_identical() -> None:
    """With two nodes of half the ranks each. All compressions use the same groups of ranks."""
    for spec in TwoLevel.examples:
        model = small_model()
        start = weights(model)
        how = compression(spec, model)
        with nodes_of(max(1, hvd.size() // 2)):
            train(model, distribute(model, how, 0.005), steps=6)
        assert_same_everywhere(model)
        assert not torch.equal(start, weights(model)), spec
        totals = how.ledger.totals
        assert (totals.bytes_in_node > 0) == (hvd.size() > 2), spec
        assert totals.compression_factor == totals.dense_bytes / (totals.bytes_sent - totals.bytes_in_node), spec
        assert totals.compression_factor > 1.5, spec


def case_different_settings_are_named_on_every_rank() -> None:
    for specs, words in (
        (("topk:ratio=0.01", "topk:ratio=0.02"), ("topk:ratio=0.01", "topk:ratio=0.02", "rank 0")),
        (("none", "powersgd:rank=2"), ("none", "powersgd:rank=2")),
    ):
        model = small_model()
        optimizer = distribute(model, compression(specs[min(hvd.rank(), 1)], model))
        message = raised(hvdcomp.RankMismatchError, lambda m=model, o=optimizer: train(m, o, steps=1))
        assert all(word in message for word in words), message
    model = small_model()
    how = compression("topk:ratio=0.01", model, seed=hvd.rank())
    optimizer = distribute(model, how)
    assert "seed" in raised(hvdcomp.RankMismatchError, lambda: train(model, optimizer, steps=1))


def case_adasum_is_refused() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model), op=hvd.Adasum)
    assert "Adasum" in raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))


def case_predivision_is_refused() -> None:
    model = small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", model), gradient_predivide_factor=2.0)
    message = raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))
    assert "gradient_predivide_factor=2.0" in message


def case_parameters_of_another_model_are_refused() -> None:
    model, other = small_model(), small_model()
    optimizer = distribute(model, compression("topk:ratio=0.05", other))
    message = raised(hvdcomp.ConfigurationError, lambda: train(model, optimizer, steps=1))
    assert "named_parameters" in message


def case_non_finite_gradients_are_seen_by_all_and_change_nothing() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2", "randomk:ratio=0.1"):
        model = small_model()
        how = compression(spec, model)
        optimizer = distribute(model, how)
        train(model, optimizer, steps=3)
        engine = how._binding.engine
        before = [array.clone() for state in engine.states.values() for array in state.memory + state.compressor]
        optimizer.zero_grad()
        inputs, classes = batch(own_generator())
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        (loss * (float("inf") if hvd.rank() == hvd.size() - 1 else 1)).backward()
        optimizer.synchronize()
        for parameter in model.parameters():
            assert not torch.isfinite(parameter.grad).all()
        after = [array for state in engine.states.values() for array in state.memory + state.compressor]
        assert len(before) == len(after) > 0
        assert_metrics(how, dense_bytes=4 * weights(model).numel())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        train(model, optimizer, steps=2)
        assert_same_everywhere(model)


def case_loss_scaler_skips_the_step_everywhere() -> None:
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    how = compression("topk:ratio=0.05", model, grad_scaler=scaler)
    optimizer = distribute(model, how)
    generator = own_generator()
    scales = []
    for step in range(12):
        optimizer.zero_grad()
        inputs, classes = batch(generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        if step == 5 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        start = weights(model)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        assert torch.equal(start, weights(model)) == (step == 5)
        scaler.update()
        scales.append(scaler.get_scale())
    assert min(scales) < 1024.0 or max(scales) > 1024.0
    assert_same_everywhere(model)
    assert_same_everywhere(torch.tensor(scales))


def case_a_loss_scale_that_has_fallen_to_nothing() -> None:
    """It ends all ranks, and what was left to be sent is still there."""
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-120)
    how = compression("topk:ratio=0.05", model, grad_scaler=scaler)
    optimizer = distribute(model, how)
    generator = own_generator()

    def step() -> None:
        optimizer.zero_grad()
        inputs, classes = batch(generator)
        scaler.scale(torch.nn.functional.cross_entropy(model(inputs), classes)).backward()
        optimizer.synchronize()

    step()
    kept = how.state_dict()["own"]["residuals"]
    assert kept
    scaler.update(2.0**-127)
    assert "the loss scale has fallen to 5.87747e-39" in raised(hvdcomp.ConfigurationError, step)
    now = how.state_dict()["own"]["residuals"]
    assert now.keys() == kept.keys()
    for name in kept:
        for one, other in zip(now[name]["arrays"], kept[name]["arrays"], strict=True):
            assert torch.equal(one, other)


def case_residuals_follow_the_loss_scale() -> None:
    """Training at a loss scale that changes gives what training at one scale gives: powers of two round alike."""
    results = []
    for scales in ([1.0] * 6, [1.0, 1.0, 4.0, 4.0, 2.0, 2.0]):
        model = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
        optimizer = distribute(model, compression("topk:ratio=0.05", model, grad_scaler=scaler))
        generator = own_generator()
        for scale in scales:
            scaler.update(scale) if scaler._scale is not None else None
            optimizer.zero_grad()
            inputs, classes = batch(generator)
            scaler.scale(torch.nn.functional.cross_entropy(model(inputs), classes)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        results.append(weights(model))
    assert torch.equal(results[0], results[1])


def case_level_changes_between_steps() -> None:
    for spec, levels in (("topk:ratio=0.05", (0.5, 0.01)), ("powersgd:rank=2", (4, 1))):
        model = small_model()
        how = compression(spec, model)
        optimizer = distribute(model, how)
        sizes = []
        for level in (how.level, *levels):
            how.set_level(level)
            train(model, optimizer, steps=3)
            sizes.append(how.ledger.last.bytes_sent)
        assert sizes[1] > sizes[0] > sizes[2]
        assert_same_everywhere(model)


def case_warm_up_schedule() -> None:
    model = small_model()
    how = compression("topk:ratio=0.01", model, policy="warmup:dense_steps=2,levels=0.5|0.1,steps=2")
    optimizer = distribute(model, how)
    sizes = []
    for level in (None, None, 0.5, 0.5, 0.1, 0.1, 0.01, 0.01):
        assert not sizes or how.level == level
        train(model, optimizer, steps=1)
        sizes.append(how.ledger.last.bytes_sent / how.ledger.last.dense_bytes)
    assert sizes[0] == sizes[1] == 1
    assert sizes[2] == sizes[3] > sizes[4] == sizes[5] > sizes[6] == sizes[7]
    assert_same_everywhere(model)


def case_global_random_state_is_untouched() -> None:
    for spec in SPECS:
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        inputs, classes = batch(own_generator())
        before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def case_the_same_seed_gives_the_same_run() -> None:
    for spec in ("fp16", "topk:ratio=0.05", "randomk:ratio=0.1", "powersgd:rank=2"):
        results = []
        for seed in (1, 1, 2):
            model = small_model()
            train(model, distribute(model, compression(spec, model, seed=seed)), steps=4)
            results.append(weights(model))
        if spec == "fp16" and hvd.size() > 2:
            continue  # Horovod carries it, and what it fuses, and so the order of additions, depends on timing
        assert torch.equal(results[0], results[1]), spec
        assert torch.equal(results[0], results[2]) == (spec not in ("randomk:ratio=0.1", "powersgd:rank=2")), spec


def case_gathered_in_parts_gives_the_same_weights() -> None:
    trained = []
    for gathered_bytes in (None, 1):
        model = small_model()
        options = {"min_numel": 0, "min_ndim": 0, "overlap": False}
        how = compression("topk:ratio=0.05", model, gathered_bytes=gathered_bytes, **options)
        train(model, distribute(model, how), steps=5)
        trained.append(weights(model))
    assert torch.equal(*trained)
    assert_same_everywhere(trained[0])


def case_two_optimizers_take_turns() -> None:
    """As in adversarial training: two models, two compressions, gradients of one flowing through the other."""
    maker, judge = torch.nn.Linear(64, 64), small_model()
    hvd.broadcast_parameters(maker.state_dict(), root_rank=0)
    makers = distribute(maker, compression("topk:ratio=0.1", maker))
    judges = distribute(judge, compression("powersgd:rank=1", judge))
    generator = own_generator()
    for step in range(10):
        inputs, classes = batch(generator)
        training = (maker, makers, judge) if step % 2 else (judge, judges, maker)
        for parameter in training[2].parameters():
            parameter.requires_grad_(False)
        training[1].zero_grad()
        torch.nn.functional.cross_entropy(judge(maker(inputs)), classes).backward()
        training[1].step()
        for parameter in training[2].parameters():
            parameter.requires_grad_(True)
    assert_same_everywhere(maker)
    assert_same_everywhere(judge)


def case_wrappers_change_neither_routing_nor_weights_nor_checkpoints() -> None:
    spec = '{"5.weight": "topk:ratio=0.05", "7.*": "randomk:ratio=0.1", "*": "none"}'  # randomk chooses by name
    state: dict[str, Any] = {}

    def trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], given: bool) -> torch.Tensor:
        nonlocal state
        model = wrap(small_model())
        how = compression(spec, model) if given else hvdcomp.Compression.from_spec(spec)
        how.load_state_dict(state)
        train(model, distribute(model, how), steps=3)
        assert set(how.levels) == {"5.weight", "7.weight"}, how.levels
        state = state or how.state_dict()
        return weights(model)

    trained(WRAPPERS["nothing"], True)
    expected = trained(WRAPPERS["nothing"], True)
    assert torch.equal(trained(WRAPPERS["torch.compile"], False), expected)
    assert torch.equal(trained(WRAPPERS["torch.compile of activation checkpointing"], True), expected)


def compressed_adam(
    model: torch.nn.Module,
    how: Any,
    freeze_after: int = 3,
    local_steps: int = 1,
    refreshes_per_gap: int | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Horovod's optimizer around ours."""
    own = {"freeze_after": freeze_after, "local_steps": local_steps, "refreshes_per_gap": refreshes_per_gap}
    optimizer = CompressedAdam(model.parameters(), 1e-3, (0.9, 0.95), warm_up="int8", **own)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=how, **options)


@thorough
def case_a_compiled_step() -> None:
    """Dynamo traces Horovod's hooks, and would trace ours."""
    for spec in ("none", "topk:ratio=0.05"):
        results = []
        for compiles in (True, False):
            torch._dynamo.reset()
            model = small_model()
            optimizer = distribute(model, how := compression(spec, model))

            def step(
                inputs: torch.Tensor, classes: torch.Tensor, model: Any = model, optimizer: Any = optimizer
            ) -> None:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()

            called, generator = torch.compile(step, backend="eager") if compiles else step, own_generator()
            for _ in range(6):
                called(*batch(generator))
            assert_same_everywhere(model)
            assert how.ledger.steps == 6
            results.append(weights(model))
        if spec == "none" and hvd.size() > 2:  # the last bits of a sum depend on what Horovod fuses, and so on the time
            torch.testing.assert_close(*results)
        else:
            assert torch.equal(*results), spec


def case_momenta_that_are_sent_whole_change_nothing() -> None:
    for options, passes in (({}, 1), ({"op": hvd.Sum}, 1), ({"backward_passes_per_step": 2}, 2)):
        results = []
        for how in ("none", "topk:ratio=1"):  # only what may lose something is sent as momentum
            model = small_model()
            optimizer = compressed_adam(model, compression(how, model), **options)
            train(model, optimizer, 8, passes)
            assert optimizer.frozen
            assert_same_everywhere(model)
            results.append(weights(model))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def case_compressed_momenta_keep_weights_identical() -> None:
    for spec in ("efsignsgd", "powersgd:rank=2"):
        model = small_model()
        how = compression(spec, model)
        optimizer = compressed_adam(model, how)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # makes a step of its own
        train(model, optimizer, 3)
        before = how.ledger.totals.bytes_sent
        train(model, optimizer, 9)
        assert_same_everywhere(model)
        assert how.ledger.totals.bytes_sent - before < 2 * before, spec
        saved = optimizer.state_dict()
        assert {one["frozen_at"] for one in saved["state"].values()} == {3}


def case_refreshes_are_of_all_ranks_and_uncompressed() -> None:
    model = small_model()
    how = compression("efsignsgd", model)
    optimizer = compressed_adam(model, how, refreshes_per_gap=2)
    train(model, optimizer, 3)
    for step in range(3, 8):
        due = step in (4, 6)
        assert optimizer.refreshes == due
        before = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
        train(model, optimizer, 1)
        after = [state["exp_avg_sq"] for state in optimizer.state.values()]
        assert step == 3 or any(not torch.equal(*pair) for pair in zip(before, after, strict=True)) == due
        assert_same_everywhere(1 / torch.cat([one.reshape(-1).double() for one in after]))  # infinite where unused
        assert_same_everywhere(model)
        assert (how.ledger.last.bytes_sent >= how.ledger.last.dense_bytes) == due, how.ledger.last


def case_momenta_need_a_result_in_units_of_gradients() -> None:
    model = small_model()
    optimizer = compressed_adam(model, compression("signsgd", model))
    assert "signsgd does not work with CompressedAdam" in raised(ValueError, lambda: train(model, optimizer, 1))


def case_local_steps_end_with_equal_weights() -> None:
    model = small_model()
    how = compression("efsignsgd", model)
    optimizer = compressed_adam(model, how, freeze_after=4, local_steps=4)
    train(model, optimizer, 11)
    assert not optimizer.in_sync
    train(model, optimizer, 1)
    assert_same_everywhere(model)
    everything = len(list(model.parameters()))
    train(model, optimizer, 1)
    assert how.ledger.last.bytes_sent == 8 * everything  # by which Horovod knows that a rank goes on
    assert how.ledger.steps == 13


def case_a_layer_that_is_frozen_stays_as_it_is() -> None:
    """Horovod hands over zeros for it, and what was kept of it would still be sent."""
    model = small_model()
    how = compression("topk:ratio=0.05", model)
    optimizer = distribute(model, how, momentum=0.0)
    train(model, optimizer, 3)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    before, others = frozen.detach().clone(), weights(model)
    train(model, optimizer, 3)
    assert torch.equal(frozen, before)
    assert not torch.equal(weights(model), others)
    assert_same_everywhere(model)
    frozen.requires_grad_(hvd.rank() == 0)
    if hvd.size() > 1:
        message = raised(hvdcomp.RankMismatchError, lambda: train(model, optimizer, 1))
        assert "frozen parameters" in message, message


def case_quantized_weights_are_left_alone() -> None:
    model = small_model()
    quantized = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    named = [*model.named_parameters(), ("quantized", quantized)]
    how = hvdcomp.Compression.from_spec("topk:ratio=0.05", named_parameters=named)
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=how)
    train(model, optimizer, 2)
    assert_same_everywhere(model)
    assert "quantized" not in how.plan


def case_a_level_that_is_set_after_a_roll_back_holds() -> None:
    model = small_model()
    how = compression("topk:ratio=0.05", model)
    optimizer = distribute(model, how)
    train(model, optimizer, 2)
    state = how.state_dict()
    for rolled_back, level, expected in ((state, 0.5, 0.5), (state, None, 0.05), ({}, 0.25, 0.25)):
        how.roll_back(rolled_back)
        if level is not None:
            how.set_level(level)
        for _ in range(2):
            train(model, optimizer, 1)
            assert {*how.levels.values()} == {how.level} == {expected}
    how.set_level(0.5)
    how.roll_back({})  # of a failure before anything was saved: what the program has set stays
    train(model, optimizer, 1)
    assert {*how.levels.values()} == {how.level} == {0.5}
    assert_same_everywhere(model)


def case_a_new_rank_gets_weights_and_state_of_an_optimizer() -> None:
    """For the state Horovod makes a step on the new rank, where weight decay would change the weights."""

    def adam_w(model: torch.nn.Module, how: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=how)

    def local(model: torch.nn.Module, how: Any) -> torch.optim.Optimizer:
        return compressed_adam(model, how, freeze_after=4, local_steps=2)

    for make in (adam_w, compressed_adam, local):
        model = small_model()
        how = compression("efsignsgd", model)
        optimizer = make(model, how)
        train(model, optimizer, 8)
        if hvd.rank() > 0:  # as if it had joined now
            model = small_model()
            how = compression("efsignsgd", model)
            optimizer = make(model, how)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=how)
        state.sync()
        assert_same_everywhere(model)
        os.environ["HOROVOD_ELASTIC"] = "1"  # so that a binding without steps meets the others
        how.roll_back(how.state_dict())
        train(model, optimizer, 4)
        del os.environ["HOROVOD_ELASTIC"]
        assert_same_everywhere(model)
        moments = [entry.reshape(-1) for one in optimizer.state.values() for entry in (one["exp_avg"], one["step"])]
        assert_same_everywhere(torch.cat(moments))
