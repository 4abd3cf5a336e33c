"""What Horovod's elastic state keeps of local steps, on ranks that do not change. Those that do: `test_elastic`."""

from __future__ import annotations

import horovod.torch as hvd
import horovod.torch.elastic  # noqa: F401 - makes hvd.elastic
import torch

import hvdcomp
from tests.multirank.cases_local_steps_streaming import equal_everywhere, made, outer, own_generator, train
from tests.multirank.models import weights
from tests.multirank.training import raised


def case_an_elastic_state_goes_back_to_the_commit_in_mid_round() -> None:
    """Weights, moments, residuals and what is under way, each rank to its own."""
    model, optimizer = made("topk:ratio=0.05")
    with torch.no_grad():
        model[5].bias += hvd.rank()
    state = hvd.elastic.TorchState(optimizer=optimizer, step=0)
    state.sync()
    assert equal_everywhere(weights(model))  # those of rank 0
    generator = own_generator()
    train(model, optimizer, generator, 7)
    assert optimizer.state_dict()["local_steps"]["sent"] is not None
    state.save()
    before, drawn = weights(model), generator.get_state()
    train(model, optimizer, generator, 5)
    after = weights(model)
    assert not equal_everywhere(after)
    state.restore()
    state.sync()
    assert torch.equal(weights(model), before)
    generator.set_state(drawn)
    train(model, optimizer, generator, 5)
    assert torch.equal(weights(model), after)
    assert equal_everywhere(outer(model, optimizer))


def case_a_model_in_the_elastic_state_is_refused() -> None:
    model, optimizer = made("none")
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    assert "Leave out model=" in raised(hvdcomp.ConfigurationError, state.sync)
