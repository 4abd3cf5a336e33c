"""Trainings with DistributedDataParallel whose gradients lie on GPUs: what `make gpu-check` runs under torchrun.

    python3 -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.ddp --check FILE

trains a small model with every method on two ranks: over NCCL where each rank has a GPU of its own, else over Gloo on
the same GPU. Without `--check`, one rank trains a model of 85 million parameters, and says what a step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.gpu.ranks import synchronize
from tests.multirank.models import batch, weights
from tests.multirank.training_ddp import large_model, own_generator

DENSE = "DDP"
HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "fp16_compress_hook": (lambda: None, default_hooks.fp16_compress_hook),
    "bf16_compress_hook": (lambda: None, default_hooks.bf16_compress_hook),
    "powerSGD_hook": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
}
"""Of PyTorch: what makes the state of each, and the hook."""

EARLY = ", in the backward pass"
"""Of a method whose buckets do not start in the backward pass."""

TIMED = (
    DENSE, *HOOKS, "none", "fp16", "bf16", "int8", "int4", "efsignsgd", "qsgd:bits=4", "topk:ratio=0.01",
    "dgc:ratio=0.01", "powersgd:rank=4", "efsignsgd" + EARLY, "topk:ratio=0.01" + EARLY, "powersgd:rank=4" + EARLY,
)  # fmt: skip
OVERLAP = " with and without overlap"
LARGE = ", payloads of more than 2 GiB together"
CUT = "int4:exchange=scatter", "fp16:exchange=scatter", "efsignsgd:exchange=scatter", "two_level(int4)"
OVERFLOW = 3  # the step in which the loss of the last rank is infinite
STEPS = 6


def train(
    spec: str,
    place: str,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    overlap: bool | str = "auto",
    early: Callable[[int], Any] = lambda count: None,
) -> tuple[list[float], Any]:
    """Trains with a method.

    Args:
        dtype: of the parameters.
        scaled: with mixed precision and a scaler, and an overflow on one rank.
        overlap: as of `Compression`.
        early: is told in each step how many buckets have started in the backward pass.

    Returns:
        The loss of each step as the mean over ranks, and the weights.
    """
    model = DistributedDataParallel(large_model().to(place, dtype), bucket_cap_mb=1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(place, init_scale=1024.0, enabled=scaled)
    options: dict[str, Any] = {"grad_scaler": scaler} if scaled else {}
    compression = hvdcomp.Compression.from_spec(spec, overlap=overlap, **options)
    hvdcomp.ddp.register(model, compression, optimizer)
    engine = compression._binding.engine
    step_of = engine.step

    def counted(*given: Any, **how: Any) -> Any:
        early(len(engine.overlap.started))
        return step_of(*given, **how)

    engine.step = counted
    generator = own_generator()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, classes = (x.to(place) for x in batch(generator))
        with torch.autocast(place, torch.float16, enabled=scaled):
            loss = cross_entropy(model(inputs.to(dtype)).float(), classes)
        losses.append(loss.detach().clone())
        if scaled and step == OVERFLOW and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist(), weights(model.module)


def check(spec: str, place: str, dtype: torch.dtype = torch.float32, scaled: bool = False) -> Iterator[str]:
    """Says how a training on GPUs differs between ranks, or from the same training on the host."""
    losses, found = train(spec, place, dtype, scaled)
    everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found)
    if not torch.isfinite(found).all():
        yield "a weight is not finite"
    yield from (f"rank {rank} has other weights" for rank, one in enumerate(everyone) if not torch.equal(one, found))
    if scaled or dtype != torch.float32:  # the host's own half precision is another
        if losses[-1] > losses[0]:
            yield f"the loss grew from {losses[0]:.4f} to {losses[-1]:.4f}"
        return
    expected, _ = train(spec, "cpu")
    if abs(losses[-1] - expected[-1]) > 0.02 * expected[-1]:
        yield f"the last loss is {losses[-1]:.4f}, and on the host {expected[-1]:.4f}"


def check_large(place: str, elements: int) -> Iterator[str]:
    """Says where ranks that gather payloads of more bytes together than 32 bits count get something else than the
    mean."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [TensorInfo("large", (elements,))]
    engine = Engine(TorchDistributedCommunicator(), tensors, parse_compressor("bf16"), min_numel=0, min_ndim=0)
    given = torch.full((elements,), float(rank + 1), device=place)
    given[-1] = -float(rank + 1)
    engine.begin()
    found = engine.step({"large": given}, in_place=True)["large"]
    mean = (size + 1) / 2
    if [float(found[:-1].min()), float(found[:-1].max()), float(found[-1])] != [mean, mean, -mean]:
        yield f"the mean of 1 to {size} is not {mean} everywhere"


