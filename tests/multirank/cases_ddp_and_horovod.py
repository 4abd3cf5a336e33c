"""The same training by Horovod and by DistributedDataParallel, on the ranks that Horovod's launcher has started."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import horovod.torch as hvd
import torch
import torch.distributed as dist

import hvdcomp
from tests.multirank import training, training_ddp
from tests.multirank.models import weights


def case_weights_are_the_same() -> None:
    meeting = Path(hvd.broadcast_object(mkdtemp(), name="folder")) / "ranks"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=hvd.rank(), world_size=hvd.size())
    for spec in ("none", "fp16", "topk:ratio=0.05", "efsignsgd", "powersgd:rank=2"):
        results = []
        for by_horovod in (True, False):
            model = training_ddp.large_model()
            how = hvdcomp.Compression.from_spec(spec)
            if by_horovod:
                training.train(model, training.distribute(model, how, 0.02), steps=6)
            else:
                training_ddp.train(*training_ddp.distribute(model, how)[:2])
            results.append(weights(model))
        if hvd.size() == 2:  # sums over more ranks have an order, and each library its own
            assert torch.equal(*results), spec
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4, msg=spec)
    dist.destroy_process_group()
