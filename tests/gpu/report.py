"""The page of `make gpu-check`: its tables, and how the results compare with the aims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdcomp.tools.bench.encode.output import number
from hvdcomp.tools.bench.encode.peers import FP16, POWERSGD
from tests.gpu.parts import PARTS
from tests.gpu.roofline import LEAST_SHARE

MOST_COPIES = {"topk:ratio=0.01": 4.0, "efsignsgd": 2.5, "onebit": 2.5, "qsgd:bits=4": 2.5, "powersgd:rank=4": 5.0}
"""The aim for a step on ResNet-50, by the device's own time, in times of a copy of the gradients."""
HOOKS = {"powersgd:rank=4": POWERSGD, "fp16": FP16}
LEAST_SPEED = 3.0
"""The aim for the speedup of a step on ResNet-50 over PyTorch's hook."""
NOT_MEASURED = "not measured"

STEP = (
    "The table shows how many milliseconds the GPU needs to compress and decompress the gradients of a step, as the "
    "median for one rank. The host queued the work in advance, so this time does not include the host's work. The "
    "number in brackets is this time divided by the time to copy the gradients once. For the first model, the table "
    "also shows the elapsed milliseconds (wall), the number of kernel launches, and the bytes per parameter that stay "
    "in GPU memory from step to step (kept)."
)
MEMORY = (
    "The table shows how many bytes PyTorch allocates in addition to the gradients, per element of four matrices of "
    '2048 x 4096. "kept" is the number of bytes that stay allocated from step to step, and "most" is the maximum '
    "within a step. The mean gradients overwrite the gradients."
)
TRAINING = (
    "DistributedDataParallel trains a decoder with 85 million parameters in bfloat16, on 8 sequences of 512 bytes, "
    "with one rank over NCCL. For each method, 15 steps with the method alternate with 15 steps of DDP without a hook. "
    "The table shows the medians. With one rank, the exchange takes no time. So the table shows only the time that the "
    "method itself adds, and overlap with the backward pass saves nothing. MB is the largest amount of memory that "
    "PyTorch "
    'allocates in a step, including the memory of the model. "-" means not measured.'
)
SEVERAL = "The table shows the same training with one rank on each of several GPUs, over NCCL."
NETWORK = "The table shows how long collectives between all GPUs take, as measured by `hvdcomp calibrate`."
PREDICTIONS = (
    "The table compares measured step times, in milliseconds, with predictions that are based on `hvdcomp calibrate` "
    "and `hvdcomp profile` on the same GPU. Either two ranks share the GPU over Gloo, or one rank uses the GPU alone "
    "over NCCL. A single rank exchanges nothing."
)
KERNELS = (
    "The rate of a kernel, in GB/s, is the number of bytes that the kernel has to move, divided by its time. It was "
    "measured on the matrices of BERT-base. The table compares this rate with the rate of a copy, and lists only "
    f"kernels with less than {LEAST_SHARE:.0%} of the copy's rate. The JSON file contains all other kernels."
)


def as_markdown(document: Mapping[str, Any]) -> str:
    """The page, from the content of `gpu.json`."""
    parts = document["parts"]
    lines = ["# Measured on GPUs", ""]
    failures = [f"- {name}: {one.splitlines()[0]}" for name, part in parts.items() for one in part["failures"]]
    lines += failures + [""] * bool(failures)
    lines += ["## Compared with the aims", ""]
    lines += table(("what was measured", "aim", "result", ""), list(aims(parts)))
    lines += ["## A step", "", STEP, ""]
    lines += _steps(_rows(parts, "bench"))
    lines += ["## Memory", "", MEMORY, ""]
    cells = [(one["method"], _kept(one["kept"]), _kept(one["peak"])) for one in _rows(parts, "memory")]
    lines += table(("method", "kept", "most"), cells)
    lines += ["## A step of a training", "", TRAINING, "", *_trainings(_rows(parts, "training"))]
    lines += ["## A step of a training on several GPUs", "", SEVERAL, "", *_trainings(_rows(parts, "nccl"))]
    lines += ["## The network", "", NETWORK, "", *table(("link",), [(one["link"],) for one in _rows(parts, "network")])]
    lines += ["## Predictions", "", PREDICTIONS, "", *_predictions(parts)]
    lines += ["## A kernel", "", KERNELS, ""]
    cells = [
        (one["method"], one["kernel"], _giga(one["bytes_a_second"]), _percent(one["share"]))
        for one in _rows(parts, "roofline")
        if one["kernel"] == "copy" or (one["share"] is not None and one["share"] < LEAST_SHARE)
    ]
    lines += table(("method", "kernel", "GB/s", "share of the copy's rate"), cells)
    lines += ["## How this page was made", "", "Made by `make gpu-check`, on", "", *_machines(parts), ""]
    results = [(name, _result(parts.get(name)), _commit(parts.get(name))) for name in PARTS]
    lines += table(("part", "result", "commit"), results)
    return "\n".join(lines)


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each method: for each model, the device's ms, and their multiple of a copy's ms."""
    models = list(dict.fromkeys(one["model"] for one in rows))
    methods: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in rows:
        methods.setdefault(one["method"], {})[one["model"]] = one
    cells = []
    for method, found in methods.items():
        first = next(iter(found.values()))
        device = [
            f"{number(found[model].get('device_ms'))} ({number(_copies(found[model]))})" if model in found else "-"
            for model in models
        ]
        launches = str(first["kernel_launches"] or "-")
        cells.append((method, *device, number(first["step_ms"]), launches, _kept(first["kept_bytes"])))
    return table(("method", *models, "wall", "launches", "kept"), cells)


def _trainings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each method with timed steps: ms and memory, and the same for DDP alone."""
    cells = [
        (
            one["method"], number(one["ms"]), " to ".join(map(number, one["quartiles_ms"])), number(one["ddp_ms"]),
            _mega(one.get("peak_bytes")), _mega(one.get("ddp_peak_bytes")),
        )
        for one in rows
        if "ms" in one
    ]  # fmt: skip
    return table(("method", "ms", "quartiles", "DDP", "MB", "DDP's MB"), cells)


