"""Runs the counterpart of a table or figure, and records its command and commit."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from benchmarks.reproduce import counted, predicted
from benchmarks.reproduce.outcome import Outcome
from benchmarks.reproduce.published import Artifact
from hvdcomp.files import commit


def run(artifact: Artifact, quick: bool, runs: Path, data: Path | None = None, epochs: int | None = None) -> Outcome:
    """Computes hvdcomp's counterpart of a table or figure.

    Args:
        artifact: the table or figure.
        quick: whether to train for fewer steps, with fewer seeds.
        runs: folder of training runs. Runs that it already contains are not repeated.
        data: folder with CIFAR and WikiText-2, on which Accordion is trained; None for small training runs instead.
        epochs: number of epochs of the training runs on `data`; None for the authors' number.
    """
    start = time.monotonic()
    name = artifact.counterpart
    if name is None:
        return Outcome(name=artifact.name, why=artifact.why)
    commits: list[str] = []
    if name in predicted.COUNTERPARTS or name in counted.COUNTERPARTS:
        outcome = {**predicted.COUNTERPARTS, **counted.COUNTERPARTS}[name](artifact)
    else:
        from benchmarks.reproduce import accordion, gravac, timed
        from benchmarks.reproduce.compared import Trainings

        if name in timed.COUNTERPARTS:
            outcome = timed.COUNTERPARTS[name](artifact, quick)
        else:
            trainings = Trainings(runs, quick, data, epochs)
            outcome = {**accordion.COUNTERPARTS, **gravac.COUNTERPARTS}[name](artifact, trainings)
            commits = sorted(trainings.commits)
    options = {"--quick": quick, f"--data-dir {data}": data, f"--epochs {epochs}": epochs}
    about = {
        "command": " ".join(
            ["python -m benchmarks.reproduce", artifact.name, *(words for words, given in options.items() if given)]
        ),
        "commit": ", ".join(commits or [commit()]),
        "seconds": round(time.monotonic() - start, 1),
    }
    return dataclasses.replace(outcome, about={**outcome.about, **about})
