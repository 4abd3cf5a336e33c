"""Trains a model of 161 tensors for 20 steps: `python -m tests.multirank.timeline SPEC`, with HOROVOD_TIMELINE set."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

from tests.multirank.training import assert_same_everywhere, compression

STEPS = 20


class Stack(torch.nn.Module):
    """53 matrices with two vectors each, and one matrix with a bias: 161 tensors, as ResNet-50 has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers: list[torch.nn.Module] = []
        for _ in range(53):
            layers += [torch.nn.Linear(40, 40, bias=False), torch.nn.BatchNorm1d(40)]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(40, 40))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def main(spec: str) -> None:
    hvd.init()
    model = Stack()
    assert len(list(model.parameters())) == 161
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression(spec, model),
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    assert_same_everywhere(model)
    if hvd.rank() == 0:
        hvd.stop_timeline()  # waits until all is written, where `shutdown` leaves out what is not yet
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
