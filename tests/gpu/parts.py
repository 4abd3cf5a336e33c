"""The parts of `make gpu-check`. Each takes the device, and a function that keeps a row, a failure or a note."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hvdcomp import ErrorFeedback
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.tools.bench.encode.comparison import rows
from hvdcomp.tools.bench.encode.measurement import Measurement, Request, measure_here
from hvdcomp.tools.bench.encode.peers import PEERS
from tests.gpu import cases, predictions, roofline, steps
from tests.gpu.ranks import Shapes, allocated

Keep = Callable[..., None]

MODELS = ("resnet50", "bert-base", "small-tensors")
METHODS = (
    "none", "fp16", "topk:ratio=0.01", "mstopk:ratio=0.01", "redsync:ratio=0.01", "dgc:ratio=0.01",
    "randomk:ratio=0.01", "efsignsgd", "onebit", "qsgd:bits=4", "terngrad", "natural", "int8", "int4", "fp8", "eden",
    "eden:bits=1", "eden:scaled=True", "powersgd:rank=4",
)  # fmt: skip
ROUNDED = ", residuals of bf16"
KEPT = {
    "efsignsgd": 4.3, "topk:ratio=0.01": 4.3, "powersgd:rank=4": 4.5, "int8": 5.3, "dgc:ratio=0.01": 8.3,
    "efsignsgd" + ROUNDED: 2.3, "topk:ratio=0.01" + ROUNDED: 2.3,
}  # fmt: skip
"""Bytes for each element that a method may keep: residuals, the momentum of dgc, and what it sends."""
ALL = slice(None)
"""Of the methods, the share that a process checks."""
ONE_GPU = "there is one GPU"
"""Why nothing is exchanged between several."""
NETWORK = "network"
"""The part that several nodes share."""
NETWORK_SECONDS = 60
SECONDS_BETWEEN_ROWS = 0.5
SMALL: Shapes = {"matrix": (33, 65), "odd": (5, 7, 3), "vector": (1_030,), "one": (1,)}


def kernels(
    place: str, keep: Keep, share: slice = ALL, shapes: Shapes = cases.ODD, specs: Sequence[str] = cases.FORMS
) -> None:
    """Every form with numbers of every kind."""
    for spec in specs[share]:
        found = [(kind, said) for kind in cases.NUMBERS for said in cases.check(spec, kind, place, shapes)]
        failures = [f"{spec}, {kind}: {said}" for kind, said in found]
        keep(row={"method": spec, "failures": len(failures)})
        for one in failures[:3]:
            keep(failure=one)


def whole_steps(place: str, keep: Keep, share: slice = ALL, shapes: Shapes = steps.TRAINING) -> None:
    """Steps in sizes as in a training, which wait for the device nowhere."""
    for name, said in steps.all_checks(place, shapes)[share]:
        try:
            failures = list(said)
        except Exception as error:  # PyTorch's, of a step that waits; and the next method is to be checked too
            failures = [f"{type(error).__name__}: {error}"]
        keep(row={"method": name, "failures": len(failures)})
        for one in failures[:3]:
            keep(failure=f"{name}: {one}")


def sanitized_steps(place: str) -> None:
    """What compute-sanitizer watches."""
    cases.tiny_steps(place, lambda rank, step: cases.gradients("normal", SMALL, rank, step), SMALL)


def sanitizer(place: str, keep: Keep) -> None:
    """compute-sanitizer over small steps of every method; a note where it is missing or does not serve the device."""
    beside = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(beside))
    if program is None:
        keep(note="compute-sanitizer is not here")
        return
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, "-m", "tests.gpu", "--part", "sanitized"]
        # Each tensor in memory of its own, so that what lies beyond its end is no other tensor's.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        said = done.stdout + done.stderr
        summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", said)
        if "not supported" in said and not summary:
            keep(note=f"{tool}: compute-sanitizer does not support this device")
        elif done.returncode or not summary:
            keep(failure=f"{tool}: {summary[-1] if summary else 'no summary'}\n{said[-3000:]}")
        else:
            keep(row={"tool": tool, "summary": summary[-1]})


def bench(
    place: str,
    keep: Keep,
    models: Sequence[str] = MODELS,
    methods: Sequence[str] = (*METHODS, *PEERS),
    seconds: float = 0.15,
) -> None:
    """`bench encode` in one process."""
    for model in models:
        measured: list[Measurement] = []
        for method in methods:
            try:
                measured.append(measure_here(Request(method, model, device=place, seconds=seconds)))
            except Exception as error:  # and the next method is to be measured too
                keep(failure=f"{method} on {model}: {type(error).__name__}: {error}")
        for one in rows(measured):
            keep(row=one.as_json())


def bandwidth(
    place: str,
    keep: Keep,
    tensors: Sequence[TensorInfo] | None = None,
    specs: Sequence[str] = roofline.SPECS,
    turns: int = 10,
) -> None:
    """The bytes a second of each kernel, on the matrices of BERT-base, which no cache holds."""
    # All go into one bucket: low rank is for matrices of more rows than a few.
    matrices = [one for one in tensors_of("bert-base") if min(one.shape) >= 32 and len(one.shape) > 1]
    matrices = matrices if tensors is None else list(tensors)
    elements = sum(one.size for one in matrices)
    copied = 8 * elements / roofline.copy_ms(elements, place) * 1000
    keep(row={"method": "copy", "kernel": "copy", "bytes_a_second": copied, "share": 1.0})
    for spec in specs:
        for one in roofline.measure(spec, matrices, place, turns):
            share = None if one.bytes_a_second is None else one.bytes_a_second / copied
            keep(
                row={"method": spec, "kernel": one.kernel, "ms": one.ms, "bytes_a_second": one.bytes_a_second,
                     "share": share}
            )  # fmt: skip


def memory(place: str, keep: Keep, sizes: Sequence[tuple[int, int]] = 4 * ((2_048, 4_096),)) -> None:
    """Bytes for each element that stay on the GPU from step to step, and the most within one, beside gradients whose
    place the results take."""
    tensors = [TensorInfo(f"matrix{number}", shape, "float32") for number, shape in enumerate(sizes)]
    elements = sum(tensor.size for tensor in tensors)
    given = {tensor.name: torch.randn(tensor.shape, device=place) for tensor in tensors}
    for name, most in KEPT.items():
        engine = None
        spec, dtype = name.removesuffix(ROUNDED), "bf16" if name.endswith(ROUNDED) else "float32"
        gc.collect()  # the engine before is a part of circles
        before = allocated(place)
        kind = None if spec.startswith("dgc") else ErrorFeedback(dtype=dtype)  # None: its own
        engine = Engine(LoopbackCommunicator(), tensors, parse_compressor(spec), kind, min_numel=0, min_ndim=0)
        for _ in range(3):
            engine.begin()
            engine.step(given, in_place=True)
        peak, kept = ((one - before) / elements for one in (allocated(place, most=True), allocated(place)))
        keep(row={"method": name, "kept": kept, "peak": peak})
        if kept > most:
            keep(failure=f"{name} keeps {kept:.2f} bytes for each element, and {most} are expected at most")


def _gpus(place: str) -> int:
    """How many GPUs there are; on the host two ranks stand in for those of as many."""
    return torch.cuda.device_count() if place == "cuda" else 2


def ranks(place: str, keep: Keep) -> None:
    """Trainings with every method on two ranks that share a GPU, and with some methods on simulated ranks."""
    _started(place, keep, 2, "--check", "--one-gpu")
    for method in ("none", "topk:ratio=0.01"):
        options = "--model gpt --data text --optimizer adamw --steps 4 --seed 0 --no-progress --simulate-ranks 2"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "hvdcomp", "train", *options.split(), "--compression", method]
            done = subprocess.run([*command, "--output", folder], capture_output=True, text=True)
            summary = Path(folder) / "summary.json"
            same = summary.exists() and json.loads(summary.read_text())["identical"]
        keep(row={"method": f"{method} on simulated ranks"})
        if done.returncode or not same:
            keep(failure=f"{method} on simulated ranks: {(done.stdout + done.stderr)[-1000:]}")


def nccl(place: str, keep: Keep) -> None:
    """Trainings with every method on a rank for each GPU, whose exchanges are checked, and then a step is timed."""
    if _gpus(place) < 2:
        keep(note=ONE_GPU)
        return
    _started(place, keep, _gpus(place), "--check")
    _started(place, keep, _gpus(place))


def horovod(place: str, keep: Keep) -> None:
    """Trainings with every method on a rank for each GPU, under horovodrun."""
    if said := no_horovod(place):
        keep(note=said)
    else:
        _started(place, keep, _gpus(place), "--check", program="horovodrun")


def no_horovod(place: str) -> str:
    """Why ranks cannot be started under horovodrun; empty if they can."""
    if _gpus(place) < 2:
        return ONE_GPU
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    if _horovodrun() is None:
        return f"there is no horovodrun beside {sys.executable} or on the PATH"
    asked = "import horovod.torch as hvd; print(int(hvd.nccl_built()), int(hvd.gloo_built()))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if done.returncode:
        return f"Horovod serves no PyTorch here ({done.stderr.strip().splitlines()[-1]})"
    nccl, gloo = map(int, done.stdout.split())
    if place == "cuda" and not nccl:
        return "Horovod was built without NCCL"
    return "" if gloo else "Horovod was built without Gloo, by which horovodrun starts ranks"


def network(place: str, keep: Keep, output: Path, nodes: int, rendezvous: str) -> None:
    """What collectives between all GPUs cost: a calibration of a minute for `hvdcomp advise`, `network.json`.

    Args:
        output: its folder.
        nodes: on which this part is started, all at the same time.
        rendezvous: HOST:PORT of one of them; empty for a single node.
    """
    gpus = _gpus(place)
    if nodes * gpus < 2:
        keep(note=ONE_GPU)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "network.json"  # by rank 0, on its node, whose folder no other node has
        said = _calibrated(place, keep, made, nodes, gpus, rendezvous)
        if said is None:
            return
        if nodes > 1 and not made.exists():
            keep(note="the node of rank 0 has the figures")
            return
        links = [line.strip() for line in said.splitlines() if " Gb/s, " in line]
        if not links or not made.exists():
            keep(failure=f"hvdcomp calibrate has named no link: {said[-1000:]}")
            return
        for link in links:
            keep(row={"link": link})
        output.mkdir(parents=True, exist_ok=True)
        path = output / "network.json"
        path.write_text(made.read_text())
    keep(note=f"{nodes * gpus} ranks; next: hvdcomp advise --calibration network.json --world-size {nodes * gpus}")


def _calibrated(place: str, keep: Keep, path: Path, nodes: int, gpus: int, rendezvous: str) -> str | None:
    """What `hvdcomp calibrate` has printed; None, and a failure, if it failed."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
    command += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"] if nodes > 1 else []
    command += ["--standalone"] if nodes == 1 else []
    command += ["-m", "hvdcomp", "calibrate", "--backend", "ddp", "--device", place, "--seconds", str(NETWORK_SECONDS)]
    command += ["--compressor", "fp16", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        keep(failure=f"hvdcomp calibrate ended with status {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
        return None
    return done.stdout


def training(place: str, keep: Keep) -> None:
    """The time of a training's step on one rank, with each method and with PyTorch's hooks."""
    _started(place, keep, 1)


def _started(place: str, keep: Keep, size: int, *options: str, program: str = "torchrun") -> None:
    """Runs `ddp.py` under a program that starts ranks, and keeps its rows, and the failures in them, as they come: the
    time of this part may be over before the program ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        if program == "horovodrun":
            command = [str(_horovodrun()), "--gloo", "-np", str(size), sys.executable]
        command += ["-m", "tests.gpu.ddp", "--under", program, *options, "--device", place, str(path)]
        with subprocess.Popen(command) as process, path.open() as lines:
            status, begun = None, ""
            while status is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(SECONDS_BETWEEN_ROWS)
                *ended, begun = (begun + lines.read()).split("\n")
                for line in ended:
                    _keep_row(json.loads(line), keep, f"{size} rank{'s' * (size > 1)}", program)
    if status:
        keep(failure=f"{program} ended with status {status}")


def _keep_row(row: dict[str, Any], keep: Keep, ranks: str, program: str) -> None:
    if "backend" in row:
        keep(note=f"{ranks} over {row['backend']}, started by {program}")
        return
    for one in row.pop("failures")[:3]:
        keep(failure=f"{row['method']}: {one}")
    if "note" in row:
        keep(note=f"{row['method']}: {row['note']}")
    keep(row=row)


def _horovodrun() -> str | None:
    """The program, beside this Python or on the PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("horovodrun", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


PARTS: dict[str, Callable[..., Any]] = {
    "kernels": kernels,
    "steps": whole_steps,
    "ranks": ranks,
    "nccl": nccl,
    "horovod": horovod,
    "bench": bench,
    "memory": memory,
    "training": training,
    "roofline": bandwidth,
    "sanitizer": sanitizer,
    "calibrate": predictions.calibrate,
    "profile": predictions.profile,
    NETWORK: network,
}
"""By name, in the order in which they run."""
RANKS = "ranks", "nccl", "horovod"
"""Parts that `--part ranks` runs: each that the machine's GPUs allow."""

SHARED = ("kernels", "steps")
"""Parts whose methods several processes share: nothing is timed there, and compiling takes longer than running."""