def check_overlap(spec: str, place: str) -> Iterator[str]:
    """Says how a training whose buckets start in the backward pass differs from one whose do not."""
    early: list[int] = []
    found, expected = train(spec, place, early=early.append, overlap=True), train(spec, place, overlap=False)
    if place == "cuda" and not sum(early):  # on the host a small model may be too quick
        yield "nothing started in the backward pass"
    if not torch.equal(found[1], expected[1]):
        yield f"weights differ by up to {(found[1] - expected[1]).abs().max():.3g}"


def checks() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each check: the method, what is particular, and options of `check`."""
    for spec in (*(kind.examples[0] for kind in COMPRESSORS.values()), *CUT):
        yield spec, "", {}
    for spec in ("none", "fp16", "bf16", "int4", "topk:ratio=0.1", "efsignsgd", "powersgd:rank=4"):
        yield spec, " of bfloat16 parameters", {"dtype": torch.bfloat16}
        yield spec, " with a scaler", {"scaled": True}
    for spec in ("int4", "topk:ratio=0.1", "efsignsgd", "powersgd:rank=4"):
        yield spec, OVERLAP, {}
    yield "bf16", LARGE, {}


def check_all(place: str, keep: Callable[[Any], None]) -> None:
    """Keeps a row of each check, with what failed on any rank."""
    apart = dist.new_group(backend="gloo")  # in which no training exchanges anything
    for spec, where, options in checks():
        try:
            if where == LARGE:
                of_each = 1 + 2**30 // dist.get_world_size()  # of two bytes
                said = list(check_large(place, of_each if "nccl" in dist.get_backend() else 1_000))
            else:
                said = list(check_overlap(spec, place) if where == OVERLAP else check(spec, place, **options))
        except Exception as error:  # and the next method is to be checked too
            said = [f"{type(error).__name__}: {error}"]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, said, group=apart)
        failures = [f"rank {rank}: {one}" for rank, found in enumerate(everyone) for one in found]
        keep({"method": spec + where, "failures": failures})


class Training:
    """A model of the size of GPT-2 small, in mixed precision, with one method, on one batch of random bytes."""

    def __init__(self, method: str, place: str, small: bool = False) -> None:
        from hvdcomp.tools.train.models import GPT_SIZES
        from hvdcomp.tools.train.models_torch import GPT

        torch.manual_seed(7)
        length, count = (32, 2) if small else (512, 8)
        model = GPT(256, length, GPT_SIZES["gpt" if small else "gpt-small"]).to(place)
        self.place = place
        self.tokens = torch.randint(0, 256, (count, length + 1), device=place)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        spec = method.removesuffix(EARLY)
        if method in HOOKS:
            make_state, hook = HOOKS[method]
            self.model.register_comm_hook(make_state(), hook)
        elif method != DENSE:
            overlap: bool | str = "auto" if method == spec else True
            hvdcomp.ddp.register(self.model, hvdcomp.Compression.from_spec(spec, overlap=overlap), self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.place, torch.bfloat16):
            found = self.model(self.tokens[:, :-1])
        cross_entropy(found.float().flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


def time_all(
    place: str, keep: Callable[[Any], None], methods: Sequence[str] = TIMED, rounds: int = 5, steps: int = 5
) -> None:
    """Keeps a row of each method: milliseconds of its steps. The methods take turns, since the host may get slower or
    faster meanwhile; so all of them are in memory."""
    trainings: dict[str, Training] = {}
    for method in methods:
        try:
            trainings[method] = _begun(method, place)
        except Exception as error:  # and the next method is to be timed too
            keep({"method": method, "failures": [f"{type(error).__name__}: {error}"]})
    took: dict[str, list[float]] = {method: [] for method in trainings}
    for _ in range(rounds):
        for method, training in trainings.items():
            training.step()
            for _ in range(steps):
                synchronize(place)
                start = time.perf_counter()
                training.step()
                synchronize(place)
                took[method].append(1000 * (time.perf_counter() - start))
    for method, ms in took.items():
        low, middle, high = statistics.quantiles(ms, n=4)
        keep({"method": method, "failures": [], "ms": middle, "quartiles_ms": [low, high]})


def _begun(method: str, place: str) -> Training:
    """A training after the steps in which kernels are compiled and buckets made."""
    training = Training(method, place, small=place != "cuda")
    for _ in range(5):
        training.step()
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("output", type=Path, help="file of JSON that rank 0 writes")
    chosen = parser.parse_args()
    place, rank, size = chosen.device, int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    alone = place == "cuda" and torch.cuda.device_count() >= size  # a GPU for each
    if place == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "gloo", timeout=timedelta(seconds=60))
    rows: list[Any] = []

    def keep(row: Any) -> None:
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"    {row}", flush=True)
            chosen.output.write_text(json.dumps({"backend": dist.get_backend(), "rows": rows}))

    if chosen.check:
        check_all(place, keep)
    else:  # PyTorch's hooks of several buckets may wait for ever in the two threads of Gloo
        time_all(place, keep, TIMED if place == "cuda" else [one for one in TIMED if one not in HOOKS])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
