"""The same training in TensorFlow and in PyTorch, in one process: both have Horovod's operations, and its rank."""

from __future__ import annotations

import horovod.tensorflow as hvd
import horovod.torch as hvd_torch
import numpy as np
import torch

import hvdcomp
from tests.multirank.training_tensorflow import (
    TapeTraining,
    assert_same_everywhere,
    batch,
    binding_of,
    own_generator,
    sgd,
)


class TorchNetwork(torch.nn.Module):
    """The network of the TensorFlow cases: parameters of the same names, shapes and values."""

    def __init__(self, like: TapeTraining) -> None:
        super().__init__()
        for variable in like.variables:
            self.register_parameter(variable.name.partition(":")[0], torch.nn.Parameter(torch.tensor(variable.numpy())))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(inputs @ self.first + self.first_bias)
        return hidden @ self.second + self.second_bias


def _trained_in_torch(spec: str, like: TapeTraining, steps: int) -> tuple[np.ndarray, hvdcomp.Compression]:
    model = TorchNetwork(like)
    how = hvdcomp.Compression.from_spec(spec, named_parameters=model.named_parameters())
    optimizer = hvd_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), compression=how
    )
    generator = own_generator()
    for _ in range(steps):
        optimizer.zero_grad()
        inputs, classes = batch(generator)
        outputs = model(torch.from_numpy(inputs))
        torch.nn.functional.cross_entropy(outputs, torch.from_numpy(classes).long()).backward()
        optimizer.step()
    return np.concatenate([p.detach().double().numpy().reshape(-1) for p in model.parameters()]), how


def case_both_frameworks_train_alike() -> None:
    hvd_torch.init()
    assert hvd_torch.rank() == hvd.rank()
    for spec in ("none", "topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"):
        training = TapeTraining(spec, optimizer=sgd(0.05, momentum=0.0))
        start = training.weights
        in_torch, of_torch = _trained_in_torch(spec, training, steps=20)
        training.run(20)
        assert_same_everywhere(training.weights)
        assert_same_everywhere(in_torch)
        assert np.abs(training.weights - start).max() > 0.01
        np.testing.assert_allclose(training.weights, in_torch, rtol=1e-3, atol=2e-5, err_msg=spec)
        ours, theirs = training.compression.ledger, of_torch.ledger
        sent = [{name: cost.bytes_sent for name, cost in one.tensors.items()} for one in (ours, theirs)]
        assert sent[0] == sent[1], spec
        # Buckets, which TensorFlow has none of, pad their payloads in another way.
        assert abs(ours.totals.bytes_sent - theirs.totals.bytes_sent) < 16 * 20, spec
        for name, state in binding_of(training.compression).engine.states.items():
            other = of_torch._binding.engine.states[name].memory
            assert len(state.memory) == len(other)
            for one, two in zip(state.memory, other, strict=True):
                np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-2, atol=1e-3, err_msg=f"{spec} {name}")
