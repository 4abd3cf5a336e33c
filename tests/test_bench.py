"""`hvdcomp bench encode`: what it measures, on a small model's shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hvdcomp.bench.encode import PEER, Measurement, Request, measure
from hvdcomp.cli import main
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors import COMPRESSORS, EXAMPLES
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel.shapes import MODELS, tensors_of

# Tensors and parameters as the models' own publications and implementations count them.
COUNTS = {
    "resnet50": (161, 25_557_032),
    "resnet101": (314, 44_549_160),
    "vgg16": (32, 138_357_544),
    "bert-base": (199, 109_482_240),
    "gravac-lstm": (11, 66_034_000),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_published_sizes(model: str) -> None:
    tensors = tensors_of(model)
    assert (len(tensors), sum(tensor.size for tensor in tensors)) == COUNTS[model]


def test_without_a_choice_every_form_of_every_compressor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    asked: list[str] = []

    def measured(request: Request) -> Measurement:
        asked.append(request.method)
        return Measurement(request.method, 1.0, 1.0, 1.0, None, None, 1.0, None, None)

    monkeypatch.setattr("hvdcomp.commands.bench.measure", measured)
    assert CliRunner().invoke(main, ["bench", "encode"]).exit_code == 0
    assert asked == [*EXAMPLES, PEER]
    assert {parse_compressor(spec).name for spec in asked[:-1]} == set(COMPRESSORS)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"])
def test_loopback_is_what_ranks_with_equal_gradients_get(spec: str) -> None:
    gradients = {"w": np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)}
    tensors = [TensorInfo("w", (64, 32))]

    def work(communicator) -> np.ndarray:
        return Engine(communicator, tensors, parse_compressor(spec)).step(gradients)["w"]

    np.testing.assert_allclose(work(LoopbackCommunicator(3)), run_ranks(3, work)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_memory_of_decoding_does_not_grow_with_the_ranks_beyond_the_payload() -> None:
    """TopK of the largest model here: 64 ranks may take the memory of their payloads more than one rank, no more."""
    pytest.importorskip("torch")
    one, many = (
        measure(Request("topk:ratio=0.001", "resnet50", repeats=1, ranks=ranks, threads=2, device="cpu"))
        for ranks in (1, 64)
    )
    assert one.bytes_sent is not None
    payloads = 64 * one.bytes_sent / 2**20
    dense = 97.5  # MiB
    assert many.peak_mb - one.peak_mb < 3 * payloads + dense / 2


def test_the_command_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    # On a busy machine two copies differ by more than what may be published.
    monkeypatch.setattr("hvdcomp.commands.bench.measure", lambda request: replace(measure(request), copy_ms=9.0))
    arguments = ["bench", "encode", "--repeats", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--method", "topk:ratio=0.01", "--method", "none"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "encode.json").read_text())["measurements"]
    assert [one["method"] for one in written] == ["topk:ratio=0.01", "none"]
    assert all(one["ratio"] > 0 and one["step_ms"] > 0 for one in written)
    assert written[0]["compression_factor"] > 40
    assert "| topk:ratio=0.01 |" in (tmp_path / "encode.md").read_text()
    assert (tmp_path / "encode.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("slower", "published"), [(11.4, True), (11.6, False)])
def test_methods_are_not_compared_where_the_machine_was_not_equally_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, published: bool
) -> None:
    """The copy that takes turns with each method may differ by 15 percent between them."""
    pytest.importorskip("torch")
    copy_ms = {"none": 10.0, "fp16": slower, "signsgd": 10.5}

    def measured(request: Request) -> Measurement:
        return Measurement(request.method, 50.0, copy_ms[request.method], 5.0, 1.0, 1.0, 0.0, 1000, 4.0)

    monkeypatch.setattr("hvdcomp.commands.bench.measure", measured)
    methods = [word for spec in copy_ms for word in ("--method", spec)]
    result = CliRunner().invoke(main, ["bench", "encode", *methods, "--output", str(tmp_path / "out")])
    assert result.exit_code == (0 if published else 1), result.output
    assert (tmp_path / "out" / "encode.json").exists() == published
    if not published:
        said = " ".join(result.stderr.split())
        assert "10.0 ms beside none and 11.6 ms beside fp16: 16% more, where 15% is allowed" in said
        assert "measure again with more --repeats" in said
    shown = CliRunner().invoke(main, ["bench", "encode", *methods])
    assert shown.exit_code == 0
    assert ("cannot be compared" in shown.stderr) == (not published)


@pytest.mark.thorough
def test_the_peer_runs() -> None:
    pytest.importorskip("torch")
    assert measure(Request(PEER, "resnet50", repeats=1, ranks=1, threads=2, device="cpu")).ratio > 0


def test_a_wrong_method_is_named() -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(main, ["bench", "encode", "--method", "topq"])
    assert result.exit_code == 2
    assert "unknown compressor 'topq'" in result.output
