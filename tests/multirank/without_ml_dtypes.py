"""Residuals in 16 bits are saved and loaded where nobody has made bfloat16 a type of NumPy. Every rank runs this.

ml_dtypes does so when it is imported, and TensorFlow imports it: either in the process would hide a state whose loading
needs it. The argument is a folder.
"""

from __future__ import annotations

import sys

for module in ("ml_dtypes", "tensorflow"):
    sys.modules[module] = None  # type: ignore[assignment]  # so that importing it fails

import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import hvdcomp  # noqa: E402
from hvdcomp.tools.commands.train import command  # noqa: E402
from hvdcomp.tools.train.ranks_torch import TorchRanks  # noqa: E402
from hvdcomp.torch import LocalSteps  # noqa: E402

Training = tuple[torch.nn.Module, Any, hvdcomp.Compression]  # a model, its optimizer, and the compression
STEPS = 4


def compression(dtype: str) -> hvdcomp.Compression:
    memory = hvdcomp.ErrorFeedback(dtype=dtype)
    return hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), memory=memory, min_numel=0)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 4))


def under_ddp(dtype: str) -> Training:
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvdcomp.ddp.register(model, given := compression(dtype), optimizer)
    return model, optimizer, given


def of_local_steps(dtype: str) -> Training:
    model = network()
    inner, given = torch.optim.SGD(model.parameters(), lr=0.1), compression(dtype)
    return model, LocalSteps(inner, every=2, compression=given), given


def advance(training: Training, steps: range) -> None:
    model, optimizer, _ = training
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()


def resumes_bit_for_bit(make: Callable[[str], Training], dtype: str, file: Path) -> None:
    whole = make(dtype)
    advance(whole, range(STEPS))
    model, optimizer, given = whole
    torch.save([model.state_dict(), optimizer.state_dict(), given.state_dict()], file)
    advance(whole, range(STEPS, 2 * STEPS))
    model, optimizer, given = resumed = make(dtype)
    of_model, of_optimizer, of_compression = torch.load(file, weights_only=True)
    assert any(kept["arrays"][0].any() for kept in of_compression["own"]["residuals"].values())
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    if not isinstance(optimizer, LocalSteps):  # which has the compression's state in its own
        given.load_state_dict(of_compression, optimizer)
    advance(resumed, range(STEPS, 2 * STEPS))
    for name, weights in whole[0].state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), (make.__name__, dtype, name)


def train(*options: str) -> int:
    """The exit code of `hvdcomp train`."""
    common = ["--framework", "torch", "--backend", "ddp", "--model", "mlp", "--samples", "320", "--epochs", "1"]
    common += ["--no-progress", "--compression", "topk:ratio=0.02", "--memory", "error_feedback:dtype=bf16"]
    return command.main([*common, *options], "train", standalone_mode=False) or 0


def trains_on(folder: Path, rank: int) -> None:
    stopped = ["--output", str(folder / "stopped"), "--checkpoint-folder", str(folder / "saved")]
    assert train("--output", str(folder / "whole")) == 0
    assert train(*stopped, "--steps", "2") == 0
    assert train(*stopped) == 0
    if rank == 0:
        whole, resumed = (json.loads((folder / run / "summary.json").read_text()) for run in ("whole", "stopped"))
        assert resumed["resumed_at"] == [2]
        assert resumed["weights_sha256"] == whole["weights_sha256"]

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("our own fault")

    if rank == 1:
        hvdcomp.Compression.load_state_dict = broken  # type: ignore[method-assign]
    assert train(*stopped) == 2, "on every rank"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    TorchRanks.leave = lambda self, code: None  # type: ignore[method-assign]  # it would end the process
    for make in (under_ddp, of_local_steps):
        for dtype in ("bf16", "fp16"):
            resumes_bit_for_bit(make, dtype, folder / f"{make.__name__}-{dtype}-{rank}.pt")
    trains_on(folder, rank)
    print(f"rank {rank}: as expected", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see TorchRanks.leave
