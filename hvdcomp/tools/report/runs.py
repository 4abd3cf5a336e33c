"""Reads the folders that `hvdcomp train` writes: steps.jsonl, evaluations.jsonl, epochs.jsonl, decisions.jsonl if there
is a policy, and summary.json after the end of a run.

An unfinished or killed run has no summary, and the last line of a file may be incomplete. All complete lines are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdcomp.adaptation.decision_log import DecisionLogError
from hvdcomp.exchange import compression_factor
from hvdcomp.files import parse_json
from hvdcomp.specs.typed import typed
from hvdcomp.tools.report.decisions import MOST_STEPS, Decisions, load_decisions
from hvdcomp.tools.train.options import SIMULATED
from hvdcomp.tools.train.target import METRICS, Target

RUN_FILES = ("steps.jsonl", "evaluations.jsonl", "epochs.jsonl", "decisions.jsonl", "summary.json")
REPORT_FILES = ("report.html", "report.json", "report.csv")  # files of the module `page`, never read as runs
SERIES_FILE = "series.csv"  # next to these files, except in reports of earlier versions
HEADINGS = {"accuracy": "Accuracy %", "perplexity": "Perplexity", "rmse": "RMSE", None: "Quality"}
"""The heading of the column of each metric. None stands for a run that has not been evaluated yet."""
PARTS = ("test", "validation")  # the parts of the data for evaluations
PHASES = ("encode", "communicate", "decode")
_HINT = "remove the file to read the run as unfinished"
_TEXTS = ("status", "model", "data", "spec")
_NUMBERS = (
    *METRICS, "loss", "ms_per_step", "bytes_sent", "bytes_sent_per_step", "bytes_in_node_per_step",
    "compression_factor", "trained_seconds", "world_size", "ranks_per_host", "seed",
)  # fmt: skip
_TARGET_NUMBERS = ("step", "bytes_sent", "trained_seconds")
_LONGEST = 60  # maximum number of characters of a value in a message
# Options that may differ between runs of the same experiment, such as the seed and the output folder. All other
# options, together with the spec, define the experiment.
_NOT_COMPARED = {
    "checkpoint_folder", "compression", "data_dir", "elastic", "metrics_address", "metrics_port", "output", "overwrite",
    "progress", "residuals", "seed", "tensorboard",
}  # fmt: skip


class RunError(ValueError):
    """A path cannot be read as a run. The message names the path and the reason."""


def printable(value: Any) -> str:
    """`value` as text without control characters, which would disturb a terminal or an SVG file."""
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))


@dataclass(frozen=True, eq=False)
class Run:
    """A training run, from the files of `hvdcomp train` in `folder`.

    `steps` and `evaluations` have a float array for each field, with NaN for missing values. The field `part` of an
    evaluation is an index into PARTS. `summary` is empty for an unfinished run. `decisions` is None if the run has no
    policy that makes decisions.
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    steps: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    decisions: Decisions | None = None

    def text(self, key: str) -> str | None:
        """A field of the summary as printable text, or None."""
        value = self.summary.get(key)
        return None if value is None else printable(value)

    def number(self, key: str) -> float | None:
        """A field of the summary as a finite number, or None."""
        return finite(as_number(self.summary.get(key)))

    def count(self, key: str) -> int | None:
        """A field of the summary as a whole number, or None."""
        value = self.number(key)
        return None if value is None else int(value)

    @property
    def status(self) -> str:
        return self.text("status") or "unfinished"

    @property
    def options(self) -> dict[str, Any]:
        options = self.summary.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def spec(self) -> str | None:
        """The spec of the compressor. In an unfinished run, only the decisions contain the spec."""
        if not self.summary and self.decisions is not None:
            return printable(self.decisions.compressor)
        return self.text("spec")

    @property
    def policy(self) -> str | None:
        """The policy's spec."""
        if self.decisions is not None:
            return printable(self.decisions.policy)
        policy = self.options.get("policy")
        return None if policy is None else printable(policy)

    @property
    def compared_options(self) -> dict[str, str]:
        """The options that are the same in all runs of an experiment: all options except the seed and options such as
        the output folder."""
        return {key: printable(value) for key, value in self.options.items() if key not in _NOT_COMPARED}

    @property
    def metric(self) -> str | None:
        """The metric of the evaluations, one of METRICS; None before the first evaluation."""
        for metric in METRICS:
            if self.summary.get(metric) is not None or np.isfinite(self.evaluations[metric]).any():
                return metric
        return None

    @property
    def quality(self) -> float | None:
        """The last value of the metric. An accuracy is between 0 and 1."""
        if self.metric is None:
            return None
        reported = self.number(self.metric)
        return reported if reported is not None or self.summary else last(self.evaluations[self.metric])

    @property
    def part(self) -> str | None:
        """The part of the data on which the run was evaluated, one of PARTS; None before the first evaluation."""
        part = last(self.evaluations["part"])
        return None if part is None else PARTS[int(part)]

    @property
    def target(self) -> Target | None:
        """The quality at which the run ends; None without a target."""
        until = self.summary.get("until")
        return None if until is None else Target.parse(until["target"])

    @property
    def reached(self) -> dict[str, float] | None:
        """The step, the sent bytes and the seconds of training at which the target was reached; None if it was not
        reached."""
        until = self.summary.get("until") or {}
        return {key: as_number(until.get(key)) for key in _TARGET_NUMBERS} if until.get("reached") else None

    @property
    def simulated_link(self) -> str | None:
        """The network link for which the times of exchanges were predicted, as a text. None if the ranks were real, as
        their exchanges were measured."""
        if self.text("backend") != SIMULATED:
            return None
        link = self.options.get("link")
        return "a link that takes no time" if link is None else printable(link)

    @property
    def ms_per_step(self) -> float | None:
        reported = self.number("ms_per_step")
        return reported if reported is not None else self.median("ms")

    @property
    def bytes_sent_per_step(self) -> float | None:
        reported = self.number("bytes_sent_per_step")
        return reported if reported is not None else mean(self.steps["bytes_sent"])

    @property
    def bytes_in_node_per_step(self) -> float | None:
        """The part of `bytes_sent_per_step` that stays within a node; None if the files do not contain it."""
        reported = self.number("bytes_in_node_per_step")
        return reported if reported is not None else mean(self.steps["bytes_in_node"])

    @property
    def compression_factor(self) -> float | None:
        """The bytes of dense gradients divided by the sent bytes that may leave the node, over all steps."""
        reported = self.number("compression_factor")
        if reported is not None:
            return reported
        means = (mean(self.steps[key]) for key in ("dense_bytes", "bytes_sent", "bytes_in_node"))
        return compression_factor(*(bytes_per_step or 0 for bytes_per_step in means))

    @property
    def shares_one_machine(self) -> bool:
        """Whether the run has several ranks, and it is known that they share a machine."""
        return (self.count("ranks_per_host") or 0) == (self.count("world_size") or 0) > 1

    @property
    def identical(self) -> bool | None:
        """Whether all ranks ended with the same weights; None if this was not checked."""
        value = self.summary.get("identical")
        return value if isinstance(value, bool) else None

    def times(self, key: str) -> np.ndarray:
        """The finite values of a field of steps.jsonl, in milliseconds.

        If there are several epochs, the first epoch is left out, because the first steps of a run are slower. `hvdcomp
        train` also leaves out the first steps when it computes the time per step.
        """
        settled = self.steps["epoch"] > 1
        values = self.steps[key][settled] if settled.any() else self.steps[key]
        return values[np.isfinite(values)]

    def median(self, key: str) -> float | None:
        """The median of `times`; None if there are no times."""
        values = self.times(key)
        return float(np.median(values)) if values.size else None


