"""`hvdcomp replay` repeats the decisions of a training run from its decision log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from hvdcomp.adaptation.decision_log import DecisionLogError
from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.report.replay import ABSENT, Difference, Replay, replay
from hvdcomp.tools.terminal import make_console

DIFFERS = 1
"""Exit status if a decision differs."""


class CannotReplay(click.ClickException):
    """The log cannot be replayed. The exit status is 2, and not 1 as for a decision that differs from the log."""

    exit_code = 2


@click.command()
@click.argument("log", metavar="DECISIONS.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON object.")
@click.pass_context
def command(ctx: click.Context, log: Path, as_json: bool) -> None:
    """Repeat the policy decisions of a training run from the statistics in its decision log, and compare them with the
    logged decisions.

    Older parts of the log, such as decisions.1.jsonl, are replayed first. To replay only one of these parts, name its
    file. You need neither a framework nor the model. The exit status is 0 if all decisions and states equal the logged
    decisions and states, 1 if any of them differs, and 2 if the file cannot be replayed. The command stops at the first
    difference.
    """
    try:
        with make_console(stderr=True).status(Text(f"Replaying {log} ...")):
            replayed = replay(log)
    except DecisionLogError as error:
        raise CannotReplay(str(error)) from None
    except OSError as error:
        raise CannotReplay(f"{log} cannot be read: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps(_result(log, replayed), indent=2))
    elif replayed.difference is None:
        click.echo(_summary(replayed))
    else:
        click.echo("\n".join(_lines(replayed.difference)))
    ctx.exit(0 if replayed.difference is None else DIFFERS)


def _summary(replayed: Replay) -> str:
    restarts = f", resumed {replayed.starts - 1}x" if replayed.starts > 1 else ""
    steps = f", steps {replayed.first_step} to {replayed.last_step}" if replayed.decisions else ""
    count = f"{replayed.decisions} decision{'' if replayed.decisions == 1 else 's'}"
    return f"{' and '.join(replayed.policies)}: {count}{steps}{restarts}: all as logged"


def _lines(difference: Difference) -> list[str]:
    head = f"{difference.file}, line {difference.line}, step {difference.step}:"
    if difference.refusal is not None:
        return [f"{head} the policy refuses the logged statistics: {difference.refusal}"]
    return [f"{head} the policy's decision differs from the log"] + [
        f"  {' > '.join(part.place)}: logged {_text(part.logged)}, recomputed {_text(part.recomputed)}"
        for part in difference.parts
    ]


def _text(value: Any) -> str:
    return "nothing" if value is ABSENT else json.dumps(value)


def _result(log: Path, replayed: Replay) -> dict[str, Any]:
    return {
        "file": str(log),
        "same": replayed.difference is None,
        "policies": replayed.policies,
        "starts": replayed.starts,
        "decisions": replayed.decisions,
        "first_step": replayed.first_step,
        "last_step": replayed.last_step,
        "difference": None if replayed.difference is None else _as_json(replayed.difference),
    }


def _as_json(difference: Difference) -> dict[str, Any]:
    """A difference as plain data. A value that is missing in the log, or in the replay, is left out."""
    parts = [
        {"place": list(part.place)}
        | {
            side: value
            for side, value in (("logged", part.logged), ("recomputed", part.recomputed))
            if value is not ABSENT
        }
        for part in difference.parts
    ]
    return {
        "file": str(difference.file),
        "line": difference.line,
        "step": difference.step,
        "parts": parts,
        "refusal": difference.refusal,
    }
