"""Two parts of `make gpu-check`: `hvdcomp calibrate` and `hvdcomp profile` on a GPU, predicted beside measured steps.

Two ranks share a GPU over Gloo, and one rank has it alone over NCCL. One rank has no network, so its calibration uses
the network of a preset; the steps of one rank exchange nothing, so only the time of computing and encoding is compared.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdcomp.perfmodel import Adviser, Calibration, Setting, from_json, load
from hvdcomp.perfmodel.advice import STOCK_SPECS

Keep = Callable[..., None]

SIZES = (2, 1)
NETWORK = "h100x8"
"""The preset whose network one rank uses."""
METHODS = ("int8", "topk:ratio=0.01", "powersgd:rank=4")
"""Compressors; dense and fp16 gradients are compared, too."""
MODELS = {"cuda": ("resnet18", 64), "cpu": ("mlp@digits", 4)}
"""The calibrated model and its batch size, by place."""
SECONDS = 10
"""Of a calibration, of the steps beside it, and of a profile."""


def calibrate(place: str, keep: Keep, sizes: Sequence[int] = SIZES, seconds: float = SECONDS) -> None:
    """Calibrates, and compares predicted with measured steps, which took turns with the calibration."""
    model, batch_size = MODELS[place]
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.json"
            options = ["--model", model, "--batch-size", batch_size, "--seconds", seconds, "--device", place]
            options += ["--no-auto", "--quiet", "--output", file]
            options += [*_of_one_rank(size), *_each("--compressor", METHODS)]
            if not _runs(keep, size, ["-m", "hvdcomp.tools.bench.compare_worker", *options], "hvdcomp calibrate"):
                continue
            run = json.loads(file.read_text())
        del run["steps"][run["alone"]]
        measured = {STOCK_SPECS.get(name, name): steps["median_ms"] for name, steps in run["steps"].items()}
        _compare(keep, from_json(run["calibration"]), size, measured)


def profile(place: str, keep: Keep, sizes: Sequence[int] = SIZES, seconds: float = SECONDS) -> None:
    """Profiles a training, and compares predicted with measured steps of this training."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file, steps = Path(folder) / "profile.json", Path(folder) / "steps.json"
            training = ["tests.gpu.profiled", "--device", place, *(["--one-gpu"] if size > 1 else [])]
            options = ["--seconds", seconds, "--output", file, *_of_one_rank(size), *_each("--compressor", METHODS)]
            timed = [*training, *_each("--method", ("none", "fp16", *METHODS)), "--output", steps]
            if not _runs(keep, size, ["-m", "hvdcomp", "profile", *options, "-m", *training], "hvdcomp profile"):
                continue
            if _runs(keep, size, ["-m", *timed], "its training"):
                _compare(keep, load(str(file)), size, json.loads(steps.read_text()))


def rows(calibration: Calibration, size: int, measured: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """A row for each method: predicted and measured milliseconds of a step, and predicted / measured - 1.

    Args:
        calibration: of one model.
        size: number of ranks.
        measured: milliseconds by spec.
    """
    adviser = Adviser(calibration, specs=list(measured))
    for spec, ms in measured.items():
        seconds = float(adviser.step_s(spec, Setting(size))) if size > 1 else _alone_s(adviser, spec)
        row = {"ranks": size, "method": spec, "predicted_ms": 1e3 * seconds, "measured_ms": ms}
        yield {**row, "error": 1e3 * seconds / ms - 1}


def _alone_s(adviser: Adviser, spec: str) -> float:
    """Seconds of a step of one rank that compresses all the same. The performance model leaves out encoding there."""
    compute, encode = adviser.facts.compute, adviser.encode[spec]
    seconds = (compute.forward_s or 0.0) + compute.backward_s + compute.optimizer_s
    seconds += 0.0 if adviser.exchange(spec, 1).overlapped else compute.engine_s
    return seconds + (0.0 if encode is None else float(encode.seconds(1)))


def _compare(keep: Keep, calibration: Calibration, size: int, measured: Mapping[str, float]) -> None:
    found = list(rows(calibration, size, measured))
    for row in found:
        keep(row=row)
        if not (math.isfinite(row["predicted_ms"]) and row["predicted_ms"] > 0):
            keep(failure=f"{row['method']}: {row['predicted_ms']} ms are predicted")
    errors = [abs(row["error"]) for row in found]
    carried = calibration.machine["torch.distributed's backend"]
    keep(
        note=f"{size} rank{'s' * (size > 1)} over {carried}: predictions of {len(found)} steps are off by "
        f"{statistics.median(errors):.0%} in the median, and by {max(errors):.0%} at most"
    )


def _of_one_rank(size: int) -> list[str]:
    return [] if size > 1 else ["--network", NETWORK]


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _runs(keep: Keep, size: int, arguments: Sequence[Any], what: str) -> bool:
    """Runs a program on ranks that share the first GPU. Keeps a failure if it fails, and returns whether it did not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": first}
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, env=environment)
    if done.returncode:
        said = (done.stdout + done.stderr)[-1000:]
        keep(failure=f"{what} on {size} rank{'s' * (size > 1)} ended with status {done.returncode}: {said}")
    return done.returncode == 0
