"""`hvdcomp calibrate`: fits against times that are made up, the schedule against Horovod's rules, and real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Group
from hvdcomp.errors import ConfigurationError, SpecError, UnevenNodesError
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel import (
    ALGORITHMS,
    NOISY,
    Collective,
    CollectiveCost,
    Compute,
    EncodeTime,
    Exchange,
    Network,
    Parts,
    Setting,
    exchange_of,
    load,
    predict,
)
from hvdcomp.perfmodel.ways import encode_time_of
from hvdcomp.tools.bench.fit import (
    extra_per_byte,
    fit_collective,
    halves,
    pool_adjacent_violators,
    reading,
)
from hvdcomp.tools.bench.levels import Levels, find_levels
from hvdcomp.tools.commands.advise import command as advise
from hvdcomp.tools.commands.calibrate import TWO_LEVELS, _checked
from hvdcomp.tools.commands.calibrate import command as calibrate
from hvdcomp.tools.train.options import SetupError
from tests.launched import run_forked_ranks

pytestmark = pytest.mark.alone

SIZES = [64, *(1 << power for power in range(12, 25, 2))]
CYCLE = 1e-3
_COMMAND = str(Path(sys.executable).parent / "hvdcomp")


def ring_time(size: float, alpha: float, bandwidth: float, p: int) -> float:
    return CYCLE + 2 * alpha * (p - 1) + 2 * size * (p - 1) / (p * bandwidth)


# Fits.


@given(
    alpha=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e10),
    p=st.integers(2, 64),
    seed=st.integers(0, 1000),
)
def test_the_fit_finds_latency_and_bandwidth_under_noise(alpha: float, bandwidth: float, p: int, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(0.98, 1.02, len(SIZES))
    exact = [ring_time(size, alpha, bandwidth, p) for size in SIZES]
    cost = fit_collective("allreduce", "ring", p, SIZES, [*(noise * exact)], CYCLE)
    for size, expected in zip(SIZES, exact, strict=True):
        assert float(cost.seconds("allreduce", size, p).total) == pytest.approx(expected, rel=0.05)
    if exact[-1] > 10 * exact[0]:  # otherwise the bytes hardly show beside latency
        assert cost.bytes_per_s == pytest.approx(bandwidth, rel=0.15)
        far = 100 * SIZES[-1]
        assert float(cost.seconds("allreduce", far, p).total) == pytest.approx(
            ring_time(far, alpha, bandwidth, p), rel=0.2
        )
    assert cost.start_s <= CYCLE


def test_one_bad_size_does_not_move_the_bandwidth() -> None:
    times = [ring_time(size, 1e-5, 1e8, 4) for size in SIZES]
    times[4] *= 8
    cost = fit_collective("allreduce", "ring", 4, SIZES, times, CYCLE)
    assert cost.bytes_per_s == pytest.approx(1e8, rel=0.05)


def test_a_collective_quicker_than_the_cycle_has_no_negative_latency() -> None:
    cost = fit_collective("allgather", "ring", 2, [64, 1 << 20, 1 << 22], [4e-4, 3e-3, 1e-2], CYCLE)
    assert (cost.start_s, cost.latency_s) == (4e-4, 0.0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=12))
def test_what_is_made_to_rise_rises_and_keeps_its_mean(values: list[float]) -> None:
    rising = pool_adjacent_violators(values)
    assert np.all(np.diff(rising) >= -1e-9)
    assert rising.mean() == pytest.approx(np.mean(values))
    if values == sorted(values):
        assert rising == pytest.approx(values)


def test_noise_is_called_by_its_name() -> None:
    quiet, loud = [1.0, 1.02, 0.99], [1.3, 1.31, 1.29]
    assert not reading([quiet, quiet]).noisy
    apart = reading([quiet, loud])
    assert apart.noisy
    assert apart.spread == pytest.approx(0.3 / np.median(quiet + loud))
    assert halves([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]).spread > NOISY
    assert halves([1.0, 5.0, 1.0, 1.0, 1.0, 5.0]).spread == 0  # single disturbances do not count


def test_a_size_whose_passes_differ_is_measured_again() -> None:
    pytest.importorskip("torch")
    from hvdcomp.tools.bench.probe_network import _Measuring

    times = {("float32", 4096): [1e-3, 1e-3], ("float32", 16384): [1e-2, 3e-2, 1e-2, 1e-2], ("fused", 4096): [2e-3] * 2}
    times["fused", 16384] = [2e-2] * 4  # with it, as differences of kinds count
    left = {place: iter(values) for place, values in times.items()}

    class Scripted(_Measuring):
        def _sample(self, kind: str, size: int, among: Group) -> tuple[list[float], float]:
            return [next(left[kind, size])] * 3, 1e-6

    found = Scripted(Mock(), Mock(), Mock(), 1.0, 1.0, lambda what: None).by_size(("float32", "fused"), [4096, 16384])
    assert found == {"float32": {4096: 1e-3, 16384: 1e-2}, "fused": {4096: 2e-3, 16384: 2e-2}}
    assert not any(list(each) for each in left.values())


def test_steps_that_are_timed_hold_no_numbers_that_make_a_processor_slow() -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.workload import build

    try:
        build("mlp", 2, 0, 0)
        fading = torch.full((4,), 1e-38) * 0.1
        assert torch.count_nonzero(fading) == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.count_nonzero(torch.full((4,), 1e-38) * 0.1) == 4


def test_a_model_is_timed_on_the_shape_of_its_data() -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.workload import build
    from hvdcomp.tools.train.options import SetupError

    try:
        digits, images = (build(name, 2, 0, 0) for name in ("mlp@digits", "mlp"))
        assert [next(iter(one.tensors())).shape[1] for one in (digits, images)] == [64, 3 * 32 * 32]
        assert digits.loss().ndim == 0
        for wrong, message in (
            ("mlp@mnist", "The data sets are: cifar10, cifar100, digits"),
            ("lstm@digits", "an image model"),
            ("cnm@digits", "the model 'cnm' is not known"),
        ):
            with pytest.raises(SetupError, match=message):
                build(wrong, 2, 0, 0)
    finally:
        torch.set_flush_denormal(False)


def test_extra_time_is_never_negative() -> None:
    assert extra_per_byte([10, 20], [1.5, 2.0], [1.0, 1.0]) == pytest.approx(0.05)
    assert extra_per_byte([10, 20], [0.5, 0.5], [1.0, 1.0]) == 0


# What a calibration adds to the model.

ALPHA, BANDWIDTH = 1e-4, 1e8
NETWORK = Network(
    CollectiveCost(
        "ring", ALPHA, BANDWIDTH, start_s=CYCLE, fusion_s_per_byte=1e-9, reduction_s_per_byte={"float16": 5e-9}
    ),
    CollectiveCost("ring", ALPHA, BANDWIDTH, start_s=CYCLE),
)


def thread(ready: Sequence[tuple[float, float]], backward: float, most: float, size: float, p: int) -> float:
    """When Horovod's background thread has sent everything, in plain Python; from the begin of the backward pass."""
    clock, sent = 0.0, 0
    shares = [0.0, *(share for share, _ in ready)]
    while sent < len(ready):
        arrives = ready[sent][1] * backward
        begins = arrives + CYCLE if arrives >= clock else clock
        upto = sent + 1
        while upto < len(ready) and ready[upto][1] * backward <= begins:
            if (shares[upto + 1] - shares[sent]) * size > most:
                break
            upto += 1
        moved = (shares[upto] - shares[sent]) * size
        clock = begins + 2 * (p - 1) * ALPHA + 2 * moved * (p - 1) / (p * BANDWIDTH)
        clock += 1e-9 * moved if upto - sent > 1 else 0.0
        sent = upto
    return clock


