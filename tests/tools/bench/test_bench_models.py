"""Which models can be timed on random data."""

from __future__ import annotations

import pytest

from hvdcomp.tools.bench.models import TIMED, split_model
from hvdcomp.tools.train.options import MODELS, SetupError


def test_models_without_random_data_are_refused_before_anything_is_measured() -> None:
    left_out = set(MODELS) - set(TIMED)
    assert left_out == {"cnn1d", "dlrm", "encoder"}
    for model in left_out:
        with pytest.raises(SetupError, match=f"the model '{model}' is not known; give one of mlp, "):
            split_model(model)


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "gpt"])
def test_a_batch_has_a_loss(model: str) -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.tools.bench.workload import build

    was_flushing = torch.zeros(1).add(1e-42).item() == 0
    try:
        assert torch.isfinite(build(model, 2, seed=0, rank=0).loss()).item()
    finally:
        torch.set_flush_denormal(was_flushing)