def as_number(value: Any) -> float:
    """A number from parsed JSON. null becomes NaN.

    Raises:
        TypeError: if the value is not a number.
        ValueError: if the number is too large.
    """
    if value is None:
        return np.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{shortened(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{shortened(value)} is too large a number") from None


def finite(value: float) -> float | None:
    """The given value, or None if the value is not finite."""
    return float(value) if np.isfinite(value) else None


def shortened(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = printable(json.dumps(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown_quality(metric: str | None, value: float) -> str:
    """A value of a metric as text. An accuracy is shown in percent."""
    return f"{100 * value:.2f}" if metric == "accuracy" else f"{value:.4f}" if metric == "rmse" else f"{value:.2f}"


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, but at most two decimals. Numbers below a million have no
    exponent."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{min(decimals, 2)}f}" if abs(value) < 1e6 else f"{value:.3g}"


def last(values: np.ndarray) -> float | None:
    return finite(values[-1]) if values.size else None


def mean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else None


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Reads every run in `paths`. A path is the folder of a run, or a folder that contains such folders.

    Returns:
        The runs in the given order, without duplicates, and notes about paths that were left out because they belong to
        an earlier report.

    Raises:
        RunError: if a path does not exist, is not a run and contains no runs, or a file of a run cannot be read.
    """
    folders: list[Path] = []
    notes = []
    for path in map(Path, paths):
        if not path.exists():
            raise RunError(
                f"{path} does not exist; name folders that `hvdcomp train` wrote, or a folder that contains such "
                "folders"
            )
        if _is_report(path):
            notes.append(f"{path} is left out, because it belongs to a report, not to a run")
            continue
        run_folders = [Path(root) for root, _, files in sorted(os.walk(path)) if set(files) & set(RUN_FILES)]
        if not run_folders:
            raise RunError(
                f"{path} contains no training run: neither this folder nor a folder below it has one of "
                f"{', '.join(RUN_FILES)}; give a folder that `hvdcomp train` wrote"
            )
        folders += [path] if path in run_folders else run_folders
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    if not folders:
        raise RunError("the given paths contain no training runs; give folders that `hvdcomp train` wrote")
    root = os.path.commonpath([folder.parent for folder in folders])
    return [_read_run(folder, printable(folder.relative_to(root))) for folder in folders], notes


def _is_report(path: Path) -> bool:
    if path.is_dir():
        return all((path / name).exists() for name in REPORT_FILES)
    return path.name in (*REPORT_FILES, SERIES_FILE) or path.suffix in (".png", ".svg")


def _read_run(folder: Path, name: str) -> Run:
    summary: dict[str, Any] = {}
    path = folder / "summary.json"
    if path.exists():
        try:
            summary = parse_json(path.read_bytes())
        except ValueError as error:
            raise RunError(f"{path} is not JSON ({error}); {_HINT}") from None
        if not isinstance(summary, dict):
            raise RunError(f"{path} contains {shortened(summary)} instead of a JSON object; {_HINT}")
        _check_summary(path, summary)
    phases = (f"{phase}_ms" for phase in PHASES)
    sent = ("bytes_sent", "bytes_in_node", "dense_bytes")
    step_fields = ("step", "epoch", "loss", "learning_rate", "ms", *sent, *phases)
    steps = _read_columns(folder / "steps.jsonl", step_fields)
    return Run(name, folder, summary, steps, _read_evaluations(folder), _read_decisions(folder / "decisions.jsonl"))


def _read_evaluations(folder: Path) -> dict[str, np.ndarray]:
    """The evaluations of a run. Files of earlier versions have only evaluations at the ends of epochs, all on the test
    part."""
    fields = ("step", "part", "loss", "bytes_sent", "trained_seconds", *METRICS)
    if (folder / "evaluations.jsonl").exists():
        return _read_columns(folder / "evaluations.jsonl", fields)
    epochs = _read_columns(folder / "epochs.jsonl", (*fields, "test_loss"))
    epochs["part"][:] = PARTS.index("test")
    epochs["loss"] = epochs.pop("test_loss")
    return epochs


def _check_summary(path: Path, summary: dict[str, Any]) -> None:
    """Raises an error if a summary has values that a report could not show."""
    for key in _NUMBERS:
        try:
            as_number(summary.get(key))
        except (TypeError, ValueError) as error:
            raise RunError(f"{path}: {key}: {error}; {_HINT}") from None
    try:
        for key in _TEXTS:
            typed(str | None, summary.get(key), key)
        typed(Mapping[str, Any] | None, summary.get("options"), "options")
        _check_target(typed(Mapping[str, Any] | None, summary.get("until"), "until"))
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: {error}; {_HINT}") from None


def _check_target(until: Mapping[str, Any] | None) -> None:
    """Raises TypeError or ValueError if a summary's target is wrong."""
    if until is None:
        return
    Target.parse(typed(str, until.get("target"), "until: target"))
    typed(bool, until.get("reached"), "until: reached")
    for key in _TARGET_NUMBERS:
        as_number(until.get(key))


def _read_decisions(path: Path) -> Decisions | None:
    try:
        return load_decisions(path) if path.exists() else None
    except DecisionLogError as error:
        raise RunError(str(error)) from None


def _read_columns(path: Path, fields: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads a JSON-lines file into a float array for each field. The last line may be incomplete."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(f"{path}, line {number} is not a record of a run: {error}") from None
        if not isinstance(record, dict):
            raise RunError(f"{path}, line {number} is not a record of a run: {shortened(record)}")
        try:
            records.append([_field(record, field) for field in fields])
        except (TypeError, ValueError) as error:
            raise RunError(f"{path}, line {number} is not a record of a run: {error}") from None
    table = np.array(records, dtype=float).reshape(len(records), len(tuple(fields)))
    return dict(zip(fields, table.T, strict=True))


def _field(record: dict[str, Any], field: str) -> float:
    """The value of a field of a record. Raises TypeError or ValueError if the value is wrong."""
    if field == "part" and field in record:
        if record[field] not in PARTS:
            raise ValueError(
                f"{shortened(record[field])} is not a part of the data; the part must be {' or '.join(PARTS)}"
            )
        return PARTS.index(record[field])
    value = as_number(record.get(field))
    if field == "step" and np.isnan(value):
        raise ValueError(f"{shortened(record)} has no step")
    if field in ("step", "epoch") and not (np.isnan(value) or 0 <= value <= MOST_STEPS):
        raise ValueError(f"{shortened(record[field])} is not the number of a {field}")
    return value
