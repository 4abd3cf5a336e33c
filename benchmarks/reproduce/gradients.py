"""Counterparts that are computed from the gradients of a single training run: critical regimes, and common coordinates
of gradients."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.diagnostics import RegimeRecord, largest_hessian_eigenvalue
from benchmarks.reproduce.outcome import Curve, Outcome, Row
from benchmarks.reproduce.published import Artifact
from hvdcomp.tools.train.data import epoch_shard, load_data
from hvdcomp.tools.train.frameworks import build_model
from hvdcomp.tools.train.options import TrainingOptions

_SAMPLES, _PASS = 256, 256  # number of samples for the Hessian, and batch size of a pass for it


class _Training:
    """Dense SGD on one rank."""

    def __init__(self, options: TrainingOptions) -> None:
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        self.options = options.resolved()
        self._data = load_data(self.options)
        data = self._data
        self.model = build_model(self.options.model, channels=data.channels, size=data.size, classes=data.classes)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=self.options.momentum)
        self.inputs = torch.from_numpy(data.model_input(data.train_x))
        self.labels = torch.from_numpy(data.train_y)

    def epoch(self, number: int) -> list[torch.Tensor]:
        """Trains for an epoch. Returns the flat gradient of each step."""
        assert self.options.batch_size is not None
        rate = self.options.learning_rate(number - 1, self.options.epochs)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        gradients = []
        shard = epoch_shard(len(self.inputs), 1, 0, self.options.batch_size, self.options.seed, number)
        for batch in shard:
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.inputs[batch]), self.labels[batch]).backward()
            flat = [parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None]
            gradients.append(torch.cat(flat).clone())
            self._optimizer.step()
        return gradients


def common_of_largest(training: Mapping[str, Any], share: float = 0.1) -> float:
    """The percentage of a gradient's largest coordinates that are also among the largest coordinates of another
    gradient, averaged over pairs of steps of the third epoch."""
    training_run = _Training(TrainingOptions(**training))
    gradients: list[torch.Tensor] = []
    for number in (1, 2, 3):
        gradients = training_run.epoch(number)
    count = int(share * gradients[0].numel())
    largest = [set(gradient.abs().topk(count).indices.tolist()) for gradient in gradients[:12]]
    return 100 * statistics.fmean(len(a & b) / count for a, b in itertools.combinations(largest, 2))


def regimes(artifact: Artifact, quick: bool) -> Outcome:
    """Accordion's figure 3: critical spans by the norm of the gradient, and by the Hessian's eigenvalue."""
    epochs, seeds = 20, range(1 if quick else 5)
    agreements, both = [], False
    curves: dict[str, list[Curve]] = {}
    for seed in seeds:
        training_run = _Training(
            TrainingOptions(model="cnn", data="digits", label_noise=0.2, epochs=epochs, milestones=(10.0,), seed=seed)
        )
        record = RegimeRecord(interval=2, eta=0.5)
        batches = [(training_run.inputs[:_SAMPLES], training_run.labels[:_SAMPLES])]
        for number in range(1, epochs + 1):
            total = torch.stack(training_run.epoch(number)).sum(dim=0)
            curvature = largest_hessian_eigenvalue(
                training_run.model, nn.CrossEntropyLoss(), batches, iterations=100, tolerance=1e-2
            )
            record.note(eigenvalue=curvature.value, gradient_norm=float(torch.linalg.vector_norm(total)))
        agreements.append(100 * float(record.as_json()["agreement"]))
        if seed == 0:
            shown = record.as_json()
            curves = {
                name: [Curve(label=name, x=list(range(1, epochs + 1)), y=shown[key]["values"])]
                for name, key in (("largest eigenvalue", "eigenvalue"), ("norm of the gradient", "gradient_norm"))
            }
            both = all(bool(record.critical(key)[10]) for key in ("eigenvalue", "gradient_norm"))
    share = statistics.fmean(agreements)
    rows = [
        Row(what="spans of two epochs that both call alike (%)", ours=share, holds=share >= 80),
        Row(what="both are critical after the learning rate falls (1: yes)", ours=float(both), holds=both),
    ]
    ours = (
        f"Dense SGD trained a cnn on digits, with a fifth of the labels replaced at random; seeds: {len(seeds)}. From "
        "an agreement of 80 % on, the two criteria count as alike."
    )
    return Outcome(name=artifact.name, rows=rows, curves=curves, x="epoch", ours=ours)
