"""Calibrates and then measures steps, on every rank of a run: what `hvdcomp bench steps` starts on its clusters.

Rank 0 writes lines that begin with "PROGRESS ", and one JSON file with the calibration and the measured steps.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import click

sys.path[0] = str(Path(__file__).parents[2])  # as this file is started by its path, from any folder

from benchmarks.cluster.steps_worker import COMPUTE, STOCK, measure_within  # noqa: E402
from hvdcomp.spec import parse_compressor  # noqa: E402

PROGRESS = "PROGRESS "


@click.command()
@click.option("--model", "models", multiple=True, required=True)
@click.option("--compressor", "specs", multiple=True)
@click.option("--batch-size", type=int, required=True)
@click.option("--seed", type=int, default=0)
@click.option("--seconds", type=float, required=True, help="For calibrating, and again for steps, of each model.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    models: tuple[str, ...], specs: tuple[str, ...], batch_size: int, seed: int, seconds: float, output: Path
) -> None:
    """Calibrates, measures, and writes what was found."""
    from hvdcomp.bench.calibrate import calibrate
    from hvdcomp.perfmodel import as_json
    from hvdcomp.train import environment
    from hvdcomp.train.ranks import Ranks

    ranks = Ranks("torch")
    environment.use_threads(ranks.local_size)

    def show(what: str) -> None:
        if ranks.rank == 0:
            print(f"{PROGRESS}{what}", flush=True)

    made = calibrate(
        models,
        [parse_compressor(spec) for spec in dict.fromkeys(("fp16", *specs))],
        name=output.stem,
        batch_size=batch_size,
        seed=seed,
        seconds=seconds * len(models),
        show=lambda what: show(f"calibrating, {what}"),
    )
    steps: dict[str, Any] = {}
    for model in models:
        trainings = measure_within(
            model,
            (*STOCK, *specs),
            batch_size=batch_size,
            seconds=seconds,
            seed=seed,
            show=lambda what, model=model: show(f"measuring, {model}: {what}"),  # type: ignore[misc]
        )
        steps[model] = {training.times.method: training.times.as_json() for training in trainings}
        del trainings
        gc.collect()  # optimizers and their hooks hold each other
    if ranks.rank == 0:
        noisy = {what: {"seconds": one.seconds, "spread": one.spread} for what, one in made.noisy.items()}
        result = {"calibration": as_json(made.calibration), "noisy": noisy, "steps": steps, "alone": COMPUTE}
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
