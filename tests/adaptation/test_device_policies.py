"""What policies see of gradients on CUDA devices, in Triton's interpreter on the CPU: the same as on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, kernels
from hvdcomp.adaptation.energies import Energies, densified
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.adaptation.observers import Observers
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.low_rank import random_columns
from hvdcomp.compressors.memory import Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda
from hvdcomp.policies import parse_policy
from tests.driven import Driven
from tests.harness import as_numpy, infos, previews_of
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
pytestmark = [
    needs_triton,
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
]

RAW = "gravac:factor=elements,gain=raw"
SHAPES = {"matrix": (6, 8), "odd": (5, 7, 3), "long": (4, 2300)}  # of one piece, and of two


@contextmanager
def where(device: bool) -> Iterator[None]:
    """Within it, gradients on the CPU are served as if they were on a device, or by the kernels of the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if not device:
            yield
            return
        with cuda.serving_host():
            yield


def assert_same(found: Any, right: Any, where: str = "", loose: float = 1.0) -> None:
    """Numbers in the same places, which differ by the order of additions; `loose` times as far as usual."""
    if dataclasses.is_dataclass(right) and not isinstance(right, type):
        assert_same(vars(found), vars(right), where, loose)
    elif isinstance(right, Mapping):
        assert found.keys() == right.keys(), where
        for name, one in right.items():
            assert_same(found[name], one, f"{where} {name}", loose)
    elif isinstance(right, list | tuple):
        assert len(found) == len(right), where
        for place, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            assert_same(mine, theirs, f"{where} {place}", loose)
    elif isinstance(right, str) or right is None:
        assert found == right, where
    else:
        np.testing.assert_allclose(found, right, rtol=2e-5 * loose, atol=1e-5 * loose, err_msg=where)


def power_step(matrix: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P Q' and Q of PowerSGD on one rank, in double precision: Q is orthonormal twice over, by Gram-Schmidt."""

    def orthonormal(columns: np.ndarray) -> np.ndarray:
        unit, triangle = np.linalg.qr(columns)
        return unit * np.sign(np.diag(triangle))

    p = orthonormal(matrix @ orthonormal(start))
    q = matrix.T @ p
    return p @ q.T, q


def numbers_of(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: as_numpy(x) for name, x in arrays.items()}


def looked(spec: str, memory: Memory, device: bool, in_place: bool, of_results: bool, ranks: int) -> Any:
    """What ranks see in steps of which the second does not count, and what they are left with after each."""

    def work(communicator: InProcessCommunicator) -> list[Any]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), memory, min_numel=0, min_ndim=0)
        sums, seen = AccumulatedGradients(), []

        def look(look: Look) -> dict[str, Any]:
            names, of_kept, half = ["odd", "long"], Energies(), {"odd": look["odd"] / 2}
            kept = {
                name: densified(look.xp, look[name], one)
                for name, one in previews_of(engine).kept(look, engine.plan, names, of_kept).items()
            }
            previews = previews_of(engine)
            lost = [previews.lost(look, engine.plan, names), previews.lost(look, engine.plan, list(SHAPES), half)]
            energies = [look.energies(names), of_kept, *lost, look.lost_when_sent(names)[0]]
            energies.append(look.gradient_energies(names))
            seen.append((energies, numbers_of(look), numbers_of(kept)))
            return half

        observe(engine, look)
        told: list[Any] = []
        for step in range(1 + ranks):
            rng = np.random.default_rng([communicator.rank, step])
            given = {name: torch.tensor(rng.normal(size=shape), dtype=torch.float32) for name, shape in SHAPES.items()}
            if step == 1 and communicator.rank == ranks - 1:
                given["odd"][0, 0, 0] = float("inf")
            engine.begin()
            results = engine.step(given, in_place, sums.of_step(0.25, of_results))
            assert all((group.bucket.device is not None) == device for group in engine.buckets.with_kernels)
            assert {name for group in engine.buckets.with_kernels for name in group.names} == SHAPES.keys()
            if step == 1:
                assert all(bool(x.isnan().any()) for x in results.values())
            else:
                energies, x, kept = seen[-1]
                told += [[one.numbers() for one in energies], x, kept, numbers_of(results)]
            told.append(numbers_of(sums.sums))
            told.append({name: [as_numpy(x) for x in state.memory] for name, state in engine.states.items()})
        return told

    with where(device):
        return run_ranks(ranks, work)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("spec", "memory", "in_place", "of_results", "ranks"),
    [
        ("efsignsgd", ErrorFeedback(0.5), True, False, 1),
        *(
            pytest.param(spec, memory, in_place, of_results, 2, marks=pytest.mark.thorough)
            for spec in (
                "none", "fp16", "bf16", "signsgd", "efsignsgd", "onebit", "qsgd:bits=4", "terngrad", "natural",
                "globalqsgd", "int4", "fp8", "eden", "topk:ratio=0.1", "topk:ratio=0.3,values=fp16",
                "randomk:ratio=0.3", "powersgd:rank=2",
            )
            for memory, in_place, of_results in (
                (NoMemory(), True, True),
                (ErrorFeedback(0.5), False, False),
                (MomentumCorrection(0.9, nesterov=True, clip=1.0), True, False),
            )
        ),
    ],
)  # fmt: skip
def test_who_looks_sees_the_same_as_on_the_host(
    spec: str, memory: Memory, in_place: bool, of_results: bool, ranks: int
) -> None:
    """x, its energy, what compression keeps and loses of it, and of something else in its place; sums of gradients, to
    which a step that does not count adds nothing; and the step does what it does on the host."""
    found, right = (looked(spec, memory, device, in_place, of_results, ranks) for device in (True, False))
    assert_same(found, right)


