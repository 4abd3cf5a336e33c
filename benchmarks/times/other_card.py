"""Computes the error of encode times that are predicted for one measured GPU from the times on another measured GPU.

    python -m benchmarks.times.other_card

The times are predicted by the formula of `hvdcomp.perfmodel.kernel_times`. The program first computes the arithmetic of
each method from the measured times on one GPU. From this arithmetic and the data sheets, it predicts the times on the
other GPU. The program prints a table in Markdown, in milliseconds of the device's own time, and then the median errors.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.kernel_times import BENCH, KERNELS, arithmetic_ps, device_s, host_s
from hvdcomp.perfmodel.shapes import tensors_of

FOLDER = Path(__file__).parents[2] / "docs" / "encode"
FILES = {"h100": FOLDER / "gpu-h100.json", "h200": FOLDER / "gpu.json"}
MODELS = ("resnet50", "bert-base")


class Prediction(NamedTuple):
    """A measured and a predicted encode time of one method.

    Attributes:
        method, model: spec of the method, and name of the model.
        card: name of the GPU whose time is predicted.
        measured_s, predicted_s: the measured and the predicted seconds.
    """

    method: str
    model: str
    card: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def elements_of(model: str) -> int:
    """Number of elements of a model."""
    return sum(tensor.size for tensor in tensors_of(model))


def measurements(card: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of `hvdcomp bench encode` on a GPU, by method and model."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads(FILES[card].read_text())["parts"]["bench"]["rows"]:
        if row["method"] in KERNELS and row["model"] in MODELS:
            found.setdefault(row["method"], {})[row["model"]] = row
    return found


def predictions(known: str, asked: str) -> Iterator[Prediction]:
    """Predicts the times of the kernels on one GPU from those on another GPU."""
    source, target = measurements(known), measurements(asked)
    for method, rows in source.items():
        times = {elements_of(model): row["device_ms"] / 1e3 for model, row in rows.items()}
        kernels = replace(KERNELS[method], arithmetic_ps=arithmetic_ps(times, KERNELS[method], CARDS[known]))
        for model, row in target[method].items():
            seconds = device_s(kernels, CARDS[asked], elements_of(model))
            yield Prediction(method, model, asked, row["device_ms"] / 1e3, seconds)


def clock(card: str) -> Iterator[Prediction]:
    """Predicts the elapsed times on a GPU. The formula assumes that a step takes the longer of two times: the host's
    and the device's."""
    for method, rows in measurements(card).items():
        for model, row in rows.items():
            kernels = KERNELS[method]
            seconds = max(host_s(kernels), device_s(kernels, CARDS[card], elements_of(model)))
            yield Prediction(method, model, card, row["step_ms"] / 1e3, seconds)


def median_error(every: list[Prediction]) -> float:
    """The median of the absolute errors."""
    return statistics.median(abs(one.error) for one in every)


def main() -> None:
    assert all(KERNELS[method].source == BENCH for method in measurements("h200"))
    device = {asked: list(predictions(known, asked)) for known, asked in (("h200", "h100"), ("h100", "h200"))}
    print("| method | model | card | measured, ms | predicted, ms | error |\n|---|---|---|--:|--:|--:|")
    for one in [*device["h100"], *device["h200"]]:
        ms = f"{1e3 * one.measured_s:.3f} | {1e3 * one.predicted_s:.3f}"
        print(f"| `{one.method}` | {one.model} | {CARDS[one.card].title} | {ms} | {100 * one.error:+.0f} % |")
    for asked, every in device.items():
        largest = max(abs(one.error) for one in every)
        print(f"{asked}, device: median {100 * median_error(every):.1f} %, largest {100 * largest:.1f} %")
    for card in FILES:
        print(f"{card}, by the clock: median {100 * median_error(list(clock(card))):.1f} %")


if __name__ == "__main__":
    main()
