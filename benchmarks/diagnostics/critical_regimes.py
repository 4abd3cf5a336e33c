"""Compares two ways to detect critical regimes: by the gradient's norm, and by the Hessian's largest eigenvalue.

    python -m benchmarks.diagnostics.critical_regimes        # without Horovod; some minutes on one core

The program trains the reference network on the digits with dense SGD. The learning rate falls once. The program
measures both quantities at the end of every epoch, and writes critical_regimes.json and critical_regimes.png. The plot
is like figure 3 of the Accordion paper, but for a model that is small enough for every machine. By default, a fifth of
the labels are random. Otherwise the loss would be near zero before the learning rate falls, and the fall would not
change anything.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from benchmarks.diagnostics import HessianEigenvalue, RegimeRecord, largest_hessian_eigenvalue
from benchmarks.diagnostics.plot import draw
from hvdcomp.perfmodel.figures import as_png
from hvdcomp.tools.train.data import epoch_shard, load_data
from hvdcomp.tools.train.frameworks import build_model
from hvdcomp.tools.train.options import SetupError, TrainingOptions

_BATCH = 256  # batch size of the passes for the Hessian; the result does not depend on it


def measure(options: TrainingOptions, record: RegimeRecord, samples: int, progress: Progress) -> list[dict[str, Any]]:
    """Trains a model with these options, adds every epoch to `record`, and returns one row per epoch."""
    torch.manual_seed(options.seed)
    data = load_data(options)
    if not 1 <= samples <= len(data.train_x):
        most = len(data.train_x)
        raise click.UsageError(f"--samples {samples}: give a number from 1 to {most}, the size of the training part")
    model = build_model(options.model, channels=data.channels, size=data.size, classes=data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=options.momentum)
    inputs, labels = torch.from_numpy(data.model_input(data.train_x)), torch.from_numpy(data.train_y)
    batches = list(zip(inputs[:samples].split(_BATCH), labels[:samples].split(_BATCH), strict=True))
    loss_function = nn.CrossEntropyLoss()
    rows = []
    task = progress.add_task("", total=options.epochs)
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        rate, loss, norm = train_epoch(options, inputs, labels, model, optimizer, epoch)
        trained = time.perf_counter()
        eigenvalue = largest_hessian_eigenvalue(model, loss_function, batches, iterations=100, tolerance=1e-2)
        seconds = {"training": trained - start, "eigenvalue": time.perf_counter() - trained}
        record.note(eigenvalue=eigenvalue.value, gradient_norm=norm)
        rows.append(row(epoch, rate, loss, norm, eigenvalue, seconds))
        description = f"loss {loss:.4f}  eigenvalue {eigenvalue.value:.3g}  norm {norm:.3g}"
        progress.update(task, advance=1, description=description)
    return rows


def train_epoch(
    options: TrainingOptions,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
) -> tuple[float, float, float]:
    """Trains one epoch, and returns its learning rate, its mean loss, and the norm of the sum of its steps'
    gradients."""
    assert options.batch_size is not None
    rate = options.learning_rate(epoch - 1, options.epochs)
    for group in optimizer.param_groups:
        group["lr"] = rate
    accumulated = [torch.zeros_like(parameter) for parameter in model.parameters()]
    losses = []
    for batch in epoch_shard(len(inputs), 1, 0, options.batch_size, options.seed, epoch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        for total, parameter in zip(accumulated, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
        optimizer.step()
        losses.append(loss.item())
    norm = torch.linalg.vector_norm(torch.cat([total.flatten() for total in accumulated])).item()
    return rate, sum(losses) / len(losses), norm


def row(
    epoch: int, rate: float, loss: float, norm: float, eigenvalue: HessianEigenvalue, seconds: dict[str, float]
) -> dict[str, Any]:
    """The measurements at the end of an epoch, for JSON."""
    return {
        "epoch": epoch,
        "learning_rate": rate,
        "train_loss": loss,
        "gradient_norm": norm,
        "eigenvalue": eigenvalue.value,
        "dominant_eigenvalue": eigenvalue.dominant,
        "hessian_vector_products": eigenvalue.iterations,
        "converged": eigenvalue.converged,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def shown(record: RegimeRecord, rows: list[dict[str, Any]]) -> Table:
    """The measurements at the end of each span of epochs, as a table for the terminal."""
    table = Table("epochs", "learning rate", "loss", "eigenvalue", "critical", "gradient norm", "critical")
    by_eigenvalue, by_norm = record.critical("eigenvalue"), record.critical("gradient_norm")
    for end in range(record.interval - 1, record.epochs, record.interval):
        last = rows[end]
        table.add_row(
            f"{end + 2 - record.interval}-{end + 1}",
            f"{last['learning_rate']:g}",
            f"{last['train_loss']:.4f}",
            f"{last['eigenvalue']:.4g}",
            "yes" if by_eigenvalue[end] else "no",
            f"{last['gradient_norm']:.4g}",
            "yes" if by_norm[end] else "no",
        )
    return table


@click.command()
@click.option("--epochs", type=int, default=40, show_default=True)
@click.option("--milestone", type=int, default=20, show_default=True, help="Epochs after which the rate falls to 1/10.")
@click.option("--lr", type=float, help="Learning rate. Default: the network's own.")
@click.option("--label-noise", type=float, default=0.2, show_default=True, help="Share of labels drawn at random.")
@click.option("--interval", type=int, default=5, show_default=True, help="Epochs between comparisons.")
@click.option("--eta", type=float, default=0.5, show_default=True, help="Relative change that is critical.")
@click.option("--samples", type=int, default=512, show_default=True, help="Number of training samples for the Hessian.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("docs/diagnostics"), show_default=True)
def main(
    epochs: int,
    milestone: int,
    lr: float | None,
    label_noise: float,
    interval: int,
    eta: float,
    samples: int,
    seed: int,
    output: Path,
) -> None:
    """Trains, measures, and writes the results."""
    try:
        options = TrainingOptions(
            epochs=epochs, milestones=(milestone,), lr=lr, label_noise=label_noise, seed=seed
        ).resolved()
        record = RegimeRecord(interval=interval, eta=eta)
    except (SetupError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    torch.set_num_threads(1)
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        rows = measure(options, record, samples, progress)
    document = {
        "made_by": "python -m benchmarks.diagnostics.critical_regimes",
        "training": options.as_json(),
        "hessian_samples": samples,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        "regimes": record.as_json(),
        "epochs": rows,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "critical_regimes.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    figure = draw(record, [row["train_loss"] for row in rows], options.milestones)
    (output / "critical_regimes.png").write_bytes(as_png(figure))
    console.print(shown(record, rows))
    agreement = record.agreement()
    console.print(
        "too few spans to compare" if agreement is None else f"the two criteria agree on {agreement:.0%} of the spans"
    )
    console.print(f"wrote critical_regimes.json and critical_regimes.png to {output}")


if __name__ == "__main__":
    main()
