"""Calls the counterpart of a table or figure, and notes what made it."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hvdcomp.files import VERSION
from hvdcomp.reproduce import counted, predicted
from hvdcomp.reproduce.outcome import Outcome
from hvdcomp.reproduce.published import Artefact


def run(artefact: Artefact, quick: bool, runs: Path) -> Outcome:
    """Finds ours.

    Args:
        quick: in about a minute, with fewer seeds.
        runs: folder for trainings, which are not made twice.
    """
    start = time.monotonic()
    name = artefact.counterpart
    if name is None:
        return Outcome(name=artefact.name, why=artefact.why)
    commits: list[str] = []
    if name in predicted.COUNTERPARTS or name in counted.COUNTERPARTS:
        found = {**predicted.COUNTERPARTS, **counted.COUNTERPARTS}[name](artefact)
    else:
        from hvdcomp.reproduce import timed, trained

        if name in timed.COUNTERPARTS:
            found = timed.COUNTERPARTS[name](artefact, quick)
        else:
            trainings = trained.Trainings(runs, quick, commit())
            found = trained.COUNTERPARTS[name](artefact, trainings)
            commits = sorted(trainings.commits)
    about = _about(artefact, quick, commits or [commit()], time.monotonic() - start)
    return dataclasses.replace(found, about={**found.about, **about})


def _about(artefact: Artefact, quick: bool, commits: Sequence[str], seconds: float) -> dict[str, Any]:
    return {
        "command": f"hvdcomp reproduce {artefact.name}{' --quick' if quick else ''}",
        "commit": ", ".join(commits),
        "seconds": round(seconds, 1),
    }


@cache
def commit() -> str:
    """The commit of the sources; the version of a package without them."""
    return commit_of(Path(__file__).parents[2], "hvdcomp") or f"hvdcomp {VERSION}"


def commit_of(root: Path, *paths: str) -> str | None:
    """The commit of a checkout, with a plus sign if these paths differ from it; None if it is no checkout.

    Args:
        paths: as git takes them, below the root.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not (root / ".git").exists():  # where it is below another checkout
            return None
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", *paths) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
