"""What `make gpu-check` runs on several ranks, as far as it goes without a GPU: over Gloo, in the host's memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hvdcomp.compressors import COMPRESSORS, TensorInfo
from hvdcomp.perfmodel import Calibration, Compute, EncodeTime, ModelFacts, load
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from hvdcomp.torch import training  # noqa: E402
from tests.captured import as_captured  # noqa: E402
from tests.gpu import ddp, parts, predictions  # noqa: E402
from tests.gpu.libraries import TorchDistributed  # noqa: E402

pytestmark = needs_triton

IN_BFLOAT16 = "none", "fp16", "bf16", "int4", "topk:ratio=0.1", "efsignsgd", "powersgd:rank=4"
OVERLAPPED = "int4", "topk:ratio=0.1", "efsignsgd", "powersgd:rank=4"
CHECKED = [
    *(kind.examples[0] for kind in COMPRESSORS.values()),
    "int4:exchange=scatter", "fp16:exchange=scatter", "efsignsgd:exchange=scatter", "two_level(int4)",
    *(spec + how for spec in IN_BFLOAT16 for how in (" of bfloat16 parameters", " with a scaler")),
    *(f"{spec} with and without overlap" for spec in OVERLAPPED),
    "bf16, payloads of more than 2 GiB each",
    "topk:ratio=0.1 of a model in CUDA graphs", "topk:ratio=0.1 captured by a CUDA graph",
]  # fmt: skip
SIMULATED = ["none on simulated ranks", "topk:ratio=0.01 on simulated ranks"]
ALONE = [
    "none", "fp16", "int8", "eden", "efsignsgd", "qsgd:bits=4", "topk:ratio=0.01", "dgc:ratio=0.01", "powersgd:rank=4",
]  # fmt: skip
TIMED = [
    *ALONE,
    *(spec + how
      for how in (", in the backward pass", ", 64 sequences", ", 64 sequences, in the backward pass")
      for spec in ("none", "efsignsgd", "topk:ratio=0.01")),
]  # fmt: skip


class Kept:
    """What a part keeps."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.failures: list[str] = []
        self.notes: list[str] = []

    def __call__(self, row: Any = None, failure: str = "", note: str = "") -> None:
        self.rows += [row] * (row is not None)
        self.failures += [failure] * bool(failure)
        self.notes += [note] * bool(note)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "rows", "started"),
    [
        ("ranks", CHECKED + SIMULATED, "2 ranks over (gloo), started by torchrun"),
        ("horovod", CHECKED, r"2 ranks over (Horovod \d+\.\d+\.\d+), started by horovodrun"),
        ("training", TIMED, "1 rank over (gloo), started by torchrun"),
    ],
    ids=["ranks", "horovod", "training"],
)
def test_trainings_run_under_torchrun_and_horovodrun(part: str, rows: list[str], started: str) -> None:
    if part == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    kept = Kept()
    parts.PARTS[part]("cpu", kept)
    assert kept.failures == []
    assert [row["method"] for row in kept.rows] == rows
    if part == "training":  # on the host without memory
        assert all(row.keys() == {"method", "ms", "quartiles_ms", "ddp_ms"} for row in kept.rows)
    over = re.fullmatch(started, kept.notes[0])
    assert over is not None
    large, *graphs = CHECKED[-3:]
    notes = [f"{large}: 1,000 elements, as {over[1]} sends them through the host"]
    notes += [f"{name}: skipped, as CUDA graphs need a GPU" for name in graphs]
    assert kept.notes[1:] == (notes if part != "training" else [])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchDistributed]:
    """Of one rank, this process, for a small model."""

    def small_model() -> torch.nn.Module:
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(64, 40))

    start = partial(torch.distributed.init_process_group, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "init_process_group", start)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(ddp, "large_model", small_model)
    made = TorchDistributed("cpu")
    yield made
    made.end()


