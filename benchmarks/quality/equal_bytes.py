"""Compares each policy that chooses compression levels with a fixed level that sends the same number of bytes, over
several seeds.

    python -m benchmarks.quality.equal_bytes --dry-run                  # lists the first runs, and their time
    python -m benchmarks.quality.equal_bytes                            # all runs; many hours of each core
    python -m benchmarks.quality.equal_bytes --workload mnist1d --only budget --seeds 0,1
    python -m benchmarks.quality.equal_bytes --page-only                # only the page, from the existing runs

First the policies and the fixed levels of three budgets are trained. Then each policy gets a control: the same
compressor at a fixed level. At this level, a training run sends as many bytes as the policy's runs do on average over
their seeds. Bisection finds this level. A policy with two levels gets a second control. The second control sends the
same number of bytes as the policy, but compresses less in the middle of the training.

Each run is a separate process and has a folder below --runs. A complete run is not trained again. The file
trainings.csv in --runs keeps the figures of all runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import (
    commits_of,
    end_if_failed,
    findings_of,
    formerly,
    mean_and_interval,
    options_of_trainings,
    seeds_to_show,
    verdict,
    with_interval,
)
from benchmarks.quality import convergence
from benchmarks.trainings import Run, keep_records, seeds_there, train_missing
from hvdcomp import LGreCo
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import TensorInfo, with_small
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange import Engine
from hvdcomp.files import csv_of, provenance_last, replace_files
from hvdcomp.tools.terminal import make_console
from hvdcomp.tools.train.options import TrainingOptions

POLICIES = ("budget", "budget-narrow", "lgreco", "accordion", "gravac", "adaqs")
# With factors that count elements, and with the gain of the authors' code, GraVAC accepts large factors, as in the
# paper's tables.
GRAVAC = "min=10,max=1000,epsilon=0.7,smoothing=0.2,factor=elements,gain=raw"
GRAVACS_LINK = "100mbit"  # needed because GraVAC measures throughput
ALIKE = 0.005
"""The bytes of a policy and of its control may differ by this share."""
EFFECT = 0.5
"""The gain for which the page says how many seeds would show it: in points of accuracy, or in percent of the loss."""
LEVEL_NAMES = {"topk": "ratio", "powersgd": "rank"}


@dataclass(frozen=True)
class Workload:
    """A model, and the options with which it is trained.

    Attributes:
        options: the options of `hvdcomp train`.
        levels: for each compressor, the fixed levels of three budgets, from many bytes to few.
        extremes: for each compressor, the two levels between which Accordion chooses: low and high compression. GraVAC
            and AdaQS begin at low compression.
        window: number of steps from one comparison of Accordion to the next, and number of steps for each candidate of
            GraVAC. The published numbers are for longer training runs.
    """

    options: dict[str, Any]
    levels: Mapping[str, tuple[float, ...]]
    extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    window: int = 0

    @property
    def metric(self) -> str:
        return "loss" if self.options["data"] == "text" else "accuracy"

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"


def _of_convergence(name: str, ranks: int = convergence.RANKS) -> dict[str, Any]:
    return {**convergence.WORKLOADS[name].options, "simulate_ranks": ranks}


_LEVELS = {"topk": (0.03, 0.008, 0.002), "powersgd": (4, 2, 1)}
_EXTREMES = {"topk": (0.1, 0.002)}
_LONG = {"topk": (0.03, 0.01, 0.003), "powersgd": (8, 4, 2)}
WORKLOADS = {
    "mnist1d": Workload(_of_convergence("mnist1d"), levels=_LEVELS, extremes=_EXTREMES, window=40),
    "mnist1d-8": Workload(_of_convergence("mnist1d", 8), levels=_LEVELS),
    "gpt": Workload(_of_convergence("gpt-frozen"), levels=_LONG),
    # Training is short, so that sending few bytes costs accuracy. With more steps, all levels end near 99 %.
    "resnet20": Workload(
        {
            "model": "resnet20",
            "data": "digits",
            "validation_samples": 360,
            "optimizer": "sgd",
            "lr": 0.1,
            "schedule": "cosine",
            "warm_up": 1.0,
            "batch_size": 16,
            "steps": 100,
            "evaluate_every": 20,
            "simulate_ranks": convergence.RANKS,
        },
        levels=_LEVELS,
        extremes=_EXTREMES,
        window=10,
    ),
    "lstm": Workload(_of_convergence("lstm"), levels=_LONG),
}


@dataclass(frozen=True)
class Row:
    """A way to send gradients: a compressor at a level, with a policy that chooses levels if there is one.

    Attributes:
        kind: "fixed", "mid" (a schedule with lower compression in mid-training), or the name of a policy.
        control_of: label of the row for which this row is the control; None if it is not a control.
    """

    kind: str
    compressor: str
    level: float
    policy: str | None = None
    control_of: str | None = None

    @property
    def spec(self) -> str:
        return f"{self.compressor}:{LEVEL_NAMES[self.compressor]}={self.level:g}"

    @property
    def label(self) -> str:
        return self.spec if self.policy is None else f"{self.spec} {self.policy}"


def rows_of(workload: Workload) -> list[Row]:
    """The rows that are trained first: fixed levels, and the policies."""
    rows = []
    for compressor, levels in workload.levels.items():
        for level in levels:
            rows.append(Row("fixed", compressor, level))
            factor = f"{factor_of(workload, Row('fixed', compressor, level)):.4g}"
            rows.append(Row("budget", compressor, level, f"budget:factor={factor}"))
            rows.append(Row("budget-narrow", compressor, level, f"budget:factor={factor},least=0.3,most=3"))
            if workload.options["steps"] > LGreCo.interval:  # otherwise LGreCo never makes a decision
                rows.append(Row("lgreco", compressor, level, "lgreco:least=0.1,most=10,levels=13"))
    for compressor, (low, high) in workload.extremes.items():
        rows.append(Row("fixed", compressor, low))
        accordion = f"accordion:low={low:g},high={high:g},steps={workload.window}"
        rows.append(Row("accordion", compressor, high, accordion))
        rows.append(Row("gravac", compressor, low, f"gravac:window={workload.window},{GRAVAC}"))
        rows.append(Row("adaqs", compressor, low, "adaqs:start=64,fall=0.5"))
    return list(dict.fromkeys(rows))


@dataclass(frozen=True)
class LevelRun(Run):
    """The training run of a workload with the method of a row."""

    row: Row

    @property
    def label(self) -> str:
        return self.row.label

    @cached_property
    def options(self) -> dict[str, Any]:
        policy = {} if self.row.policy is None else {"policy": self.row.policy}
        if self.row.kind == "gravac":
            policy["link"] = GRAVACS_LINK
        return {**WORKLOADS[self.workload].options, "compression": self.row.spec, **policy, "seed": self.seed}

    def figures(self) -> dict[str, Any]:
        """The compression factor, the bytes that a rank sent, and the final quality (None if the training diverged).

        The quality is measured on the validation data.
        """
        assert self.summary is not None
        ended = self.summary["status"] == "finished"
        metric = WORKLOADS[self.workload].metric
        return {
            "factor": self.summary["compression_factor"],
            "bytes_sent": self.summary["bytes_sent"],
            "quality": self.records("evaluations.jsonl")[-1][metric] if ended else None,
        }


# The bytes of a level.


@cache
def _tensors(model: str, data: str) -> tuple[TensorInfo, ...]:
    from hvdcomp.tools.train.data import load_data
    from hvdcomp.tools.train.frameworks import build_model

    loaded = load_data(TrainingOptions(model=model, data=data).resolved())
    network = build_model(model, channels=loaded.channels, size=loaded.size, classes=loaded.classes)
    return tuple(TensorInfo(name, tuple(parameter.shape)) for name, parameter in network.named_parameters())


def bytes_of_step(workload: Workload, row: Row) -> tuple[int, int]:
    """Bytes that a rank sends in a step: at the row's fixed level, and uncompressed."""
    return payload_bytes(workload.options, row.spec), payload_bytes(workload.options, "none")


