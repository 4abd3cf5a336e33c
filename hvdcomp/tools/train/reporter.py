"""The terminal output of a run, on rank 0: a progress bar on a terminal, or occasional lines elsewhere, and a table at
the end.

With a launcher, there is no progress bar, because the launcher may prefix each line or write to a file.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hvdcomp.tools.terminal import make_console, make_table, print_table
from hvdcomp.tools.train import environment
from hvdcomp.tools.train.target import METRICS

_SECONDS_BETWEEN_LINES = 5.0


class Reporter:
    """Shows the progress of a run. `visible` is False on all ranks except rank 0, so that only rank 0 shows
    anything."""

    def __init__(self, steps: int, epochs: int, *, visible: bool, progress: bool) -> None:
        # With mpirun, each rank has a terminal, even if its output does not go to the terminal.
        terminal = False if environment.launched() else None
        self._console = make_console(quiet=not visible, soft_wrap=True, force_terminal=terminal)
        self._visible = visible and progress
        self._steps = steps
        self._epochs = epochs
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if self._visible and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.4f}  {task.fields[ms]:.1f} ms/step"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, epoch=1, loss=float("nan"), ms=0.0)

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line, even with --no-progress."""
        self._console.print(text)

    def note(self, text: str) -> None:
        """Prints a line, unless --no-progress is given."""
        if self._visible:
            self._line(text)

    def step(self, step: int, epoch: int, loss: float, ms: float) -> None:
        """Shows a step. `step` counts batches of the initial size, so a larger batch counts as several."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, epoch=epoch, loss=loss, ms=ms)
        elif self._visible and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line(f"step {step}/{self._steps}  epoch {self._of(epoch)}  loss {loss:.4f}  {ms:.1f} ms/step")

    def epoch(self, record: dict[str, Any]) -> None:
        if not self._visible:
            return
        metric = next(name for name in METRICS if name in record)
        part = "test" if "test_loss" in record else "validation"
        self._line(
            f"epoch {self._of(record['epoch'])}  train loss {record['train_loss']:.4f}  "
            f"{part} loss {record[f'{part}_loss']:.4f}  {metric} {_quality(metric, record[metric])}  "
            f"{record['seconds']:.1f} s  sent {_bytes(record['bytes_sent'])} per rank"
        )

    def _of(self, epoch: int) -> str:
        """A text with an epoch and the number of epochs. A run that continues with a different number of ranks may need
        more epochs than planned."""
        return f"{epoch}/{max(epoch, self._epochs)}"

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(text)

    def summary(self, summary: dict[str, Any], output: str | None) -> None:
        """Prints the table at the end."""
        metric = next(name for name in METRICS if name in summary)
        best, of_best = f"best_{metric}", "best in validation" if "validation" in summary["best_over"] else "best"
        table = make_table("", "")
        rows = [
            ("compression", summary["spec"]),
            ("ranks", f"{summary['world_size']} ({summary['controller']})"),
            ("parameters", f"{summary['parameters']:,}"),
            (metric, f"{_quality(metric, summary[metric])} ({of_best} {_quality(metric, summary[best])})"),
            *_target(summary["until"]),
            ("steps", f"{summary['steps']:,} in {summary['seconds']:.1f} s"),
            (
                "time per step",
                _or_none(summary["ms_per_step"], "{:.2f} ms") + f" ({summary['ms_per_step_over']})",
            ),
            ("sent per rank and step", _bytes(summary["bytes_sent_per_step"])),
            *_within_nodes(summary["bytes_in_node_per_step"]),
            ("compression factor", _factor(summary)),
            *_part(summary, "tables", "for rows of tables"),
            *_part(summary, "shards", "within replicas"),
            ("weights", "the same on every rank" if summary["identical"] else "DIFFERENT between ranks"),
        ]
        if summary["note"]:
            rows.append(("note", summary["note"]))
        if output is not None:
            rows.append(("written to", output))
        for name, value in rows:
            table.add_row(name, value)
        print_table(self._console, table, f"{summary['model']} on {summary['data']}: {summary['status']}")


def _target(until: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The row for the target, if the run had one."""
    if until is None:
        return []
    if not until["reached"]:
        return [("until", f"{until['target']}, which was not reached")]
    return [("until", f"{until['target']}: {until['step']:,} steps, {until['trained_seconds']:.1f} s of training")]


def _quality(metric: str, value: float | None) -> str:
    form = {"accuracy": ".2%", "perplexity": ".2f", "rmse": ".4f"}[metric]
    return "none" if value is None else format(value, form)


def _within_nodes(sent: float | None) -> list[tuple[str, str]]:
    """The row for the sent bytes that stay within a node, if there are any."""
    return [("of this within a node", _bytes(sent))] if sent else []


def _part(summary: dict[str, Any], key: str, what: str) -> list[tuple[str, str]]:
    """The row for the bytes of tables or of shards, if there are any."""
    part = summary[key]
    if part is None or not summary["steps"]:
        return []
    factor = _or_none(part["compression_factor"], "{:.1f}")
    return [(f"of this {what}", f"{_bytes(part['bytes_sent'] / summary['steps'])}, {factor} times fewer")]


def _factor(summary: dict[str, Any]) -> str:
    """The compression factor. It does not count bytes that stay within a node."""
    counted = " (without bytes that stay within a node)" if summary["bytes_in_node_per_step"] else ""
    return _or_none(summary["compression_factor"], "{:.1f}") + counted


def _or_none(value: float | None, form: str) -> str:
    return "none" if value is None else form.format(value)


def _bytes(count: float | None) -> str:
    if count is None:
        return "none"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
