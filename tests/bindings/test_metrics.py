"""`Compression.metrics`, before and after steps of every kind, and what writes it for TensorBoard."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hvdcomp
from hvdcomp import FP16, ByName, PowerSGD, TopK
from hvdcomp.bindings.metrics import metrics_of
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import Cost, Ledger, StepCost
from tests.docs.test_docs_examples import DOCS, program
from tests.harness import BACKENDS, infos, make, run_engines

SHAPES = {"b": (64,), "v": (64, 64), "w": (64, 64)}
TIMES = {f"hvdcomp/{phase}_seconds" for phase in ("encode", "communicate", "decode")}
BYTES = {f"hvdcomp/{name}" for name in ("bytes_sent", "bytes_in_node", "dense_bytes", "compression_factor")}


def told(engine: Engine) -> dict[str, float]:
    return metrics_of(engine.ledger, engine.plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_and_one_that_does_not_count(backend: str) -> None:
    """The third step has a NaN: it is sent all the same, and changes no residual."""
    seen: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    levels = (None, 0.5, 0.5, 0.01)

    def before(engine: Engine, step: int) -> None:
        seen[engine.communicator.rank].append(told(engine))
        engine.set_level(levels[step])

    def gradients(rank: int, step: int) -> dict[str, object]:
        lost = math.nan if (rank, step) == (1, 2) else 1.0
        return {name: make(backend, np.full(shape, lost)) for name, shape in SHAPES.items()}

    runs = run_engines(2, infos(SHAPES), TopK(0.1), gradients, 4, before=before, min_ndim=2)
    for run, metrics in zip(runs, seen.values(), strict=True):
        assert metrics[0] == {}
        metrics = [*metrics[1:], told(run.engine)]
        for step, (kept, ratio) in enumerate(((410, 0.1), (2048, 0.5), (2048, 0.5), (41, 0.01))):
            assert metrics[step].keys() == BYTES | TIMES | {"hvdcomp/mean_ratio"}
            sent = 2 * 6 * kept + 256 + 4  # a value of 4 bytes and an index of 2; dense; whether the step counts
            assert metrics[step]["hvdcomp/bytes_sent"] == sent
            assert metrics[step]["hvdcomp/bytes_in_node"] == 0
            assert metrics[step]["hvdcomp/dense_bytes"] == 2 * 16384 + 256
            assert metrics[step]["hvdcomp/compression_factor"] == pytest.approx((2 * 16384 + 256) / sent)
            assert metrics[step]["hvdcomp/mean_ratio"] == pytest.approx(ratio)
            assert all(0 < metrics[step][name] < 60 for name in TIMES)
            assert all(type(value) is float for value in metrics[step].values())


def test_levels_of_different_kinds_are_apart() -> None:
    router = ByName({"v": PowerSGD(rank=4), "w": PowerSGD(rank=1), "x": TopK(0.25), "*": FP16()})
    shapes = {**SHAPES, "x": (64, 64)}
    gradients = {name: make("numpy", np.ones(shape)) for name, shape in shapes.items()}
    (run,) = run_engines(1, infos(shapes), router, lambda rank, step: gradients)
    means = {name: value for name, value in told(run.engine).items() if "mean" in name}
    assert means == {"hvdcomp/mean_rank": 2.5, "hvdcomp/mean_ratio": 0.25}


def test_what_the_library_carried_itself_has_no_times() -> None:
    """Nor those of the steps before, once they are known."""
    (run,) = run_engines(
        1, infos(SHAPES), TopK(0.1),
        lambda rank, step: {name: make("numpy", np.ones(shape)) for name, shape in SHAPES.items()},
    )  # fmt: skip
    assert told(run.engine).keys() >= TIMES
    run.engine.set_plan(dict.fromkeys(SHAPES, FP16()))
    run.engine.begin()
    run.engine.enter_casts(set(SHAPES))
    metrics = told(run.engine)
    assert metrics.keys() == BYTES
    assert metrics["hvdcomp/compression_factor"] == 2


def test_nothing_waits_for_times_that_are_not_known() -> None:
    """As on a device: they are those of the newest step that it has come to the end of."""
    ledger, passed = Ledger(), set()

    def record(number: int) -> None:
        step = StepCost(bytes_sent=10 * number, dense_bytes=100, step=number, parts=({"w": Cost()},))

        def settle() -> bool:
            if number in passed:
                ledger.enter_times(step, [(float(number), 0.5)], 0.25)
            return number in passed

        ledger.record(step, settle)

    record(1)
    assert metrics_of(ledger, {}).keys() == BYTES
    passed.add(1)
    record(2)
    for _ in range(2):
        metrics = metrics_of(ledger, {})
        assert metrics["hvdcomp/bytes_sent"] == 20
        assert metrics["hvdcomp/encode_seconds"] == 1
    passed.add(2)  # the device goes on while no step is made
    assert metrics_of(ledger, {})["hvdcomp/encode_seconds"] == 2
    assert ledger.totals.encode_seconds == 3


def test_all_that_was_sent_stayed_in_the_node() -> None:
    ledger = Ledger()
    ledger.record(StepCost(bytes_sent=10, dense_bytes=100, bytes_in_node=10))
    assert metrics_of(ledger, {}) == {
        "hvdcomp/bytes_sent": 10, "hvdcomp/bytes_in_node": 10, "hvdcomp/dense_bytes": 100,
    }  # fmt: skip


def test_nothing_before_the_first_step() -> None:
    compression = hvdcomp.Compression(TopK(0.1))
    assert compression.metrics() == {}
    hvdcomp.write_metrics(compression, None)  # type: ignore[arg-type]  # nothing is written


def test_tensorboard_shows_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    compression = hvdcomp.Compression(TopK(0.1))
    metrics: dict[str, float] = {}
    monkeypatch.setattr(compression, "metrics", lambda: metrics)
    with writers.SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            compression.ledger.steps = 10 * step
            metrics = {"hvdcomp/bytes_sent": 100.0 * step, "hvdcomp/mean_ratio": 0.5}
            hvdcomp.write_metrics(compression, writer)
        hvdcomp.write_metrics(compression, writer, step=7)
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(metrics)
    sent = [(event.step, event.value) for event in board.Scalars("hvdcomp/bytes_sent")]
    assert sent == [(10, 100), (20, 200), (7, 200)]


@pytest.mark.thorough
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    """In a process of its own, as it makes a process group."""
    pytest.importorskip("torch.utils.tensorboard")
    source = program((DOCS / "metrics.md").read_text(encoding="utf-8"))
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs/mine").glob("events*"))