@given(
    sizes=st.lists(st.floats(1e3, 1e7), min_size=1, max_size=12),
    moments=st.lists(st.floats(0.001, 1), min_size=12, max_size=12),
    backward=st.floats(1e-3, 0.5),
    most=st.floats(1e4, 1e8),
    p=st.integers(2, 16),
    gamma=st.floats(1, 2),
)
def test_gradients_are_sent_when_they_are_ready(
    sizes: list[float], moments: list[float], backward: float, most: float, p: int, gamma: float
) -> None:
    total = sum(sizes)
    shares = [*(np.cumsum(sizes)[:-1] / total), 1.0]
    ready = tuple(zip(map(float, shares), sorted(moments[: len(sizes)]), strict=True))
    compute = Compute(backward, 0.01, gamma, optimizer_s=0.002, horovod_s=0.003, ready=ready)
    exchange = Exchange(((Collective("allreduce", total, "float32"),),), overlapped=True, dense_bytes=total)
    settings = Setting(np.array([p, p]), BANDWIDTH)
    parts = predict(NETWORK, compute, exchange, most, settings)
    slowed = gamma * backward
    expected = 0.01 + max(slowed, thread(ready, slowed, most, total, p)) + 0.002 + 0.003
    assert parts.total == pytest.approx([expected, expected], rel=1e-6)
    assert min(np.min(part) for part in parts[:4]) >= 0


