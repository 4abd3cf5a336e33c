"""`hvdcomp replay`: make the decisions of a training run again from its decision log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from hvdcomp.adaptation.decision_log import DecisionLogError
from hvdcomp.tools.report.replay import ABSENT, Difference, Replay, replay
from hvdcomp.tools.terminal import make_console

DIFFERS = 1
"""Exit status if a decision differs."""


class CannotReplay(click.ClickException):
    """There is nothing to compare. It has an exit status of its own, to be told from a difference."""

    exit_code = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log", metavar="DECISIONS.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON object.")
@click.pass_context
def command(ctx: click.Context, log: Path, as_json: bool) -> None:
    """Make the decisions of a training run again, from the statistics in its decision log, and compare.

    Files that were put aside of it, such as decisions.1.jsonl, are replayed before it; give one of these to replay it
    alone. Needs neither a framework nor the model. The exit status is 0 if all decisions and states are as logged, 1
    at the first that is not, and 2 if the file cannot be replayed.
    """
    try:
        with make_console(stderr=True).status(Text(f"Replaying {log} ...")):
            done = replay(log)
    except DecisionLogError as error:
        raise CannotReplay(str(error)) from None
    except OSError as error:
        raise CannotReplay(f"{log} cannot be read: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps(_result(log, done), indent=2))
    elif done.difference is None:
        click.echo(_summary(done))
    else:
        click.echo("\n".join(_lines(done.difference)))
    ctx.exit(0 if done.difference is None else DIFFERS)


def _summary(done: Replay) -> str:
    restarts = f", resumed {done.starts - 1}x" if done.starts > 1 else ""
    steps = f", steps {done.first_step} to {done.last_step}" if done.decisions else ""
    count = f"{done.decisions} decision{'' if done.decisions == 1 else 's'}"
    return f"{' and '.join(done.policies)}: {count}{steps}{restarts}: all as logged"


def _lines(difference: Difference) -> list[str]:
    head = f"{difference.file}, line {difference.line}, step {difference.step}:"
    if difference.refusal is not None:
        return [f"{head} the policy refuses the logged statistics: {difference.refusal}"]
    return [f"{head} the policy does not make what was logged"] + [
        f"  {' > '.join(part.place)}: logged {_text(part.logged)}, recomputed {_text(part.recomputed)}"
        for part in difference.parts
    ]


def _text(value: Any) -> str:
    return "nothing" if value is ABSENT else json.dumps(value)


def _result(log: Path, done: Replay) -> dict[str, Any]:
    return {
        "file": str(log),
        "same": done.difference is None,
        "policies": done.policies,
        "starts": done.starts,
        "decisions": done.decisions,
        "first_step": done.first_step,
        "last_step": done.last_step,
        "difference": None if done.difference is None else _as_json(done.difference),
    }


def _as_json(difference: Difference) -> dict[str, Any]:
    """What one side does not have is left out."""
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
