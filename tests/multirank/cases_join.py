"""`hvd.join()`, with which Horovod itself is not dependable: see `tests.torch.test_ranks_torch`."""

from __future__ import annotations

import horovod.torch as hvd

import hvdcomp
from tests.multirank.training import compression, distribute, small_model, train


def case_ranks_that_join_are_refused() -> None:
    for spec in ("topk:ratio=0.05", "powersgd:rank=2"):
        model = small_model()
        optimizer = distribute(model, compression(spec, model))
        train(model, optimizer, steps=2)
        if hvd.rank() != 0:
            message = ""
            try:
                train(model, optimizer, steps=1)
            except hvdcomp.ConfigurationError as error:
                message = str(error)
            assert "hvd.join()" in message
        hvd.join()


def case_join_works_as_in_horovod_without_compression() -> None:
    model = small_model()
    optimizer = distribute(model, compression("none", model))
    train(model, optimizer, steps=2)
    if hvd.rank() != 0:
        train(model, optimizer, steps=1)
    hvd.join()