@pytest.mark.parametrize("overflows", [True, False])
def test_a_scale_that_stays_is_a_failure(
    library: TorchDistributed, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not overflows:
        monkeypatch.setattr(ddp, "OVERFLOW", ddp.STEPS)
    said = list(ddp.check(library, "fp16", "cpu", scaled=True))
    assert said == ([] if overflows else ["the scale is 1024 after an overflow of the last rank, in place of 512"])


def test_a_model_in_graphs_is_made_before_it_is_distributed(
    library: TorchDistributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: the model stays as it is."""
    graphed: list[Any] = []

    def make(model: Any, given: Any) -> Any:
        assert [(x.shape, x.requires_grad) for x in given] == [((16, 64), False)]
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        graphed.append(model)
        return model

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    assert list(ddp.check(library, "topk:ratio=0.5", "cpu", graphed=True)) == []
    assert len(graphed) == 1


@pytest.mark.parametrize(
    ("refuses", "ends", "said"),
    [
        (True, "", []),
        (True, "the end", []),  # of a capture that hvdcomp has ended
        (False, "", ["the step was captured"]),
        (False, "the end", ["the capture failed, and hvdcomp had not refused it: RuntimeError: the end"]),
    ],
)
def test_a_step_that_a_graph_captures_is_a_failure(
    library: TorchDistributed, refuses: bool, ends: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def graph(graph: Any, stream: Any) -> Iterator[None]:
        try:
            with as_captured():
                yield
        finally:
            if ends:
                raise RuntimeError(ends)

    in_place = {"Stream": Mock, "stream": nullcontext, "current_stream": Mock, "CUDAGraph": Mock, "graph": graph}
    for name, one in in_place.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(ddp, "STEPS_BEFORE_CAPTURE", 1)
    if not refuses:
        monkeypatch.setattr(training, "refuse_capture", lambda: None)
    assert list(ddp.check_captured(library, "topk:ratio=0.1", "cpu")) == said


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_method_is_timed_beside_ddp_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        """A training that takes 1 ms and 3 bytes without a method, 5 ms and 7 bytes with one."""

        def __init__(self, method: str, *_: Any) -> None:
            if method == "bad":
                raise ValueError("no such method")
            self.ms, self.peak_bytes = (5.0, 7) if method else (1.0, 3)

        def milliseconds(self, steps: int) -> list[float]:
            return [self.ms - 1, self.ms, self.ms + 1]

    monkeypatch.setattr(ddp, "Training", Fixed)
    rows: list[Any] = []
    ddp.time_all(place, rows.append, ["bad", "int8"], rounds=1)
    peaks = {"peak_bytes": 7, "ddp_peak_bytes": 3} if place == "cuda" else {}
    assert rows == [
        {"method": "bad", "failures": ["ValueError: no such method"]},
        {"method": "int8", "failures": [], "ms": 5.0, "quartiles_ms": [4.0, 6.0], "ddp_ms": 1.0, **peaks},
    ]


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_rank_is_started_for_each_of_several_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(parts, "_started", lambda place, keep, *given, **how: started.append((*given, *how.values())))
    if gpus > 1:
        monkeypatch.setattr(parts, "no_horovod", lambda place: "")
    kept = Kept()
    parts.nccl("cuda", kept)
    parts.horovod("cuda", kept)
    if gpus == 1:
        assert (started, kept.notes) == ([], ["there is one GPU"] * 2)
    else:
        assert (started, kept.notes) == ([(4, "--check"), (4,), (4, "--check", "horovodrun")], [])


@pytest.mark.parametrize("beside", [True, False])
def test_horovodrun_is_taken_beside_this_python_or_on_the_path(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "bin", tmp_path / "elsewhere"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folders[0] / "python"))
    monkeypatch.setenv("PATH", str(folders[1]))
    assert parts._horovodrun() is None
    program_of = folders[0 if beside else 1] / "horovodrun"
    program_of.write_text("#!/bin/sh\n")
    program_of.chmod(0o755)
    assert parts._horovodrun() == str(program_of)


def test_rows_are_kept_while_ranks_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that starts ranks ends only after its first row was kept, and then with an error."""
    python, seen = tmp_path / "python", tmp_path / "seen"
    os.mkfifo(seen)
    rows = ['{"backend": "b"}', '{"method": "one", "failures": ["bad"]}', '{"method": "two", "fai']
    written = "\\n".join(rows).replace('"', '\\"')
    # The last of its arguments is the file.
    program = f'for file; do :; done\nprintf "{written}" >> $file\ntimeout 20 head -n 1 {seen} && exit 3\n'
    python.write_text(f"#!/bin/sh\n{program}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(parts, "SECONDS_BETWEEN_ROWS", 0.01)

    with seen.open("r+b", buffering=0) as telling:

        class Telling(Kept):
            def __call__(self, row: Any = None, **others: Any) -> None:
                super().__call__(row, **others)
                if row is not None:
                    telling.write(b"\n")

        parts._started("cpu", kept := Telling(), 2)
    assert kept.rows == [{"method": "one"}]
    assert kept.failures == ["one: bad", "torchrun ended with status 3"]
    assert kept.notes == ["2 ranks over b, started by torchrun"]


class OneRank:
    """A library of one rank, without ranks."""

    rank, size = 0, 1

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def gathered_texts(self, texts: list[str]) -> list[list[str]]:
        return [texts, ["70000000000"]]  # another rank has less free memory


@pytest.mark.parametrize(
    ("place", "backend", "free", "elements", "said"),
    [
        ("cuda", "cpu:gloo,cuda:nccl", 120e9, 2**30 + 1, ""),
        ("cuda", "Horovod 0.28.1 with NCCL", 5e9, 375_000_000,
         "375,000,000 elements, as 4.7 GiB are free on a GPU, and 13.3 are needed"),
        ("cuda", "gloo", 120e9, 1_000, "1,000 elements, as gloo sends them through the host"),
        ("cpu", "gloo", 120e9, 1_000, "1,000 elements, as gloo sends them through the host"),
    ],
)  # fmt: skip
def test_a_large_payload_follows_the_memory(
    place: str, backend: str, free: float, elements: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), 0))
    library: Any = OneRank(backend)
    assert ddp.elements_of_large(library, place) == (elements, said)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["calibrate", "profile"])
