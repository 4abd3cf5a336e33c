"""Counterparts by small trainings on simulated ranks, whose times are predicted for a link.

Two trainings replace the papers': a convolutional network on MNIST-1D (Greydanus and Kobak 2020), and an LSTM on text.
Both are smaller, but as in the papers, low compression ends better than high compression.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdcomp.tools.reproduce.counted import floats_sent
from hvdcomp.tools.reproduce.outcome import CONTROL, Curve, Outcome, Row
from hvdcomp.tools.reproduce.predicted import scaling_efficiency
from hvdcomp.tools.reproduce.published import Artefact
from hvdcomp.tools.reproduce.trainings import Run, train_missing
from hvdcomp.tools.terminal import make_console
from hvdcomp.tools.train.options import DECISIONS
from hvdcomp.tools.train.ranks import RunRefused
from hvdcomp.tools.train.spread import estimate

RANKS, LINK = 2, "100mbit"
QUICK_SEEDS, SEEDS = 3, 10
EPOCHS, DECAY, LAST_DECAY = 8, 5, 7
STEPS_OF_AN_EPOCH, WINDOW_STEPS = 80, 20
"""Accordion's authors compare norms every 10 of 300 epochs, a thirtieth of the training, like 20 of 640 steps."""
CHANCE, CHANCE_PERPLEXITY = 10.0, 256.0
"""Accuracy in percent and perplexity of a diverged training: those of guessing among ten classes, or all bytes."""
MARGIN = 1.0
"""Loss in points of accuracy, or percent of perplexity, that does not count as a loss."""
SMALL, LARGE, EXTREME = 50, 200, 800
"""Samples of a step, over all ranks, of 4,000 samples: 80, 20 or 5 steps an epoch."""

