"""The training loop under stock Horovod: `hvd.DistributedOptimizer` with `compression=hvdcomp.Compression`.

Every rank starts from rank 0's weights, sees its own part of each epoch's common shuffle, and ends with the
same weights; the digest of each rank's weights in the summary says whether that came true. On a CPU with two
ranks the same seed gives the same weights, bit for bit; with more ranks the order of additions in Horovod's
fused allreduce may change the last bits.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn

import hvdcomp
from hvdcomp.train import environment, outputs
from hvdcomp.train.data import DataSet, augment, epoch_shard, evaluation_shard, load_data, steps_per_epoch
from hvdcomp.train.models import build_model
from hvdcomp.train.progress import Reporter
from hvdcomp.train.ranks import check_same, gather, together
from hvdcomp.train.settings import Settings

_STEPS_BETWEEN_CHECKS = 20  # how often the ranks ask each other for a non-finite loss
_FIRST_STEPS = 5  # not counted in the time per step of a run of one epoch
_EVALUATION_BATCH = 256


def train(settings: Settings) -> dict[str, Any]:
    """Train under Horovod as `settings` say, writing and showing what they ask for. Call it on every rank.

    Returns:
        The summary, as in summary.json; the same on every rank but for what is rank 0's own (its loss and
        times).

    Raises:
        RunRefused: on every rank, if the run cannot start as asked.
    """
    if not hvd.is_initialized():
        hvd.init()
    settings = together(lambda: _checked(settings))
    environment.use_threads(hvd.local_size())
    data, model, steps = together(lambda: _build(settings))
    check_same({**_comparable(settings), "training samples": len(data.train_x), "classes": data.classes})
    optimizer = _broadcast(settings, model)
    compression = together(lambda: _compression(settings, model, steps))
    return _Run(settings, data, model, optimizer, compression, steps).run()


def _checked(settings: Settings) -> Settings:
    environment.check_world_size(hvd.size())
    settings = settings.resolved()
    if settings.output is not None and hvd.rank() == 0:
        outputs.check_output(settings.output, settings.overwrite)
    if settings.tensorboard:
        outputs.check_tensorboard()
    return settings


def _build(settings: Settings) -> tuple[DataSet, nn.Module, int]:
    """The data, the model, both on this rank's device, and the steps of an epoch."""
    assert settings.batch_size is not None
    data = load_data(settings)
    steps = steps_per_epoch(len(data.train_x), hvd.size(), settings.batch_size, settings.backward_passes_per_step)
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, channels=data.channels, size=data.size, classes=data.classes)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda")
    return data.to(device), model.to(device), steps


def _comparable(settings: Settings) -> dict[str, Any]:
    """The options in which all ranks must agree: all but places, which each host may name its own way."""
    return {key: value for key, value in settings.as_options().items() if key not in ("data_dir", "output")}


