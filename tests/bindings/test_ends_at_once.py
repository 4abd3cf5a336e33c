"""A training may end right after its last step: a decision of rank 0 that nobody obeys any more does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import run_ranks

SCRIPT = Path(__file__).parents[1] / "multirank" / "ends_at_once.py"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("controller", "last"),
    [
        ("mpi", "nothing"),
        *(
            pytest.param(*setting, marks=pytest.mark.thorough)
            for setting in [
                ("mpi", "shutdown"),
                ("gloo", "nothing"),
                ("gloo", "shutdown"),
                ("torchrun", "nothing"),
                ("torchrun", "shutdown"),
            ]
        ),
    ],
)
def test_a_decision_is_on_its_way_when_the_other_rank_has_ended(controller: str, last: str) -> None:
    carrier = "ddp" if controller == "torchrun" else "horovod"
    done = run_ranks(2, controller, [str(SCRIPT), carrier, last], timeout=120)
    assert done.returncode == 0, done.stdout
    assert "rank 0 has ended" in done.stdout
    assert "rank 1 has ended" in done.stdout
    assert "Traceback" not in done.stdout
    if (controller, last) == ("mpi", "nothing"):  # `hvd.shutdown()` ends MPI whoever waits
        assert "MPI has not ended" in done.stdout, "a rank that ends while it waits for rank 0 would end it"