IMAGES = {
    "model": "cnn1d", "data": "mnist1d", "epochs": EPOCHS, "lr": 0.1, "warm_up": 1.0,
    "milestones": (float(DECAY), float(LAST_DECAY)),
}  # fmt: skip
# In a longer training the model would memorise the text, and low compression would end better than none.
TEXT = {
    "model": "lstm", "data": "stdlib-text", "text_size": 40_000, "sequence_length": 32, "batch_size": 16, "epochs": 6,
    "milestones": (4.0, 5.0),
}  # fmt: skip
WORKLOADS: dict[str, dict[str, Any]] = {"images": IMAGES, "text": TEXT}
SHOWN = {"images": "a small convolutional network on MNIST-1D", "text": "an LSTM on text of Python's library"}
LEVELS = {"powersgd": (4, 1), "topk": (0.05, 0.002)}
KNOB = {"powersgd": "rank", "topk": "ratio"}
# The LSTM's norms change by less than a fifth: with Accordion's threshold of 0.5 nearly all would stay at high
# compression.
RULE = {"images": f"steps={WINDOW_STEPS}", "text": "steps=7,eta=0.1"}
WINDOW = {"images": "window=30,smoothing=0.2", "text": "window=10,smoothing=0.2"}
# With factors of elements and the gain of the authors' code, large factors pass as in the paper's tables.
GRAVAC = "factor=elements,gain=raw"


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        quality: accuracy in percent, or perplexity, of the test part.
        floats: sent by a rank, by the papers' count.
        seconds: of training on the link.
        epochs: quality and sent floats at the end of each epoch.
        sent: sent floats up to the end of each step.
        decisions: of the policy, in order.
    """

    quality: float
    floats: float
    seconds: float
    epochs: Sequence[tuple[float, float]] = ()
    sent: Sequence[float] = ()
    decisions: Sequence[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Training(Run):
    """A training of a workload, with options that change its own."""

    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.changes.items())

    @cached_property
    def options(self) -> dict[str, Any]:
        fixed = {"simulate_ranks": RANKS, "link": LINK, "seed": self.seed}
        return {**WORKLOADS[self.workload], **self.changes, **fixed}

    def trained(self) -> Trained:
        """The result of the complete training in the folder."""
        assert self.summary is not None
        sent = list(itertools.accumulate(step["floats_sent"] for step in self.records("steps.jsonl")))
        return Trained(
            _quality(self.summary),
            self.summary["floats_sent"],
            self.summary["trained_seconds"],
            [(_quality(end), sent[end["step"] - 1]) for end in self.records("epochs.jsonl")],
            sent,
            self.records(DECISIONS) if (self.folder / DECISIONS).exists() else [],
        )


class Trainings:
    """Trains, or reads earlier trainings with the same options.

    Args:
        folder: of all trainings.
        quick: use `QUICK_SEEDS` seeds in place of `SEEDS`.

    Attributes:
        seeds: the number of seeds.
        commits: of the trainings that were used.
    """

    def __init__(self, folder: Path, quick: bool) -> None:
        self._folder = folder
        self.seeds = QUICK_SEEDS if quick else SEEDS
        self.commits: set[str] = set()

    def train(
        self, workload: str, compression: str, policy: str | None = None, seeds: int | None = None, **changes: Any
    ) -> list[Trained]:
        """A training for each seed.

        Raises:
            RunRefused: a training fails.
        """
        chosen = {"compression": compression, **({} if policy is None else {"policy": policy}), **changes}
        runs = [_Training(workload, seed, self._folder, chosen) for seed in range(seeds or self.seeds)]
        if any(run.summary is None for run in runs):
            for run in train_missing(runs, make_console(stderr=True)):
                raise RunRefused(f"{run}: {run.about['error']} (full log: {run.folder / 'log.txt'})")
        self.commits |= {run.about.get("commit", "unknown") for run in runs}
        return [run.trained() for run in runs]


def _quality(record: Mapping[str, Any]) -> float:
    """The quality in a summary or in the record of an epoch. A diverged summary may have that of an earlier epoch."""
    is_text = "perplexity" in record
    quality = record.get("perplexity" if is_text else "accuracy")
    if quality is None or record.get("status") == "diverged":
        return CHANCE_PERPLEXITY if is_text else CHANCE
    return float(quality) if is_text else 100 * float(quality)


@dataclass(frozen=True)
class Compared:
    """Trainings of a workload that are compared, by label."""

    workload: str
    runs: Mapping[str, Sequence[Trained]]

    @property
    def _text(self) -> bool:
        return self.workload == "text"

    def mean(self, label: str, value: Callable[[Trained], float]) -> float:
        return statistics.fmean(value(run) for run in self.runs[label])

    def gains(self, label: str, base: str) -> list[float]:
        """The advantage of `label` over `base` for each seed, in points of accuracy or percent of perplexity."""
        pairs = zip(self.runs[label], self.runs[base], strict=False)
        return [100 * (b.quality / a.quality - 1) if self._text else a.quality - b.quality for a, b in pairs]

    def gain(
        self,
        label: str,
        base: str,
        claim: str,
        published: float | None = None,
        note: str = "",
        margin: float = MARGIN,
        main: bool = False,
    ) -> Row:
        """The row for the advantage of `label` over `base` at the end.

        Args:
            label, base: of the compared trainings.
            claim: "worse" or "better"; "no loss", up to the margin; "" without a claim.
            published: the paper's number.
            note, main: of the row.
            margin: loss that "no loss" allows.
        """
        estimated = estimate(self.gains(label, base))
        assert estimated is not None
        half = estimated.half or 0.0
        least, most = estimated.mean - half, estimated.mean + half
        holds = {
            "worse": True if most < 0 else False if least > 0 else None,
            "better": True if least > 0 else False if most < 0 else None,
            "no loss": True if least > -margin else False if most < MARGIN - margin else None,
            "": None,
        }[claim]
        unit = "%, perplexity" if self._text else "points"
        meant = {"no loss": f"no more than {margin:g} lost"}.get(claim, claim)
        what = f"{label} - {base} ({unit}{': ' + meant if meant else ''})"
        return Row(
            what=what,
            published=published,
            ours=estimated.mean,
            half=estimated.half,
            holds=holds,
            open=bool(claim) and holds is None,
            main=main,
            note=note,
        )

    def quality(self, label: str, published: float | None = None) -> Row:
        """The row for the final quality of `label`, which has no claim, as the data differ."""
        estimated = estimate([run.quality for run in self.runs[label]])
        assert estimated is not None
        what = f"{label}: {'perplexity' if self._text else 'accuracy (%)'}"
        return Row(what=what, published=published, ours=estimated.mean, half=estimated.half)

    def times_fewer_floats(self, label: str, base: str, published: float | None = None) -> Row:
        ours = self.mean(base, lambda run: run.floats) / self.mean(label, lambda run: run.floats)
        what = f"{label}: times fewer floats than {base}"
        holds = ours > 1 if published is None else ours > max(1, published / 2)
        note = "of the whole training" + ("" if published is None else "; holds from half of the published on")
        return Row(what=what, published=published, ours=ours, holds=holds, note=note)

    def times_as_fast(self, label: str, base: str, published: float | None = None) -> Row:
        estimated = estimate([a.seconds / b.seconds for a, b in zip(self.runs[base], self.runs[label], strict=False)])
        assert estimated is not None
        half = estimated.half or 0.0
        least = 1 if published is None or published <= 1 else max(1, published / 2)
        holds = True if estimated.mean - half > least else False if estimated.mean + half < least else None
        what = f"{label}: times as fast as {base}"
        from_where = "; holds from half of the published on" if least > 1 else ""
        note = f"predicted for {RANKS} ranks on {LINK} links{from_where}"
        return Row(
            what=what,
            published=published,
            ours=estimated.mean,
            half=estimated.half,
            holds=holds,
            open=holds is None,
            note=note,
        )

    def curves(self) -> dict[str, list[Curve]]:
        """Curves of quality over epochs and over floats, averaged over the seeds."""
        name = "perplexity" if self._text else "accuracy (%)"
        over_epochs, over_floats = [], []
        for label, runs in self.runs.items():
            ends = list(zip(*(run.epochs for run in runs), strict=False))
            quality = [statistics.fmean(point[0] for point in end) for end in ends]
            floats = [statistics.fmean(point[1] for point in end) / 1e6 for end in ends]
            over_epochs.append(Curve(label=label, x=list(range(1, len(ends) + 1)), y=quality))
            over_floats.append(Curve(label=label, x=floats, y=quality))
        return {f"{name} over epochs": over_epochs, f"{name} over millions of floats": over_floats}

    def outcome(self, artefact: Artefact, rows: Sequence[Row], note: str = "", **more: Any) -> Outcome:
        seeds = len(next(iter(self.runs.values())))
        ours = f"Trained: {SHOWN[self.workload]}, {RANKS} simulated ranks, {seeds} seeds.{' ' if note else ''}{note}"
        more.setdefault("curves", self.curves())
        more.setdefault("x", "epochs; millions of floats")
        return Outcome(name=artefact.name, rows=rows, ours=ours, about={"seeds": seeds}, **more)


def _spec(compressor: str, level: float) -> str:
    return f"{compressor}:{KNOB[compressor]}={level:g}"


def _accordion(compressor: str, workload: str, levels: tuple[float, float] | None = None) -> str:
    low, high = levels or LEVELS[compressor]
    return f"accordion:low={low:g},high={high:g},{RULE[workload]}"


def _fixed_and_accordion(t: Trainings, compressor: str, workload: str) -> dict[str, Sequence[Trained]]:
    low, high = LEVELS[compressor]
    return {
        "low": t.train(workload, _spec(compressor, low)),
        "high": t.train(workload, _spec(compressor, high)),
        "Accordion": t.train(workload, _spec(compressor, low), _accordion(compressor, workload)),
    }


def _control(t: Trainings, compressor: str, compared: Compared) -> tuple[str, str, str | None]:
    """The control, which sends as many floats as Accordion without adaptation: its label, spec and policy."""
    low, high = LEVELS[compressor]
    sent = {label: compared.mean(label, lambda run: run.floats) for label in ("low", "high", "Accordion")}
    share = (sent["Accordion"] - sent["high"]) / (sent["low"] - sent["high"])
    if compressor == "topk":
        return "fixed ratio", _spec(compressor, float(f"{high + share * (low - high):.4g}")), None
    steps = len(compared.runs["low"][0].sent)
    at_low = max(1, round(share * steps))
    first = max(1, (steps - at_low) // 2)
    schedule = f"schedule:levels={high:g}|{low:g},steps={first}|{first + at_low}"
    return "low in mid-training", _spec(compressor, high), schedule


def _table(artefact: Artefact) -> tuple[dict[str, float], str]:
    """The published accuracies, floats and seconds at low, high and Accordion, and the network they belong to."""
    networks = artefact.published
    name = artefact.settings.get("network", "ResNet-18")
    if name not in networks:
        return {}, name
    values: dict[str, float] = {}
    for label, (_, numbers) in zip(("low", "high", "Accordion"), networks[name].items(), strict=True):
        values |= {f"{label} {quantity}": value for quantity, value in numbers.items()}
    return values, name


def _of(numbers: Mapping[str, float], quantity: str, a: str, b: str, ratio: bool = False) -> float | None:
    if not numbers:
        return None
    first, second = numbers[f"{a} {quantity}"], numbers[f"{b} {quantity}"]
    return second / first if ratio else first - second


def levels(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's tables 1 to 4 and their curves: fixed levels, Accordion, and a control with as many floats."""
    compressor, workload = artefact.settings["compressor"], artefact.settings.get("workload", "images")
    compared = Compared(workload, _fixed_and_accordion(t, compressor, workload))
    label, spec, policy = _control(t, compressor, compared)
    compared = Compared(workload, {**compared.runs, label: t.train(workload, spec, policy)})
    numbers, network = _table(artefact)
    rows = [
        *floats_sent(artefact),
        *(compared.quality(level, numbers.get(f"{level} accuracy")) for level in ("low", "high", "Accordion")),
        compared.gain("high", "low", "worse", _of(numbers, "accuracy", "high", "low")),
        compared.gain("Accordion", "low", "no loss", _of(numbers, "accuracy", "Accordion", "low"), main=True),
        compared.times_fewer_floats("Accordion", "low", _of(numbers, "floats", "Accordion", "low", ratio=True)),
        compared.times_as_fast("Accordion", "low", _of(numbers, "seconds", "Accordion", "low", ratio=True)),
        _beside_control(compared, label, f"{spec}{' ' + policy if policy else ''}"),
    ]
    low, high = LEVELS[compressor]
    beside = f" Published numbers of trainings are those of {network}." if numbers else ""
    note = f"Low is {_spec(compressor, low)}, high is {_spec(compressor, high)}.{beside}"
    return compared.outcome(artefact, rows, note)


