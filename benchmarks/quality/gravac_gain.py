"""Compares GraVAC's compression gain with and without the gradient's residual in the denominator.

    python -m benchmarks.quality.gravac_gain                  # no Horovod; half a minute on one core

Tyagi and Swany (2023, arXiv:2305.12201, section III-B) divide the energy of the sent values C(g + r) by the energy of g
+ r. Here g is the gradient, and r is the residual of error feedback. Their published code divides by the energy of g
alone (`gain=raw`). This program trains the cnn on the digits with TopK and error feedback on one rank, at fixed
compression factors that count bytes or elements. It prints both gains, and the gain at the same factor without a
residual.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from hvdcomp import TopK
from hvdcomp.adaptation.energies import densified
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.adaptation.previews import Previews
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange import Engine
from hvdcomp.tools.train.data import epoch_shard, load_data
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.frameworks import build_model
from hvdcomp.tools.train.options import TrainingOptions

BYTES_OF_A_PAIR = 8  # a float32 value and its index


@dataclass(frozen=True)
class GravacGains:
    """The gains of a training run by several formulas. g is the gradient, and r is the residual. Each gain is the
    median over the steps of the second half of the run.

    Attributes:
        alone: ||C(g)||^2 / ||g||^2, the share of a gradient's energy that is kept if there is no residual.
        text: ||C(g + r)||^2 / ||g + r||^2, the gain in the text of the paper. hvdcomp's GraVAC decides based on this
            gain.
        code: ||C(g + r)||^2 / ||g||^2, the gain in the authors' code, which divides by the energy of the gradient
            alone.
        residual: ||r||^2 / ||g||^2, the energy of the residual relative to the gradient.
    """

    alone: float
    text: float
    code: float
    residual: float


def ratio_of(factor: float, of: str = "bytes") -> float:
    """The share of elements that TopK must send for a compression factor, counted in bytes or in elements."""
    return (4 / BYTES_OF_A_PAIR if of == "bytes" else 1) / factor


def measure(data: DataSet, options: TrainingOptions, ratio: float) -> GravacGains:
    """Trains as one rank with TopK at this ratio, and computes the energies in each step."""
    assert options.batch_size is not None
    assert options.lr is not None
    torch.manual_seed(options.seed)
    model = build_model(options.model, channels=data.channels, size=data.size, classes=data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    named = dict(model.named_parameters())
    compressor = TopK(ratio)
    tensors = [TensorInfo(name, tuple(parameter.shape)) for name, parameter in named.items()]
    engine = Engine(LoopbackCommunicator(1), tensors, compressor)
    compressed = {name for name, chosen in engine.plan.items() if chosen == compressor}
    previews = Previews(engine.tensors, engine.states)
    xs: dict[str, Tensor] = {}
    kept: dict[str, Any] = {}

    def before_compress(look: Look) -> dict[str, Tensor]:
        for name, sent in previews.kept(look, engine.plan, sorted(compressed)).items():
            x: Any = look[name]
            xs[name], kept[name] = x.clone(), densified(look.xp, x, sent)
        return {}

    observe(engine, before_compress)
    steps = []
    for epoch in range(1, options.epochs + 1):
        for samples in epoch_shard(len(data.train_x), 1, 0, options.batch_size, options.seed, epoch):
            inputs = torch.from_numpy(data.model_input(data.train_x[samples]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), torch.from_numpy(data.train_y[samples])).backward()
            gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
            originals = {name: gradients[name].clone() for name in compressed}
            xp = arrays_for(next(iter(originals.values())))
            sent = previews.kept_alone(xp, originals, dict.fromkeys(originals, compressor), engine.context(""))
            alone: dict[str, Any] = {name: densified(xp, g, sent[name]) for name, g in originals.items()}
            engine.begin()
            for name, mean in engine.step(gradients).items():
                named[name].grad = mean
            optimizer.step()
            raw = energy(originals)
            residual = {name: xs[name] - originals[name] for name in compressed}
            steps.append((energy(alone) / raw, energy(kept) / energy(xs), energy(kept) / raw, energy(residual) / raw))
    later = steps[len(steps) // 2 :]
    return GravacGains(*(statistics.median(column) for column in zip(*later, strict=True)))


def energy(tensors: Mapping[str, Tensor]) -> float:
    """The sum of the squares of all elements."""
    return float(sum(tensor.double().square().sum() for tensor in tensors.values()))


@click.command()
@click.option("--factor", "factors", multiple=True, type=float, default=(10.0, 100.0, 1000.0), show_default=True)
@click.option("--of", type=click.Choice(["bytes", "elements"]), default="bytes", show_default=True, help="Unit.")
@click.option("--batch-size", "batches", multiple=True, type=int, default=(16, 256), show_default=True)
@click.option("--steps", type=click.IntRange(2), default=180, show_default=True, help="Minimum for each training.")
@click.option("--seed", default=0, show_default=True)
def main(factors: tuple[float, ...], of: str, batches: tuple[int, ...], steps: int, seed: int) -> None:
    """Prints GraVAC's gain by both formulas, at each batch size and compression factor."""
    table = Table("batch", "factor", "kept of g", "gain, text", "gain, code", "|r|² / |g|²")
    for batch in batches:
        options = TrainingOptions(model="cnn", data="digits", batch_size=batch, seed=seed).resolved()
        data = load_data(options)
        epochs = -(-steps // (len(data.train_x) // batch))
        options = TrainingOptions(model="cnn", data="digits", batch_size=batch, seed=seed, epochs=epochs).resolved()
        for factor in factors:
            gains = measure(data, options, ratio_of(factor, of))
            shown = (f"{gain:.2f}" for gain in (gains.alone, gains.text, gains.code, gains.residual))
            table.add_row(str(batch), f"{factor:g}", *shown)
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
