"""Error feedback of gradients of 16 bits loses nothing: residuals are of 32 bits, and what travels stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.bindings.checkpoint import restore, state_of
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.memory import MomentumCorrection
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.sizes import payloads_of
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS_AND_DTYPES, as_numpy, assert_same_on_all_ranks, copy, infos, make, run_engines

SHAPE, STEPS = (24, 40), 60
# Methods whose sums are made in single precision or more. Those in half precision lose what Horovod rounds on the way.
SPECS = [
    "topk:ratio=0.05", "topk:ratio=0.05,values=fp16", "randomk:ratio=0.05", "powersgd:rank=2", "stc:ratio=0.05",
    "efsignsgd", "efsignsgd:exchange=scatter", "onebit", "onebit:per_row=true", "int4", "int4:exchange=scatter",
    "qsgd:bits=8", "natural", "globalqsgd", "bf16", "two_level(topk:ratio=0.05)", "two_level(powersgd:rank=2)",
]  # fmt: skip
IN_HALF = ("randomk", "fp16")

sixteen_bits = pytest.mark.parametrize(
    ("backend", "dtype"), [one for one in BACKENDS_AND_DTYPES if one.values[1] in ("float16", "bfloat16")]
)


def gradients(backend: str, dtype: str, rank: int, step: int) -> dict[str, Any]:
    """With heavy tails, which small numbers do not add up beside where 8 bits are kept of a sum."""
    values = np.random.default_rng([rank, step]).standard_t(2, size=SHAPE)
    return {"w": make(backend, values, dtype)}


@sixteen_bits
@pytest.mark.parametrize("spec", SPECS)
def test_what_arrived_and_what_is_kept_add_up_to_all_gradients(spec: str, backend: str, dtype: str) -> None:
    size = 4 if spec.startswith("two_level") else 3
    if dtype == "float16" and spec.startswith(IN_HALF):
        size = 1  # whose sums round nothing
    runs = run_engines(
        size, infos({"w": SHAPE}, dtype), parse_compressor(spec), lambda r, s: gradients(backend, dtype, r, s), STEPS,
        memory=ErrorFeedback,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    assert {str(result["w"].dtype).removeprefix("torch.") for result in runs[0].results} == {dtype}
    every = [gradients(backend, dtype, rank, step)["w"] for rank in range(size) for step in range(STEPS)]
    given = sum(as_numpy(gradient).astype(float) for gradient in every)
    arrived = sum(as_numpy(result["w"]).astype(float) for result in runs[0].results) * size
    kept = sum(as_numpy(run.engine.states["w"].memory[0]).astype(float) for run in runs)
    lost = np.linalg.norm(given - arrived - kept) / np.linalg.norm(given)
    assert lost < 2e-6, lost


@sixteen_bits
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2", "randomk:ratio=0.05", "int4"])
def test_as_many_bytes_travel_as_are_predicted(spec: str, backend: str, dtype: str) -> None:
    """Values of 16 bits for sparsifiers, although x is of 32: with its residual it is rounded before it is sent."""
    (run,) = run_engines(
        1, infos({"w": SHAPE}, dtype), parse_compressor(spec), lambda r, s: gradients(backend, dtype, r, s), 3,
        memory=ErrorFeedback,
    )  # fmt: skip
    predicted = sum(one.bytes for one in payloads_of(parse_compressor(spec), SHAPE, dtype))
    assert run.engine.ledger.tensors["w"].bytes_sent == 3 * predicted
    if spec.startswith("topk"):
        assert predicted == 48 * (2 + 2)


@sixteen_bits
def test_momentum_is_kept_in_single_precision_too(backend: str, dtype: str) -> None:
    memory = MomentumCorrection(momentum=0.9, masking=False)
    (run,) = run_engines(
        1, infos({"w": SHAPE}, dtype), parse_compressor("topk:ratio=0.05"),
        lambda r, s: gradients(backend, dtype, r, s), STEPS, memory=lambda: memory,
    )  # fmt: skip
    velocity, total = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(STEPS):
        velocity = 0.9 * velocity + as_numpy(gradients(backend, dtype, 0, step)["w"]).astype(float)
        total += velocity
    arrived = sum(as_numpy(result["w"]).astype(float) for result in run.results)
    kept = [as_numpy(one).astype(float) for one in run.engine.states["w"].memory]
    np.testing.assert_allclose(kept[0], velocity, rtol=1e-5, atol=1e-5 * np.abs(velocity).max())
    assert np.linalg.norm(total - arrived - kept[1]) < 2e-6 * np.linalg.norm(total)


@sixteen_bits
def test_a_state_of_an_earlier_version_goes_on(backend: str, dtype: str) -> None:
    """It holds residuals of 16 bits."""

    def work(communicator: InProcessCommunicator) -> None:
        def engine() -> Engine:
            return Engine(communicator, infos({"w": SHAPE}, dtype), parse_compressor("topk:ratio=0.05"), min_numel=0)

        first, second = engine(), engine()
        first.begin()
        first.step(gradients(backend, dtype, 0, 0))
        state = state_of(first, None, copy)
        assert as_numpy(state["own"]["residuals"]["w"]["arrays"][0]).any()
        narrow = make(backend, as_numpy(state["own"]["residuals"]["w"]["arrays"][0]), dtype)
        state["own"]["residuals"]["w"]["arrays"] = [narrow]
        restore(state, second, None, lambda array, name: copy(array))
        (kept,) = second.states["w"].memory
        assert str(kept.dtype).removeprefix("torch.") == "float32"
        np.testing.assert_array_equal(as_numpy(kept), as_numpy(narrow))
        second.begin()
        second.step(gradients(backend, dtype, 0, 1))

    run_ranks(1, work)


@pytest.mark.parametrize("spec", ["topk:ratio=0.3", "randomk:ratio=0.3"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_what_half_precision_does_not_hold_is_sent_later(backend: str, spec: str) -> None:
    """Gradient and residual are below the largest number, and their sum is not: the step counts, and all arrives."""
    if backend == "torch":
        pytest.importorskip("torch")
    g = np.full((4, 4), 40000.0) * np.sign(np.random.default_rng(0).normal(size=(4, 4)))
    factors = [1, 1, 1, *[0] * 40]
    (run,) = run_engines(
        1, infos({"w": (4, 4)}, "float16"), parse_compressor(spec),
        lambda r, s: {"w": make(backend, g * factors[s], "float16")}, len(factors), memory=ErrorFeedback,
    )  # fmt: skip
    arrived = sum(as_numpy(result["w"]).astype(float) for result in run.results)
    np.testing.assert_array_equal(arrived + as_numpy(run.engine.states["w"].memory[0]), 3 * g)
    assert max(np.abs(as_numpy(result["w"])).max() for result in run.results) == 65504
