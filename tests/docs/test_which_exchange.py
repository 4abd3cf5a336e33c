"""The table of the quality with gather and with scatter is that of the kept trainings."""

from __future__ import annotations

import pytest

from benchmarks.best_rates.outcomes import Row, outcomes_of
from benchmarks.best_rates.rows import DENSE, SCATTERED
from benchmarks.best_rates.search import HELD_OUT
from benchmarks.best_rates.which_method import lost_in_words
from benchmarks.pages import MEASURED, mean_and_interval
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from tests.loaded import ROOT

PAGE = (ROOT / "docs" / "which-exchange.md").read_text()
TABLE = [line for line in PAGE.splitlines() if line.startswith("|")]
TASKS = {"heavy-tails": "adamw", "sorting": "adamw", "gpt": "adamw", "shapes": "sgd", "mnist1d": "sgd", "lstm": "sgd"}


@pytest.mark.parametrize("workload", TASKS)
def test_the_quality_with_scatter_is_that_of_the_trainings(workload: str) -> None:
    ((place, line),) = ((place, line) for place, line in enumerate(TABLE) if f"(`{workload}`)" in line)
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    # Only the first row of a method names it.
    gathered = next(first.split("`")[1] for row in TABLE[place::-1] if "`" in (first := row.split("|")[1]))
    compressor = parse_compressor(gathered)
    assert isinstance(compressor, Gathering)
    scattered = str(compressor.with_exchange("scatter"))
    assert scattered in SCATTERED[TASKS[workload]]
    outcomes = outcomes_of(workload, MEASURED / "best-rates", HELD_OUT, [gathered, scattered])
    dense, gather, scatter = (outcomes[spec].complete for spec in (DENSE, gathered, scattered))
    words = [_in_words(gather, dense), _in_words(scatter, dense), _in_words(scatter, gather)]
    assert cells[2:] == [str(len(dense.qualities)), f"{scatter.factor:.1f}", *words]


def _in_words(row: Row, other: Row) -> str:
    return lost_in_words(row.workload, *mean_and_interval(row.lost_beside(other)))
