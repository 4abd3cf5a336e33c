"""Calibrates and then measures steps, on every rank of a run: what `hvdcomp bench steps` starts on its clusters.

Rank 0 writes lines that begin with "PROGRESS ", and one JSON file with the calibration and the measured steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

sys.path[0] = str(Path(__file__).parents[2])  # as this file is started by its path, from any folder

from benchmarks.cluster.auto_training import AUTO, AutoTraining  # noqa: E402
from benchmarks.cluster.steps_worker import COMPUTE, STOCK, Training, measure_within  # noqa: E402
from hvdcomp.perfmodel import Adviser, Calibration, Setting, as_json, save  # noqa: E402
from hvdcomp.spec import parse_compressor  # noqa: E402

PROGRESS = "PROGRESS "
_FAR = 1.3  # dense that takes so many times the best is no measure of `auto` any more


@click.command()
@click.option("--model", required=True)
@click.option("--compressor", "specs", multiple=True)
@click.option("--batch-size", type=int, required=True)
@click.option("--seed", type=int, default=0)
@click.option("--seconds", type=float, required=True, help="For calibrating, and again for steps.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(model: str, specs: tuple[str, ...], batch_size: int, seed: int, seconds: float, output: Path) -> None:
    """Calibrates, measures, and writes what was found."""
    from hvdcomp.bench.calibrate import calibrate
    from hvdcomp.train import environment
    from hvdcomp.train.ranks import Ranks

    ranks = Ranks("torch")
    environment.use_threads(ranks.local_size)

    def show(what: str) -> None:
        if ranks.rank == 0:
            print(f"{PROGRESS}{what}", flush=True)

    made = calibrate(
        [model],
        [parse_compressor(spec) for spec in dict.fromkeys(("fp16", *specs))],
        name=output.stem,
        batch_size=batch_size,
        seed=seed,
        seconds=seconds,
        show=lambda what: show(f"calibrating, {what}"),
    )
    file = output.with_name(f"{output.stem}.calibration.json")
    if ranks.rank == 0:
        save(made.calibration, file)
    best = _predicted_best(made.calibration, model, specs)
    log = output.with_suffix(".jsonl")
    auto = AutoTraining(best, file, log, model, batch_size, seed) if best else None
    others = [Training(method, model, batch_size, seed) for method in (COMPUTE, *STOCK, *specs)]
    steps = _measure(others, auto, seconds, lambda what: show(f"measuring, {what}"))
    if ranks.rank == 0:
        noisy = {what: {"seconds": one.seconds, "spread": one.spread} for what, one in made.noisy.items()}
        calibration = as_json(made.calibration)
        result = {"calibration": calibration, "noisy": noisy, "steps": steps, "alone": COMPUTE, "auto": AUTO}
        output.write_text(json.dumps(result) + "\n")


def _measure(
    others: Sequence[Training], auto: AutoTraining | None, seconds: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """What was measured of each training, by method; of `auto` on rank 0 also what it chose."""
    import horovod.torch as hvd

    if auto is not None:
        show("auto begins")
        auto.begin(seconds / 3)
    trainings = [*others, *([] if auto is None else [auto])]
    measure_within(trainings, seconds=seconds, show=show)
    measured = {training.times.method: training.times.as_json() for training in trainings}
    if auto is not None:
        best, *rest = hvd.broadcast_object(_rivals(measured), name="steps.rivals")
        turns = [auto, *(one for one in others if one.times.method in (best, *rest))]
        for training in turns:
            training.forget()
        measure_within(turns, seconds=2 * seconds, show=lambda what: show(f"auto against {best}: {what}"))
        if hvd.rank() == 0:
            against = {training.times.method: training.times.step_ms for training in turns}
            measured[AUTO] |= {**auto.choice(), "best": best, "against": against}
    return measured


def _rivals(measured: dict[str, Any]) -> list[str]:
    """The fastest static choice, and dense if it is another and not far behind: what `auto` is to be no slower than."""
    medians = {method: one["median_ms"] for method, one in measured.items() if method not in (COMPUTE, AUTO)}
    best = min(medians, key=lambda method: medians[method])
    return [best, *(["none"] if best != "none" and medians["none"] < _FAR * medians[best] else [])]


def _predicted_best(calibration: Calibration, model: str, specs: Sequence[str]) -> str | None:
    """The compressor that is fastest by rank 0's calibration, the same on all ranks; None if there are none."""
    import horovod.torch as hvd

    if not specs:
        return None
    adviser = Adviser(calibration, model, specs)
    seconds = {spec: float(adviser.step_s(str(parse_compressor(spec)), Setting(hvd.size()))) for spec in specs}
    return hvd.broadcast_object(min(seconds, key=lambda spec: seconds[spec]), name="steps.best")


if __name__ == "__main__":
    main()
