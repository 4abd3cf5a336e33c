"""Nothing in a step waits for a device: what would do so fails in a step, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import EXAMPLES
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from hvdcomp.policies import parse_policy
from tests.driven import Driven
from tests.harness import infos

torch = pytest.importorskip("torch")
from tests.cuda_kernels import SPECS, recorded, watch  # noqa: E402
from tests.device_waits import WaitedError, nothing_waits, on_device  # noqa: E402

pytestmark = pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}")

SHAPES = {"matrix": (16, 24), "odd": (5, 7, 3), "vector": (77,)}
MEMORIES = [NoMemory(), ErrorFeedback(0.5), MomentumCorrection(0.9, nesterov=True, clip=1.0)]
WAITING = {"atomo"}  # finds singular vectors, for which PyTorch asks the device whether it has found them
SCATTERED = "qsgd:bits=4,exchange=scatter", "int4:exchange=scatter", "fp8:exchange=scatter,rounding=stochastic"
CUT = *SCATTERED, "two_level(int4)", "two_level(powersgd:rank=2)"

needs_value: Mapping[str, Callable[[Any], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if x[0] == 0 else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: x.__setitem__(x > 0, torch.ones(1)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: torch.repeat_interleave(x, x.int()),
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(2)).to(x.device),
    "eigh": lambda x: torch.linalg.eigh(torch.outer(x, x)),
}


@pytest.mark.parametrize("what", needs_value)
def test_what_waits_is_found(what: str) -> None:
    x = torch.ones(3)
    with pytest.raises(WaitedError), nothing_waits():
        needs_value[what](x)
    with nothing_waits():
        x[0] = 2.0
        x[1:] *= x[0]
        x[:1] = torch.where(x[:1] == 0, x[1:2], 0.5)
    assert x.tolist() == [0.5, 2.0, 2.0]


def ranks_for(spec: str) -> LoopbackCommunicator:
    """Two ranks, or two nodes of two."""
    return LoopbackCommunicator(4, ranks_per_node=2) if spec.startswith("two_level") else LoopbackCommunicator(2)


def steps(engine: Engine, plans: list[str | None], dtype: str = "float32", in_place: bool = False) -> list[Any]:
    """A step for each plan (None: as the step before); returns what the device was told of in each."""
    sums = AccumulatedGradients()
    found = []
    for number, spec in enumerate(plans):
        if spec is not None:
            engine.set_plan(dict.fromkeys(engine.tensors, parse_compressor(spec)))
        engine.begin()
        rng = np.random.default_rng(number)
        given = {
            name: torch.from_numpy(rng.normal(size=one.shape)).to(getattr(torch, dtype))
            for name, one in engine.tensors.items()
        }
        added = sums.of_step(0.25) if engine.before_compress is not None else None
        with nothing_waits() as mode:
            engine.step(given, in_place, added)
        found.append(mode.operations)
    return found


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.name)
@pytest.mark.parametrize("spec", [*SPECS, *CUT])
def test_in_a_step_of_buckets_nothing_waits(spec: str, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, one like the one before, dense ones that send what was kept, and one of the method again; whether or
    not somebody looks at x, compresses something else in its place, and adds gradients up."""
    with on_device(monkeypatch), recorded():
        for watched, sources in ((False, False), (True, False), (True, True)):
            engine = Engine(ranks_for(spec), infos(SHAPES), parse_compressor(spec), memory)
            if watched:
                watch(engine, sources)
            steps(engine, [spec, None, "none", "fp16", spec], in_place=watched)
            assert {name for group in engine.buckets.with_kernels for name in group.names} == SHAPES.keys()


@pytest.mark.parametrize(("spec", "text"), [
    ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=2,eta=0.3"),
    ("qsgd:bits=4", "accordion:low=8,high=2,interval=2,eta=0.3,statistic=aggregated"),
    ("randomk:ratio=0.1", "adaqs:start=64,fall=0.01,interval=1"),
    ("topk:ratio=0.1", "lgreco:interval=3,last=2"),
    ("topk:ratio=0.1", "budget:error=0.5,interval=3,last=2"),
    ("eden", "budget:factor=12,interval=3,last=2"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.5"),
    ("topk:ratio=0.1", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.5,factor=elements,gain=raw"),
    ("qsgd:bits=4", "gravac:min=4,max=16,window=3,omega=0,epsilon=0.5"),
    ("powersgd:rank=2", "gravac:min=2,max=16,window=3,omega=0,epsilon=0.5"),
])  # fmt: skip
def test_in_a_step_that_a_policy_watches_nothing_waits(spec: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(communicator: InProcessCommunicator) -> None:
        driven = Driven(communicator, parse_policy(text), "torch", spec=spec, steps_per_epoch=2)
        step = driven.engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            with nothing_waits():
                return step(*args, **kwargs)

        monkeypatch.setattr(driven.engine, "step", watched)
        driven.run(5)
        grouped = {name for group in driven.engine.buckets.with_kernels for name in group.names}
        assert grouped == driven.engine.tensors.keys()

    with on_device(monkeypatch), recorded():
        run_ranks(1, work)


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_waits_where_tensors_go_one_by_one_or_have_16_bits(
    dtype: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one go those whose method no kernel takes."""
    for spec in (*EXAMPLES, *CUT):
        compressor = parse_compressor(spec)
        if dtype == "float32" and cuda.takes(compressor, 1):
            continue
        with on_device(monkeypatch), recorded():
            engine = Engine(ranks_for(spec), infos(SHAPES, dtype), compressor, memory)
            watch(engine)
            waits = pytest.raises(WaitedError, match="linalg") if compressor.name in WAITING else nullcontext()
            with waits:
                steps(engine, [spec, None, "none", None], dtype)


def test_what_was_sent_dense_is_dropped_before_the_next_step_if_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real results, as only then the host learns what it reads later; nobody else's residuals are dropped."""
    with on_device(monkeypatch), recorded():
        for spec in ("topk:ratio=0.1", "sidco:ratio=0.1"):
            engine = Engine(LoopbackCommunicator(2), infos(SHAPES), parse_compressor(spec), ErrorFeedback())
            steps(engine, [spec, "none"])
            assert engine.has_residuals
            assert not engine.passthrough
            engine.begin()
            assert not engine.has_residuals
            assert engine.passthrough


@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "fp16",
        "topk:ratio=0.1",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in SPECS if one not in ("none", "fp16")),
    ],
)
def test_a_watched_step_tells_the_device_the_same_for_any_number_of_tensors(
    spec: str, sources: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of kernels, and operations of PyTorch."""

    def told(count: int) -> tuple[int, Any]:
        shapes = {f"tensor {number}": (6, 5) for number in range(count)}
        with on_device(monkeypatch), recorded() as launches:
            engine = Engine(LoopbackCommunicator(2), infos(shapes), parse_compressor(spec), min_numel=0)
            watch(engine, sources)
            steps(engine, [None, None])
            before = len(launches)
            operations = steps(engine, [None])[-1]
        return len(launches) - before, operations

    few = told(10)
    assert few[0]
    assert told(100) == few
    assert told(1000) == few
