"""ShardedTables on ranks in one process. Real ranks, and training: `multirank`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import ShardedTables  # noqa: E402


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("on_meta", [True, False])
def test_a_rank_has_its_rows_and_none_of_a_table_that_is_too_small(count: int, on_meta: bool) -> None:
    whole = torch.arange(2.0 * count).view(count, 2)

    def work(communicator: SimulatedCommunicator) -> Any:
        model = torch.nn.Sequential(torch.nn.Embedding(count, 2, sparse=True))
        if on_meta:
            model = model.to("meta")
        else:
            model[0].weight.data.copy_(whole)
        ShardedTables(model, fill=lambda _, ids: whole[ids], communicator=communicator)
        ids = torch.tensor([0, count - 1, communicator.rank % count])
        assert torch.equal(model.eval()(ids), whole[ids])
        return model.state_dict()["0.weight"]

    parts = list(SimulatedGroup(4).run(work))
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[rank::4])
    for ranks in (1, 3, 7):
        for rank in range(ranks):
            assert torch.equal(ShardedTables.resharded(parts, rank, ranks), whole[rank::ranks])