def test_predictions_are_compared_with_measured_steps(part: str) -> None:
    """Of two ranks, and of one rank with the network of a preset."""
    kept = Kept()
    parts.PARTS[part]("cpu", kept, seconds=1)
    assert kept.failures == []
    methods = {"none", "fp16", *predictions.METHODS}
    assert {(row["ranks"], row["method"]) for row in kept.rows} == {(size, one) for size in (2, 1) for one in methods}
    for row in kept.rows:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
    starts = [f"{said} over gloo: predictions of 5 steps are off by " for said in ("2 ranks", "1 rank")]
    assert all(note.startswith(start) for note, start in zip(kept.notes, starts, strict=True))


def test_one_rank_computes_and_encodes() -> None:
    """5 s for the passes and the optimizer. The engine takes 0.5 s, but only in steps through it; encoding takes 2 s,
    and decoding 0.25 s for a payload."""
    encode = {"int8": EncodeTime(2.0, decode_per_rank_s=0.25), "none": EncodeTime(0.125)}
    compute = Compute(backward_s=3.0, forward_s=1.0, optimizer_s=1.0, engine_s=0.5, encode=encode)
    network = load(predictions.NETWORK).network
    known = Calibration("here", network, {"m": ModelFacts((TensorInfo("w", (64, 64)),), compute, bucket_bytes=1e9)})
    none, int8 = predictions.rows(known, 1, {"none": 5125.0, "int8": 3875.0})
    assert (none["predicted_ms"], none["error"]) == (5125.0, 0.0)
    assert (int8["predicted_ms"], int8["error"]) == (7750.0, 1.0)


def test_what_fails_on_some_ranks_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends with an error on two ranks, and is told which GPU to use."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES, ranks $5"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    predictions.calibrate("cpu", kept := Kept())
    predictions.profile("cpu", kept, sizes=(1,))
    assert kept.failures == [
        "hvdcomp calibrate on 2 ranks ended with status 3: GPU 5, ranks 2\n",
        "hvdcomp calibrate on 1 rank ended with status 3: GPU 5, ranks 1\n",
        "hvdcomp profile on 1 rank ended with status 3: GPU 5, ranks 1\n",
    ]
    assert (kept.rows, kept.notes) == ([], [])


@pytest.mark.thorough
def test_the_probe_of_the_network_is_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "NETWORK_SECONDS", 5)
    kept = Kept()
    parts.network("cpu", kept, tmp_path, 1, "")
    assert kept.failures == []
    assert [row["link"].split(":")[0] for row in kept.rows][:2] == ["allreduce", "allgather"]
    (said,) = kept.notes
    command = said.removeprefix("2 ranks; next: hvdcomp ").split()
    done = subprocess.run([sys.executable, "-m", "hvdcomp", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout


@pytest.mark.parametrize(
    ("nodes", "makes", "failures", "notes"),
    [
        (1, True, 1, []),
        (1, False, 1, []),
        (2, True, 1, []),
        (2, False, 0, ["the node of rank 0 has the figures"]),
    ],
)
def test_a_network_without_a_link_is_a_failure(
    nodes: int, makes: bool, failures: int, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a node without rank 0, which makes no file."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nfor file; do :; done\n" + "echo {} > $file\n" * makes)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    parts.network("cpu", kept := Kept(), tmp_path, nodes, "host:1")
    assert (len(kept.failures), kept.notes, kept.rows) == (failures, notes, [])
    assert not (tmp_path / "network.json").exists()
