"""The same training in TensorFlow and in PyTorch, in one process: both have Horovod's operations, and its rank."""

from __future__ import annotations

import horovod.tensorflow as hvd
import horovod.torch as hvd_torch
import numpy as np
import tensorflow as tf
import torch

import hvdcomp
from hvdcomp.bindings.base import PRESENCE_BYTES
from hvdcomp.kernels import cuda
from tests.multirank.training_tensorflow import (
    TapeTraining,
    assert_like_horovods,
    assert_same_everywhere,
    batch,
    binding_of,
    own_generator,
    sgd,
)
from tests.multirank.worker import thorough

# PyTorch's optimizers import Triton, which ends a process that has TensorFlow unless hvdcomp has loaded it before.
cuda.available()


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


def _presences(spec: str, tensors: int, steps: int) -> int:
    """The bytes by which ranks say more often in PyTorch that they take part: once for each tensor of a step."""
    return 0 if spec in ("none", "fp16") else PRESENCE_BYTES * (tensors - 1) * steps


@thorough
def case_both_frameworks_train_alike() -> None:
    hvd_torch.init()
    assert hvd_torch.rank() == hvd.rank()
    for spec in ("none", "topk:ratio=0.1", "powersgd:rank=2", "efsignsgd"):
        training = TapeTraining(spec, optimizer=sgd(0.05, momentum=0.0))
        start = training.weights
        in_torch, of_torch = _trained_in_torch(spec, training, steps=20)
        training.run(20)
        assert_same_everywhere(training.variables)
        assert_same_everywhere(in_torch)
        assert np.abs(training.weights - start).max() > 0.01
        np.testing.assert_allclose(training.weights, in_torch, rtol=1e-3, atol=2e-5, err_msg=spec)
        ours, theirs = training.compression.ledger, of_torch.ledger
        sent = [{name: cost.bytes_sent for name, cost in one.tensors.items()} for one in (ours, theirs)]
        assert sent[0] == sent[1], spec
        assert ours.totals.bytes_sent + _presences(spec, 4, 20) == theirs.totals.bytes_sent, spec
        for name, state in binding_of(training.compression).engine.states.items():
            other = of_torch._binding.engine.states[name].memory
            assert len(state.memory) == len(other)
            for one, two in zip(state.memory, other, strict=True):
                np.testing.assert_allclose(one, two.numpy(), rtol=1e-2, atol=1e-3, err_msg=f"{spec} {name}")


# The kernel is a matrix of 32 by 36 to both frameworks.
_SHAPES = {"wide": (64, 300), "tall": (300, 40), "kernel": (32, 3, 3, 4), "bias": (40,), "scale": ()}
# So that learning rate times gradient is exact: one framework rounds it, the other may not.
_RATE = 0.5


def _stepped_in_tensorflow(spec: str, steps: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, hvdcomp.Compression]:
    variables = [tf.Variable(np.ones(shape, np.float32), name=name) for name, shape in _SHAPES.items()]
    how = hvdcomp.Compression.from_spec(spec, variables=variables)

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one * other) for one, other in zip(variables, gradients, strict=True)])
        means = hvd.DistributedGradientTape(tape, compression=how).gradient(loss, variables)
        for variable, mean in zip(variables, means, strict=True):
            variable.assign_sub(_RATE * mean)

    for gradients in steps:
        step(*map(tf.constant, gradients.values()))
    return np.concatenate([variable.numpy().reshape(-1) for variable in variables]), how


def _stepped_in_torch(spec: str, steps: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, hvdcomp.Compression]:
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in _SHAPES.items()}
    how = hvdcomp.Compression.from_spec(spec, named_parameters=parameters.items())
    optimizer = hvd_torch.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=_RATE), named_parameters=parameters.items(), compression=how
    )
    for gradients in steps:
        optimizer.zero_grad()
        sum((parameters[name] * torch.from_numpy(one)).sum() for name, one in gradients.items()).backward()
        optimizer.step()
    return np.concatenate([one.detach().numpy().reshape(-1) for one in parameters.values()]), how


@thorough
def case_the_same_gradients_give_the_same_weights_in_both_frameworks() -> None:
    hvd_torch.init()
    generator = own_generator()
    steps = [
        {name: np.asarray(generator.normal(size=shape), np.float32) for name, shape in _SHAPES.items()}
        for _ in range(6)
    ]
    specs = ("fp16", "bf16", "topk:ratio=0.05", "dgc:ratio=0.05", "randomk:ratio=0.05", "powersgd:rank=2", "efsignsgd",
             "qsgd:bits=4", "sidco:ratio=0.05", "fp16:rounding=stochastic,exchange=scatter",
             "bf16:rounding=stochastic")  # fmt: skip
    for spec in specs:
        ours, of_tensorflow = _stepped_in_tensorflow(spec, steps)
        theirs, of_torch = _stepped_in_torch(spec, steps)
        assert np.abs(ours - 1).max() > 0.1, spec
        assert_same_everywhere(ours)
        assert_like_horovods(ours, theirs)
        sent = of_tensorflow.ledger.totals.bytes_sent + _presences(spec, len(_SHAPES), len(steps))
        assert sent == of_torch.ledger.totals.bytes_sent, spec
