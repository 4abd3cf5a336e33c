"""Measures the time that compression adds to a step of `hvdcomp train`, in TensorFlow and in PyTorch.

    horovodrun -np 2 python -m benchmarks.times.tensorflow_training --model cnn --output training.json

Each rank trains like `hvdcomp train` with its default settings, but always on the same batch. Each framework trains
without an exchange ("compute"), with Horovod's compression "none" and with a method of hvdcomp. All training runs take
turns in one process. In each turn, the time that an exchange adds is the time of a step with the exchange minus the
time of a step without it. The added time is measured as processor time of this rank and as wall-clock time.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click

from benchmarks.times.tensorflow_steps import Step, Turns, of_all_turns, take_turns
from hvdcomp.kernels import cuda
from hvdcomp.tools.train.data import load_data
from hvdcomp.tools.train.frameworks import learner_class
from hvdcomp.tools.train.learner import Learner
from hvdcomp.tools.train.options import FRAMEWORKS, MODELS, TrainingOptions
from hvdcomp.tools.train.ranks_horovod import HorovodRanks

COMPUTE, NONE = "compute", "hvd.none"


def learner_without_exchange() -> type[Learner]:
    """A learner for TensorFlow whose step computes gradients with a plain tape instead of Horovod's."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    class Alone(learner_class("tensorflow")):  # type: ignore[misc]
        @tf.autograph.experimental.do_not_convert
        def _training_step(self, inputs: Any, targets: Any) -> Any:
            horovods, hvd.DistributedGradientTape = hvd.DistributedGradientTape, lambda tape, **options: tape
            try:
                return super()._training_step(inputs, targets)
            finally:
                hvd.DistributedGradientTape = horovods

    return Alone


def step_of(framework: str, method: str, options: dict[str, Any]) -> Step:
    """A step of `hvdcomp train`."""
    ranks = HorovodRanks(framework)
    kind = learner_without_exchange() if (framework, method) == ("tensorflow", COMPUTE) else learner_class(framework)
    kind.prepare(ranks.local_rank, ranks.local_size)
    settings = TrainingOptions(framework=framework, **options).resolved()
    data = load_data(settings)
    learner = kind(settings, data, ranks)
    learner.broadcast()
    stock = importlib.import_module(f"horovod.{framework}").Compression.none
    if method != COMPUTE:
        learner.distribute(stock if method == NONE else learner.compression(method))
    learner.set_learning_rate(1e-4)
    assert settings.batch_size is not None
    first = ranks.rank * settings.batch_size
    batch = data.train_x[first : first + settings.batch_size], data.train_y[first : first + settings.batch_size]
    return lambda: learner.step(*batch, 1)


@click.command(help=__doc__)
@click.option("--method", default="topk:ratio=0.01", show_default=True, help="Spec of a compressor.")
@click.option("--model", type=click.Choice(MODELS), default="cnn", show_default=True)
@click.option("--data", default="digits", show_default=True, help="Data set of `hvdcomp train`.")
@click.option("--batch-size", default=16, show_default=True, help="Batch size of each rank.")
@click.option("--turns", default=15, show_default=True, help="Turns of each training.")
@click.option("--steps", default=20, show_default=True, help="Steps in a turn.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file.")
def main(method: str, turns: int, steps: int, output: Path | None, **options: Any) -> None:
    cuda.available()  # PyTorch's optimizers import Triton, which ends this process unless hvdcomp has loaded it before
    trainings = {
        f"{framework} {exchange}": Turns(step_of(framework, exchange, options))
        for framework in reversed(FRAMEWORKS)  # TensorFlow first: it must choose its threads before anything runs
        for exchange in (COMPUTE, NONE, method)
    }
    take_turns(trainings, turns, steps)
    if HorovodRanks("torch").rank != 0:
        return
    rows = {name: training.as_json() for name, training in trainings.items()}
    for name, row in rows.items():
        click.echo(f"{name:32} cpu {row['cpu_ms']:7.2f} ms   wall {row['wall_ms']:7.2f} ms")
    added: dict[str, Any] = {}
    for exchange, unit in itertools.product((NONE, method), ("cpu_ms", "wall_ms")):
        of_both = []
        for framework in FRAMEWORKS:
            exchanged, computed = (getattr(trainings[f"{framework} {name}"], unit) for name in (exchange, COMPUTE))
            row = of_all_turns(x - y for x, y in zip(exchanged, computed, strict=True))
            added[f"{framework} {exchange} {unit}"] = row
            of_both.append(f"{row['median']:6.2f} ms in {framework}")
        click.echo(f"{exchange:16} adds to the {unit.removesuffix('_ms'):4} time of a step {', '.join(of_both)}")
    if output is not None:
        facts = {**options, "method": method, "ranks": HorovodRanks("torch").size, "turns": turns, "steps": steps}
        output.write_text(json.dumps({**facts, **rows, "added": added}, indent=1))


if __name__ == "__main__":
    main()