def _predictions(parts: Mapping[str, Any]) -> list[str]:
    """A row for each step that was predicted and measured."""
    cells = [
        (
            name, str(one["ranks"]), one["method"], number(one["predicted_ms"]), number(one["measured_ms"]),
            f"{one['error']:+.0%}",
        )
        for name in ("calibrate", "profile")
        for one in _rows(parts, name)
    ]  # fmt: skip
    return table(("command", "ranks", "method", "predicted", "measured", "error"), cells)


def aims(parts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """For each aim: its subject, the aim, the measured value, and "met" or "missed"."""
    steps = {one["method"]: one for one in _rows(parts, "bench") if one["model"] == "resnet50"}
    for method, most in MOST_COPIES.items():
        copies = _copies(steps[method]) if method in steps else None
        met = copies is not None and copies <= most
        yield f"{method} on ResNet-50", f"at most {most} device copies", number(copies), _met(met, copies)
    for method, hook in HOOKS.items():
        pair = steps.get(method), steps.get(hook)
        times = None if None in pair else pair[1]["device_ms"] / pair[0]["device_ms"]  # type: ignore[index]
        met = times is not None and times >= LEAST_SPEED
        yield f"{method} compared with {hook}", f"speedup of at least {LEAST_SPEED}", number(times), _met(met, times)
    shares = {
        f"{one['kernel']} of {one['method']}": one["share"]
        for one in _rows(parts, "roofline")
        if one["share"] is not None
    }
    least = min(shares, key=lambda name: shares[name]) if shares else None
    share = None if least is None else shares[least]
    what = "slowest kernel" if least is None else f"slowest kernel, {least}"
    yield what, f"at least {LEAST_SHARE:.0%} of the copy", _percent(share), _met((share or 0) >= LEAST_SHARE, share)


def table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown: a table, or a line "Not measured." if it has no rows."""
    if not cells:
        return [f"{NOT_MEASURED.capitalize()}.", ""]
    return [*(f"| {' | '.join(line)} |" for line in (headings, ("---",) * len(headings), *cells)), ""]


def is_measured(part: Mapping[str, Any] | None) -> bool:
    """Whether a part has results or failures. A part that lacks a second GPU or a program only has a note."""
    return part is not None and bool(part["rows"] or part["failures"])


def _machines(parts: Mapping[str, Any]) -> list[str]:
    """A line for each machine, with the parts that ran there."""
    found: dict[str, list[str]] = {}
    for name, part in parts.items():
        if is_measured(part):
            facts, gpu = part["facts"], part["facts"]["gpu"]
            versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
            machine = (
                f"{facts['accelerator']}, compute capability {gpu['compute_capability']}, driver {gpu['driver']}, CUDA "
                f"{gpu['cuda']}, NCCL {gpu['nccl']}; {versions}"
            )
            found.setdefault(machine, []).append(name)
    return [f"- {machine}: {', '.join(names)}" for machine, names in found.items()]


def _rows(parts: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    return parts[name]["rows"] if name in parts else ()


def _result(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return NOT_MEASURED
    failed = f"failed: {len(part['failures'])}" if part["failures"] else ""
    return "; ".join([failed or ("passed" if part["rows"] else NOT_MEASURED), *part["notes"]])


def _commit(part: Mapping[str, Any] | None) -> str:
    return f"`{part['facts']['commit']}`" if part is not None and is_measured(part) else "-"


def _copies(one: Mapping[str, Any]) -> float | None:
    return one["device_ms"] / one["device_copy_ms"] if one.get("device_ms") else None


def _kept(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _met(met: bool, value: float | None) -> str:
    return NOT_MEASURED if value is None else "met" if met else "missed"


def _mega(value: float | None) -> str:
    return number(None if value is None else value / 1e6)


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
