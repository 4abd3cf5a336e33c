"""Measures the processor time of compressed steps in TensorFlow, compared with Horovod's fp16 and with steps in
PyTorch.

    horovodrun -np 2 python -m benchmarks.times.tensorflow_steps --method topk:ratio=0.01 --output steps.json

The gradients are constants with the shapes of the 65 variables of ResNet-20 for CIFAR, with 1x1 convolutions as
shortcuts. A step therefore consists almost only of the work of Horovod and hvdcomp; `compute` is the time of a step
without this work. All training runs of both frameworks take turns in one process, so that other work on the machine
affects all of them equally. The output has each method's time in TensorFlow, relative to Horovod's fp16 and to the same
method in PyTorch. The values are medians over all turns.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvdcomp
from hvdcomp.kernels import cuda

Step = Callable[[], Any]
_SETTLING = 2  # steps before each measurement, in which Horovod renegotiates names with new sizes
_RATE = 0.01


def shapes_of_resnet20() -> list[tuple[int, ...]]:
    """The shapes of the variables of ResNet-20: kernels, scales, offsets and the last layer. Dimensions are in Keras's
    order."""
    shapes: list[tuple[int, ...]] = [(3, 3, 3, 16), (16,), (16,)]
    before = 16
    for width in [16] * 6 + [32] * 6 + [64] * 6:
        shapes += [(3, 3, before, width), (width,), (width,)]
        if width != before:
            shapes += [(1, 1, before, width), (width,), (width,)]
        before = width
    return [*shapes, (64, 10), (10,)]


def gradients_of(rank: int) -> list[np.ndarray]:
    """The constant gradients of a rank. They differ between ranks."""
    random = np.random.default_rng(rank)
    return [random.normal(0, 0.1, shape).astype(np.float32) for shape in shapes_of_resnet20()]


def step_of_tensorflow(name: str, compression: Any) -> Step:
    """A traced step with Horovod's tape, or without it if the compression is None."""
    gradients = [tf.constant(gradient) for gradient in gradients_of(hvd.rank())]
    variables = [tf.Variable(tf.ones_like(gradient), name=f"{name}{place}") for place, gradient in enumerate(gradients)]
    if isinstance(compression, str):
        compression = hvdcomp.Compression.from_spec(compression, variables=variables)

    @tf.function(autograph=False)
    def step(*gradients: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            products = [variable * gradient for variable, gradient in zip(variables, gradients, strict=True)]
            loss = tf.add_n([tf.reduce_sum(product) for product in products])
        if compression is not None:
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, mean in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(_RATE * mean)

    return lambda: step(*gradients)


def step_of_torch(name: str, compression: Any) -> Step:
    """A step of Horovod's optimizer, or of PyTorch's if the compression is None."""
    import horovod.torch as hvd_torch
    import torch

    cuda.available()  # PyTorch's optimizers import Triton, which ends this process unless hvdcomp has loaded it before
    torch.set_num_threads(1)
    hvd_torch.init()
    gradients = [torch.from_numpy(gradient) for gradient in gradients_of(hvd.rank())]
    named = [
        (f"{name}{place}", torch.nn.Parameter(torch.ones_like(gradient))) for place, gradient in enumerate(gradients)
    ]
    optimizer: Any = torch.optim.SGD([parameter for _, parameter in named], lr=_RATE)
    if isinstance(compression, str) and compression.startswith("hvd."):
        compression = getattr(hvd_torch.Compression, compression.removeprefix("hvd."))
    elif compression is not None:
        compression = hvdcomp.Compression.from_spec(compression, named_parameters=named)
    if compression is not None:
        optimizer = hvd_torch.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def step() -> None:
        optimizer.zero_grad()
        products = [parameter * gradient for (_, parameter), gradient in zip(named, gradients, strict=True)]
        torch.stack([product.sum() for product in products]).sum().backward()
        optimizer.step()

    return step


class Turns:
    """The times of one training run's turns, in milliseconds per step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.cpu_ms: list[float] = []
        self.wall_ms: list[float] = []

    def turn(self, steps: int) -> None:
        for _ in range(_SETTLING):
            self._step()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self._step()
        self.cpu_ms.append(1000 * (time.process_time() - cpu) / steps)
        self.wall_ms.append(1000 * (time.perf_counter() - wall) / steps)

    def forget(self) -> None:
        """Drops all measurements so far."""
        self.cpu_ms.clear()
        self.wall_ms.clear()

    def as_json(self) -> dict[str, Any]:
        return {
            "cpu_ms": statistics.median(self.cpu_ms),
            "cpu_quartiles_ms": statistics.quantiles(self.cpu_ms, n=4),
            "wall_ms": statistics.median(self.wall_ms),
            "wall_quartiles_ms": statistics.quantiles(self.wall_ms, n=4),
        }


def take_turns(trainings: dict[str, Turns], turns: int, steps: int) -> None:
    """Lets all training runs take turns. The first turn, which traces graphs and creates states, is not measured."""
    for turn in range(turns + 1):
        for training in trainings.values():
            training.turn(steps)
            if turn == 0:
                training.forget()


def of_all_turns(values: Iterable[float]) -> dict[str, float | list[float]]:
    """The median and the quartiles of the values of all turns together."""
    in_turns = list(values)
    return {"median": statistics.median(in_turns), "quartiles": statistics.quantiles(in_turns, n=4)}


@click.command(help=__doc__)
@click.option("--method", "methods", multiple=True, default=("topk:ratio=0.01",), help="Compressor's spec; repeatable.")
@click.option("--turns", default=15, show_default=True, help="Turns of each training.")
@click.option("--steps", default=20, show_default=True, help="Steps in a turn.")
@click.option("--torch/--no-torch", "with_torch", default=True, help="Whether to measure PyTorch too.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file.")
def main(methods: tuple[str, ...], turns: int, steps: int, with_torch: bool, output: Path | None) -> None:
    hvd.init()
    stock = {"compute": None, "hvd.none": hvd.Compression.none, "hvd.fp16": hvd.Compression.fp16}
    makers = [("tensorflow", step_of_tensorflow, stock)]
    if with_torch:
        makers.append(("torch", step_of_torch, {"compute": None, "hvd.none": "hvd.none", "hvd.fp16": "hvd.fp16"}))
    trainings = {
        f"{framework} {name}": Turns(make(f"{framework}.{name}.", compression))
        for framework, make, compressions in makers
        for name, compression in {**compressions, **{method: method for method in methods}}.items()
    }
    take_turns(trainings, turns, steps)
    if hvd.rank() != 0:
        return
    rows = {name: training.as_json() for name, training in trainings.items()}
    for name, row in rows.items():
        click.echo(f"{name:32} cpu {row['cpu_ms']:7.2f} ms   wall {row['wall_ms']:7.2f} ms")
    ratios = {}
    for method in methods:
        times = trainings[f"tensorflow {method}"].cpu_ms
        for name in ["tensorflow hvd.fp16", *([f"torch {method}"] if with_torch else [])]:
            reference = trainings[name].cpu_ms
            ratio = of_all_turns(first / second for first, second in zip(times, reference, strict=True))
            ratios[f"cpu of tensorflow {method} / {name}"] = ratio
            click.echo(f"tensorflow {method}: {ratio['median']:.2f} times the processor time of {name}")
    if output is not None:
        facts = {"ranks": hvd.size(), "turns": turns, "steps": steps}
        output.write_text(json.dumps({**facts, **rows, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
