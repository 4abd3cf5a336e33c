"""Counterparts that are measured on this machine's processor instead of the papers' GPUs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reproduce.gradients import regimes
from benchmarks.reproduce.outcome import Curve, Outcome, Row, within
from benchmarks.reproduce.published import Artifact
from hvdcomp.arrays import arrays_for
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import Adviser, load
from hvdcomp.perfmodel.shapes import tensors_of

POWERSGD = "powersgd:rank=4"
FASTER = 1.05
"""The smallest speedup that counts. A smaller speedup may be due to the spread of repeated measurements."""


def _encode_ms(specs: Sequence[str], quick: bool) -> tuple[str, dict[str, float]]:
    """The model and, for each method, the milliseconds of a step without a network, from `hvdcomp bench encode`."""
    model = "resnet20" if quick else "resnet50"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "encode.json"
        words = ["bench", "encode", "--model", model, "--no-peers", "--threads", "1", "--retries", "0"]
        words += ["--seconds", "0.3", "--json", str(file)]
        for spec in specs:
            words += ["--method", spec]
        # The order of the methods is still visible if other work on the machine changes the measurements by a few
        # percent.
        subprocess.run([sys.executable, "-m", "hvdcomp", *words], check=False, capture_output=True)
        measured = json.loads(file.read_text())["measurements"]
    return model, {measurement["method"]: measurement["step_ms"] for measurement in measured}


def _outcome(artifact: Artifact, model: str, rows: list[Row], bars: Mapping[str, Mapping[str, float]]) -> Outcome:
    curves = [Curve(label=label, x=list(values), y=list(values.values())) for label, values in bars.items()]
    ours = f"Measured by `hvdcomp bench encode --model {model}` on one thread of this machine's processor."
    return Outcome(name=artifact.name, rows=rows, curves={"ms": curves}, ours=ours)


def encoding(artifact: Artifact, quick: bool) -> Outcome:
    """Table 2 of On the Utility: encode times divided by the encode time of PowerSGD rank 4. This machine's processor
    is not a V100, so the times themselves cannot be compared."""
    published: Mapping[str, float] = artifact.published
    model, ours = _encode_ms(list(published), quick)
    rows = [Row(what=f"{spec}: ms", published=published[spec], ours=ours.get(spec)) for spec in published]
    for spec in published:
        if spec != POWERSGD and spec in ours:
            published_ratio, own_ratio = published[spec] / published[POWERSGD], ours[spec] / ours[POWERSGD]
            what = f"{spec} / {POWERSGD}"
            holds = (own_ratio > 1) == (published_ratio > 1)
            rows.append(Row(what=what, published=published_ratio, ours=own_ratio, holds=holds))
    return _outcome(artifact, model, rows, {"V100, ResNet-50": published, f"here, {model}": ours})


def ratios(artifact: Artifact, quick: bool) -> Outcome:
    """Table 3 of On the Utility: compression factors for ResNet-50, and times relative to PowerSGD rank 4."""
    published: Mapping[str, Sequence[float]] = artifact.published
    model, ours = _encode_ms(list(published), quick)
    adviser = Adviser(load("v100-p3.8xlarge-2021"), "resnet50", list(published))
    rows = []
    for spec, (factor, _) in published.items():
        exchange = adviser.exchange(spec, 64)
        own_factor, note = exchange.compression_factor, ""
        if spec.startswith("mstopk"):
            own_factor, note = 2 * own_factor, "without indices, as in the paper; half as large with indices"
        holds = within(own_factor, factor, 0.1)
        rows.append(Row(what=f"{spec}: compression ratio", published=factor, ours=own_factor, holds=holds, note=note))
    for spec, (_, published_ms) in published.items():
        if spec != POWERSGD:
            own_ratio, published_ratio = ours[spec] / ours[POWERSGD], published_ms / published[POWERSGD][1]
            holds = (own_ratio > 1) == (published_ratio > 1)
            rows.append(Row(what=f"{spec}: time / {POWERSGD}", published=published_ratio, ours=own_ratio, holds=holds))
    return _outcome(artifact, model, rows, {f"here, {model}": ours})


def multilevel(artifact: Artifact, quick: bool) -> Outcome:
    """GraVAC's table 3: selection at 10x and at 1000x. Either both selections read the whole gradient, or the second
    selection reads only the result of the first selection."""
    sizes = {"ResNet101": "resnet101", "VGG16": "vgg16", "LSTM": "gravac-lstm"}
    rows, xp = [], arrays_for(np.zeros(1, np.float32))
    share = 16 if quick else 1
    for name, (direct, levels) in artifact.published.items():
        network, method = name.split()
        size = sum(tensor.size for tensor in tensors_of(sizes[network])) // share
        vector = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        compressor: Any = parse_compressor(f"{method}:ratio=0.1")
        first = _seconds(lambda: _choose(xp, compressor, vector, 10))  # noqa: B023
        chosen = vector[_choose(xp, compressor, vector, 10)]
        again = _seconds(lambda: _choose(xp, compressor, vector, 1000))  # noqa: B023
        second = _seconds(lambda: _choose(xp, compressor, chosen, 100))  # noqa: B023
        ours, published_ratio = (first + again) / (first + second), direct / levels
        what = f"{name}: times as fast in levels"
        rows.append(Row(what=what, published=published_ratio, ours=ours, holds=ours > FASTER))
    part = "" if share == 1 else f" a {share}th of"
    ours_text = f"Measured on this machine's processor, on{part} as many random numbers as the model has parameters."
    return Outcome(name=artifact.name, rows=rows, ours=ours_text)


def _choose(xp: Any, compressor: Any, vector: np.ndarray, factor: int) -> np.ndarray:
    k = max(1, len(vector) // factor)
    if compressor.name == "randomk":
        return np.random.default_rng(1).choice(len(vector), k, replace=False, shuffle=False)
    return np.asarray(compressor.choose(xp, vector, k))


def _seconds(work: Callable[[], object], turns: int = 3) -> float:
    samples = []
    for _ in range(turns):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


COUNTERPARTS: Mapping[str, Callable[[Artifact, bool], Outcome]] = {
    counterpart.__name__: counterpart for counterpart in (encoding, ratios, multilevel, regimes)
}