def payload_bytes(options: Mapping[str, Any], spec: str) -> int:
    """Bytes that a rank sends in one exchange.

    Args:
        options: the options of `hvdcomp train`.
        spec: spec of the compressor.
    """
    small = options.get("small_tensors", "none")
    return _payload_bytes(options["model"], options["data"], options["simulate_ranks"], spec, small)


@cache
def _payload_bytes(model: str, data: str, ranks: int, spec: str, small: str) -> int:
    tensors, compressor = _tensors(model, data), parse_compressor(spec)
    if small == "none":
        engine = Engine(LoopbackCommunicator(), list(tensors), compressor)
    else:
        both = with_small(compressor, parse_compressor(small))
        engine = Engine(LoopbackCommunicator(), list(tensors), both, min_numel=0, min_ndim=0)
    plan = engine.planner.plan_for(engine.compressor)
    return sum(plan[tensor.name].payload_bytes(tensor.shape, dtype=tensor.dtype, ranks=ranks) for tensor in tensors)


def factor_of(workload: Workload, row: Row) -> float:
    sent, dense = bytes_of_step(workload, row)
    return dense / sent


def training_bytes(workload: Workload, row: Row, measured: Mapping[float, float]) -> float:
    """Predicts the bytes that a training run at the row's fixed level sends.

    Some bytes of a training run do not depend on the level: the bytes of the steps before the second moment is frozen,
    and the numbers that are sent along with the gradients. The function computes how many such bytes there are from two
    measured training runs.

    Args:
        measured: the bytes of a whole training run, by level, for at least two levels.
    """
    levels = sorted(measured)
    first, last = (bytes_of_step(workload, Row("fixed", row.compressor, level))[0] for level in (levels[0], levels[-1]))
    slope = (measured[levels[-1]] - measured[levels[0]]) / (last - first)
    return measured[levels[0]] + slope * (bytes_of_step(workload, row)[0] - first)


