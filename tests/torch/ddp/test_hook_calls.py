"""What the hook of DistributedDataParallel costs the host: calls of Python, which delay the backward pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hvdcomp.ddp  # noqa: E402
from benchmarks.times.host_times import calls_of  # noqa: E402
from hvdcomp.torch.ddp.binding import DDPBinding  # noqa: E402

MOST = 40
"""Calls for a bucket that starts no exchange. The buckets that start one cost what `test_host_times` holds."""


@pytest.mark.parametrize("layers", [6, 60])
def test_the_hook_makes_few_calls_for_any_number_of_tensors(
    layers: int, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))
    distributed = DistributedDataParallel(model, bucket_cap_mb=layers * 64 * 64 * 4 / 3 / 2**20)
    compression = hvdcomp.Compression.from_spec("topk:ratio=0.01", overlap=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hvdcomp.ddp.register(distributed, compression, optimizer=optimizer)
    reduce, calls = DDPBinding.reduce, []

    def counted(binding: DDPBinding, bucket: object) -> torch.futures.Future:
        futures = []
        calls.append(calls_of(lambda: futures.append(reduce(binding, bucket))).total())
        return futures[0]

    monkeypatch.setattr(DDPBinding, "reduce", counted)
    for _ in range(3):
        calls.clear()
        distributed(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    others = calls[1:-1]  # the first hook begins the step, and the last one exchanges the gradients
    assert others
    assert max(others) <= MOST
