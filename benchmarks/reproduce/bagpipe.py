"""Bagpipe: measures, on synthetic ids, how skewed the accesses to embeddings are, and how much is gained by reading
batches ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.reproduce.outcome import Curve, Outcome, Row, within
from benchmarks.reproduce.published import Artifact
from hvdcomp.tools.train.data_clicks import zipf

RANKS, TABLES, ROWS, BATCH, BATCHES = 4, 4, 50_000, 2048, 60
"""The same numbers as in `benchmarks/times/look_ahead.py`, which measures steps."""
AHEAD = (1, 2, 5, 10, 20, 50)
"""For the share of hits: the numbers of batches for which rows stay in a cache."""
_OURS = (
    f"Counted on {BATCHES} batches of {BATCH} samples on each of {RANKS} ranks. Each sample has one id, drawn by "
    f"Zipf's law, in each of {TABLES} tables of {ROWS:,} rows."
)


def look_ahead(artifact: Artifact) -> Outcome:
    """Compares hvdcomp with the numbers in Bagpipe's abstract. The time of a step is predicted from two shares: the
    share of embeddings in the paper's step time, and the share of rows that the next batch looks up. All other rows are
    sent while the next batch is trained."""
    published = artifact.published
    draws = np.random.default_rng(0).random((BATCHES, RANKS, BATCH, TABLES))
    keys = zipf(draws, ROWS) + ROWS * np.arange(TABLES)
    often = (keys % ROWS < ROWS // 100).mean()
    batches = [[np.unique(of_rank) for of_rank in batch] for batch in keys]
    urgent, embeddings = urgent_share(batches), published["share of embeddings in the time of a step"]
    faster = 1 / max(1 - embeddings + urgent * embeddings, embeddings)
    times, hits = published["times as fast, at most"], [hit_share(batches, ahead) for ahead in AHEAD]
    note = "the exponent of Zipf's law is chosen to give this share"
    case = f"of a step of which embeddings are {embeddings:.0%}"
    rows = [
        Row(what="share of accesses to 1 % of the rows", published=published["share"], ours=often, note=note),
        Row(what="share of a batch's rows that the next batch looks up", ours=urgent),
        *(
            Row(what=f"share of a batch's rows in a cache of earlier batches: {ahead}", ours=hit)
            for ahead, hit in zip(AHEAD, hits, strict=True)
        ),
        Row(what=f"times as fast by looking ahead, {case}", published=times, ours=faster, holds=faster > 1.05),
        Row(
            what=f"the same to a fifth, {case}",
            published=times,
            ours=faster,
            holds=within(faster, times, 0.2),
            note="late rows are sent too; the paper's baselines fetch rows from other hosts, but here each rank has "
            "all rows",
        ),
    ]
    curves = {"share of rows in the cache": [Curve(label="counted", x=AHEAD, y=hits)]}
    return Outcome(name=artifact.name, rows=rows, curves=curves, x="batches ahead", ours=_OURS)


def urgent_share(batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Among the rows that a rank sends after a batch, the share that any rank looks up in its next batch.

    Args:
        batches: for each batch, the keys of each rank. No key occurs twice in a rank's batch.
    """
    urgent = total = 0
    for i, batch in enumerate(batches[:-1]):
        following = np.concatenate(batches[i + 1])
        urgent += sum(int(np.isin(keys, following).sum()) for keys in batch)
        total += sum(map(len, batch))
    return urgent / total


def hit_share(batches: Sequence[Sequence[np.ndarray]], ahead: int) -> float:
    """The share of the rows of a batch, over all ranks, that one of the `ahead` previous batches looked up."""
    unions = [np.unique(np.concatenate(batch)) for batch in batches]
    hits = sum(int(np.isin(unions[i], np.concatenate(unions[i - ahead : i])).sum()) for i in range(ahead, len(unions)))
    return hits / sum(map(len, unions[ahead:]))