def level_of_bytes(workload: Workload, compressor: str, target: float, measured: Mapping[float, float]) -> float:
    """The fixed level at which a training run sends `target` bytes. If levels are ranks, this is the lowest rank that
    sends at least `target` bytes.

    If the bytes of a measured level differ from the target by at most `ALIKE`, the function returns this level, because
    another training run would take hours.
    """

    def sent(level: float) -> float:
        return training_bytes(workload, Row("fixed", compressor, level), measured)

    if compressor == "powersgd":
        return float(next(rank for rank in range(1, 65) if rank == 64 or sent(rank) >= target))
    nearest = min(measured, key=lambda level: abs(measured[level] - target))
    if abs(measured[nearest] - target) <= ALIKE * target:
        return nearest
    least, most = 1e-5, 1.0
    for _ in range(60):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if sent(middle) < target else (least, middle)
    return float(f"{most:.3g}")


def controls_of(name: str, runs: Path, seeds: Sequence[int], only: Sequence[str] = ()) -> list[Row]:
    """The controls for the policies that were trained on a workload.

    Args:
        only: the kinds of policies whose controls are returned; empty for all.
    """
    workload, controls = WORKLOADS[name], []
    for compressor in workload.levels:
        rows = [row for row in rows_of(workload) if row.compressor == compressor]
        sent = {row: mean_bytes(name, row, runs, seeds) for row in rows}
        measured = {row.level: value for row, value in sent.items() if row.kind == "fixed" and value is not None}
        if len(measured) < 2:
            continue
        for row, value in sent.items():
            if row.kind == "fixed" or value is None or (only and row.kind not in only):
                continue
            level = level_of_bytes(workload, compressor, value, measured)
            controls.append(Row("fixed", compressor, level, control_of=row.label))
            if row.kind == "accordion":
                low, high = workload.extremes[compressor]
                controls.append(_in_mid_training(workload, row, low, high, value, measured))
    return controls


