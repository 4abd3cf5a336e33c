"""Calibrates and measures steps, on every rank of a run: what `hvdcomp bench steps` starts on its clusters, and
`make demo` on two ranks of one machine.

The steps that are compared with the prediction take turns with those that the calibration times: machines are not
equally fast from one minute to the next, and what is compared should be of the same minutes.

Rank 0 writes lines that begin with "PROGRESS " (not with --quiet), and one JSON file with the calibration and the
measured steps. Where the calibration was too noisy to predict from, and was made again until there were no attempts
left, all of them are in the file: how far their predictions differ says more than the noise of what each rests on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import NOISY, as_json, save, uncertain_shares
from hvdcomp.tools.bench.auto_training import AUTO, AutoTraining
from hvdcomp.tools.bench.compare import ratio
from hvdcomp.tools.bench.trainings import COMPUTE, OVERLAPS, Training, Turns, trainings_of
from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.options import BACKENDS
from hvdcomp.tools.train.ranks import Ranks

if TYPE_CHECKING:
    from hvdcomp.tools.bench.carrier import Carrier

PROGRESS = "PROGRESS "
_FAR = 1.3  # times the best: dense that takes longer than this takes no turns with `auto`
_SURE = 0.005  # standard error of the ratio to the best static choice with which the turns of `auto` end
_FEWEST_ROUNDS = 20
_ALONE = 0.5  # times the seconds of a calibration, for which `auto` trains alone first
_LONGEST = 3  # times the seconds of a calibration, after which these turns end in any case


@click.command()
@click.option("--model", required=True)
@click.option("--compressor", "specs", multiple=True)
@click.option("--batch-size", type=int, required=True)
@click.option("--seed", type=int, default=0)
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", help="auto: what the launcher is for.")
@click.option("--overlap", type=click.Choice(list(OVERLAPS)), default="on", help="How compressors are measured.")
@click.option("--seconds", type=float, required=True, help="For calibrating, and again for steps.")
@click.option("--attempts", type=click.IntRange(1), default=1, help="Calibrate again where it was too noisy to trust.")
@click.option("--auto/--no-auto", "with_auto", default=True, help="Measure the policy auto after them.")
@click.option("--rate", help="Of the links between the ranks, to be noted in the file.")
@click.option("--quiet", is_flag=True, help="No lines of progress.")
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
    quiet: bool,
    output: Path,
) -> None:
    """Calibrates and measures, and writes what was found."""
    from hvdcomp.tools.bench.calibrate import calibrate
    from hvdcomp.tools.bench.carriers import carrier_on
    from hvdcomp.tools.train import environment

    ranks = reach(backend, "torch")
    carrier = carrier_on(ranks)
    environment.use_threads(ranks.local_size)

    def show(what: str) -> None:
        if ranks.rank == 0 and not quiet:
            print(f"{PROGRESS}{what}", flush=True)

    others = trainings_of(carrier, model, (*carrier.stock, *specs), OVERLAPS[overlap], batch_size, seed)
    repeated: list[dict[str, Any]] = []
    for attempt in range(1, attempts + 1):
        turns = Turns(carrier, others, lambda what: show(f"measuring, {what}"))
        made = calibrate(
            carrier,
            [model],
            [parse_compressor(spec) for spec in dict.fromkeys(("fp16", *specs))],
            name=output.stem,
            batch_size=batch_size,
            seed=seed,
            seconds=seconds,
            show=lambda what: show(f"calibrating, {what}"),
            beside=turns.round,
        )
        noisy = {what: {"seconds": one.seconds, "spread": one.spread} for what, one in made.noisy.items()}
        shares = uncertain_shares(noisy, min(_medians(others).values()) / 1e3)
        # On rank 0's word: the ranks' times differ.
        again = ranks.broadcast(max([made.calibration.noise, *shares.values()]) > NOISY, "again")
        repeated = [*repeated, as_json(made.calibration)] if again else []
        if not again or attempt == attempts:
            break
        if ranks.rank == 0:
            print(f"Too noisy to predict from: calibrating again ({attempt + 1} of {attempts})", flush=True)
    steps = {training.times.name: training.times.as_json() for training in others}
    if specs and with_auto:
        file = output.with_name(f"{output.stem}.calibration.json")
        if ranks.rank == 0:
            save(made.calibration, file)
        own, *rest = given = _given(specs, others, ranks)
        auto = AutoTraining(carrier, own, file, output.with_suffix(".jsonl"), model, batch_size, seed, others=rest)
        found = _measure_auto(carrier, auto, others, seconds, lambda what: show(f"auto, {what}"))
        steps[AUTO] = {**found, "compressors": given}
    if ranks.rank == 0:
        calibration = as_json(made.calibration)
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
    carrier: Carrier, auto: AutoTraining, others: Sequence[Training], seconds: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """What was measured of `auto` in turns with nothing but its rivals; on rank 0 also what it chose."""
    ranks = carrier.ranks
    best, *rest = ranks.broadcast(_rivals(others), "rivals")
    show("begins")
    auto.begin(_ALONE * seconds)
    turns = Turns(carrier, [auto, *(one for one in others if one.times.name in (best, *rest))], show)
    start = time.perf_counter()
    going = True
    while going:
        turns.round()
        against = {training.times.name: training.times.step_ms for training in turns.trainings}
        known = turns.rounds >= _FEWEST_ROUNDS and ratio(against[AUTO], against[best])[1] <= _SURE
        # On rank 0's word: clocks differ.
        going = ranks.broadcast(not known and time.perf_counter() - start < _LONGEST * seconds, "going")
    measured = auto.times.as_json()
    return measured | ({**auto.choice(), "best": best, "against": against} if ranks.rank == 0 else {})


def _given(specs: Sequence[str], others: Sequence[Training], ranks: Ranks) -> list[str]:
    """What `auto` may choose from, the same on all ranks: of the compressors those that go with faster ones."""
    times = {spec: [one.times.as_json()["median_ms"] for one in others if one.times.method == spec] for spec in specs}
    fastest_first = sorted(specs, key=lambda spec: min(times[spec]))
    return ranks.broadcast(able_to_take_turns(fastest_first), "given")


def able_to_take_turns(specs: Sequence[str]) -> list[str]:
    """Compressors among which one policy may choose: the first, and each other that goes with those before it.

    Example:
        >>> able_to_take_turns(["topk:ratio=0.01", "qsgd:bits=4", "powersgd:rank=4"])
        ['topk:ratio=0.01', 'powersgd:rank=4']
    """
    from hvdcomp import Auto
    from hvdcomp.errors import SpecError
    from hvdcomp.settings import check

    first, *rest = specs
    given: list[str] = []
    for spec in rest:
        try:
            check(parse_compressor(first), None, Auto(calibration="any", compressors=(*given, spec)), None)
        except SpecError:
            continue
        given.append(spec)
    return [first, *given]


def _rivals(others: Sequence[Training]) -> list[str]:
    """The fastest static choice, and dense if it is another and not far behind: what `auto` is to be no slower than."""
    medians = _medians(others)
    best = min(medians, key=lambda method: medians[method])
    return [best, *(["none"] if best != "none" and medians["none"] < _FAR * medians[best] else [])]


def _medians(others: Sequence[Training]) -> dict[str, float]:
    """The median time of a step by method, of those that exchange gradients."""
    return {one.times.name: one.times.as_json()["median_ms"] for one in others if one.times.method != COMPUTE}


if __name__ == "__main__":
    main()
