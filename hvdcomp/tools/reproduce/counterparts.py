"""Runs the counterpart of a table or figure, and notes its command and commit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdcomp.files import commit
from hvdcomp.tools.reproduce import counted, predicted
from hvdcomp.tools.reproduce.outcome import Outcome
from hvdcomp.tools.reproduce.published import Artefact


def run(artefact: Artefact, quick: bool, runs: Path) -> Outcome:
    """The outcome of an artefact's counterpart.

    Args:
        artefact: a table or figure.
        quick: use fewer seeds, for about a minute.
        runs: folder of trainings, which are not repeated.
    """
    start = time.monotonic()
    name = artefact.counterpart
    if name is None:
        return Outcome(name=artefact.name, why=artefact.why)
    commits: list[str] = []
    if name in predicted.COUNTERPARTS or name in counted.COUNTERPARTS:
        outcome = {**predicted.COUNTERPARTS, **counted.COUNTERPARTS}[name](artefact)
    else:
        from hvdcomp.tools.reproduce import timed, trained

        if name in timed.COUNTERPARTS:
            outcome = timed.COUNTERPARTS[name](artefact, quick)
        else:
            trainings = trained.Trainings(runs, quick)
            outcome = trained.COUNTERPARTS[name](artefact, trainings)
            commits = sorted(trainings.commits)
    about = _about(artefact, quick, commits or [commit()], time.monotonic() - start)
    return dataclasses.replace(outcome, about={**outcome.about, **about})


def _about(artefact: Artefact, quick: bool, commits: Sequence[str], seconds: float) -> dict[str, Any]:
    return {
        "command": f"hvdcomp reproduce {artefact.name}{' --quick' if quick else ''}",
        "commit": ", ".join(commits),
        "seconds": round(seconds, 1),
    }
