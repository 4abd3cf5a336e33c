"""LocalSteps in fragments and with a delay, over torch.distributed and over Horovod."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdcomp
from hvdcomp.torch import LocalSteps
from hvdcomp.torch.ranks import started_ranks
from tests.multirank.models import batch, small_model, weights

STEPS = 11


def made(spec: str) -> tuple[torch.nn.Module, LocalSteps]:
    model = small_model()
    compression = hvdcomp.Compression.from_spec(spec, named_parameters=model.named_parameters())
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = LocalSteps(inner, 6, compression=compression, fragments=2, delay=2, local_share=0.5)
    return model, optimizer


def train(model: Any, optimizer: LocalSteps, generator: torch.Generator, steps: int = 1) -> None:
    for _ in range(steps):
        inputs, classes = batch(generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(100 + started_ranks().rank)


def equal_everywhere(vector: torch.Tensor) -> bool:
    rows = started_ranks().gather_bytes(vector.numpy().view(np.uint8), "weights")
    return bool((rows == rows[0]).all())


def outer(model: Any, optimizer: LocalSteps) -> torch.Tensor:
    with optimizer.outer_weights():
        return weights(model)


def case_outer_weights_are_the_same_after_every_step() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):  # exchanged once, and several times
        model, optimizer = made(spec)
        generator, seen = own_generator(), []
        for _ in range(STEPS):
            train(model, optimizer, generator)
            seen.append(outer(model, optimizer))
            assert equal_everywhere(seen[-1]), spec
            assert not equal_everywhere(weights(model)), spec
        changed = [not torch.equal(one, other) for one, other in itertools.pairwise(seen)]
        # Sent after steps 3, 6 and 9, and applied two steps later; the list begins with the second step.
        assert [step for step, here in enumerate(changed, 2) if here] == [5, 8, 11], spec
        train(model, optimizer, generator, 2)  # another is under way
        optimizer.exchange()
        assert optimizer.in_sync
        assert equal_everywhere(weights(model)), spec


def case_it_goes_on_bit_for_bit_with_an_exchange_under_way() -> None:
    """From files, as after a kill: what a rank saved is all that it knows."""
    for spec in ("topk:ratio=0.05", "qsgd:bits=4,exchange=scatter"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "saved.pt"
            model, optimizer = made(spec)
            generator = own_generator()
            train(model, optimizer, generator, 7)
            torch.save((model.state_dict(), optimizer.state_dict(), generator.get_state()), file)
            train(model, optimizer, generator, STEPS - 7)
            whole = weights(model)
            model, optimizer = made(spec)
            saved = torch.load(file, weights_only=True)
            assert saved[1]["local_steps"]["sent"] is not None
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            generator.set_state(saved[2])
            train(model, optimizer, generator, STEPS - 7)
            assert torch.equal(weights(model), whole), spec


def case_with_a_loss_scaler_a_rank_leaves_out_its_own_steps_alone() -> None:
    """In float16; what overflows on one rank keeps no other from its step, and exchanges are at the same steps."""
    model, optimizer = made("topk:ratio=0.05")
    scaler, generator, rank = torch.amp.GradScaler("cpu", init_scale=2.0**8), own_generator(), started_ranks().rank
    for step in range(STEPS):
        inputs, classes = batch(generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        scaler.scale(loss * (torch.inf if step == 4 and rank == 1 else 1)).backward()
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        # In step 5, the index of which is 4, a mean is applied: of its own weights that rank keeps half.
        assert torch.isfinite(weights(model)).all()
        assert not torch.equal(weights(model), before)
        assert equal_everywhere(outer(model, optimizer))
        assert not equal_everywhere(weights(model))
    assert scaler.get_scale() == 2.0 ** (7 if rank == 1 else 8)


def case_what_is_not_finite_on_one_rank_stops_all_when_it_is_to_be_applied() -> None:
    model, optimizer = made("topk:ratio=0.05")
    generator = own_generator()
    train(model, optimizer, generator, 5)
    before = copy.deepcopy(optimizer.state_dict()["local_steps"]["anchors"])
    if started_ranks().rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
    train(model, optimizer, generator, 2)
    told = ""
    try:
        train(model, optimizer, generator)
    except hvdcomp.ConfigurationError as error:
        told = str(error)
    assert started_ranks().gather_bytes(np.array([bool(told)], np.uint8), "raised").all()
    assert ("on this rank in " in told) == (started_ranks().rank == 1), told
    assert all(map(torch.equal, before, optimizer.state_dict()["local_steps"]["anchors"]))
