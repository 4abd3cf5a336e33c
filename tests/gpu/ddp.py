"""Trainings of several ranks whose gradients lie on GPUs: what `make gpu-check` runs under torchrun and horovodrun.

    python3 -m torch.distributed.run --nproc-per-node 2 -m tests.gpu.ddp --check FILE
    horovodrun -np 2 python3 -m tests.gpu.ddp --under horovodrun --check FILE

train a small model with every method on two ranks, over NCCL, so that each rank needs a GPU of its own; under torchrun
with `--one-gpu` over Gloo on the same GPU. Without `--check`, ranks of torchrun train a model of 85 million parameters,
and say what a step takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdcomp
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.gpu.libraries import Horovod, Library, TorchDistributed
from tests.gpu.ranks import allocated, synchronize
from tests.multirank.models import batch, weights
from tests.multirank.training_ddp import large_model

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
"""Of a method whose buckets start in the backward pass."""
BUSY = ", 64 sequences"
"""Of a training in which the device takes longer than the host, on a GPU that has the memory."""
_LEAST_MEMORY = 60e9

TIMED = (
    *HOOKS, "none", "fp16", "int8", "eden", "efsignsgd", "qsgd:bits=4", "topk:ratio=0.01", "dgc:ratio=0.01",
    "powersgd:rank=4",
    *(method + how for how in (EARLY, BUSY, BUSY + EARLY) for method in ("none", "efsignsgd", "topk:ratio=0.01")),
)  # fmt: skip
OVERLAP = " with and without overlap"
LARGE = ", payloads of more than 2 GiB each"
_LARGE_ELEMENTS = 2**30 + 1
"""Of two bytes each, those of a payload of more bytes than 31 bits count."""
_FEW_ELEMENTS = 1_000
GRAPHED = " of a model in CUDA graphs"
CAPTURED = " captured by a CUDA graph"
CUT = "int4:exchange=scatter", "fp16:exchange=scatter", "efsignsgd:exchange=scatter", "two_level(int4)"
OVERFLOW = 3  # the step in which the loss of the last rank is infinite
SCALE = 1024.0  # of losses, before it
STEPS = 6
STEPS_BEFORE_CAPTURE = 12
"""DistributedDataParallel asks for 11: in the first ones it makes its buckets, and takes times."""


class Trained(NamedTuple):
    """What a training has come to.

    Attributes:
        losses: of each step, the mean over ranks.
        weights: of this rank.
        scale: the scaler's at the end, or 1 without a scaler.
    """

    losses: list[float]
    weights: torch.Tensor
    scale: float


def train(
    library: Library,
    spec: str,
    place: str,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    overlap: bool | str = "auto",
    early: Callable[[int], Any] = lambda count: None,
    graphed: bool = False,
) -> Trained:
    """Trains with a method.

    Args:
        dtype: of the parameters.
        scaled: with mixed precision and a scaler, and an overflow on one rank.
        overlap: as of `Compression`.
        early: is told in each step how many buckets have started in the backward pass.
        graphed: whether the model's own passes are CUDA graphs.
    """
    plain = large_model().to(place, dtype)
    if graphed:
        plain = torch.cuda.make_graphed_callables(plain, (batch(torch.Generator())[0].to(place, dtype),))
    scaler = torch.amp.GradScaler(place, init_scale=SCALE, enabled=scaled)
    options: dict[str, Any] = {"grad_scaler": scaler} if scaled else {}
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, compression = library.distribute(plain, sgd, spec, overlap=overlap, **options)
    generator = torch.Generator().manual_seed(100 + library.rank)  # other data on each rank
    losses = []
    for step in range(STEPS):
        if step == 1:  # by now there is an engine
            _count_early(compression._binding.engine, early)
        optimizer.zero_grad()
        inputs, classes = (x.to(place) for x in batch(generator))
        with torch.autocast(place, torch.float16, enabled=scaled):
            loss = cross_entropy(model(inputs.to(dtype)).float(), classes)
        losses.append(loss.detach().clone())
        if scaled and step == OVERFLOW and library.rank == library.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        library.step(optimizer, scaler)
        scaler.update()
    return Trained(library.mean(torch.stack(losses).double()).tolist(), weights(plain), scaler.get_scale())


def _count_early(engine: Engine, early: Callable[[int], Any]) -> None:
    step_of = engine.step

    def counted(*given: Any, **how: Any) -> Any:
        early(len(engine.overlap.started))
        return step_of(*given, **how)

    engine.step = counted  # type: ignore[method-assign]


def check(
    library: Library,
    spec: str,
    place: str,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    graphed: bool = False,
) -> Iterator[str]:
    """Says how a training on GPUs differs between ranks, or from the same training on the host."""
    losses, found, scale = train(library, spec, place, dtype, scaled, graphed=graphed)
    everyone = library.gathered(found)
    if not torch.isfinite(found).all():
        yield "a weight is not finite"
    yield from (f"rank {rank} has other weights" for rank, one in enumerate(everyone) if not torch.equal(one, found))
    if scaled and scale != SCALE / 2:
        yield f"the scale is {scale:g} after an overflow of the last rank, in place of {SCALE / 2:g}"
    if scaled or dtype != torch.float32:  # the host's own half precision is another
        if losses[-1] > losses[0]:
            yield f"the loss grew from {losses[0]:.4f} to {losses[-1]:.4f}"
        return
    expected = train(library, spec, "cpu").losses
    if abs(losses[-1] - expected[-1]) > 0.02 * expected[-1]:
        yield f"the last loss is {losses[-1]:.4f}, and on the host {expected[-1]:.4f}"


def elements_of_large(library: Library, place: str) -> tuple[int, str]:
    """How many elements, of two bytes in its payload, a rank has in `check_large`; and why so few, if it is not more
    than 2 GiB."""
    if place != "cuda" or "nccl" not in library.backend.lower():
        return _FEW_ELEMENTS, f"{_FEW_ELEMENTS:,} elements, as {library.backend} sends them through the host"
    torch.cuda.empty_cache()
    free = min(int(one) for (one,) in library.gathered_texts([str(torch.cuda.mem_get_info()[0])]))
    of_each = 4 + 2 + 2 * library.size + 4  # the gradient, this rank's payload, those of all, and as much as a gradient
    fits = int(0.9 * free) // of_each
    if fits >= _LARGE_ELEMENTS:
        return _LARGE_ELEMENTS, ""
    needed = of_each * _LARGE_ELEMENTS / 0.9
    return fits, f"{fits:,} elements, as {free / 2**30:.1f} GiB are free on a GPU, and {needed / 2**30:.1f} are needed"


def check_large(library: Library, place: str, elements: int) -> Iterator[str]:
    """Says where ranks that gather payloads of more bytes than 31 bits count get something else than the mean."""
    rank, size = library.rank, library.size
    tensors = [TensorInfo("large", (elements,))]
    engine = Engine(library.communicator(), tensors, parse_compressor("bf16"), min_numel=0, min_ndim=0)
    given = torch.full((elements,), float(rank + 1), device=place)
    given[-1] = -float(rank + 1)
    engine.begin()
    found = engine.step({"large": given}, in_place=True)["large"]
    mean = (size + 1) / 2
    if [float(found[:-1].min()), float(found[:-1].max()), float(found[-1])] != [mean, mean, -mean]:
        yield f"the mean of 1 to {size} is not {mean} everywhere"


def check_overlap(library: Library, spec: str, place: str) -> Iterator[str]:
    """Says how a training whose buckets start in the backward pass differs from one whose do not."""
    early: list[int] = []
    found = train(library, spec, place, early=early.append, overlap=True)
    expected = train(library, spec, place, overlap=False)
    if place == "cuda" and not sum(early):  # on the host a small model may be too quick
        yield "nothing started in the backward pass"
    if not torch.equal(found.weights, expected.weights):
        yield f"weights differ by up to {(found.weights - expected.weights).abs().max():.3g}"


def check_captured(library: Library, spec: str, place: str) -> Iterator[str]:
    """Says if a graph can capture a step, which hvdcomp is to refuse."""
    plain = large_model().to(place)
    inputs, classes = (x.to(place) for x in batch(torch.Generator()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # all of it, since no other stream must be part of the capture
        model, optimizer, _ = library.distribute(plain, torch.optim.SGD(plain.parameters(), lr=0.1), spec)
        for _ in range(STEPS_BEFORE_CAPTURE):
            optimizer.zero_grad()
            cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    synchronize(place)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            cross_entropy(model(inputs), classes).backward()
    except Exception as error:  # hvdcomp's, after which the end of the capture may raise another
        if not any(isinstance(one, hvdcomp.ConfigurationError) for one in _with_causes(error)):
            yield f"the capture failed, and hvdcomp had not refused it: {type(error).__name__}: {error}"
    else:
        yield "the step was captured"


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    yield "topk:ratio=0.1", GRAPHED, {"graphed": True}
    yield "topk:ratio=0.1", CAPTURED, {}  # the last, since what follows a broken capture may fail


def check_all(library: Library, place: str, keep: Callable[[Any], None]) -> None:
    """Keeps a row of each check, with what failed on any rank, and why it was made smaller or skipped."""
    for spec, where, options in checks():
        note = ""
        try:
            said, note = _checked(library, spec, where, place, options)
        except Exception as error:  # and the next method is to be checked too
            said = [f"{type(error).__name__}: {error}"]
        everyone = library.gathered_texts(said)
        failures = [f"rank {rank}: {one}" for rank, found in enumerate(everyone) for one in found]
        keep({"method": spec + where, "failures": failures, **({"note": note} if note else {})})


def _checked(library: Library, spec: str, where: str, place: str, options: dict[str, Any]) -> tuple[list[str], str]:
    """What failed on this rank, and what there is to note."""
    if where in (GRAPHED, CAPTURED) and place != "cuda":
        return [], "skipped, as CUDA graphs need a GPU"
    if where == LARGE:
        elements, smaller = elements_of_large(library, place)
        return list(check_large(library, place, elements)), smaller
    if where == OVERLAP:
        return list(check_overlap(library, spec, place)), ""
    if where == CAPTURED:
        return list(check_captured(library, spec, place)), ""
    return list(check(library, spec, place, **options)), ""


class Training:
    """A model of the size of GPT-2 small, in mixed precision, with one method, on one batch of random bytes.

    Args:
        method: a spec, or one of `HOOKS`; empty for DDP alone.
        how: `EARLY`, `BUSY`, both or neither.

    Attributes:
        peak_bytes: the most memory of the GPU that the model and a step of it take.
    """

    def __init__(self, method: str, how: str, place: str, small: bool = False) -> None:
        from hvdcomp.tools.train.models import GPT_SIZES
        from hvdcomp.tools.train.models_torch import GPT

        before = allocated(place)
        torch.manual_seed(7)
        length, count = (32, 2) if small else (512, 64 if BUSY in how else 8)
        with torch.device(place):
            model = GPT(256, length, GPT_SIZES["gpt" if small else "gpt-small"])
        self.place = place
        self.tokens = torch.randint(0, 256, (count, length + 1), device=place)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if method in HOOKS:
            make_state, hook = HOOKS[method]
            self.model.register_comm_hook(make_state(), hook)
        elif method:
            compression = hvdcomp.Compression.from_spec(method, overlap=EARLY in how)
            hvdcomp.ddp.register(self.model, compression, self.optimizer)
        for _ in range(5):  # in which kernels are compiled and buckets made
            self.step()
        allocated(place)  # from here on the most is asked for
        self.step()
        self.peak_bytes = allocated(place, most=True) - before

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.place, torch.bfloat16):
            found = self.model(self.tokens[:, :-1])
        cross_entropy(found.float().flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()

    def milliseconds(self, steps: int) -> Iterator[float]:
        """Of each of some steps, after one that is not timed."""
        self.step()
        for _ in range(steps):
            synchronize(self.place)
            start = time.perf_counter()
            self.step()
            synchronize(self.place)
            yield 1000 * (time.perf_counter() - start)


def time_all(
    place: str, keep: Callable[[Any], None], methods: Sequence[str] = TIMED, rounds: int = 3, steps: int = 5
) -> None:
    """Keeps a row of each method: milliseconds of its steps and its memory, and those of DDP alone."""
    small = place != "cuda"
    for name in methods:
        method = name.partition(", ")[0]
        how = name.removeprefix(method)
        if BUSY in how and not small and torch.cuda.get_device_properties(place).total_memory < _LEAST_MEMORY:
            continue
        try:
            keep({"method": name, "failures": [], **_measured(method, how, place, small, rounds, steps)})
        except Exception as error:  # and the next method is to be timed too
            keep({"method": name, "failures": [f"{type(error).__name__}: {error}"]})
        gc.collect()  # a model in DDP and its hook hold each other


def _measured(method: str, how: str, place: str, small: bool, rounds: int, steps: int) -> dict[str, Any]:
    """What a method takes, and DDP alone. The two take turns, since the host may get slower or faster meanwhile."""
    alone, compressed = pair = [Training(one, how, place, small) for one in ("", method)]
    took: list[list[float]] = [[], []]
    for _ in range(rounds):
        for ms, training in zip(took, pair, strict=True):
            ms += training.milliseconds(steps)
    low, middle, high = statistics.quantiles(took[1], n=4)
    times = {"ms": middle, "quartiles_ms": [low, high], "ddp_ms": statistics.median(took[0])}
    peaks = {"peak_bytes": compressed.peak_bytes, "ddp_peak_bytes": alone.peak_bytes}
    return times | (peaks if place == "cuda" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--under", choices=("torchrun", "horovodrun"), default="torchrun")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("output", type=Path, help="file to which rank 0 appends JSON, a line for each row")
    chosen = parser.parse_args()
    place = chosen.device
    if place == "cuda":
        local = next(os.environ[name] for name in ("LOCAL_RANK", "HOROVOD_LOCAL_RANK") if name in os.environ)
        torch.cuda.set_device(0 if chosen.one_gpu else int(local))
    else:
        torch.set_num_threads(1)
    library: Library = Horovod(place) if chosen.under == "horovodrun" else TorchDistributed(place, chosen.one_gpu)

    def keep(row: Any) -> None:
        if library.rank == 0:
            with chosen.output.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    keep({"backend": library.backend})
    if chosen.check:
        check_all(library, place, keep)
    else:  # PyTorch's hooks of several buckets may wait for ever in the two threads of Gloo
        time_all(place, keep, TIMED if place == "cuda" else [one for one in TIMED if one not in HOOKS])
    library.end()


if __name__ == "__main__":
    main()
