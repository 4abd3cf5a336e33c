"""Calibrates and measures steps on every rank of a run. `hvdcomp demo` starts this program on two ranks of one machine,
and `python -m benchmarks.steps` starts it on emulated clusters.

The measured steps alternate with the steps of the calibration, because the speed of a machine changes from minute to
minute.

Rank 0 writes a JSON file with the calibration and the measured steps. Without --quiet, rank 0 also prints lines that
begin with "PROGRESS ". If all calibrations were too noisy, the file contains all of them. The spread between the
predictions of several calibrations shows better than the noise of one calibration how wrong a prediction may be.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import NOISY, as_json, load, save, uncertain_shares
from hvdcomp.tools.bench.auto_training import AUTO, AutoTraining
from hvdcomp.tools.bench.trainings import COMPUTE, OVERLAPS, Training, Turns, ratio, trainings_of
from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.options import BACKENDS
from hvdcomp.tools.train.ranks import Ranks

if TYPE_CHECKING:
    from hvdcomp.tools.bench.carrier import Carrier

PROGRESS = "PROGRESS "
_FAR = 1.3  # `auto` is also compared with dense if dense takes less than this factor times the best method
_SURE = 0.005  # the comparison ends when the standard error of the ratio `auto` / best method is at most this
_FEWEST_ROUNDS = 20
_ALONE = 0.5  # before the comparison, `auto` trains alone for this factor times --seconds
_LONGEST = 3  # the comparison lasts at most this factor times --seconds


@click.command()
@click.option("--model", required=True)
@click.option("--compressor", "specs", multiple=True)
@click.option("--batch-size", type=int, required=True)
@click.option("--seed", type=int, default=0)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    help="Library that averages gradients. auto: Horovod under horovodrun, torch.distributed under torchrun.",
)
@click.option(
    "--overlap",
    type=click.Choice(list(OVERLAPS)),
    default="on",
    help="When compressors send gradients: during the backward pass, after it, or alternately during and after it.",
)
@click.option(
    "--seconds",
    type=float,
    required=True,
    help="Approximate time of the calibration. Measuring the steps takes about the same time in addition.",
)
@click.option(
    "--attempts",
    type=click.IntRange(1),
    default=1,
    help="Maximum number of calibrations, if the measurements are too noisy.",
)
@click.option("--auto/--no-auto", "with_auto", default=True, help="Measure the policy auto after the compressors.")
@click.option("--rate", help="Bandwidth of the links between the hosts. It is only recorded in the file.")
@click.option("--device", default="cpu", help="Device of the models: cpu, or cuda for a CUDA device of each rank.")
@click.option(
    "--network",
    "known_network",
    metavar="FILE|PRESET",
    help=(
        "Calibration file or preset whose network costs are used instead of measured costs. If there is only one "
        "rank, pass this option."
    ),
)
@click.option("--quiet", is_flag=True, help="Do not print the progress.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    model: str,
    specs: tuple[str, ...],
    batch_size: int,
    seed: int,
    backend: str,
    overlap: str,
    seconds: float,
    attempts: int,
    with_auto: bool,
    rate: str | None,
    device: str,
    known_network: str | None,
    quiet: bool,
    output: Path,
) -> None:
    """Calibrates, measures steps, and writes the results."""
    from hvdcomp.tools.bench.calibrate import calibrate
    from hvdcomp.tools.bench.carriers import carrier_on
    from hvdcomp.tools.train import environment

    ranks = reach(backend, "torch")
    carrier = carrier_on(ranks)
    environment.use_threads(ranks.local_size)
    device_used = environment.use_device(device, ranks.local_rank)

    def show(text: str) -> None:
        if ranks.rank == 0 and not quiet:
            print(f"{PROGRESS}{text}", flush=True)

    methods = (*carrier.stock, *specs)
    trainings = trainings_of(carrier, model, methods, OVERLAPS[overlap], batch_size, seed, str(device_used))
    repeated: list[dict[str, Any]] = []
    for attempt in range(1, attempts + 1):
        turns = Turns(carrier, trainings, lambda text: show(f"measuring, {text}"))
        calibrated = calibrate(
            carrier,
            [model],
            [parse_compressor(spec) for spec in dict.fromkeys(("fp16", *specs))],
            name=output.stem,
            batch_size=batch_size,
            seed=seed,
            seconds=seconds,
            device=device_used,
            known_network=None if known_network is None else load(known_network),
            show=lambda text: show(f"calibrating, {text}"),
            beside=turns.round,
        )
        readings = calibrated.noisy.items()
        noisy = {name: {"seconds": reading.seconds, "spread": reading.spread} for name, reading in readings}
        shares = uncertain_shares(noisy, min(_medians(trainings).values()) / 1e3)
        # Rank 0 decides, because times differ between ranks.
        again = ranks.broadcast(max([calibrated.calibration.noise, *shares.values()]) > NOISY, "again")
        repeated = [*repeated, as_json(calibrated.calibration)] if again else []
        if not again or attempt == attempts:
            break
        if ranks.rank == 0:
            print(
                f"The calibration is too noisy for predictions: calibrating again ({attempt + 1} of {attempts})",
                flush=True,
            )
    steps = {training.times.name: training.times.as_json() for training in trainings}
    if specs and with_auto:
        file = output.with_name(f"{output.stem}.calibration.json")
        if ranks.rank == 0:
            save(calibrated.calibration, file)
        first, *more = candidates = _candidates(specs, trainings, ranks)
        auto = AutoTraining(carrier, first, file, output.with_suffix(".jsonl"), model, batch_size, seed, more)
        measured = _measure_auto(carrier, auto, trainings, seconds, lambda text: show(f"auto, {text}"))
        steps[AUTO] = {**measured, "compressors": candidates}
    if ranks.rank == 0:
        calibration = as_json(calibrated.calibration)
        result = {
            "calibration": calibration,
            "noisy": noisy,
            "repeated": repeated,
            "steps": steps,
            "alone": COMPUTE,
            "auto": AUTO,
            "early_bytes": carrier.early_bytes,
            "rate": rate,
        }
        output.write_text(json.dumps(result) + "\n")
    ranks.leave(0)


def _measure_auto(
    carrier: Carrier, auto: AutoTraining, trainings: Sequence[Training], seconds: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """Measures the step times of `auto`. The steps of `auto` alternate with the steps of the methods with which `auto`
    is compared. On rank 0, the result also contains the choices of `auto`."""
    ranks = carrier.ranks
    best, *slower = ranks.broadcast(_rivals(trainings), "rivals")
    show("begins")
    auto.begin(_ALONE * seconds)
    rivals = [training for training in trainings if training.times.name in (best, *slower)]
    turns = Turns(carrier, [auto, *rivals], show)
    start = time.perf_counter()
    going = True
    while going:
        turns.round()
        against = {training.times.name: training.times.step_ms for training in turns.trainings}
        is_known = turns.rounds >= _FEWEST_ROUNDS and ratio(against[AUTO], against[best])[1] <= _SURE
        # Rank 0 decides, because clocks differ.
        going = ranks.broadcast(not is_known and time.perf_counter() - start < _LONGEST * seconds, "going")
    measured = auto.times.as_json()
    return measured | ({**auto.choice(), "best": best, "against": against} if ranks.rank == 0 else {})


def _candidates(specs: Sequence[str], trainings: Sequence[Training], ranks: Ranks) -> list[str]:
    """The compressors that `auto` may choose: the fastest compressor, and each slower compressor that can be combined
    with all faster compressors that `auto` may choose. The result is the same on all ranks."""
    trained = [(training.times.method, training.times.as_json()["median_ms"]) for training in trainings]
    times = {spec: [median for method, median in trained if method == spec] for spec in specs}
    fastest_first = sorted(specs, key=lambda spec: min(times[spec]))
    return ranks.broadcast(able_to_take_turns(fastest_first), "given")


def able_to_take_turns(specs: Sequence[str]) -> list[str]:
    """The compressors from which a policy may choose: the first compressor, and each later compressor that can be
    combined with all chosen compressors before it.

    Example:
        >>> able_to_take_turns(["topk:ratio=0.01", "qsgd:bits=4", "powersgd:rank=4"])
        ['topk:ratio=0.01', 'powersgd:rank=4']
    """
    from hvdcomp import Auto
    from hvdcomp.errors import SpecError
    from hvdcomp.settings import check

    first, *other_specs = specs
    fitting: list[str] = []
    for spec in other_specs:
        try:
            check(parse_compressor(first), None, Auto(calibration="any", compressors=(*fitting, spec)), None)
        except SpecError:
            continue
        fitting.append(spec)
    return [first, *fitting]


def _rivals(trainings: Sequence[Training]) -> list[str]:
    """The methods with which to compare `auto`: the fastest fixed method, and dense gradients if dense steps are not
    much slower."""
    medians = _medians(trainings)
    best = min(medians, key=lambda method: medians[method])
    return [best, *(["none"] if best != "none" and medians["none"] < _FAR * medians[best] else [])]


def _medians(trainings: Sequence[Training]) -> dict[str, float]:
    """The median step times of the methods that exchange gradients."""
    exchanging = [training.times for training in trainings if training.times.method != COMPUTE]
    return {times.name: times.as_json()["median_ms"] for times in exchanging}


if __name__ == "__main__":
    main()
