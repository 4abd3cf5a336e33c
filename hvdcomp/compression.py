"""`Compression`: the one object that a user makes and gives to Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hvdcomp.adaptation.decision_log import FILE_BYTES, FILES, log_files
from hvdcomp.bindings import frameworks
from hvdcomp.bindings.decisions import check_files
from hvdcomp.bindings.metrics import metrics_of, shown
from hvdcomp.bindings.setup import Setup
from hvdcomp.bindings.state_check import checked
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.base import HorovodMethod
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL, Plan
from hvdcomp.compressors.contraction import require_bounded_residuals
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.exchange.ledger import Ledger
from hvdcomp.policies import LevelSchedule, Policy, changes_batch_size, parse_policy
from hvdcomp.settings import Settings, check
from hvdcomp.specs.levels import Level


class Compression:
    """Goes into `compression=` of `hvd.DistributedOptimizer`.

        compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )

    Args:
        compressor: how to compress, the same on every rank.
        named_parameters: PyTorch: as given to Horovod, pairs of name and parameter, or a function that returns them.
            State is kept by these names. Default: those of Horovod's optimizer.
        variables: TensorFlow: all that are trained, `model.trainable_variables`, or a function that returns them. State
            is kept by their names. Default: those of the first step.
        optimizer: TensorFlow: the Keras optimizer, for policies that follow its learning rate; needed with tapes only.
        memory: what to do with what was not sent. Default: `ErrorFeedback()` for biased compressors, nothing for
            unbiased ones and casts. `NoMemory()` turns error feedback off.
        policy: when, and how hard, to compress, such as `Accordion(low=4, high=1)`; with it rank 0 decides for all. Or
            a schedule of levels, such as `WarmUp(levels=(0.25, 0.05), epochs=1)`. Default: the compressor's own level
            throughout.
        steps_per_epoch: optimizer steps per epoch, `len(loader)`, for policies that count epochs.
        seed: of the random choices of compressors.
        min_numel, min_ndim: tensors with fewer elements or dimensions (biases, norm layers) are sent dense, fused.
        overlap: PyTorch: whether gradients are compressed and sent while the backward pass makes others (`True`), or at
            its end (`False`); `"auto"`: early, if possible and on the CPU. It changes no more than last bits of sums.
        bucket_bytes: of gradients, the least that is sent by itself, with overlap. Smaller models are sent at once.
            Default: what the calibration of the policy `Auto` finds best, or else 25 MiB.
        process_set: the Horovod process set of the optimizer, if it is not the global one.
        decision_log: a file to which rank 0 adds each decision of the policy, with the statistics that it was made
            from, for `hvdcomp replay` and `hvdcomp report`. Default: none.
        decision_log_bytes, decision_log_files: the size from which on the log goes on in a new file, and how many stay.
        grad_scaler: the `torch.amp.GradScaler` or Keras `LossScaleOptimizer` in use, if any; when it changes the loss
            scale, residuals follow. `hvd.DistributedOptimizer` in a LossScaleOptimizer finds it by itself.

    Attributes:
        ledger: bytes, floats and times of each step (`hvdcomp.exchange.ledger`). With one rank of Horovod it is empty.

    Raises:
        ConfigurationError: with both `named_parameters` and `variables`, if the first are not unique pairs, or for
            variables of Keras 3, with which Horovod does not work; for an optimizer or a scaler that is none. On rank
            0, if a file of the policy cannot be used.
        SpecError: for a compressor, a memory, an overlap or a number that is none, or if the first two would let
            residuals grow without end (error feedback of unbiased methods of high variance).
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        named_parameters: Iterable[tuple[str, Any]] | Callable[[], Iterable[tuple[str, Any]]] | None = None,
        variables: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        optimizer: Any = None,
        memory: Memory | None = None,
        policy: LevelSchedule | Policy[Any] | None = None,
        steps_per_epoch: int | None = None,
        decision_log: str | Path | None = None,
        decision_log_bytes: int = FILE_BYTES,
        decision_log_files: int = FILES,
        seed: int = 0,
        min_numel: int = MIN_NUMEL,
        min_ndim: int = MIN_NDIM,
        overlap: bool | str = "auto",
        bucket_bytes: int | None = None,
        process_set: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        policy = check(compressor, memory, policy, steps_per_epoch)
        self.settings = Settings(
            compressor, memory, seed, min_numel, min_ndim, policy, steps_per_epoch, overlap, bucket_bytes
        )
        self.ledger = Ledger()
        self.decision_log = log_files(decision_log, decision_log_bytes, decision_log_files, policy)
        check_files(policy, self.decision_log, process_set)
        self._framework, self._parameters = frameworks.of_arguments(
            {"named_parameters": named_parameters, "variables": variables}, optimizer, grad_scaler
        )
        for framework in frameworks.named_or_all(self._framework).values():
            framework.prepare(type(self))
        self._optimizer = optimizer
        self._process_set = process_set
        self._grad_scaler = grad_scaler
        self._level: Level | None = None
        self._restored: dict[str, Any] | None = None  # to be put into the binding
        self._binding: Any = None

    @classmethod
    def from_spec(
        cls,
        spec: str,
        *,
        memory: str | Memory | None = None,
        policy: str | LevelSchedule | Policy[Any] | None = None,
        **options: Any,
    ) -> Compression:
        """Makes one from spec strings, as a command line gives them.

        Args:
            spec: of the compressor, such as "topk:ratio=0.01".
            memory: of the memory ("error_feedback", "none"), or None for the default.
            policy: of the policy ("accordion:low=4,high=1"), or None for none.
            options: as for `Compression`.

        Raises:
            SpecError: for a wrong name or value; lists what exists.
        """
        return cls(
            parse_compressor(spec),
            memory=parse_memory(memory) if isinstance(memory, str) else memory,
            policy=parse_policy(policy) if isinstance(policy, str) else policy,
            **options,
        )

    __repr__ = shown

    @property
    def level(self) -> Level | None:
        """The level in force from the next step on; None for a compressor without one."""
        return self.settings.compressor.level if self._level is None else self._level

    @property
    def plan(self) -> Plan:
        """The compressor of each tensor in the latest step, by name; empty before the first gradient."""
        return {} if self._binding is None else self._binding.engine.plan

    @property
    def levels(self) -> dict[str, Level]:
        """The level of each tensor in the latest step, by name; without those that are sent dense."""
        return {name: compressor.level for name, compressor in self.plan.items() if compressor.level is not None}

    def metrics(self) -> dict[str, float]:
        """Costs of the latest step on this rank, for experiment trackers; empty before the first step. It never waits.

            wandb.log(compression.metrics(), step=step)

        Returns:
            Each after "hvdcomp/": `bytes_sent`, `bytes_in_node`, `dense_bytes`, `compression_factor`, `encode_seconds`,
            `communicate_seconds` and `decode_seconds` as the ledger has them, and the mean over the tensors that have a
            level: `mean_ratio`, `mean_rank` or `mean_bits`. What is not known, or means nothing, is left out.
        """
        return metrics_of(self.ledger, self.plan)

    def set_level(self, level: Level) -> None:
        """Sets the level (ratio, rank) of all compressed tensors from the next step on; to be called on every rank
        between the same two steps.

        Raises:
            SpecError: if the compressor has no level, or not this one, if residuals would grow without end at it, or
                if a policy sets the levels.
        """
        if self.settings.policy is not None:
            raise SpecError(f"the policy {self.settings.policy} sets the levels; leave them to it, or give no policy")
        require_bounded_residuals(self.settings.compressor.at_level(level), self.settings.memory)
        self._level = level
        if self._binding is not None:
            self._binding.engine.set_level(level)

    @property
    def accumulation(self) -> int:
        """By how much the batch of the next step is larger than at the start: 1 without a policy of the batch size.

        With such a policy every rank reads it before each step, makes this number of times the usual backward passes,
        and divides their losses by it. Horovod's `backward_passes_per_step` and the learning rate follow.
        """
        return 1 if self._binding is None else self._binding.accumulation

    def paused(self) -> AbstractContextManager[None]:
        """A context for work between two steps, such as evaluation: its time counts for no step.

        Some policies (GraVAC, Auto) decide by the time that steps take.
        """
        coordinator = None if self._binding is None else self._binding.coordinator
        return nullcontext() if coordinator is None else coordinator.clock.paused()

    def state_dict(self) -> dict[str, Any]:
        """All that later steps need of earlier ones, for a checkpoint between two steps.

        It holds the policy, levels and warm starts, which are the same on all ranks, and residuals, which are not: to
        lose nothing, save it on every rank, with `torch.save` to a file of its own, or through `hvdcomp.dcp`.
        """
        return (self._restored or {}) if self._binding is None else self._binding.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Any = None) -> None:
        """Goes on from what `state_dict` returned, before the first step; to be called on every rank.

        Each rank gives what it saved itself, or every rank what rank 0 saved. In the second case, and on another
        number of ranks than before, residuals start at zero, with a warning.

        Args:
            optimizer: what hvd.DistributedOptimizer returned; needed by a policy that changes the batch size, and to
                have errors at once instead of in the first step.

        Raises:
            ConfigurationError: if the state is damaged, or of another model, compressor or policy; or after a step.
        """
        if self._binding is not None and self._binding.has_begun:
            raise ConfigurationError("load_state_dict has to be called before the first step")
        self._restored = restored = checked(state)
        if restored and self._binding is not None:
            self._binding.load_state_dict(restored)
        elif restored and not self._bind(optimizer) and changes_batch_size(self.settings.policy):
            raise ConfigurationError(
                f"the policy {self.settings.policy} changes the batch size: give load_state_dict the optimizer too, "
                "compression.load_state_dict(state, optimizer=optimizer) with what hvd.DistributedOptimizer returned"
            )

    # What elastic Horovod asks for, whose ranks change while a training runs.

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned at an earlier time; to be called on every rank.

        `hvd.elastic.TorchState(..., compression=compression)` calls it after a failure. The next step is then as the
        first of a training: all ranks wait for each other, and have of what they share what rank 0 has.
        """
        if self._binding is None:
            self._restored = dict(state) or None
        else:
            self._binding.roll_back(state)

    def meet_ranks_early(self, optimizer: Any = None) -> None:
        """Makes all ranks agree now, if the first step would be too late: a training loop reads `accumulation` before
        it. To be called on every rank.

        Args:
            optimizer: what hvd.DistributedOptimizer returned, if that is known.

        Raises:
            ConfigurationError: if the optimizer is needed and not known, or the ranks cannot go on together.
        """
        if not changes_batch_size(self.settings.policy):
            return
        if self._binding is None:
            optimizer = self._optimizer if optimizer is None else optimizer
            if optimizer is None or not self._bind(optimizer):
                raise ConfigurationError(
                    f"the policy {self.settings.policy} changes the batch size: give the elastic state the optimizer "
                    "too, hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
                )
        elif self._binding.is_stale:
            self._binding.follow_ranks()
        self._binding.meet_elastic_ranks()

    def __getstate__(self) -> dict[str, Any]:
        """For copies. A copy serves another model, so it takes the names of parameters from Horovod's optimizer.

        Raises:
            ConfigurationError: after the first step, because two copies could not both send what was left to be sent.
        """
        if self._binding is not None:
            raise ConfigurationError(
                "this hvdcomp.Compression is at work in a training, and cannot be copied or pickled any more: do so "
                "before the first step, or make a new one from state_dict(). For elastic states there is hvdcomp.track"
            )
        return self.__dict__ | {"_parameters": None}

    def __hash__(self) -> int:
        for framework in frameworks.named_or_all(self._framework).values():
            framework.check_wrapping()
        return object.__hash__(self)

    @HorovodMethod
    @frameworks.left_as_written
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod for each gradient that is ready; returns what Horovod itself is to allreduce."""
        if self._binding is None:
            self._framework = frameworks.of_gradient(tensor, self._framework)
            self.serve(frameworks.maker(self._framework, tensor), self._optimizer)
        return self._binding.compress(tensor)

    @HorovodMethod
    @frameworks.left_as_written
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod for each gradient after all were compressed; returns the aggregated gradient."""
        return tensor if ctx is None else self._binding.decompress(tensor, ctx)

    def serve(self, make_binding: Callable[[Setup], Any], optimizer: Any = None) -> Any:
        """Ties this to one training, and returns its binding. Raises ConfigurationError if it serves one already."""
        if self._binding is not None:
            raise ConfigurationError("this hvdcomp.Compression serves a training already; make one for each model")
        binding = make_binding(Setup(self, self._parameters, self._process_set, self._grad_scaler, optimizer))
        restored, self._restored = self._restored, None  # once: if it is refused, there is none any more
        if restored is not None:
            binding.load_state_dict(restored)
        if self._level is not None:
            binding.engine.set_level(self._level)
        self._binding = binding
        return binding

    def _bind(self, optimizer: Any) -> bool:
        """Makes the binding before the first gradient, if what is known is enough for it; says whether it did.

        Args:
            optimizer: as for `load_state_dict`.
        """
        if self._framework is None and optimizer is not None:
            self._framework = frameworks.of_optimizer(optimizer)
        if not self._framework or not frameworks.framework_named(self._framework).can_bind(self._parameters, optimizer):
            return False
        self.serve(frameworks.maker(self._framework), self._optimizer if optimizer is None else optimizer)
        return True