@pytest.mark.parametrize("device", [True, False])
def test_powersgd_goes_on_from_what_it_kept_when_its_rank_changes(device: bool) -> None:
    """From the first columns of Q and, at a higher rank, from the random ones that a first step begins with; the
    residual is what was left, bit for bit."""
    tensors = infos({"matrix": (6, 8), "odd": (5, 7, 3)})
    engine = Engine(LoopbackCommunicator(), tensors, parse_compressor("powersgd:rank=1"), min_numel=0, min_ndim=0)
    rng = np.random.default_rng(0)
    kept: dict[str, np.ndarray] = {}
    with where(device):
        for rank in (2, 3, 1, 3):
            engine.set_level(rank)
            engine.begin()
            given = {one.name: rng.standard_normal(one.shape, dtype=np.float32) for one in tensors}
            before = {name: [as_numpy(x) for x in engine.states[name].memory] for name in given}
            found = engine.step({name: torch.tensor(x) for name, x in given.items()})
            assert [group.bucket.device is not None for group in engine.buckets.with_kernels] == [device]
            for name, gradient in given.items():
                x = sum(before[name], gradient)
                matrix = x.reshape(x.shape[0], -1)
                random = random_columns(numpy_arrays, matrix, matrix.shape[1], 3, Context(name, 0, 0, 0, 1), "powersgd")
                columns = kept.get(name, random)
                start = np.concatenate([columns, random[:, columns.shape[1] :]], axis=1)[:, :rank]
                approximation, q = power_step(matrix.astype(np.float64), start.astype(np.float64))
                np.testing.assert_allclose(as_numpy(found[name]), approximation.reshape(x.shape), rtol=0, atol=2e-6)
                (kept[name],) = (as_numpy(one) for one in engine.states[name].compressor)
                np.testing.assert_allclose(kept[name], q, rtol=0, atol=2e-5)
                (residual,) = engine.states[name].memory
                np.testing.assert_array_equal(as_numpy(residual), x - as_numpy(found[name]))


@pytest.mark.parametrize(
    ("spec", "text", "ranks"),
    [
        ("qsgd:bits=4", "accordion:low=8,high=2,interval=1,eta=0.3", 1),
        *(
            pytest.param(spec, text, 2, marks=pytest.mark.thorough)
            for spec, text in (
                ("topk:ratio=0.1", "accordion:low=0.5,high=0.02,interval=2,eta=0.3,statistic=aggregated"),
                ("powersgd:rank=2", "accordion:low=4,high=1,steps=2,statistic=aggregated,eta=0.5"),
                ("powersgd:rank=2", "adaqs:start=8,fall=0.01,steps=2"),
                ("topk:ratio=0.1", "lgreco:interval=2,alpha=1.1"),
                ("powersgd:rank=2", "lgreco:interval=4,last=2,alpha=1.2"),
                ("topk:ratio=0.1", "budget:factor=4,interval=4,last=2"),
                ("eden", "lgreco:interval=4,last=2,alpha=1.5"),
                ("topk:ratio=0.1", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.5,smoothing=0.3"),
                ("topk:ratio=0.1", f"{RAW},min=2,max=64,window=3,omega=0,epsilon=0.5,smoothing=0.3"),
                ("powersgd:rank=2", f"{RAW},min=2,max=64,window=3,omega=0,epsilon=0.1,smoothing=0.3"),
                ("qsgd:bits=4", "gravac:min=4,max=16,window=3,omega=0,epsilon=0.5"),
                ("powersgd:rank=2", "gravac:min=2,max=64,window=3,omega=0,epsilon=0.1,smoothing=0.3"),
            )
        ),
    ],
)
def test_policies_are_told_the_same_and_decide_the_same_as_on_the_host(spec: str, text: str, ranks: int) -> None:
    def train(device: bool) -> Any:
        def work(communicator: InProcessCommunicator) -> Any:
            driven = Driven(communicator, parse_policy(text), "torch", spec=spec, steps_per_epoch=2)
            observers, told = driven.coordinator.observers, []

            def statistics(*args: Any) -> dict[str, Any]:
                found = Observers.statistics(observers, *args)
                told.append({name: one for name, one in found.items() if name != "timing"})
                return found

            observers.statistics = statistics  # type: ignore[method-assign]
            driven.run(5 if ranks == 1 else 9)
            groups = driven.engine.buckets.with_kernels
            assert all((group.bucket.device is not None) == device for group in groups)
            assert {name for group in groups for name in group.names} == driven.engine.tensors.keys()
            return told, driven.plans, driven.results

        with where(device):
            return run_ranks(ranks, work)

    found, right = train(True), train(False)
    assert len(right[0][0]) >= 2
    # PowerSGD goes on from what it found, so the last bits grow from step to step.
    assert_same(found, right, loose=10.0 if spec.startswith("powersgd") else 1.0)
