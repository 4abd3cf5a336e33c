"""How DistributedDataParallel is measured: its buckets, the parts of a step, and what stands in for an exchange."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.bench import marks, probe_steps
from hvdcomp.tools.bench.carrier import Distributed, alone
from hvdcomp.tools.bench.carrier_ddp import DDPCarrier
from hvdcomp.tools.bench.probe_encode import gradients
from hvdcomp.tools.bench.probe_steps import EXCHANGE, Training, parts_of, ready_moments
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ranks_torch import TorchRanks
from tests.multirank.training_ddp import gathered, own_generator


def workload(width: int = 64, layers: int = 2) -> Workload:
    """A model that is the same on all ranks, and a batch of each rank's own."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    batch = torch.randn(4, width, generator=own_generator())
    return Workload(model, lambda: model(batch).square().mean())


def after_steps(given: Workload, distributed: Distributed, steps: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of the last step; the weights stay as they are."""
    for group in distributed.optimizer.param_groups:
        group["lr"] = 0.0
    training = Training(given, distributed)
    for _ in range(steps):
        training.step()
    return {name: gradient.clone() for name, gradient in gradients(given).items()}


def means() -> dict[str, torch.Tensor]:
    """The means over the ranks of the gradients of `workload()`."""
    mine = after_steps(given := workload(), alone(given))
    return {name: torch.stack(several).mean(0) for name, several in by_name(gathered(mine)).items()}


def by_name(everyones: list[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: [one[name] for one in everyones] for name in everyones[0]}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to the norm of those expected."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([given[name].flatten() for name in expected]) for given in (found, expected))
    return float((one - other).norm() / other.norm())


def case_what_is_sent_together_are_the_buckets_of_ddp() -> None:
    carrier, sizes = DDPCarrier(TorchRanks()), []

    class Watched:
        def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sizes.append(4 * bucket.buffer().numel())
            there: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            there.set_result(bucket.buffer())
            return there

    def hooked(state, bucket):  # whose annotations DDP would read
        return state.reduce(bucket)

    given = workload(width=1024, layers=9)  # 37.8 MB
    distributed: Any = carrier.with_stock(given, "none", "watched")
    distributed.loss.register_comm_hook(Watched(), hooked)
    training = Training(given, distributed)
    training.step()  # DDP's buckets are made anew after it
    training.step()
    sizes.clear()
    training.step()
    plain = workload(width=1024, layers=9)
    ready = ready_moments(Training(plain, alone(plain)), carrier.ranks)
    dense_bytes = 4 * sum(parameter.numel() for parameter in given.model.parameters())
    together = carrier.sent_together(ready, dense_bytes)
    assert sum(sizes) == dense_bytes
    assert len(sizes) == 3
    assert [share * dense_bytes for share, _ in together] == pytest.approx(np.cumsum(sizes).tolist())
    moments = dict(ready)
    assert all(moments[share] == moment for share, moment in together)


def case_what_is_left_of_the_exchange_is_no_part_of_the_backward_pass() -> None:
    carrier, computed = DDPCarrier(TorchRanks()), threading.Event()

    class Late:
        def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            there: torch.futures.Future[torch.Tensor] = torch.futures.Future()

            def later() -> None:
                computed.wait(timeout=20)  # in vain if the step's third mark waits for the exchange
                time.sleep(0.2)
                there.set_result(bucket.buffer())

            # A thread of its own: a callback of a collective runs within the backward pass if the other rank was first.
            threading.Thread(target=later).start()
            return there

    def hooked(state, bucket):
        return state.reduce(bucket)

    marked: list[Any] = []

    def mark(device: torch.device) -> Any:
        marked.append(taken := marks.mark(device))
        if len(marked) == 3:  # before and after the forward pass, and at the end of the backward pass
            computed.set()
        return taken

    given = workload()
    distributed: Any = carrier.with_stock(given, "none", "late")
    distributed.loss.register_comm_hook(Late(), hooked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_steps, "mark", mark)
        assert parts_of(Training(given, distributed).step())[EXCHANGE] > 0.15
    plain = workload()
    assert parts_of(Training(plain, alone(plain)).step())[EXCHANGE] < 0.15


def case_one_number_travels_and_no_gradient() -> None:
    carrier = DDPCarrier(TorchRanks())
    mine = after_steps(plain := workload(), alone(plain))
    given = workload()
    assert distance(after_steps(given, carrier.with_one_number(given, "numbers"), steps=3), mine) == 0


def case_casts_and_stock_give_the_means() -> None:
    carrier, expected = DDPCarrier(TorchRanks()), means()
    dense, fp16 = carrier.stock
    assert (dense, fp16) == ("none", "ddp.fp16")
    found = after_steps(given := workload(), carrier.with_stock(given, dense, "dense"))
    assert distance(found, expected) < 1e-6
    for make in (
        lambda one: carrier.with_stock(one, fp16, "fp16"),
        lambda one: carrier.with_cast(one, parse_compressor("fp16"), "cast"),
    ):
        found = after_steps(given := workload(), make(given))
        assert 1e-6 < distance(found, expected) < 1e-2


def case_compressors_of_hvdcomp_take_ddps_buckets() -> None:
    carrier = DDPCarrier(TorchRanks())
    given = workload()
    distributed = carrier.compressed(given, "topk:ratio=0.1", "own", bucket_bytes=1_500_000, seed=0, overlap=True)
    after_steps(given, distributed, steps=2)
    assert distributed.compression is not None
    totals = distributed.compression.ledger.totals
    assert 0 < totals.bytes_sent < totals.dense_bytes / 2
    wrapped: Any = distributed.loss
    assert wrapped.bucket_bytes_cap == pytest.approx(1_500_000, abs=1)