@given(
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    backward=st.floats(1e-3, 0.5),
    most=st.floats(1e4, 1e8),
    p=st.integers(2, 16),
    lost=st.floats(0, 1e-8),
)
def test_what_a_cast_takes_beside_is_its_own_and_grows_with_its_bytes(
    sizes: list[int], backward: float, most: float, p: int, lost: float
) -> None:
    """Steps as the thread makes them, in which the ranks take some time from each other for each byte: what is then
    predicted is what was measured, of dense gradients and of float16."""
    pytest.importorskip("torch")
    from hvdcomp.tools.bench.probe_model import unpredicted_time

    tensors = [TensorInfo(str(place), (size, 500)) for place, size in enumerate(sizes)]
    total, ends = sum(sizes), np.cumsum(sizes)
    ready = tuple(zip((ends / total).tolist(), ((1 + np.arange(len(ends))) / len(ends)).tolist(), strict=True))
    compute = Compute(backward, 0.01, 1.2, optimizer_s=0.002, horovod_s=0.003, ready=ready)
    network = replace(NETWORK, allreduce=replace(NETWORK.allreduce, reduction_s_per_byte={}))
    found: dict[str, EncodeTime] = {}
    for spec, width in (("none", 4), ("fp16", 2)):
        exchange, sent = exchange_of(parse_compressor(spec), tensors, p), 500.0 * width * total
        slowed = 1.2 * backward
        step = 0.01 + max(slowed, thread(ready, slowed, most, sent, p)) + 0.002 + 0.003 + lost * sent
        found[spec] = unpredicted_time(network, compute, exchange, most, p, step)
        for encode_speed in (1.0, 10.0) if spec == "none" else (1.0,):  # nothing is encoded there
            there = Setting(p, encode_speed=encode_speed)
            parts = predict(network, compute, exchange, most, there, found[spec])
            assert float(parts.total) == pytest.approx(step, rel=1e-6)
            assert float(parts.encode) == (0 if spec == "none" else found[spec].encode_s)
        # a step quicker than predicted
        assert unpredicted_time(network, compute, exchange, most, p, 0.01).encode_s == 0
    fp16 = encode_time_of(parse_compressor("fp16"), {"none": found["none"]})
    assert fp16 is not None
    assert fp16.estimated
    assert fp16.encode_s == pytest.approx(found["fp16"].encode_s, rel=1e-3, abs=1e-6 * step)


def test_one_rank_sends_nothing_whatever_is_ready() -> None:
    compute = Compute(0.1, 0.05, 1.5, optimizer_s=0.01, engine_s=0.02, horovod_s=0.03, ready=((0.5, 0.5), (1.0, 1.0)))
    for overlapped in (True, False):
        exchange = Exchange(((Collective("allreduce", 1e6, "float32"),),), overlapped, 1e6)
        parts: Parts = predict(NETWORK, compute, exchange, 1e9, Setting(1))
        assert float(parts.total) == pytest.approx(0.16)


def test_the_engine_waits_for_the_cycle_once_a_round_and_float16_is_added_up_slowly() -> None:
    compute = Compute(0.1, 0.0, optimizer_s=0.01, engine_s=0.02)
    both = (Collective("allreduce", 1e6, "float16"), Collective("allgather", 1e5))
    exchange = Exchange((both, both[:1]), overlapped=False, dense_bytes=4e6)
    total = float(predict(NETWORK, compute, exchange, 1e9, Setting(2)).total)
    reduced = 2 * ALPHA + 1e6 / BANDWIDTH + 5e-9 * 1e6
    gathered = ALPHA + 1e5 / BANDWIDTH
    assert total == pytest.approx(0.13 + 2 * CYCLE + 2 * reduced + gathered)


# Two levels.


