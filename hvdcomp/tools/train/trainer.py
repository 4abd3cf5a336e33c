"""Sets up a run on all ranks. If an error occurs on one rank, all ranks raise this error, so that no rank waits forever
for another rank."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.train import environment, outputs
from hvdcomp.tools.train.backends import reach
from hvdcomp.tools.train.checkpoints import Checkpoints, Warnings
from hvdcomp.tools.train.data import load_data, steps_per_epoch
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.frameworks import learner_class
from hvdcomp.tools.train.learner import Learner
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.run import Run


def train(options: TrainingOptions, ranks: Ranks | None = None, warnings: Warnings | None = None) -> dict[str, Any]:
    """Trains with these options. Call this on every rank.

    Args:
        options: the options of the run.
        ranks: the ranks from `backends.reach`. If this is None, the function connects the ranks itself.
        warnings: the object that records signals to stop. If this is None, and the options name a folder for
            checkpoints, the function records the signals itself.

    Returns:
        The summary, as in summary.json. It is the same on every rank, except for the loss and the times of the rank.
        Its status is "finished", "diverged", or "stopped" (if a rank was told to save and stop).

    Raises:
        RunRefused: on every rank, if the run cannot start.
        SetupError: if the ranks cannot be connected.
        ImportError: if the framework, or Horovod for this framework, is not installed.
    """
    with ExitStack() as stack:
        if warnings is None and options.checkpoint_folder is not None:
            warnings = stack.enter_context(Warnings())
        return _set_up(options, ranks, warnings, stack).run()


def _set_up(options: TrainingOptions, ranks: Ranks | None, warnings: Warnings | None, stack: ExitStack) -> Run:
    ranks = ranks or reach(options.backend, options.framework, options.timeout)
    options = dataclasses.replace(options, backend=ranks.backend)
    make_learner = learner_class(options.framework, ranks.backend, options.fsdp)
    make_learner.prepare(ranks.local_rank, ranks.local_size)
    options = ranks.together(lambda: _checked(options, ranks))
    # If only some ranks had a folder for checkpoints, these ranks would wait for the others when they look for a
    # checkpoint. This is therefore checked first.
    folder = None if options.checkpoint_folder is None else "given"
    facts = _comparable(options)
    ranks.check_same({**facts, "checkpoint_folder": folder})
    checkpoints, saved = None, None
    if options.checkpoint_folder is not None:
        checkpoints = Checkpoints(options, facts, ranks)
        saved = checkpoints.find()
    ranks.together(lambda: _check_outputs(options, ranks, saved))
    data, steps = ranks.together(lambda: _data(options, ranks))
    options = ranks.together(lambda: options.for_steps(steps))
    learner = ranks.together(lambda: make_learner(options, data, ranks))
    ranks.check_same({"training samples": len(data.train_x), "classes": data.classes})
    learner.broadcast()
    compression = ranks.together(lambda: _compression(options, learner, steps))
    stack.enter_context(ranks.together(lambda: _metrics(options, ranks, compression)))
    learner.distribute(compression)
    if checkpoints is not None and saved is not None:
        checkpoints.restore(learner)
    writer = ranks.together(lambda: _writer(options, ranks, saved))
    run = Run(options, ranks, data, learner, compression, steps, checkpoints, writer, warnings)
    if saved is not None:
        run.continue_from(saved)
    return run


def _checked(options: TrainingOptions, ranks: Ranks) -> TrainingOptions:
    if not ranks.elastic:  # In an elastic job, the launcher's variables give only the number of ranks at the start.
        environment.check_world_size(ranks.size)
    return options.resolved()


def _check_outputs(options: TrainingOptions, ranks: Ranks, saved: dict[str, Any] | None) -> None:
    if options.output is not None and ranks.rank == 0:
        if saved is not None and saved["sizes"] is None:
            raise SetupError(
                "--output cannot be added now: the run in --checkpoint-folder was started without it, so the output "
                "would lack the first steps; leave --output out, or name another --checkpoint-folder"
            )
        # A restart may overwrite output that was written before the first checkpoint.
        overwrite = options.overwrite or ranks.restarts > 0
        outputs.check_output(options.output, overwrite, None if saved is None else saved["sizes"])
    if options.tensorboard:
        outputs.check_tensorboard()


def _data(options: TrainingOptions, ranks: Ranks) -> tuple[DataSet, int]:
    """The data, and the number of steps in an epoch."""
    assert options.batch_size is not None
    data = load_data(options)
    if data.validation is None and not (options.until is None and options.evaluate_every is None):
        raise SetupError(
            "--until and --evaluate-every need the validation part of the data, but the file of this part of --data "
            f"{options.data} is missing in --data-dir {options.data_dir}: add the published file"
        )
    return data, steps_per_epoch(len(data.train_x), ranks.size, options.batch_size, options.backward_passes_per_step)


def _comparable(options: TrainingOptions) -> dict[str, Any]:
    """The options that must be the same on all ranks: all options except paths, which may differ between hosts."""
    places = ("data_dir", "output", "checkpoint_folder")
    return {key: value for key, value in options.as_json().items() if key not in places}


def _compression(options: TrainingOptions, learner: Learner, steps: int) -> Compression:
    return learner.compression(**options.of_compression(), steps_per_epoch=steps)


def _metrics(options: TrainingOptions, ranks: Ranks, compression: Compression) -> AbstractContextManager[object]:
    """Starts the server for Prometheus on rank 0, if the options require it."""
    if options.metrics_port is None or ranks.rank != 0:
        return nullcontext()
    try:
        return hvdcomp.serve_metrics(compression, options.metrics_port, options.metrics_address)
    except ConfigurationError as error:
        raise SetupError(f"--metrics-port {options.metrics_port}: {error}") from None


def _writer(options: TrainingOptions, ranks: Ranks, saved: dict[str, Any] | None) -> outputs.RunWriter | None:
    if options.output is None or ranks.rank != 0:
        return None
    sizes, steps_done = (None, 0) if saved is None else (saved["sizes"], saved["step"])
    return outputs.RunWriter(options.output, options.tensorboard, sizes, steps_done)