def _broadcast(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Rank 0's weights on every rank, and an optimizer that starts there."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Horovod fills the optimizer's state by a step of its own with zero gradients. With a learning rate and a
    # weight decay of zero that changes nothing; both are set afterwards.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay
        group["lr"] = settings.lr
    # From here on random choices of the model (dropout) differ between ranks.
    torch.manual_seed(settings.seed + hvd.rank() * 2**31)
    return optimizer


def _compression(settings: Settings, model: nn.Module, steps: int) -> hvdcomp.Compression:
    return hvdcomp.Compression.from_spec(
        settings.compression,
        memory=settings.memory,
        policy=settings.policy,
        steps_per_epoch=steps,
        decision_log=None if settings.output is None else settings.output / outputs.DECISIONS,
        named_parameters=model.named_parameters(),
        seed=settings.seed,
    )


class _Run:
    """One run, ready to start: the same on every rank but for its shard; rank 0 writes and shows."""

    def __init__(
        self,
        settings: Settings,
        data: DataSet,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compression: hvdcomp.Compression,
        steps: int,
    ) -> None:
        self._settings = settings
        self._data = data
        self._model = model
        self._compression = compression
        self._steps_per_epoch = steps
        self._optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            backward_passes_per_step=settings.backward_passes_per_step,
        )
        self._writer: outputs.RunWriter | None = None
        if settings.output is not None and hvd.rank() == 0:
            self._writer = outputs.RunWriter(settings.output, settings.tensorboard)
        self._reporter = Reporter(
            steps * settings.epochs, settings.epochs, visible=hvd.rank() == 0, progress=settings.progress
        )
        self._augmenting = torch.Generator().manual_seed(settings.seed + hvd.rank() * 2**31)
        self._metric = "perplexity" if data.is_text else "accuracy"
        self._step = 0
        self._batches = 0  # of the starting size, that were taken
        self._rate = 0.0
        self._finite = True  # on this rank
        self._times: list[float] = []  # ms of each step
        self._epochs: list[dict[str, Any]] = []
        self._start = time.perf_counter()

    def run(self) -> dict[str, Any]:
        status = "failed"
        summary: dict[str, Any] = {}
        try:
            with self._reporter:
                status = self._train()
            summary = self._summary(status, gather(_digest(self._model), "weights"))
        except BaseException as error:
            # The other ranks may be gone: nothing is asked of them.
            summary = {**self._summary(status, []), "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            if self._writer is not None:
                self._writer.finish(summary)
        output = None if self._settings.output is None else str(self._settings.output)
        self._reporter.summary(summary, output)
        return summary

    def _train(self) -> str:
        """Train all epochs; "finished", or "diverged" as soon as the ranks know of a non-finite loss."""
        settings, data = self._settings, self._data
        assert settings.batch_size is not None
        for epoch in range(1, settings.epochs + 1):
            start = time.perf_counter()
            shard = epoch_shard(
                len(data.train_x),
                hvd.size(),
                hvd.rank(),
                settings.batch_size * settings.backward_passes_per_step,
                settings.seed,
                epoch,
            )
            self._model.train()
            losses = []
            while len(shard) >= (accumulation := self._next_accumulation(epoch, len(shard))):
                losses.append(self._timed_step(shard[:accumulation].flatten(), accumulation, epoch))
                shard = shard[accumulation:]
                if self._step % _STEPS_BETWEEN_CHECKS == 0 and self._any_diverged():
                    return "diverged"
            if self._any_diverged():
                return "diverged"
            self._end_epoch(epoch, sum(losses) / len(losses), start)
        return "finished"

    def _next_accumulation(self, epoch: int, batches_left: int) -> int:
        """How many batches the next step takes: more than one only where a policy has made them larger.

        The learning rate is set before, as a scheduler would do it, because policies look at it.
        """
        self._batches = epoch * self._steps_per_epoch - batches_left
        self._rate = self._settings.learning_rate(self._batches / self._steps_per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
        return self._compression.accumulation

    def _timed_step(self, batch: Tensor, accumulation: int, epoch: int) -> float:
        """One optimizer step on this rank's samples `batch`; returns its loss."""
        start = time.perf_counter()
        loss = self._optimizer_step(batch, accumulation * self._settings.backward_passes_per_step)
        milliseconds = 1000 * (time.perf_counter() - start)
        self._step += 1
        self._times.append(milliseconds)
        self._finite = self._finite and math.isfinite(loss)
        self._reporter.step(self._batches + accumulation, epoch, loss, milliseconds)
        if self._writer is not None:
            record = {
                "step": self._step,
                "epoch": epoch,
                "loss": loss,
                "learning_rate": self._rate,
                "accumulation": accumulation,
                "ms": milliseconds,
            }
            self._writer.step({**record, **_cost(self._compression)})
        return loss

    def _optimizer_step(self, batch: Tensor, passes: int) -> float:
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._data.train_x.device)
        for part in batch.to(total.device).chunk(passes):
            images = self._data.train_x[part]
            if self._data.augment:
                images = augment(images, self._augmenting)
            # Horovod adds the gradients of the passes up.
            loss = _loss(self._model(self._data.model_input(images)), self._data.train_y[part]) / passes
            loss.backward()
            total += loss.detach()
        if self._settings.clip_norm:
            # The norm of the averaged gradient: it is there only after the exchange.
            self._optimizer.synchronize()
            nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_norm)
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
        else:
            self._optimizer.step()
        return total.item()  # on an accelerator this waits for the step to be done

    def _any_diverged(self) -> bool:
        finite = hvd.allreduce(torch.tensor(float(self._finite)), name="hvdcomp.train.finite", op=hvd.Min)
        return finite.item() == 0

    def _end_epoch(self, epoch: int, loss: float, start: float) -> None:
        _average_buffers(self._model)
        mean_loss = hvd.allreduce(torch.tensor(loss, dtype=torch.float64), name="hvdcomp.train.loss").item()
        test_loss, accuracy = evaluate(self._model, self._data)
        record = {
            "epoch": epoch,
            "step": self._step,
            "train_loss": mean_loss,
            "test_loss": test_loss,
            self._metric: accuracy if self._metric == "accuracy" else _exp(test_loss),
            "seconds": time.perf_counter() - start,
            "bytes_sent": self._compression.ledger.totals.bytes_sent,
        }
        self._epochs.append(record)
        self._reporter.epoch(record)
        if self._writer is not None:
            self._writer.epoch(record)

    def _summary(self, status: str, digests: list[str]) -> dict[str, Any]:
        settings, totals = self._settings, self._compression.ledger.totals
        last = self._epochs[-1] if self._epochs else {}
        values = [record[self._metric] for record in self._epochs]
        best = max if self._metric == "accuracy" else min
        median, over = self._time_per_step()
        note = "one rank: Horovod exchanges nothing, so nothing is compressed or sent" if hvd.size() == 1 else None
        return {
            "status": status,
            "model": settings.model,
            "data": settings.data,
            "spec": settings.compression,
            "seed": settings.seed,
            self._metric: last.get(self._metric),
            f"best_{self._metric}": best(values) if values else None,
            "loss": last.get("test_loss"),
            "train_loss": last.get("train_loss"),
            "steps": self._step,
            "epochs": len(self._epochs),
            "world_size": hvd.size(),
            "controller": environment.controller(hvd),
            "seconds": time.perf_counter() - self._start,
            "ms_per_step": median,
            "ms_per_step_over": over,
            "bytes_sent": totals.bytes_sent,
            "dense_bytes": totals.dense_bytes,
            "bytes_sent_per_step": totals.bytes_sent / self._step if self._step else None,
            "floats_sent": totals.floats_sent,
            "compression_factor": totals.dense_bytes / totals.bytes_sent if totals.bytes_sent else None,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "weights_sha256": digests,
            "weights_sha256_over": "parameters by name, without buffers; one digest per rank",
            "identical": len(set(digests)) == 1 if digests else None,
            "note": note,
            "options": settings.as_options(),
            "versions": environment.versions(),
        }

    def _time_per_step(self) -> tuple[float | None, str]:
        """Median time of a step in ms, and the steps it is of: those of the start are slower."""
        skipped = self._steps_per_epoch if len(self._times) > self._steps_per_epoch else _FIRST_STEPS
        counted = self._times[skipped:]
        if not counted:
            return None, f"no more than {skipped} steps were made"
        return float(np.median(counted)), f"median of steps {skipped + 1} to {len(self._times)}"