@pytest.mark.parametrize(
    ("node", "across", "inside", "why_not"),
    [(2, 3, 2, ""), (1, 4, None, "each node has one rank"), (4, 1, None, "all ranks are on one node")],
)
def test_levels_are_several_nodes_of_several_ranks(node: int, across: int, inside: int | None, why_not: str) -> None:
    sizes = {"node": node, "across": across}
    ranks: Any = SimpleNamespace(part=lambda group: SimpleNamespace(world_size=sizes[group]))
    found = find_levels(ranks)
    assert (found.ranks_per_node, found.why_not) == (inside, why_not)


def test_uneven_nodes_have_no_levels_and_what_the_user_set_wrong_is_told() -> None:
    ranks = Mock()
    ranks.part.side_effect = UnevenNodesError("uneven")
    found = find_levels(ranks)
    assert (found.ranks_per_node, found.why_not) == (None, "the nodes have different numbers of ranks")
    ranks.part.side_effect = ConfigurationError("not allowed")
    with pytest.raises(ConfigurationError, match="not allowed"):
        find_levels(ranks)


def test_the_largest_collectives_of_both_levels_are_measured() -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench import calibrate
    from hvdcomp.tools.bench.workload import build

    try:
        compressors = [parse_compressor("qsgd:bits=8")]
        models = [build("mlp", batch_size=2, seed=0, rank=0).tensors()]
        flat, both = (calibrate.largest_collectives(models, compressors, 4, inside) for inside in (None, 2))
    finally:
        torch.set_flush_denormal(False)
    elements = 820_874
    assert set(flat) == {(kind, "all") for kind in ALGORITHMS}
    assert {kind: both[kind] for kind in flat} == flat
    assert both["reducescatter", "node"] == pytest.approx(4 * elements, rel=0.01)
    assert both["allgather", "node"] == pytest.approx(2 * elements, rel=0.01)
    for kind in ("allgather", "alltoall"):
        assert both[kind, "across"] == pytest.approx(elements / 2, rel=0.02)


