"""What is kept on a device from step to step: in one place of each tensor, and in two within a step only."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.adaptation.look import observe
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.device_residuals import DeviceResiduals
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from tests.harness import infos, states_of
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from tests.cuda_kernels import recorded  # noqa: E402
from tests.device_waits import on_device  # noqa: E402
from tests.exchange.test_overlap import BYTES, assert_same, early, run, with_nan, without_one  # noqa: E402
from tests.gpu import cases  # noqa: E402

pytestmark = needs_triton

SHAPES = {"matrix": (40, 48), "long": (3, 3_200), "small": (8, 12)}  # sizes are multiples of 32
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())


def given() -> dict[str, Any]:
    return {name: torch.ones(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("spec", "memory", "expected"),
    [("efsignsgd", None, 4), ("topk:ratio=0.1", None, 4), ("int8", ErrorFeedback(), 4), ("powersgd:rank=2", None, 4),
     ("dgc:ratio=0.1", None, 8), ("int8", None, 0)],
)  # fmt: skip
def test_residuals_take_one_place_between_steps(
    spec: str, memory: Memory | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> float:
        return engine.buckets._residuals.nbytes / ELEMENTS

    within: list[float] = []
    with on_device(monkeypatch), recorded():
        engine = Engine(LoopbackCommunicator(2), infos(SHAPES), parse_compressor(spec), memory, 0, 0, 0)
        observe(engine, lambda look: within.append(kept()) or {})
        for _ in range(3):
            engine.begin()
            engine.step(given())
            assert kept() == expected
    assert within == [expected, 2 * expected, 2 * expected]


@pytest.mark.parametrize(
    ("spec", "memory"),
    [("efsignsgd", None), ("topk:ratio=0.1", ErrorFeedback(dtype="fp16")), ("powersgd:rank=2", ErrorFeedback()),
     ("powersgd:rank=2", ErrorFeedback(dtype="bf16")), ("dgc:ratio=0.1", None), ("int8", None)],
)  # fmt: skip
def test_what_is_kept_is_known_before_the_first_step(
    spec: str, memory: Memory | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device(monkeypatch), recorded():
        engine = Engine(LoopbackCommunicator(2), infos(SHAPES), parse_compressor(spec), memory, 0, 0, 0)
        expected = engine.planner.kept_bytes(engine.compressor)
        for _ in range(2):
            engine.begin()
            engine.step(given())
        assert engine.buckets.kept_bytes == expected


def test_a_rounded_residual_takes_two_bytes_and_x_four_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[float] = []
    with on_device(monkeypatch), recorded():
        memory = ErrorFeedback(dtype="bf16")
        engine = Engine(LoopbackCommunicator(2), infos(SHAPES), parse_compressor("efsignsgd"), memory, 0, 0, 0)
        observe(engine, lambda look: within.append(engine.buckets.kept_bytes) or {})
        for _ in range(3):
            engine.begin()
            engine.step(given())
            assert engine.buckets.kept_bytes == 2 * ELEMENTS
    assert within == [6 * ELEMENTS] * 3


_KEPT = ("none", "fp16", "efsignsgd", "dgc:ratio=0.01", "two_level(int8)")
_MORE = (
    *(kind.examples[0] for kind in COMPRESSORS.values() if kind.name in cuda.METHODS),
    *("int4:exchange=scatter", "bf16:exchange=scatter", "two_level(topk:ratio=0.01)", "two_level(powersgd:rank=4)"),
)


@pytest.mark.parametrize("spec", [*_KEPT, *(pytest.param(spec, marks=pytest.mark.thorough) for spec in _MORE)])
@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback()], ids=["none", "residuals"])
def test_little_else_stays_in_memory(spec: str, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tensors that are alive: payloads of less than float32, and what kernels note of each piece."""
    has_no_storage = torch._C._functorch.is_functorch_wrapped_tensor  # other tests may have left such tensors

    def alive() -> int:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and not has_no_storage(one)]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

    compressor = parse_compressor(spec)
    with on_device(monkeypatch), recorded():
        gradients = {"w": torch.ones(1024, 2048)}
        before = alive()
        engine = Engine(LoopbackCommunicator(), infos({"w": (1024, 2048)}), compressor, memory, 0, 0, 0)
        for _ in range(3):
            engine.begin()
            engine.step(gradients, in_place=True)
        (bucket,) = engine.buckets.with_kernels
        assert bucket.on_device
        sent = sum(payload.bytes for payload in compressor.payloads((1024, 2048), "float32", 1))
        kept = engine.buckets.kept_bytes
        places = 2 if bucket.bucket.memory.is_momentum else bucket.bucket.keeps
        assert kept / 2**21 == pytest.approx(4 * places, abs=0.1)
        assert (alive() - before - kept) / 2**21 < (0 if spec in ("none", "fp16") else sent / 2**21) + 0.4


@pytest.mark.usefixtures("in_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("spec", "gone"),  # residuals of two steps, velocities too, or what all three steps sent; of two ranks
    [("efsignsgd", 4), ("fp16", 6), pytest.param("dgc:ratio=0.3", 8, marks=pytest.mark.thorough)],
)
def test_nothing_reads_what_was_let_go_of(spec: str, gone: int, spoiled: list[Any]) -> None:
    """Nor what has just been taken: also where a step does not count, the second one here."""
    assert list(cases.check(spec, "nan", "cpu", {"matrix": (6, 8), "odd": (5, 7, 3), "vector": (77,)})) == []
    assert len(spoiled) == gone


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize(
    "memory",
    [ErrorFeedback(0.5), MomentumCorrection(0.9), ErrorFeedback(0.5, "bf16")],
    ids=str,
)
@pytest.mark.thorough
def test_buckets_that_start_early_keep_the_same(memory: Memory) -> None:
    """With a tensor that misses a step, which moves to another bucket, and a step that does not count."""
    options: dict[str, Any] = {
        "backend": "torch", "memory": memory, "steps": 7, "change": {3: without_one, 5: with_nan}
    }  # fmt: skip
    found = run("efsignsgd", BYTES, **options)
    assert all(isinstance(one.engine.buckets._residuals, DeviceResiduals) for one in found)
    assert early(found[0])
    assert_same(found, run("efsignsgd", None, **options))


@pytest.mark.usefixtures("spoiled")
def test_an_exchange_that_fails_costs_nothing_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(started: Any) -> Any:
        raise ConnectionError

    def work(communicator: InProcessCommunicator) -> None:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("efsignsgd"), min_numel=0, min_ndim=0)
        plain = Engine(communicator, infos(SHAPES), parse_compressor("efsignsgd"), min_numel=0, min_ndim=0)
        for step in range(4):
            rng = np.random.default_rng(step)
            values = {name: torch.tensor(rng.normal(size=shape), dtype=torch.float32) for name, shape in SHAPES.items()}
            if step == 2:
                before = states_of(engine)
                for _ in range(2):
                    with monkeypatch.context() as patch:
                        patch.setattr(communicator, "wait", lost)
                        with pytest.raises(ConnectionError):
                            engine.step(values)
                assert states_of(engine) == before
                assert engine.buckets._residuals.nbytes == 8 * ELEMENTS  # for the next try
            found, expected = engine.step(values), plain.step(values)
            assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
            assert states_of(engine) == states_of(plain)
        assert engine.buckets._residuals.nbytes == 4 * ELEMENTS

    run_ranks(1, work)