def _beside_control(compared: Compared, label: str, spec: str) -> Row:
    share = compared.mean(label, lambda run: run.floats) / compared.mean("Accordion", lambda run: run.floats)
    note = f"{CONTROL}: `{spec}` sends {share:.0%} of Accordion's floats, and looks at no gradient"
    return compared.gain("Accordion", label, "", note=note)


def logs(artefact: Artefact, t: Trainings) -> Outcome:
    """Final numbers of the authors' published logs."""
    compressor = artefact.settings["compressor"]
    rows = []
    images = Compared("images", _fixed_and_accordion(t, compressor, "images"))
    text = Compared("text", _fixed_and_accordion(t, compressor, "text"))
    for network, numbers in artefact.published.items():
        compared = text if "LSTM" in network else images
        for a, b, claim in (("high", "low", "worse"), ("Accordion", "low", "no loss")):
            value = 100 * (numbers[b] / numbers[a] - 1) if compared is text else numbers[a] - numbers[b]
            row = compared.gain(a, b, claim, value, main=a == "Accordion")
            rows.append(dataclasses.replace(row, what=f"{network}: {row.what}"))
    return images.outcome(artefact, rows, f"The authors' LSTM is beside {SHOWN['text']}.", curves={})


def schedule(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's figures 1 and 2: low compression only in critical regimes, or only outside them."""
    compressor = artefact.settings["compressor"]
    low, high = LEVELS[compressor]
    fall = DECAY * STEPS_OF_AN_EPOCH
    first, after = 2 * WINDOW_STEPS, WINDOW_STEPS  # as 20 and 10 of the paper's 300 epochs
    ends = f"{first}|{fall}|{fall + after}"
    runs = _fixed_and_accordion(t, compressor, "images")
    critical = "low in critical regimes"
    runs[critical] = t.train("images", _spec(compressor, high), f"schedule:levels={low}|{high}|{low},steps={ends}")
    reverse = "high in critical regimes"
    if artefact.settings.get("reverse"):
        runs[reverse] = t.train("images", _spec(compressor, 32), f"schedule:levels={high}|32|{high},steps={ends}")
    compared = Compared("images", runs)
    rows = [
        compared.gain("high", "low", "worse"),
        compared.gain(critical, "low", "no loss", main=True),
        compared.times_fewer_floats(critical, "low"),
    ]
    if artefact.settings.get("reverse"):
        note = "rank 32, which is nearly all, elsewhere"
        rows.append(compared.gain(reverse, "low", "worse", note=note))
    curves = compared.curves()
    if artefact.settings.get("norms"):
        norms = _norms(runs["Accordion"][0])
        curves["norm of the gradient, by tensor"] = [
            Curve(label=tensor, x=list(range(1, len(values) + 1)), y=values) for tensor, values in norms.items()
        ]
        for tensor, values in norms.items():
            at = fall // WINDOW_STEPS  # the first window after the fall
            change = 100 * (1 - values[at] / values[at - 1])
            what = f"{tensor}: fall of the norm in the {WINDOW_STEPS} steps after the learning rate's (%)"
            note = "critical by Accordion's rule from 50 % on"
            rows.append(Row(what=what, ours=change, holds=change >= 50, note=note))
    note = f"Critical are the first {first} steps and {after} after the rate falls, the paper's share of the training."
    return compared.outcome(artefact, rows, note, curves=curves)


def _norms(run: Trained) -> dict[str, list[float]]:
    """The norms of accumulated gradients that Accordion used, by tensor."""
    names = list(run.decisions[0]["tensors"])
    lists = [
        decision["statistics"]["norms"]["by_tensor"]
        for decision in run.decisions
        if "norms" in decision.get("statistics", {})
    ]
    return {name: [float(values[number]) for values in lists] for number, name in enumerate(names)}


def _levels_chosen(run: Trained) -> dict[str, list[float]]:
    """The level of each of Accordion's windows, by tensor."""
    names = list(run.decisions[0]["tensors"])
    now = list(run.decisions[0]["decision"]["levels"]["by_tensor"])
    chosen = [list(now)]
    for decision in run.decisions[1:]:
        new = decision["decision"].get("changed", {}).get("levels", {})
        now = list(new.get("by_tensor", now))
        for number, level in new.get("changed", {}).items():
            now[int(number)] = level
        chosen.append(list(now))
    return {name: [float(window[number]) for window in chosen] for number, name in enumerate(names)}


def ranks(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's figures 18 to 20: low compression early and after the learning rate falls, high elsewhere."""
    compressor = artefact.settings["compressor"]
    low, high = LEVELS[compressor]
    runs = t.train("images", _spec(compressor, low), _accordion(compressor, "images"))
    compared = Compared("images", {"Accordion": runs})
    chosen = [_levels_chosen(run) for run in compared.runs["Accordion"]]
    names = list(chosen[0])
    name = names[{"first": 0, "middle": len(names) // 2, "last": -1}[artefact.settings["part"]]]
    rows = []
    fall = DECAY * STEPS_OF_AN_EPOCH // WINDOW_STEPS
    for when, windows, at in (
        (f"the first {2 * WINDOW_STEPS} steps", range(2), low),
        (f"the {2 * WINDOW_STEPS} steps after the learning rate falls", range(fall, fall + 2), low),
        (f"the {fall * WINDOW_STEPS // 2} steps before", range(fall // 2, fall), high),
    ):
        share = statistics.fmean(float(levels[name][window] == at) for levels in chosen for window in windows)
        text = f"{name}, {when}: share at {'low' if at == low else 'high'} compression (%)"
        rows.append(Row(what=text, ours=100 * share, holds=share > 0.5))
    steps = [WINDOW_STEPS * window for window in range(len(chosen[0][name]))]
    curves = {"rank": [Curve(label=name, x=steps, y=chosen[0][name]) for name in names]}
    note = f"Its {len(names)} compressed tensors stand for the layers."
    return compared.outcome(artefact, rows, note, curves=curves, x="steps")


def batch(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's tables 5 and 6, and figures 4, 5, 10, 16 and 17: small and large batches beside Accordion."""
    settings = artefact.settings
    large = EXTREME if settings.get("extreme") else LARGE
    rate = 0.05
    whole: dict[str, Any] = {"lr": rate}
    accordion = f"accordion_batch_size:low={SMALL},high={large},interval=1"
    runs: dict[str, Sequence[Trained]] = {
        "small": t.train("images", "none", **whole),
        "large": t.train(
            "images", "none", lr=rate * large / SMALL, backward_passes_per_step=large // SMALL
        ),
        "Accordion": t.train("images", "none", accordion, **whole),
    }
    if settings.get("smith"):
        runs["Smith et al."] = t.train("images", "none", f"increase_batch_size:low={SMALL},high={LARGE}", **whole)
    compared = Compared("images", {"small": runs.pop("small"), **runs})
    table, _ = _table(artefact) if settings.get("data") else ({}, "")
    numbers = {key.replace("low ", "small ").replace("high ", "large "): value for key, value in table.items()}
    published = artefact.published
    rows = [*floats_sent(artefact)]
    rows += [compared.quality(label, numbers.get(f"{label} accuracy")) for label in compared.runs]
    rows.append(compared.gain("large", "small", "worse", _of(numbers, "accuracy", "large", "small")))
    lost = published.get("Accordion - small batch (points)", _of(numbers, "accuracy", "Accordion", "small"))
    if settings.get("extreme"):
        rows.append(compared.gain("Accordion", "large", "better"))
    margin = MARGIN + (-lost if settings.get("extreme") and lost is not None else 0)
    rows.append(compared.gain("Accordion", "small", "no loss", lost, margin=margin, main=True))
    fewer = published.get("Accordion: times fewer floats", _of(numbers, "floats", "Accordion", "small", ratio=True))
    rows.append(compared.times_fewer_floats("Accordion", "small", fewer))
    if numbers:
        faster = _of(numbers, "seconds", "Accordion", "small", ratio=True)
        rows.append(compared.times_as_fast("Accordion", "small", faster))
    if settings.get("smith"):
        rows.append(compared.times_fewer_floats("Smith et al.", "small", published["Smith et al.: times fewer floats"]))
        floats = {label: compared.mean(label, lambda run: run.floats) for label in ("Smith et al.", "Accordion")}
        more = floats["Smith et al."] / floats["Accordion"]
        rows.append(Row(what="floats of Smith et al. / floats of Accordion", ours=more, holds=more > 1))
    if settings.get("overlap"):
        from hvdcomp.tools.reproduce.gradients import common_of_largest

        common, name = common_of_largest(IMAGES), "common to two gradients (%)"
        least = published[name]
        rows.append(Row(what=f"largest 10 %: {name}, more than", published=least, ours=common, holds=common >= least))
    note = f"Batches of {SMALL} and {large}, and the learning rate goes with them."
    return compared.outcome(artefact, rows, note)


def adaqs(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's figure 7."""
    compressor = artefact.settings["compressor"]
    runs = _fixed_and_accordion(t, compressor, "images")
    runs["AdaQS"] = t.train("images", _spec(compressor, LEVELS[compressor][0]), "adaqs:start=64,fall=0.5")
    compared = Compared("images", runs)
    more = compared.mean("AdaQS", lambda run: run.floats) / compared.mean("Accordion", lambda run: run.floats)
    rows = [
        compared.gain("Accordion", "low", "no loss", main=True),
        compared.gain("AdaQS", "low", "worse"),
        Row(what="floats of AdaQS / floats of Accordion", ours=more, holds=more > 1),
    ]
    return compared.outcome(artefact, rows, "AdaQS begins at a factor of 64 and halves it after a fall of 0.5.")


def longer(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's figure 8: high compression for more epochs, which sends as much as low compression."""
    compressor = artefact.settings["compressor"]
    runs = _fixed_and_accordion(t, compressor, "images")
    compared = Compared("images", runs)
    times = compared.mean("low", lambda run: run.floats) / compared.mean("high", lambda run: run.floats)
    epochs = round(EPOCHS * times)
    milestones = (float(round(DECAY * times)), float(round(LAST_DECAY * times)))
    label = f"high for {epochs} epochs"
    spec = _spec(compressor, LEVELS[compressor][1])
    compared = Compared("images", {**runs, label: t.train("images", spec, epochs=epochs, milestones=milestones)})
    rows = [
        compared.gain(label, "low", "worse", main=True),
        compared.gain("Accordion", "low", "no loss", main=True),
        compared.times_fewer_floats("Accordion", label),
    ]
    return compared.outcome(artefact, rows)


def limits(artefact: Artefact, t: Trainings) -> Outcome:
    """Accordion's figure 9: limits of high compression."""
    runs = {f"rank {rank}": t.train("images", _spec("powersgd", rank)) for rank in (4, 2, 1)}
    for high in (1, 2):
        policy = _accordion("powersgd", "images", (4, high))
        runs[f"Accordion 4 and {high}"] = t.train("images", "powersgd:rank=4", policy)
    compared = Compared("images", runs)
    published = artefact.published
    rows = [compared.quality(f"rank {rank}", published[f"rank {rank}: accuracy"]) for rank in (1, 2, 4)]
    lost = published["rank 2: accuracy"] - published["rank 4: accuracy"]
    rows += [
        compared.gain("Accordion 4 and 1", "rank 4", "worse", lost),
        compared.gain("Accordion 4 and 2", "rank 4", "no loss", 0.0, main=True),
        compared.times_fewer_floats("Accordion 4 and 2", "rank 4", published["Accordion 4 and 2: times fewer floats"]),
    ]
    return compared.outcome(artefact, rows)


def _gravac(epsilon: float, workload: str, largest: int = 1000, least: float = 10, more: str = "") -> str:
    return f"gravac:min={least:g},max={largest},epsilon={epsilon:g},{WINDOW[workload]},{GRAVAC}{more}"


def _momentum(compressor: str) -> dict[str, Any]:
    return {"momentum": 0.0} if compressor == "dgc" else {}  # DGC has its own momentum


def static(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's table 2 and figure 2 for ResNet101: fixed factors of four compressors, and GraVAC on DGC."""
    runs: dict[str, Sequence[Trained]] = {}
    for compressor in ("topk", "dgc", "redsync", "randomk"):
        for factor in (10, 1000):
            spec = f"{compressor}:ratio={1 / factor:g}"
            runs[f"{compressor} {factor}x"] = t.train("images", spec, **_momentum(compressor))
    runs["GraVAC"] = t.train("images", "dgc:ratio=0.1", _gravac(0.7, "images"), **_momentum("dgc"))
    compared = Compared("images", runs)
    numbers = artefact.published["ResNet101"]
    base = numbers["topk 10"]
    rows = []
    for compressor in ("topk", "dgc", "redsync"):
        a, b = numbers[f"{compressor} 1000"], numbers[f"{compressor} 10"]
        rows.append(compared.gain(f"{compressor} 1000x", f"{compressor} 10x", "worse", a["quality"] - b["quality"]))
        rows.append(compared.times_as_fast(f"{compressor} 1000x", "topk 10x", a["speedup"]))
    for factor in (10, 1000):
        lost = -statistics.fmean(compared.gains(f"randomk {factor}x", "topk 10x"))
        what = f"randomk {factor}x: points below topk 10x (published: fails, at 20 %)"
        rows.append(Row(what=what, ours=lost, holds=lost > 20))
    gained = numbers["GraVAC"]["quality"] - base["quality"]
    rows.append(compared.gain("GraVAC", "topk 10x", "no loss", gained, main=True))
    rows.append(compared.times_as_fast("GraVAC", "topk 10x", numbers["GraVAC"]["speedup"]))
    speeds = [compared.times_as_fast(label, "topk 10x").ours for label in runs]
    bars = [Curve(label="times as fast as topk 10x", x=list(runs), y=speeds)]
    note = "Published numbers are those of ResNet101; its speedups are to a target, ours of as many steps."
    return compared.outcome(artefact, rows, note, curves={**compared.curves(), "times as fast": bars})


def gain(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's figures 4 to 6: TopK at 10x and 1000x beside dense SGD, and the gain of both factors."""
    workload = artefact.settings["workload"]
    runs = {
        "dense": t.train(workload, "none"),
        "10x": t.train(workload, "topk:ratio=0.1"),
        "1000x": t.train(workload, "topk:ratio=0.001"),
    }
    compared = Compared(workload, runs)
    # The window never ends, so that the gain of 10x is measured in every step.
    looking = "gravac:min=10,max=1000,epsilon=0.99,window=100000,smoothing=1,factor=elements"
    log = t.train(workload, "topk:ratio=0.1", looking, seeds=1)[0]
    gains = [
        decision["statistics"]["gains"] for decision in log.decisions if decision.get("statistics", {}).get("gains")
    ]
    robust = artefact.settings["network"] == "VGG16"  # it loses nothing at 1000x in the paper
    rows = [
        compared.gain("10x", "dense", "no loss"),
        compared.gain("1000x", "dense", "no loss" if robust else "worse"),
        _gain_row("10x", [gain["minimum"] for gain in gains]),
    ]
    curves = compared.curves()
    steps = list(range(1, len(gains) + 1))
    curves["compression gain"] = [Curve(label="10x", x=steps, y=[float(gain["minimum"]) for gain in gains])]
    return compared.outcome(artefact, rows, curves=curves, x="epochs; millions of floats; steps")


def _gain_row(label: str, values: Sequence[float]) -> Row:
    ours = statistics.median(values)
    what = f"{label}: median compression gain (published: close to 1)"
    return Row(what=what, ours=ours, holds=ours > 0.8, note="with the paper's denominator, gradient and residual")


def gravac(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's figures 7 to 10: GraVAC beside dense SGD."""
    workload = artefact.settings["workload"]
    published = artefact.published
    runs = {"dense": t.train(workload, "none")}
    if artefact.settings.get("geometric"):
        policy = _gravac(0.7, workload, 2000, more=",scaling=geometric")
        runs["GraVAC"] = t.train(workload, "redsync:ratio=0.1", policy)
        compared = Compared(workload, runs)
        fewer = compared.times_fewer_floats("GraVAC", "dense", published["times fewer floats"])
        return compared.outcome(artefact, [compared.gain("GraVAC", "dense", "no loss", main=True), fewer])
    for epsilon in (0.7, 0.9):
        runs[f"epsilon {epsilon}"] = t.train(workload, "dgc:ratio=0.1", _gravac(epsilon, workload), **_momentum("dgc"))
    compared = Compared(workload, runs)
    rows = []
    for epsilon in (0.7, 0.9):
        label = f"epsilon {epsilon}"
        rows.append(compared.gain(label, "dense", "no loss", main=True))
        rows.append(compared.times_fewer_floats(label, "dense", published[f"{label}: times fewer floats"]))
    return compared.outcome(artefact, rows, "On DGC, with the gain of the authors' code and factors of elements.")


def beside_accordion(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's table 4 for ResNet101 and LSTM: GraVAC on DGC, and Accordion on PowerSGD of ranks 4 and 1."""
    rows = []
    for network, workload in (("ResNet101", "images"), ("LSTM", "text")):
        compared = Compared(
            workload,
            {
                "Accordion": t.train(workload, "powersgd:rank=4", _accordion("powersgd", workload)),
                "GraVAC": t.train(workload, "dgc:ratio=0.1", _gravac(0.7, workload), **_momentum("dgc")),
            },
        )
        numbers = artefact.published[network]
        for row in (
            compared.times_fewer_floats("GraVAC", "Accordion", numbers["communication"]),
            compared.times_as_fast("GraVAC", "Accordion", numbers["time"]),
            compared.gain("GraVAC", "Accordion", "no loss", note="the paper compares at the same quality"),
        ):
            rows.append(dataclasses.replace(row, what=f"{network}: {row.what}"))
    return compared.outcome(artefact, rows, f"ResNet101 is beside {SHOWN['images']}.", curves={})


def randomk(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's figure 11: GraVAC and Accordion on RandomK, between 1.5x and 1000x."""
    runs = {
        "dense": t.train("images", "none"),
        "GraVAC": t.train("images", "randomk:ratio=0.5", _gravac(0.7, "images", least=1.5)),
        "Accordion": t.train("images", "randomk:ratio=0.5", f"accordion:low=0.6667,high=0.001,{RULE['images']}"),
    }
    compared = Compared("images", runs)
    published = artefact.published
    better = published["GraVAC: accuracy"] - published["Accordion: accuracy"]
    rows = [
        compared.quality("GraVAC", published["GraVAC: accuracy"]),
        compared.quality("Accordion", published["Accordion: accuracy"]),
        compared.gain("GraVAC", "Accordion", "better", better, main=True),
        compared.times_fewer_floats("GraVAC", "dense", published["GraVAC: times fewer floats"]),
    ]
    return compared.outcome(artefact, rows)


def early(artefact: Artefact, t: Trainings) -> Outcome:
    """GraVAC's figure 1: predicted scaling over workers, and the trained gradient's change in the first steps."""
    curve = scaling_efficiency("resnet101")
    falls = list(curve.y) == sorted(curve.y, key=float, reverse=True)  # type: ignore[arg-type]
    what = f"ResNet101, predicted: share of linear scaling on {curve.x[-1]} GPUs (%), falling all the way"
    rows = [Row(what=what, ours=curve.y[-1], holds=falls)]
    runs = t.train("images", _spec("powersgd", LEVELS["powersgd"][0]), _accordion("powersgd", "images"))
    windows = DECAY * STEPS_OF_AN_EPOCH // WINDOW_STEPS  # before the learning rate falls
    changes = []
    for run in runs:
        norms = [sum(values) for values in zip(*_norms(run).values(), strict=True)][:windows]
        changes.append([abs(b / a - 1) for a, b in itertools.pairwise(norms)])
    first, last = (
        100 * statistics.fmean(statistics.fmean(change[part]) for change in changes)
        for part in (slice(0, 4), slice(-4, None))
    )
    what = f"change of the norm from {WINDOW_STEPS} steps to the next, first 80 of {windows * WINDOW_STEPS} steps (%)"
    rows.append(Row(what=f"{what}, more than in the last 80 ({last:.0f} %)", ours=first, holds=first > last))
    curves = {"share of linear scaling (%)": [curve]}
    curves["norm of the gradient"] = [
        Curve(label=tensor, x=[WINDOW_STEPS * (at + 1) for at in range(len(values))], y=values)
        for tensor, values in _norms(runs[0]).items()
    ]
    return Compared("images", {"Accordion": runs}).outcome(artefact, rows, curves=curves, x="GPUs; steps")


COUNTERPARTS: Mapping[str, Callable[[Artefact, Trainings], Outcome]] = {
    counterpart.__name__: counterpart
    for counterpart in (
        early, levels, logs, schedule, ranks, batch, adaqs, longer, limits, static, gain, gravac, beside_accordion,
        randomk,
    )
}  # fmt: skip