class Tiny:
    """Ranks of two nodes of two that are told of collectives, and carry out none."""

    def __init__(self, rank: int, size: int, sent: list[int]) -> None:
        self.rank, self.world_size, self.sent = rank, size, sent

    def part(self, group: str) -> Tiny:
        return Tiny({"node": self.rank % 2, "across": self.rank // 2}[group], 2, self.sent)

    def wait(self, handle: None) -> None:
        pass

    def _start(self, array: Any, *_: str) -> None:
        self.sent.append(array.numel() * array.element_size())

    start_allreduce = start_allgather = start_alltoall = start_reducescatter = _start


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "spec", ["two_level(topk:ratio=0.01)", "two_level(powersgd:rank=1)", "two_level(efsignsgd:exchange=scatter)"]
)
def test_steps_without_payload_in_two_levels_go_on_for_long(spec: str, rank: int) -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.no_payload import NoPayload

    sent: list[int] = []
    communicator: Any = NoPayload("own", Tiny(rank, 4, sent))  # type: ignore[arg-type]
    tensors = [TensorInfo("a", (64, 40)), TensorInfo("b", (50, 30))]
    engine = Engine(communicator, tensors, parse_compressor(spec))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        engine.begin()
        found = engine.step({one.name: torch.randn(one.shape, generator=generator) for one in tensors})
        assert all(bool(torch.isfinite(one).all()) for one in found.values())
    assert max(sent) <= 32  # eight bytes to each rank


# Overlap.


def carrier(shares_buckets: bool = False) -> Any:
    """Of two ranks, as far as a trial asks."""
    return SimpleNamespace(ranks=SimpleNamespace(size=2), shares_buckets=shares_buckets, early_bytes=1_000_000)


@pytest.mark.parametrize(
    ("at_end", "early", "spread", "hides"),
    [(1.0, 0.5, 0.0, 0.5), (1.0, 0.75, 0.0, 0.25), (1.0, -0.5, 0.0, 1.0), (1.0, 1.2, 0.0, 0.0), (1.0, 0.5, 0.9, None)],
)
def test_hides_is_the_share_of_what_could_be_saved(
    at_end: float, early: float, spread: float, hides: float | None
) -> None:
    """at_end, early: measured, in units of what could be saved beyond the predicted early step."""
    pytest.importorskip("torch")
    from hvdcomp.tools.bench.fit import Reading
    from hvdcomp.tools.bench.probe_overlap import trial_of

    tensors = [TensorInfo(name, (1000, 1000)) for name in "abcd"]
    specs = [parse_compressor(one) for one in ("fp16", "topk:ratio=0.01", "qsgd:bits=4", "two_level(qsgd:bits=8)")]
    trial = trial_of(specs, tensors, carrier(shares_buckets=False))
    assert trial is not None
    assert (str(trial.compressor), trial.early_bytes) == ("qsgd:bits=4", 16_000_000 // 3)
    ready = ((0.25, 0.1), (0.5, 0.2), (0.75, 0.4), (1.0, 1.0))
    # What stands in `hides` already is not of this measurement.
    compute = Compute(0.1, 0.05, encode={"qsgd:bits=4": EncodeTime(0.01)}, ready=ready, hides=0.3)
    full = Compute(0.1, 0.05, encode=compute.encode, ready=ready)
    exchange = exchange_of(trial.compressor, tensors, 2)
    asked = (NETWORK, full, exchange, 1e9, Setting(2), EncodeTime(0.01))
    late, soon = (float(predict(*asked, one).total) for one in (None, trial.early_bytes))
    could = late - soon
    assert could > 0.02 * late
    readings = [Reading(soon + could * one, spread) for one in (at_end, early)]
    found, source = trial.hidden_share(NETWORK, compute, tensors, *readings)
    assert found == (None if hides is None else pytest.approx(hides))
    assert ("too small to measure" in source) == (hides is None)
    slow = Compute(1e3, 0.05, encode=compute.encode, ready=ready)
    found, source = trial.hidden_share(NETWORK, slow, tensors, *readings)
    assert found is None
    assert "could save" in source


def test_without_a_compressor_that_can_be_sent_early_nothing_is_trained_for_it() -> None:
    pytest.importorskip("torch")
    from hvdcomp.tools.bench.probe_overlap import trial_of

    specs = [parse_compressor(one) for one in ("fp16", "two_level(qsgd:bits=8)")]
    assert trial_of(specs, [TensorInfo("a", (1000, 1000))], carrier()) is None


@pytest.mark.parametrize(("shares_buckets", "dtype", "early_bytes"), [
    (False, "float32", 100_000), (False, "bfloat16", 50_000), (True, "float32", 1_000_000),
])  # fmt: skip
def test_buckets_of_the_library_hold_no_less_than_what_is_sent_by_itself(
    shares_buckets: bool, dtype: str, early_bytes: int
) -> None:
    pytest.importorskip("torch")
    from hvdcomp.tools.bench.probe_overlap import trial_of

    trial = trial_of([parse_compressor("qsgd:bits=4")], [TensorInfo("a", (300, 250), dtype)], carrier(shares_buckets))
    assert trial is not None
    assert trial.early_bytes == early_bytes


# The command.


OWN = """
import torch

def small(batch_size):
    model = torch.nn.Linear(64, 32)
    batch = torch.randn(batch_size, 64)
    return model, lambda: model(batch).square().mean()
"""


def alone(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_COMMAND, "calibrate", *options], capture_output=True, text=True, timeout=120)


def test_without_a_cuda_device_all_ranks_are_told_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("here is a CUDA device")
    from hvdcomp.tools.train.environment import use_device

    assert use_device("auto", 1) == use_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(SetupError, match=r"--device cuda does not work: PyTorch .* finds no CUDA device on .*, or giv"):
        use_device("cuda", 0)


@pytest.mark.parametrize(
    ("devices", "libraries"),
    [((0, 0), "gloo"), ((1, 1), "gloo"), ((1, 2), "gloo"), ((2, 1), "gloo"), ((2, 2), "cpu:gloo,cuda:nccl")],
)
def test_ranks_that_share_a_device_exchange_over_gloo(
    devices: tuple[int, int], libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on each host, where hosts may have other numbers of devices: NCCL refuses ranks that share one."""
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.train import ranks_torch

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store, here = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here.devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here.devices)

    def rank(number: int) -> str:
        here.devices = devices[number // 2]
        return ranks_torch._libraries(store, 4)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(rank, range(4))) == [libraries] * 4


def test_each_rank_of_a_host_takes_a_cuda_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be seen without one."""
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.train.environment import use_device

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    assert use_device("auto", 6) == torch.device("cuda", 2)
    assert use_device("cuda", 1) == torch.device("cuda", 1)
    assert use_device("cpu", 3) == torch.device("cpu")
    assert chosen == [2, 1]


@pytest.mark.parametrize("model", ["mlp", "lstm", "own_model:small"])
def test_model_and_batch_are_on_the_device_that_is_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's "meta" stands for a CUDA device: what is elsewhere, or forgotten on the host, does not go with it."""
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.workload import build

    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    meta = torch.device("meta")
    try:
        there = build(model, 2, 0, 0, meta)
        assert there.device == there.loss().device == meta
        assert {one.device for one in there.model.parameters()} == {meta}
        here = build(model, 2, 0, 0)
        assert here.device == here.loss().device == torch.device("cpu")
        assert [one.shape for one in here.tensors()] == [one.shape for one in there.tensors()]
        if model == "own_model:small":
            on_host = OWN.replace("64, 32)", '64, 32, device="cpu")').replace("size, 64)", 'size, 64, device="cpu")')
            (tmp_path / "host_model.py").write_text(on_host)
            with pytest.raises(
                SetupError, match="host_model:small is on cpu, but the device to measure is meta; create"
            ):
                build("host_model:small", 2, 0, 0, meta)
    finally:
        torch.set_flush_denormal(False)


def test_collectives_without_payload_are_where_the_payload_is() -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.no_payload import NoPayload

    sent: list[Any] = []

    class Noted(Tiny):
        def _start(self, array: Any, *_: str) -> None:
            sent.append((array.device.type, array.numel() * array.element_size()))

        start_allreduce = start_allgather = start_alltoall = start_reducescatter = start_broadcast = _start

    communicator = NoPayload("own", Noted(0, 4, []))  # type: ignore[arg-type]
    there = torch.zeros(64, device="meta")
    communicator.start_allreduce(there, "sum", "a")
    communicator.start_allgather(there, "b")
    communicator.start_alltoall(there, "c")
    communicator.start_reducescatter(there, "sum", "d")
    communicator.start_broadcast(there, "e")
    assert sent == [("meta", size) for size in (8, 8, 32, 32, 8)]


def test_one_rank_is_told_how_to_start() -> None:
    pytest.importorskip("horovod.torch")
    done = alone("--output", "calibration.json")
    assert done.returncode == 2
    assert "one rank" in done.stderr
    assert "horovodrun -np 2 hvdcomp calibrate" in done.stderr
    assert "torchrun --nproc-per-node 2 -m hvdcomp calibrate" in done.stderr
    assert "Or use the network of a preset, such as --network h100x8" in done.stderr


def test_an_unknown_network_is_refused() -> None:
    pytest.importorskip("torch")
    answer = CliRunner().invoke(calibrate, ["--network", "h100x9"])
    assert answer.exit_code == 2
    assert "'h100x9' is neither a file nor a preset" in answer.output


@pytest.mark.thorough
def test_one_rank_calibrates_a_model_for_the_network_of_a_preset(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own_model.py").write_text(OWN)
    file = tmp_path / "one.json"
    options = ["--model", "own_model:small", "--compressor", "int4", "--seconds", "1", "--batch-size", "4"]
    arguments = ["-m", "hvdcomp", "calibrate", "--network", "h100x8", *options, "--output", str(file)]
    done = run_forked_ranks(1, "torchrun", arguments, beside(tmp_path), timeout=300)
    assert done.returncode == 0, done.stdout
    assert "one, 1 rank\nThe network was not measured. These numbers are from h100x8:" in done.stdout
    assert f"Next: hvdcomp advise --calibration {file}\n" in done.stdout
    found, preset = load(file), load("h100x8")
    assert found.network == preset.network
    assert found.network_source == f"{preset.network_source} (h100x8)"
    encode = found.models["own_model:small"].compute.encode["int4"]
    assert encode.encode_s > 0
    answer = CliRunner().invoke(advise, ["--calibration", str(file), "--world-size", "64", "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["methods"]["two_level(int4:exchange=scatter)"]["encode_ms"] > 0


@pytest.mark.parametrize(
    ("model", "spec", "file", "words"),
    [
        ("mlpp", "fp16", "x.json", ("'mlpp'", "resnet20", "module:function")),
        ("mlp", "topkk:ratio=0.01", "x.json", ("topkk", "topk")),
        ("mlp", "fp16", "no-such-folder/x.json", ("no-such-folder", "create it first")),
        ("os.path:join", "fp16", "x.json", ("os.path:join(batch_size) must return", "TypeError")),
        ("builtins:divmod_", "fp16", "x.json", ("builtins:divmod_", "cannot be imported")),
        ("builtins:range", "fp16", "x.json", ("must return (torch.nn.Module", "not range")),
        ("mlp", "two_level(qsgd:bits=4)", "x.json", ("two_level(qsgd:bits=4)", "each node has one rank")),
    ],
)
def test_what_cannot_work_is_refused(model: str, spec: str, file: str, words: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flat = Levels(Mock(), why_not="each node has one rank")
    with pytest.raises((SetupError, SpecError)) as refused:
        _checked((model,), (spec,), {"batch_size": 2, "seed": 0}, tmp_path / file, rank=0, levels=flat)
    assert all(word in str(refused.value) for word in words), refused.value
    assert not list(tmp_path.iterdir())


def test_what_rank_0_cannot_do_stops_all_ranks_before_measuring() -> None:
    pytest.importorskip("horovod.torch")
    arguments = [_COMMAND, "calibrate", "--output", "no-such-folder/calibration.json"]
    done = run_forked_ranks(2, "gloo", arguments, timeout=90)
    assert done.returncode != 0
    assert done.stdout.count("Error: --output no-such-folder/calibration.json cannot be written") == 1
    assert "calibrate.py" not in done.stdout  # no traceback of ours


def beside(folder: Path) -> dict[str, str]:
    """The environment in which modules of a folder are found too."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def test_two_ranks_calibrate_what_advise_reads(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    (tmp_path / "own_model.py").write_text(OWN)
    file = tmp_path / "two.json"
    scattered = "qsgd:bits=4,exchange=scatter"
    specs = [word for spec in ("fp16", "topk:ratio=0.01", scattered) for word in ("--compressor", spec)]
    models = ["--model", "mlp", "--model", "own_model:small"]
    arguments = [_COMMAND, "calibrate", *models, *specs, "--seconds", "1", "--batch-size", "4", "--output", str(file)]
    done = run_forked_ranks(2, "gloo", arguments, beside(tmp_path), timeout=120)
    assert done.returncode == 0, done.stdout
    calibration = load(file)
    assert set(calibration.models) == {"mlp", "own_model:small"}
    facts = calibration.models["mlp"]
    assert sum(tensor.size for tensor in facts.tensors) == 820_874
    assert set(facts.compute.encode) == {"none", "fp16", "topk:ratio=0.01", scattered}
    # What a step that casts takes beside may be nothing.
    own = [time for spec, time in facts.compute.encode.items() if spec not in ("none", "fp16")]
    assert all(time.encode_s + time.decode_per_rank_s > 0 for time in own)
    assert facts.compute.batch_size == 4
    assert len(facts.compute.ready) == len(facts.tensors)
    assert facts.compute.ready[0][0] < 0.01  # the last layer's gradients are small and come first
    assert facts.compute.optimizer_s > 0
    for kind in ALGORITHMS:
        assert calibration.network.stand_in(kind) is None
        assert calibration.network.cost(kind).transfer[-1][0] > 1 << 16
    assert "ranks" in calibration.machine
    assert "median" in calibration.noise_note
    noisy = "too noisy to trust" in calibration.noise_note
    assert ("too noisy to trust" in done.stdout) == noisy
    asked = ["--calibration", str(file), "--model", "mlp", "--world-size", "2", "--json"]
    answer = CliRunner().invoke(advise, asked)
    assert answer.exit_code == 0, answer.output
    methods = json.loads(answer.output)["methods"]
    assert set(methods) == {"none", "fp16", "topk:ratio=0.01", "qsgd:bits=4", scattered}
    # A step takes at least what computing takes, and no step of so small a model takes a second.
    least = 1e3 * ((facts.compute.forward_s or 0) + facts.compute.backward_s)
    assert all(least <= one["step_ms"] < 1000 for one in methods.values())


@pytest.mark.thorough
def test_two_ranks_of_torch_distributed_calibrate_what_advise_reads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own_model.py").write_text(OWN)
    file = tmp_path / "two.json"
    specs = [word for spec in ("fp16", "topk:ratio=0.01") for word in ("--compressor", spec)]
    options = ["--model", "own_model:small", *specs, "--seconds", "1", "--batch-size", "4", "--output", str(file)]
    done = run_forked_ranks(2, "torchrun", ["-m", "hvdcomp", "calibrate", *options], beside(tmp_path), timeout=120)
    assert done.returncode == 0, done.stdout
    assert "Two-level compressors were not measured, because all ranks are on one node" in done.stdout
    assert "orovod" not in done.stdout
    calibration = load(file)
    assert (calibration.machine["backend"], calibration.machine["ranks"]) == ("ddp", "2")
    assert calibration.network_source == "hvdcomp calibrate, 2 ranks of torch.distributed"
    for kind in ALGORITHMS:
        cost = calibration.network.cost(kind)
        assert calibration.network.stand_in(kind) is None
        assert (cost.start_s, cost.fusion_s_per_byte) == (0, 0)
        assert cost.latency_s > 0
    facts = calibration.models["own_model:small"]
    assert (facts.bucket_bytes, facts.early_bytes) == (25 * 2**20, 1_000_000)
    assert len(facts.compute.ready) == 1  # a bucket for all
    assert set(facts.compute.encode) == {"none", "fp16", "topk:ratio=0.01"}
    answer = CliRunner().invoke(advise, ["--calibration", str(file), "--world-size", "2", "--json"])
    assert answer.exit_code == 0, answer.output
    assert set(json.loads(answer.output)["methods"]) == {"none", "fp16", "topk:ratio=0.01"}


@pytest.mark.thorough
def test_what_rank_0_of_torch_distributed_cannot_do_stops_all_ranks() -> None:
    pytest.importorskip("torch")
    arguments = ["-m", "hvdcomp", "calibrate", "--output", "no-such-folder/calibration.json"]
    done = run_forked_ranks(2, "torchrun", arguments, timeout=90)
    assert done.returncode != 0
    assert done.stdout.count("Error: --output no-such-folder/calibration.json cannot be written") == 1
    assert "calibrate.py" not in done.stdout  # no traceback of ours


@pytest.mark.thorough
def test_horovod_is_refused_under_torchrun() -> None:
    pytest.importorskip("torch")
    words = [_COMMAND, "calibrate", "--backend", "horovod"]
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "made up"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    assert "torchrun started these processes" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("controller", ["mpi", "gloo", "torchrun"])
def test_four_ranks_on_two_nodes_calibrate_both_links(controller: str, tmp_path: Path) -> None:
    pytest.importorskip("torch" if controller == "torchrun" else "horovod.torch")
    (tmp_path / "own_model.py").write_text(OWN)
    file = tmp_path / "four.json"
    two_levels = {"two_level(qsgd:bits=4)", "two_level(powersgd:rank=2)"}
    specs = [word for spec in ("qsgd:bits=4", *sorted(two_levels)) for word in ("--compressor", spec)]
    if controller == "mpi":  # those of the command itself
        specs, two_levels = [], set(TWO_LEVELS)
    program = ["-m", "hvdcomp"] if controller == "torchrun" else [_COMMAND]
    arguments = [*program, "calibrate", "--model", "own_model:small", *specs, "--seconds", "1", "--batch-size", "4"]
    environment = {**beside(tmp_path), "HVDCOMP_RANKS_PER_NODE": "2"}
    done = run_forked_ranks(4, controller, [*arguments, "--output", str(file)], environment, timeout=240)
    assert done.returncode == 0, done.stdout
    calibration = load(file)
    levels = calibration.network.levels
    assert levels is not None
    assert levels.ranks_per_node == 2
    measured = [{kind for kind in ALGORITHMS if one.stand_in(kind) is None} for one in (levels.node, levels.across)]
    assert measured == [{"allreduce", "allgather", "reducescatter"}, {"allreduce", "allgather", "alltoall"}]
    compute = calibration.models["own_model:small"].compute
    found = {spec for spec in compute.encode if spec.startswith("two_level")}
    assert found == two_levels
    assert all(compute.encode[spec].encode_s + compute.encode[spec].decode_per_rank_s > 0 for spec in found)
    for words in ("2 ranks on each node", "reducescatter within nodes", "alltoall between nodes", "possible overlap"):
        assert words in done.stdout
    asked = ["--calibration", str(file), "--model", "own_model:small", "--world-size", "4", "--json"]
    answer = CliRunner().invoke(advise, asked)
    assert answer.exit_code == 0, answer.output
    assert two_levels <= set(json.loads(answer.output)["methods"])