def _in_mid_training(
    workload: Workload, row: Row, low: float, high: float, value: float, measured: Mapping[float, float]
) -> Row:
    """The control with low compression in the middle of a training run, and high compression before and after.

    The number of steps with low compression is chosen so that the training run sends `value` bytes.
    """
    least, most = (training_bytes(workload, Row("fixed", row.compressor, level), measured) for level in (high, low))
    steps = workload.options["steps"]
    count = max(1, min(steps - 2, round(steps * (value - least) / (most - least))))
    start = max(1, (steps - count) // 2)
    schedule = f"schedule:levels={high:g}|{low:g},steps={start}|{start + count}"
    return Row("mid", row.compressor, high, schedule, control_of=row.label)


def mean_bytes(name: str, row: Row, runs: Path, seeds: Sequence[int]) -> float | None:
    """The mean number of bytes that the row's training runs sent; None if there are no runs."""
    records = [LevelRun(name, seed, runs, row).record for seed in seeds]
    sent = [record["bytes_sent"] for record in records if record is not None]
    return statistics.mean(sent) if sent else None


# The page.


@dataclass(frozen=True)
class Outcome:
    """The results of a row's training runs.

    Attributes:
        factor, megabytes: compression factor, and megabytes that a rank sent; both are means over the seeds.
        qualities: the final quality of each training run that did not diverge, by seed.
        count: number of training runs.
    """

    row: Row
    factor: float
    megabytes: float
    qualities: Mapping[int, float]
    count: int

    @property
    def mean(self) -> float:
        return statistics.mean(self.qualities.values()) if self.qualities else math.nan


def outcome_of(name: str, row: Row, runs: Path, seeds: Sequence[int]) -> Outcome | None:
    records = {seed: LevelRun(name, seed, runs, row).record for seed in seeds}
    finished = {seed: record for seed, record in records.items() if record is not None}
    if not finished:
        return None
    return Outcome(
        row,
        statistics.mean(record["factor"] for record in finished.values()),
        statistics.mean(record["bytes_sent"] for record in finished.values()) / 1e6,
        {seed: record["quality"] for seed, record in finished.items() if record["quality"] is not None},
        len(finished),
    )


@dataclass(frozen=True)
class Pair:
    """A policy and one of its controls.

    Attributes:
        ends: the compressor's fixed levels that send the most and the fewest bytes. The gap is the difference between
            their qualities.
    """

    workload: str
    policy: Outcome
    control: Outcome
    ends: tuple[Outcome, Outcome]

    @property
    def shares_of_gap(self) -> tuple[float, float]:
        """The shares of the gap that the policy and its control recover, over the seeds that all four rows have.

        A share is 0 for the quality of the level with the fewest bytes, and 1 for the level with the most bytes.
        """
        outcomes = (self.policy, self.control, *self.ends)
        seeds = set.intersection(*(set(outcome.qualities) for outcome in outcomes))
        if not seeds:
            return math.nan, math.nan
        policy, control, most, fewest = (
            statistics.mean(outcome.qualities[seed] for seed in seeds) for outcome in outcomes
        )
        gap = most - fewest or math.nan
        return (policy - fewest) / gap, (control - fewest) / gap

    @property
    def gains(self) -> list[float]:
        """The policy's advantage over its control for each seed: points of accuracy, or percent of the loss."""
        workload = WORKLOADS[self.workload]
        pairs = [
            (self.policy.qualities[seed], self.control.qualities[seed])
            for seed in sorted(self.policy.qualities.keys() & self.control.qualities.keys())
        ]
        if workload.higher_is_better:
            return [100 * (first - second) for first, second in pairs]
        return [100 * (1 - first / second) for first, second in pairs]

    @property
    def share(self) -> float:
        """The bytes of the control divided by the bytes of the policy."""
        return self.control.megabytes / self.policy.megabytes

    def record(self) -> dict[str, Any]:
        mean, half = mean_and_interval(self.gains) if self.gains else (None, None)
        return {
            "workload": self.workload,
            "policy": self.policy.row.policy,
            "compressor": self.policy.row.spec,
            "factor": self.policy.factor,
            "quality": self.policy.mean,
            "control": self.control.row.label,
            "control_quality": self.control.mean,
            "control_bytes_share": self.share,
            "share_of_gap": self.shares_of_gap[0],
            "control_share_of_gap": self.shares_of_gap[1],
            "seeds": len(self.gains),
            "gain": mean,
            "half_interval": None if half is None or math.isnan(half) else half,
            "verdict": verdict(self.gains).strip("*"),
        }


def pairs_of(name: str, runs: Path, seeds: Sequence[int]) -> list[Pair]:
    """All pairs in which both rows have training runs, sorted by policy and factor."""
    pairs = []
    by_label = {row.label: row for row in rows_of(WORKLOADS[name])}
    for control in controls_of(name, runs, seeds):
        assert control.control_of is not None
        policy = outcome_of(name, by_label[control.control_of], runs, seeds)
        reference = outcome_of(name, control, runs, seeds)
        ends = ends_of(name, control.compressor, runs, seeds)
        if policy is not None and reference is not None and ends is not None:
            pairs.append(Pair(name, policy, reference, ends))
    return sorted(pairs, key=lambda pair: (pair.policy.row.compressor, pair.policy.row.kind, pair.policy.factor))


def ends_of(name: str, compressor: str, runs: Path, seeds: Sequence[int]) -> tuple[Outcome, Outcome] | None:
    """The fixed levels that send the most and the fewest bytes; None if fewer than two levels are trained."""
    fixed = [row for row in rows_of(WORKLOADS[name]) if row.kind == "fixed" and row.compressor == compressor]
    trained = [outcome for row in fixed if (outcome := outcome_of(name, row, runs, seeds)) is not None]
    by_bytes = sorted(trained, key=lambda outcome: outcome.megabytes)
    return (by_bytes[-1], by_bytes[0]) if len(by_bytes) > 1 else None


def _shown(outcome: Outcome, workload: Workload) -> str:
    values = [(100 if workload.higher_is_better else 1) * value for value in outcome.qualities.values()]
    if not values:
        return "diverged"
    text = with_interval(values, ".2f" if workload.higher_is_better else ".4f")
    lost = outcome.count - len(values)
    return text + (f"; {lost} of {outcome.count} diverged" if lost else "")


def _in_words(seeds: Sequence[int]) -> str:
    """The seeds in words, such as "0 to 14", or "0, 2" if a seed between the first and the last is missing."""
    first, last = seeds[0], seeds[-1]
    return f"{first} to {last}" if list(seeds) == list(range(first, last + 1)) else ", ".join(map(str, seeds))


def section_of(name: str, pairs: Sequence[Pair], seeds: Sequence[int]) -> list[str]:
    """The section of a workload: its options, and a table of its pairs."""
    workload = WORKLOADS[name]
    quality = "accuracy (%)" if workload.higher_is_better else "validation loss"
    unit = "points" if workload.higher_is_better else "%"
    options = ", ".join(f"{key} {value}" for key, value in workload.options.items())
    lines = [
        f"## {name}",
        "",
        f"The training runs in this table used the seeds {_in_words(seeds)}. "
        f"The options of `hvdcomp train` are: {options}.",
        "",
        f"| compressor | policy | seeds | factor | {quality} | control | control's bytes | control's {quality} "
        f"| share of the gap | gain ({unit}) | | seeds to show {EFFECT:g} |",
        "|---|---|--:|--:|--:|---|--:|--:|--:|--:|---|--:|",
    ]
    for pair in pairs:
        control = f"`{pair.control.row.spec if pair.control.row.kind == 'fixed' else pair.control.row.policy}`"
        cells = [
            f"`{pair.policy.row.spec}`", f"`{pair.policy.row.policy}`", str(len(pair.gains)),
            f"{pair.policy.factor:.1f}", _shown(pair.policy, workload),
            control, f"{pair.share:.1%}", _shown(pair.control, workload),
            ", ".join(f"{round(share, 2) + 0.0:.0%}" for share in pair.shares_of_gap),  # no -0%
            with_interval(pair.gains, "+.2f"),
            verdict(pair.gains),
            str(seeds_to_show(EFFECT, pair.gains)) if len(pair.gains) > 1 else "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def summary_of(pairs: Sequence[Pair]) -> list[str]:
    """The section that counts how often each policy is better or worse than the fixed level that sends the same number
    of bytes."""
    fixed = [pair for pair in pairs if pair.control.row.kind == "fixed"]
    lines = [
        "## Policies compared with the fixed level of the same bytes",
        "",
        "The table shows in how many comparisons each policy was better or worse than the fixed level:",
        "",
        "| policy | compressor | better | no difference shown | worse |",
        "|---|---|--:|--:|--:|",
    ]
    groups = sorted({(pair.policy.row.kind, pair.policy.row.compressor) for pair in fixed})
    for kind, compressor in groups:
        own = [pair for pair in fixed if (pair.policy.row.kind, pair.policy.row.compressor) == (kind, compressor)]
        verdicts = [verdict(pair.gains) for pair in own]
        counts = [sum(word in one for one in verdicts) for word in ("better", "no difference", "worse")]
        lines.append(f"| {kind} | {compressor} | {' | '.join(map(str, counts))} |")
    return [*lines, ""]


def write_page(file: Path, runs: Path, seeds: Sequence[int]) -> bool:
    """Writes the page of all complete runs, with a CSV file and a plot. Returns False if there are no runs."""
    by_workload = {name: pairs_of(name, runs, seeds) for name in WORKLOADS}
    by_workload = {name: pairs for name, pairs in by_workload.items() if pairs}
    pairs = [pair for workload_pairs in by_workload.values() for pair in workload_pairs]
    if not pairs:
        return False
    shown = commits_of(
        LevelRun(pair.workload, seed, runs, outcome.row)
        for pair in pairs
        for outcome in (pair.policy, pair.control)
        for seed in seeds
    )
    table, plot = file.with_suffix(".csv"), file.with_suffix(".png")
    lines = [
        "# Adaptive levels compared with a fixed level of the same bytes",
        "",
        f"""Made by `{_command(by_workload)}`, at commit {shown}. {formerly("python ./benchmarks/equal_bytes.py")}

Does a policy train a better model than a fixed compression level that sends the same number of bytes? To find out, we
trained with `hvdcomp train` on [simulated ranks](simulated-ranks.md), and compared each policy with one or two control
runs:

- **A fixed level** of the same compressor that sends, on average, the same number of bytes as the policy. We find the
  level by bisection. For PowerSGD, we use the lowest rank that does not send fewer bytes than the policy.
- **A `schedule`**, if the policy chooses between two levels. The schedule uses the same two levels and sends the same
  number of bytes as the policy, but compresses less in the middle of training.

The tables have these columns:

- **seeds** is the number of seeds that both the policy and the control were trained with.
- **factor** is the number of bytes of dense training divided by the number of bytes with the policy.
- **control's bytes** is the number of bytes of the control run, in percent of the bytes of the policy's run.
- **share of the gap** shows how much of a gap in quality is recovered: first by the policy, then by the control. The
  gap is the difference in quality between the fixed level that sends the fewest bytes and the one that sends the most.
  For Accordion, these two levels are its high and low levels. This column uses only the seeds that the policy, the
  control and both fixed levels were all trained with.
- **gain** is the mean difference in quality between the policy and the control over the seeds, with its 95 % confidence
  interval (Student's t). A policy counts as better or worse only if zero is outside the interval.
- **seeds to show {EFFECT:g}** is the number of seeds that would be needed to show a true gain of {EFFECT:g} points of
  accuracy, or {EFFECT:g} % of the loss, in four of five experiments. It is computed from how much the gain differs
  between seeds.

The CSV file [{table.name}]({table.name}) contains the same numbers. The page on
[reproduced papers](reproduction.md) compares policies with the results of their papers.""",
        "",
        findings_of(file),
        "",
        f"![Quality over bytes]({plot.name})",
        "",
        "<!-- made: tables -->",
        *summary_of(pairs),
        *(line for name, pairs in by_workload.items() for line in section_of(name, pairs, _seeds_of(pairs))),
        "<!-- end of tables -->",
    ]
    text = "\n".join(lines).rstrip() + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    records = csv_of([pair.record() for pair in pairs])
    replace_files({file: provenance_last(text).encode(), table: records, plot: draw(by_workload)})
    return True


def _command(by_workload: Mapping[str, Sequence[Pair]]) -> str:
    """The command that trains all rows on the page."""
    words = ["python -m benchmarks.quality.equal_bytes"]
    if list(by_workload) != list(WORKLOADS):
        words += [word for name in by_workload for word in ("--workload", name)]
    kinds = sorted({pair.policy.row.kind for pairs in by_workload.values() for pair in pairs})
    if kinds != sorted(POLICIES):
        words += [word for kind in kinds for word in ("--only", kind)]
    compressors = sorted({pair.policy.row.compressor for pairs in by_workload.values() for pair in pairs})
    if compressors != sorted(LEVEL_NAMES):
        words += [word for compressor in compressors for word in ("--compressor", compressor)]
    return " ".join(words)


def _seeds_of(pairs: Sequence[Pair]) -> list[int]:
    return sorted({seed for pair in pairs for seed in pair.policy.qualities})


_COLORS = {
    "fixed": "#7d7d7d", "budget": "#0072b2", "budget-narrow": "#999933", "lgreco": "#009e73", "accordion": "#d55e00",
    "mid": "#cc79a7", "gravac": "#e69f00", "adaqs": "#56b4e9",
}  # fmt: skip


def pareto_front(quality: Mapping[float, float], higher_is_better: bool) -> list[tuple[float, float]]:
    """The points (bytes, quality) that are better than every point with fewer bytes, sorted by bytes."""
    front: list[tuple[float, float]] = []
    for size, value in sorted(quality.items()):
        if not front or (value > front[-1][1] if higher_is_better else value < front[-1][1]):
            front.append((size, value))
    return front


def draw(by_workload: Mapping[str, Sequence[Pair]]) -> bytes:
    """Plots the quality of policies and of fixed levels over their bytes. Returns a PNG."""
    from matplotlib.ticker import LogLocator, NullFormatter

    from hvdcomp.perfmodel.figures import as_png, new_figure

    figure = new_figure(11, 4 * math.ceil(len(by_workload) / 2))
    for number, (name, pairs) in enumerate(by_workload.items(), 1):
        axes = figure.add_subplot(math.ceil(len(by_workload) / 2), min(2, len(by_workload)), number)
        axes.set_title(name, fontsize=10)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("MB that a rank sends in the training")
        axes.set_ylabel(WORKLOADS[name].metric)
        axes.grid(alpha=0.3)
        everything = [outcome for pair in pairs for outcome in (pair.policy, pair.control)]
        for compressor, line, marker in zip(LEVEL_NAMES, ("-", "--"), ("o", "s"), strict=True):
            for kind, color in _COLORS.items():
                of_compressor = [outcome for outcome in everything if outcome.row.compressor == compressor]
                of_kind = [outcome for outcome in of_compressor if outcome.row.kind == kind]
                chosen = {outcome.megabytes: outcome.mean for outcome in of_kind}
                if chosen:
                    places = sorted(chosen)
                    joined = line if kind == "fixed" else "none"
                    axes.plot(
                        places, [chosen[at] for at in places], color=color, linestyle=joined, marker=marker,
                        markersize=4, label=f"{compressor} {kind}",
                    )  # fmt: skip
        quality = {outcome.megabytes: outcome.mean for outcome in everything}
        front = pareto_front(quality, WORKLOADS[name].higher_is_better)
        axes.plot(*zip(*front, strict=True), color=_COLORS["fixed"], linestyle=":", zorder=0.5, label="Pareto front")
        axes.legend(fontsize=7)
    return as_png(figure)


# The command.


def planned(
    workloads: Iterable[str], seeds: Sequence[int], runs: Path, rows: Callable[[str], Sequence[Row]]
) -> list[LevelRun]:
    """All runs, sorted by seed: all rows with one seed come before the next seed."""
    of_workloads = {name: rows(name) for name in workloads}
    found = [LevelRun(name, seed, runs, row) for seed in seeds for name, own in of_workloads.items() for row in own]
    return list({run.folder: run for run in found}.values())


@click.command()
@options_of_trainings(WORKLOADS, "equal-bytes", seeds="0,1,2,3,4")
@click.option("--only", multiple=True, type=click.Choice(POLICIES), help="Policy; repeatable. Default: all.")
@click.option("--compressor", "compressors", multiple=True, type=click.Choice(list(LEVEL_NAMES)), help="Default: all.")
def main(
    workloads: tuple[str, ...],
    only: tuple[str, ...],
    compressors: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    runs: Path,
    table: Path,
    dry_run: bool,
    page_only: bool,
) -> None:
    """Train policies of levels and their controls on simulated ranks, and write the page of all complete runs."""
    chosen = workloads or tuple(WORKLOADS)
    console = make_console(soft_wrap=True)

    def wanted(rows: Sequence[Row]) -> list[Row]:
        kinds = ("fixed", "mid", *(only or POLICIES))
        return [row for row in rows if row.kind in kinds and (not compressors or row.compressor in compressors)]

    failed = []
    if not page_only:
        first = planned(chosen, seeds, runs, lambda name: wanted(rows_of(WORKLOADS[name])))
        failed = train_missing(first, console, workers=workers, dry_run=dry_run)
        if dry_run:
            return
        second = planned(chosen, seeds, runs, lambda name: wanted(controls_of(name, runs, seeds, only)))
        failed += train_missing(second, console, workers=workers)
    everywhere = seeds_there(runs)
    for rows in (lambda name: rows_of(WORKLOADS[name]), lambda name: controls_of(name, runs, everywhere)):
        keep_records(planned(WORKLOADS, everywhere, runs, rows), runs)
    if write_page(table, runs, everywhere):
        console.print(f"wrote {table}, and a CSV file and a plot beside it")
    else:
        console.print(f"there is no finished pair of runs in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