def evaluate(model: nn.Module, data: DataSet) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set (of text: per token), each rank doing its share."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, right answers, answers
    with torch.no_grad():
        shard = evaluation_shard(len(data.test_x), hvd.size(), hvd.rank())
        for batch in shard.split(_EVALUATION_BATCH) if len(shard) else ():
            batch = batch.to(data.test_x.device)
            logits, targets = model(data.model_input(data.test_x[batch])), data.test_y[batch]
            right = (logits.argmax(dim=-1) == targets).sum()
            count = targets.numel()
            totals += torch.tensor([_loss(logits, targets).item() * count, right.item(), count])
    loss, right, count = hvd.allreduce(totals, name="hvdcomp.train.evaluation", op=hvd.Sum).tolist()
    return loss / count, right / count


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _average_buffers(model: nn.Module) -> None:
    """Average the running statistics of normalization layers, which each rank takes from its own shard."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(hvd.allreduce(buffer, name=f"hvdcomp.train.buffer.{name}"))


def _digest(model: nn.Module) -> str:
    """SHA-256 over the names and the bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _cost(compression: hvdcomp.Compression) -> dict[str, float | None]:
    """What the ledger says of the last step; with one rank Horovod compresses nothing and it is empty."""
    last = compression.ledger.last
    cost: dict[str, float | None] = {
        name: 0 if last is None else getattr(last, name) for name in ("bytes_sent", "dense_bytes", "floats_sent")
    }
    for phase in ("encode", "communicate", "decode"):
        seconds = None if last is None else getattr(last, f"{phase}_seconds")
        cost[f"{phase}_ms"] = None if seconds is None else 1000 * seconds
    return cost


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
