"""The training loop, which is the same for all frameworks and backends. A `Learner` implements the parts that differ.

Every rank starts with the weights of rank 0, and trains on its part of the shuffled data of each epoch. All ranks end
with the same weights. As a check, the summary has the digest of each rank's weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.train import environment, outputs
from hvdcomp.tools.train.checkpoints import KEPT, Checkpoints, Warnings
from hvdcomp.tools.train.data import epoch_shard, evaluation_shard, steps_per_epoch
from hvdcomp.tools.train.dataset import DataSet, Part
from hvdcomp.tools.train.learner import Arrays, Learner
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.reporter import Reporter
from hvdcomp.tools.train.target import Target

# After this number of steps, the ranks check whether any rank has a non-finite loss or a signal to stop.
_STEPS_BETWEEN_CHECKS = 20
_SECONDS_BETWEEN_CHECKS = 2.0  # seconds between these checks if steps are slow and there are checkpoints
_MOST_TIMES = 10_000  # largest number of step times that are kept, and saved in checkpoints
_FIRST_STEPS = 5  # In a run of one epoch, the time per step leaves out this number of first steps.
_EVALUATION_BATCH = 256


class Run:
    """A run that is ready to start. Each rank has its own shard of the data. Only rank 0 writes files and shows the
    progress."""

    def __init__(
        self,
        options: TrainingOptions,
        ranks: Ranks,
        data: DataSet,
        learner: Learner,
        compression: Compression,
        steps: int,
        checkpoints: Checkpoints | None,
        writer: outputs.RunWriter | None,
        warnings: Warnings | None,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._data = data
        self._learner = learner
        self._compression = compression
        self._steps_per_epoch = steps
        self._epochs_in_all: float = options.epochs if options.steps is None else options.steps / steps
        self._target = None if options.until is None else Target.parse(options.until)
        self._checkpoints = checkpoints
        self._warnings = warnings
        self._writer = writer
        self._reporter = Reporter(
            options.steps or steps * options.epochs,
            math.ceil(self._epochs_in_all),
            visible=ranks.rank == 0,
            progress=options.progress,
        )
        self._augmenting = np.random.default_rng([options.seed, ranks.rank])
        self._metric = options.metric
        # Counting the parameters gathers shards. This is done now, because it is not possible after the run has failed.
        self._parameters = sum(parameter.size for parameter in learner.parameters().values())
        self._step = 0
        self._epoch = 1  # the current epoch
        self._taken = 0  # number of batches of the initial size that were used in this epoch
        self._losses: list[float] = []  # the losses of the steps of this epoch
        self._rate = 0.0
        self._finite = True  # whether the loss on this rank was finite
        self._times: list[float] = []  # the milliseconds of each of the latest steps
        self._epochs: list[dict[str, Any]] = []
        self._trained_seconds = 0.0  # the seconds of all steps, without evaluations
        self._trained_on_links = np.zeros(len(ranks.links))  # the seconds of all steps on each simulated link
        self._reached: dict[str, Any] | None = None  # the evaluation that reached the target
        self._evaluated_at = 0  # the step of the latest evaluation
        self._quality: dict[str, float] = {}  # the quality at the latest evaluation
        self._stepped = False  # whether this process has run a step
        self._resumed_at: list[int] = []  # the steps at which the run was resumed from a checkpoint
        self._next_check = _STEPS_BETWEEN_CHECKS if checkpoints is None else 1
        self._start = self._epoch_start = ranks.now()

    def continue_from(self, saved: dict[str, Any]) -> None:
        """Resumes from a position that `_position` returned."""
        assert self._checkpoints is not None
        for name in KEPT:
            setattr(self, f"_{name}", saved[name])
        self._taken = self._taken_of(self._checkpoints.old_ranks)
        if self._checkpoints.sources[0] == self._ranks.rank:  # otherwise, the random state belongs to a different rank
            self._augmenting.bit_generator.state = saved["augmenting"]
        self._resumed_at = [*saved["resumed_at"], self._step]
        self._next_check = self._step + 1
        # Checkpoints of earlier versions lack these fields.
        self._trained_seconds, reached = saved.get("trained_seconds", 0.0), saved.get("reached")
        if self._target is not None and reached is not None and self._target.is_reached(reached):
            self._reached = reached
        self._evaluated_at, self._quality = saved.get("evaluated_at", 0), saved.get("quality", {})
        now = self._ranks.now()
        self._start, self._epoch_start = now - saved["seconds"], now - saved["epoch_seconds"]
        for damage in self._checkpoints.damaged:
            self._reporter.say(f"skipped a checkpoint: {damage}")
        over = ", which was the last step: nothing is left to train" if self._over and not self._losses else ""
        self._reporter.say(f"continuing after step {self._step} from {self._options.checkpoint_folder}{over}")
        if self._checkpoints.change is not None:
            self._reporter.say(self._checkpoints.change)

    def _taken_of(self, old_ranks: int) -> int:
        """Converts a number of batches in an epoch from the old ranks to the new ranks, so that the share of the epoch
        stays the same. The result is rounded down."""
        options = self._options
        assert options.batch_size is not None
        samples = len(self._data.train_x)
        then = steps_per_epoch(samples, old_ranks, options.batch_size, options.backward_passes_per_step)
        return self._taken * self._steps_per_epoch // then

    def _position(self) -> dict[str, Any]:
        """The position of this rank in the run, for JSON."""
        now = self._ranks.now()
        return {
            **{name: getattr(self, f"_{name}") for name in KEPT},
            "augmenting": self._augmenting.bit_generator.state,
            "resumed_at": self._resumed_at,
            "seconds": now - self._start,
            "epoch_seconds": now - self._epoch_start,
            "trained_seconds": self._trained_seconds,
            "reached": self._reached,
            "evaluated_at": self._evaluated_at,
            "quality": self._quality,
            "sizes": None if self._writer is None else self._writer.sizes(),
        }

    def run(self) -> dict[str, Any]:
        try:
            with self._reporter:
                status = self._train()
                final = self._final_quality(status)
            with self._learner.common_weights():
                digest = _digest(self._learner.parameters())
            digests = self._ranks.gather(digest, "weights")
            summary = self._summary(status, digests, final)
            if self._writer is not None:
                self._writer.finish(summary)
            self._refuse_unwritten(self._ranks.gather(self._unwritten, "written"))
        except BaseException as error:
            # There is no communication here, because other ranks may have ended.
            if self._writer is not None:
                self._writer.finish({**self._summary("failed", [], {}), "error": f"{type(error).__name__}: {error}"})
            raise
        output = None if self._options.output is None else str(self._options.output)
        self._reporter.summary(summary, output)
        return summary

    @property
    def _unwritten(self) -> str | None:
        """The writing error of this rank, or None."""
        return None if self._writer is None else self._writer.problem

    def _refuse_unwritten(self, problems: Sequence[str | None]) -> None:
        """Ends the run on every rank if a rank could not write."""
        for problem in filter(None, problems):
            raise ConfigurationError(
                f"{problem}. Everything that was written before is complete. Free some space, or name another "
                "--output, and start again"
            )

    def _train(self) -> str:
        """Trains the rest of the run. Returns "finished" or, if the run ends early, "diverged" or "stopped"."""
        # If the saved run ended within an epoch, or was stopped at the end of an epoch, this epoch has losses but no
        # record.
        while not self._over or self._losses:
            if ended := self._train_epoch():
                return ended
        return "finished"

    @property
    def _over(self) -> bool:
        """Whether the run has reached its end or its target."""
        steps = self._options.steps
        trained = self._epoch > self._options.epochs if steps is None else self._step >= steps
        return trained or self._reached is not None

    def _train_epoch(self) -> str | None:
        """Trains the rest of this epoch. Returns "diverged" or "stopped" if the run ends, otherwise None."""
        options, data = self._options, self._data
        assert options.batch_size is not None
        shard = epoch_shard(
            len(data.train_x),
            self._ranks.size,
            self._ranks.rank,
            options.batch_size * options.backward_passes_per_step,
            options.seed,
            self._epoch,
        )[self._taken :]
        while not self._over and len(shard) >= (accumulation := self._next_accumulation()):
            self._timed_step(shard[:accumulation].flatten(), accumulation)
            shard = shard[accumulation:]
            if self._options.evaluate_every is not None and self._step % self._options.evaluate_every == 0:
                self._evaluate()
            if self._over:
                break
            due = self._checkpoints is not None and self._checkpoints.due(self._step)
            if (due or self._step >= self._next_check) and (ended := self._agree(save=due)):
                return ended
        # A run that ends within an epoch is saved before the record of the epoch is written, because the epoch may be
        # continued later.
        if ended := self._agree(save=len(shard) >= self._next_accumulation()):
            return ended
        self._end_epoch()
        if self._checkpoints is not None and (self._over or self._checkpoints.due_each_epoch):
            ended = self._agree(save=True)
            return None if self._over else ended
        return None

    def _agree(self, save: bool = False) -> str | None:
        """Agrees with all ranks whether to continue. Returns the status that ends the run, or None.

        A checkpoint is saved if `save` is True, and before the run stops.
        """
        warnings = self._warnings
        warned, all_warned = (False, False) if warnings is None else (warnings.warned, warnings.all_warned)
        change = self._ranks.changed
        state = (self._finite, warned, all_warned, change, self._steps_to_next_check(), self._unwritten)
        finite, stop, stop_all, changed, steps, unwritten = zip(*self._ranks.gather(state, "agree"), strict=True)
        self._refuse_unwritten(unwritten)
        self._next_check = self._step + min(steps)
        if not all(finite):
            return "diverged"
        if self._checkpoints is not None and (save or any(stop) or any(changed)):
            # The loss of a step is computed before the weights change, so weights may be non-finite although the loss
            # is finite. A checkpoint with such weights would be useless. All ranks check together, even if only one
            # rank got a signal, because FSDP gathers the weights for the check.
            if any(self._ranks.gather(self._weights_are_lost(), "lost")):
                return "diverged"
            with self._compression.paused():
                self._checkpoints.save(self._step, self._learner, self._position)
        some_leave = self._ranks.elastic and any(stop) and not all(stop)
        if (any(changed) or some_leave) and not any(stop_all):
            self._ranks.meet_anew(without_me=warned)
        return "stopped" if any(stop) else None

    def _weights_are_lost(self) -> bool:
        """Whether a weight on this rank is not finite. Call this on every rank."""
        return not all(np.isfinite(parameter).all() for parameter in self._learner.parameters().values())

    def _steps_to_next_check(self) -> int:
        if self._checkpoints is None:
            return _STEPS_BETWEEN_CHECKS
        seconds = float(np.median(self._times[-_FIRST_STEPS:])) / 1000
        return max(1, min(_STEPS_BETWEEN_CHECKS, int(_SECONDS_BETWEEN_CHECKS / seconds)))

    @property
    def _batches(self) -> int:
        """The number of batches of the initial size that have been used."""
        return (self._epoch - 1) * self._steps_per_epoch + self._taken

    def _next_accumulation(self) -> int:
        """The number of batches in the next step. It is above 1 only if a policy has increased it.

        Policies use the learning rate, so this method first sets the learning rate, as a scheduler would do.
        """
        self._rate = self._options.learning_rate(self._batches / self._steps_per_epoch, self._epochs_in_all)
        self._learner.set_learning_rate(self._rate)
        return self._compression.accumulation

    def _timed_step(self, samples: np.ndarray, accumulation: int) -> None:
        """Takes an optimizer step on these samples of this rank, and measures its time."""
        if not self._stepped and self._learner.first_step is not None:
            self._reporter.note(self._learner.first_step)
        self._stepped = True
        start, start_on_links, before = self._ranks.now(), self._ranks.on_links(), self._totals
        loss = self._learner.step(*self._data.training_batch(samples, self._augmenting), accumulation)
        if self._step + 1 == self._options.steps:
            self._learner.end()
        seconds = self._ranks.now() - start
        milliseconds = 1000 * seconds
        self._trained_seconds += seconds
        self._trained_on_links += self._ranks.on_links() - start_on_links
        self._step += 1
        self._taken += accumulation
        self._losses.append(loss)
        self._times.append(milliseconds)
        if len(self._times) >= 2 * _MOST_TIMES:
            del self._times[:-_MOST_TIMES]
        self._finite = self._finite and math.isfinite(loss)
        self._reporter.step(self._batches, self._epoch, loss, milliseconds)
        if self._writer is not None:
            record = {
                "step": self._step,
                "epoch": self._epoch,
                "loss": loss,
                "learning_rate": self._rate,
                "accumulation": accumulation,
                "ms": milliseconds,
            }
            cost = _cost(self._totals.without(before), self._compression.ledger.last)
            self._writer.step(record, cost, self._compression.metrics)

    def _end_epoch(self) -> None:
        with self._compression.paused():
            loss = sum(self._losses) / len(self._losses)
            mean_loss = float(self._ranks.sum(loss, "loss")) / self._ranks.size
        quality = self._evaluate()
        record = {
            "epoch": self._epoch,
            "step": self._step,
            "train_loss": mean_loss,
            f"{self._watched}_loss": quality["loss"],
            self._metric: quality[self._metric],
            "seconds": self._ranks.now() - self._epoch_start,
            "bytes_sent": self._totals.bytes_sent,
        }
        self._epochs.append(record)
        self._reporter.epoch(record)
        if self._writer is not None:
            self._writer.epoch(record)
        self._epoch, self._taken, self._losses = self._epoch + 1, 0, []
        self._epoch_start = self._ranks.now()

    @property
    def _watched(self) -> str:
        """The part of the data that is evaluated during the run: the validation part if it exists, otherwise the test
        part."""
        return "test" if self._data.validation is None else "validation"

    def _evaluate(self) -> dict[str, float]:
        """Evaluates the current weights on the watched part, and records whether they reach the target."""
        if self._evaluated_at == self._step:
            return self._quality
        with self._compression.paused():
            self._average_buffers()
            self._quality = quality = self._quality_on(self._data.validation or self._data.test)
        self._evaluated_at = self._step
        record = {
            "step": self._step,
            "epoch": self._epoch,
            "part": self._watched,
            **quality,
            "trained_seconds": self._trained_seconds,
            **self._on_links,
            "bytes_sent": self._totals.bytes_sent,
        }
        if self._writer is not None:
            self._writer.evaluation(record)
        # The record contains the seconds of rank 0; no decision depends on them.
        if self._target is not None and self._reached is None and self._target.is_reached(quality):
            self._reached = record
        return quality

    @property
    def _on_links(self) -> dict[str, dict[str, float]]:
        """The training seconds on simulated links, for a record."""
        seconds = dict(zip(self._ranks.links, self._trained_on_links.tolist(), strict=True))
        return {"trained_seconds_on_links": seconds} if seconds else {}

    def _final_quality(self, status: str) -> dict[str, Any]:
        """The quality on the test part. If there is a validation part, the test part is evaluated only once, after the
        run has finished."""
        if self._data.validation is not None:
            return self._quality_on(self._data.test) if status == "finished" else {}
        last = self._epochs[-1] if self._epochs else {}
        return {"loss": last.get("test_loss"), self._metric: last.get(self._metric)}

    def _average_buffers(self) -> None:
        """Averages the running statistics of normalization layers over the ranks, because the ranks have different
        data."""
        everywhere = self._ranks.gather(self._learner.buffers(), "buffers")
        means = {name: np.mean([state[name] for state in everywhere], axis=0) for name in everywhere[0]}
        self._learner.set_buffers(means)

    def _quality_on(self, part: Part) -> dict[str, float]:
        """The mean loss (for text, per token) and the metric on a part of the data. Each rank evaluates a share of this
        part."""
        totals = np.zeros(3)  # loss, correct answers, answers
        shard = evaluation_shard(len(part.x), self._ranks.size, self._ranks.rank)
        with self._learner.common_weights():
            for first in range(0, len(shard), _EVALUATION_BATCH):
                samples = shard[first : first + _EVALUATION_BATCH]
                targets = part.y[samples]
                loss, right = self._learner.evaluate(self._data.model_input(part.x[samples]), targets)
                totals += loss * targets.size, right, targets.size
        loss, right, count = self._ranks.sum(totals, "evaluation").tolist()
        loss, accuracy = loss / count, right / count
        of_loss = {"perplexity": _exp, "rmse": math.sqrt}
        return {"loss": loss, self._metric: accuracy if self._metric == "accuracy" else of_loss[self._metric](loss)}

    def _summary(self, status: str, digests: list[str], final: dict[str, Any]) -> dict[str, Any]:
        options, totals = self._options, self._totals
        last = self._epochs[-1] if self._epochs else {}
        values = [record[self._metric] for record in self._epochs]
        best = max if self._metric == "accuracy" else min
        median, over = self._time_per_step()
        alone = self._ranks.size == 1 and self._ranks.backend == "horovod"
        note = "one rank: Horovod exchanges nothing, so nothing is compressed or sent" if alone else self._ranks.note
        return {
            "status": status,
            "framework": options.framework,
            "backend": self._ranks.backend,
            "model": options.model,
            "data": options.data,
            "spec": options.compression,
            "seed": options.seed,
            self._metric: final.get(self._metric),
            f"best_{self._metric}": best(values) if values else None,
            "best_over": f"the {self._watched} part, at the ends of epochs",
            "loss": final.get("loss"),
            "validation_loss": last.get("validation_loss"),
            "train_loss": last.get("train_loss"),
            "steps": self._step,
            "epochs": len(self._epochs),
            "resumed_at": self._resumed_at,
            "world_size": self._ranks.size,
            "ranks_per_host": self._ranks.local_size,
            "controller": self._ranks.controller,
            "seconds": self._ranks.now() - self._start,
            "trained_seconds": self._trained_seconds,
            **self._on_links,
            "until": self._until(),
            "ms_per_step": median,
            "ms_per_step_over": over,
            "bytes_sent": totals.bytes_sent,
            "dense_bytes": totals.dense_bytes,
            "bytes_sent_per_step": totals.bytes_sent / self._step if self._step else None,
            "bytes_in_node_per_step": totals.bytes_in_node / self._step if self._step else None,
            "floats_sent": totals.floats_sent,
            "compression_factor": totals.compression_factor,
            "compression_factor_over": "dense bytes / sent bytes that may leave the node",
            "tables": _of_ledger(self._learner.row_ledger),
            "shards": _of_ledger(self._learner.shard_ledger),
            "parameters": self._parameters,
            "weights_sha256": digests,
            "weights_sha256_over": "parameters by name, without buffers; one digest per rank",
            "identical": len(set(digests)) == 1 if digests else None,
            "note": note,
            "options": options.as_json(),
            "versions": environment.versions(options.framework, self._ranks.backend),
        }

    @property
    def _totals(self) -> Any:
        """The totals of the bytes that were sent so far, for layers, tables, and reduce-scatters within replicas."""
        totals = replace(self._compression.ledger.totals)
        for ledger in (self._learner.row_ledger, self._learner.shard_ledger):
            if ledger is not None:
                totals.add(ledger.totals)
        return totals

    def _until(self) -> dict[str, Any] | None:
        """The target with the cost of reaching it, or a note that it was not reached; None if there is no target."""
        if self._target is None:
            return None
        if self._reached is None:
            return {"target": str(self._target), "reached": False}
        stored = ("step", "trained_seconds", *self._on_links, "bytes_sent", "loss", self._metric)
        return {"target": str(self._target), "reached": True, **{key: self._reached[key] for key in stored}}

    def _time_per_step(self) -> tuple[float | None, str]:
        """The median step time in ms, and a text that describes the steps that count. The first steps are slower, and
        are left out."""
        skipped = self._steps_per_epoch if self._step > self._steps_per_epoch else _FIRST_STEPS
        if self._step <= skipped:
            return None, f"no more than {skipped} steps were made"
        counted = self._times[-min(self._step - skipped, _MOST_TIMES) :]
        return float(np.median(counted)), f"median of steps {self._step - len(counted) + 1} to {self._step}"


def _digest(parameters: Arrays) -> str:
    """The SHA-256 digest of the names and the bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(parameter.tobytes())
    return digest.hexdigest()


def _of_ledger(ledger: Any) -> dict[str, Any] | None:
    """The bytes in a ledger that is separate from the compression; None without such a ledger."""
    names = ("bytes_sent", "dense_bytes", "compression_factor")
    return None if ledger is None else {name: getattr(ledger.totals, name) for name in names}


def _cost(spent: Any, last: Any) -> dict[str, float | None]:
    """The bytes and times of a step, from the ledgers.

    Args:
        spent: the bytes of the step, as a difference of totals.
        last: the latest ledger entry of the layers, which has the times; None if there is only one rank, because
            Horovod then does not compress.
    """
    counts = ("bytes_sent", "bytes_in_node", "dense_bytes", "floats_sent")
    cost: dict[str, float | None] = {name: round(getattr(spent, name), 6) for name in counts}
    for phase in ("encode", "communicate", "decode"):
        seconds = None if last is None else getattr(last, f"{phase}_seconds")
        cost[f"{phase}_ms"] = None if seconds is None else 1000 * seconds
    return cost


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
