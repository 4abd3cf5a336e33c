"""`Compression`: the object that a user creates and passes to Horovod, DistributedDataParallel or FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from hvdcomp.compressors.bucket import GATHERED_BYTES
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
    """Compresses the gradients of one training run. Pass it as `compression=` to `hvd.DistributedOptimizer`, or pass it
    to `hvdcomp.ddp.register` or `hvdcomp.fsdp.register`.

        compression = hvdcomp.Compression(hvdcomp.Int4())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )

    Args:
        compressor: the compressor, the same on every rank.
        named_parameters: only for PyTorch. The pairs of name and parameter that you pass to Horovod, or a function that
            returns them. Residuals and other state are stored under these names. Default: the names in Horovod's
            optimizer.
        variables: only for TensorFlow. All trained variables, that is, `model.trainable_variables`, or a function that
            returns them. Residuals and other state are stored under the names of the variables. Default: the variables
            of the first step.
        optimizer: only for TensorFlow. The Keras optimizer. The optimizer is needed only if you use gradient tapes
            together with a policy that follows the learning rate.
        memory: the memory. It keeps the part of each gradient that was not sent, for use in later steps. Default:
            `ErrorFeedback()` for biased compressors, and no memory for unbiased compressors and casts. `NoMemory()`
            turns error feedback off.
        policy: a policy that decides when, and how strongly, gradients are compressed, such as `Accordion(low=4,
            high=1)`. Rank 0 decides for all ranks. You can also pass a schedule of levels, such as
            `WarmUp(levels=(0.25, 0.05), epochs=1)`. Default: the compressor's own level in every step.
        steps_per_epoch: number of optimizer steps per epoch, such as `len(loader)`, for policies that count epochs.
        seed: seed of the compressors' random numbers.
        min_numel, min_ndim: a tensor is compressed only if it has at least this number of elements and this number of
            dimensions. All other tensors, such as biases and the weights of norm layers, are sent together,
            uncompressed.
        overlap: only for PyTorch. `True` to compress and send gradients during the backward pass, `False` to do so
            after it, or `"auto"` to do so during the backward pass if possible. The choice changes at most the last
            bits of sums.
        bucket_bytes: smallest size of a bucket, in bytes of gradients. This size is used only with overlap. A smaller
            model is one bucket. Default: the best size according to the calibration of the policy `Auto`. Without this
            policy, the default is 25 MiB, or, on a CUDA device, a quarter of all gradients if this is more.
        gathered_bytes: largest size, in bytes, of the gathered payloads that a rank may have in memory at the same
            time; None for no limit. If the gathered payloads of a step exceed this limit, the ranks exchange them in
            several parts after the backward pass, even with overlap. A single tensor may exceed the limit. The limit
            does not change results.
        process_set: the Horovod process set of the optimizer, if it is not the global one.
        decision_log: file to which rank 0 adds each decision of the policy with its statistics, for `hvdcomp replay`
            and `hvdcomp report`. Default: no file.
        decision_log_bytes: size in bytes at which the decision log continues in a new file.
        decision_log_files: largest number of decision log files to keep. If there are more, the oldest files are
            removed.
        grad_scaler: the `torch.amp.GradScaler` or Keras `LossScaleOptimizer` that you train with, if there is one. If
            its loss scale changes, residuals are rescaled. You can omit this argument if the LossScaleOptimizer
            contains `hvd.DistributedOptimizer`.

    Attributes:
        ledger: bytes, floats and times of each step (`hvdcomp.exchange.ledger`). The ledger is empty if Horovod has
            only one rank.

    Raises:
        ConfigurationError: if both `named_parameters` and `variables` are given; if `named_parameters` are not pairs
            with unique names; if the variables are those of Keras 3, which Horovod does not support; if the optimizer
            or the loss scaler is invalid. Rank 0 also raises this error if the file of the policy cannot be used.
        SpecError: if the compressor, the memory, `overlap` or a number is invalid; or if residuals would grow without
            limit, for example because error feedback is used with an unbiased method of high variance.
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
        gathered_bytes: int | None = GATHERED_BYTES,
        process_set: Any = None,
        grad_scaler: Any = None,
    ) -> None:
        policy = check(compressor, memory, policy, steps_per_epoch)
        self.settings = Settings(
            compressor,
            memory,
            seed,
            min_numel,
            min_ndim,
            policy,
            steps_per_epoch,
            overlap,
            bucket_bytes,
            gathered_bytes,
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
        self._restored: dict[str, Any] | None = None  # the loaded state, until there is a binding that can restore it
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
        """Creates a `Compression` from spec strings, such as those of a command line.

        Args:
            spec: spec of the compressor, such as "topk:ratio=0.01".
            memory: spec of the memory, such as "error_feedback" or "none"; None for the default memory.
            policy: spec of the policy, such as "accordion:low=4,high=1"; None for no policy.
            options: other arguments of `Compression`.

        Raises:
            SpecError: if a name or a value is wrong. The message lists the allowed names or values.
        """
        return cls(
            parse_compressor(spec),
            memory=parse_memory(memory) if isinstance(memory, str) else memory,
            policy=parse_policy(policy) if isinstance(policy, str) else policy,
            **options,
        )

    __repr__ = shown

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigurationError. Horovod iterates over a `Compression` only if the user passed it as
        `named_parameters` by mistake."""
        raise ConfigurationError(
            "hvdcomp.Compression was passed in the position of a list, such as named_parameters. Pass it by name: "
            "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)"
        )

    @property
    def level(self) -> Level | None:
        """The level of the next step: a ratio, a rank or a number of bits. None if the compressor has no level, or if a
        schedule or a policy sends tensors uncompressed or at different levels (see `levels`)."""
        if self._binding is not None:
            return self._binding.level
        return self.settings.compressor.level if self._level is None else self._level

    @property
    def plan(self) -> Plan:
        """The compressor of each tensor in the latest step, by name; empty before the first gradient."""
        return {} if self._binding is None else self._binding.engine.plan

    @property
    def levels(self) -> dict[str, Level]:
        """The level of each tensor in the latest step, by name, without the tensors that are sent uncompressed."""
        return {name: compressor.level for name, compressor in self.plan.items() if compressor.level is not None}

    def metrics(self) -> dict[str, float]:
        """The costs of the latest step on this rank, for experiment trackers. Before the first step, the result is
        empty. This method never waits for the device.

            wandb.log(compression.metrics(), step=step)

        Returns:
            The metrics, by name. Each name begins with "hvdcomp/". The values from the ledger are `bytes_sent`,
            `bytes_in_node`, `dense_bytes`, `compression_factor`, `encode_seconds`, `communicate_seconds` and
            `decode_seconds`. The mean level of the tensors that have a level is `mean_ratio`, `mean_rank` or
            `mean_bits`. Unknown values are omitted.
        """
        return metrics_of(self.ledger, self.plan)

    def set_level(self, level: Level) -> None:
        """Sets the level (a ratio, a rank or a number of bits) of all compressed tensors from the next step on. Call
        this method on every rank between the same two steps.

        Raises:
            SpecError: if the compressor has no level or does not allow this level, if residuals would grow without
                limit, or if a policy sets the levels.
        """
        if self.settings.policy is not None:
            raise SpecError(
                f"the policy {self.settings.policy} sets the levels, so set_level cannot set them; do not call "
                "set_level, or leave out the policy"
            )
        require_bounded_residuals(self.settings.compressor.at_level(level), self.settings.memory)
        self._level = level
        if self._binding is not None:
            self._binding.set_level(level)

    @property
    def accumulation(self) -> int:
        """The batch size of the next step divided by the batch size at the start; 1 unless a policy changes the batch
        size.

        With such a policy, read this factor on every rank before each step. Make `accumulation` times the usual number
        of backward passes, and divide each loss by `accumulation`. hvdcomp adapts Horovod's `backward_passes_per_step`
        and the learning rate.
        """
        return 1 if self._binding is None else self._binding.accumulation

    def paused(self) -> AbstractContextManager[None]:
        """A context manager for work between two steps, such as an evaluation.

        The measured times of steps do not include the time of this work. Some policies, such as GraVAC and Auto, base
        their decisions on these times.
        """
        coordinator = None if self._binding is None else self._binding.coordinator
        return nullcontext() if coordinator is None else coordinator.clock.paused()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the compression, for a checkpoint. Call this method between two steps.

        The policy, the levels and the warm starts are the same on all ranks, but the residuals are not. Every rank must
        therefore save the state, with `torch.save` to its own file or with `hvdcomp.dcp`.
        """
        return (self._restored or {}) if self._binding is None else self._binding.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Any = None) -> None:
        """Restores a state that `state_dict` returned. Call this method on every rank, before the first step.

        Either each rank loads the state that it saved, or all ranks load the state of rank 0. If all ranks load the
        state of rank 0, or the number of ranks has changed, residuals start at zero, with a warning.

        Args:
            state: the state that `state_dict` returned.
            optimizer: the optimizer from hvd.DistributedOptimizer. The optimizer is needed if a policy changes the
                batch size. If you pass the optimizer, a state that does not fit raises its error in this call instead
                of in the first step.

        Raises:
            ConfigurationError: if the state is damaged, or comes from another model, compressor or policy; or if a step
                has already been made.
        """
        if self._binding is not None and self._binding.has_begun:
            raise ConfigurationError("load_state_dict was called after the first step; call it before the first step")
        self._restored = restored = checked(state)
        if restored and self._binding is not None:
            self._binding.load_state_dict(restored)
        elif restored and not self._bind(optimizer) and changes_batch_size(self.settings.policy):
            raise ConfigurationError(
                f"the policy {self.settings.policy} changes the batch size, so load_state_dict needs the optimizer "
                "too. Pass the optimizer that hvd.DistributedOptimizer returned: compression.load_state_dict(state, "
                "optimizer=optimizer)"
            )

    # Methods for elastic Horovod, whose ranks change during a training run.

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned earlier in this training run. Call this method on every rank.

        `hvd.elastic.TorchState(..., compression=compression)` calls this method after a failure. In the next step, as
        in the first step of a training run, all ranks wait for each other and continue from rank 0's shared state.
        """
        if self._binding is None:
            self._restored = dict(state) or None
        else:
            self._binding.roll_back(state)

    def meet_ranks_early(self, optimizer: Any = None) -> None:
        """Synchronizes the state of all ranks before the first step, for training loops that read `accumulation` before
        their first step. Call this method on every rank.

        Args:
            optimizer: the optimizer from hvd.DistributedOptimizer; None if it is unknown.

        Raises:
            ConfigurationError: if the optimizer is needed and unknown, or if the states of the ranks do not fit
                together.
        """
        if not changes_batch_size(self.settings.policy):
            return
        if self._binding is None:
            optimizer = self._optimizer if optimizer is None else optimizer
            if optimizer is None or not self._bind(optimizer):
                raise ConfigurationError(
                    f"the policy {self.settings.policy} changes the batch size, so the elastic state needs the "
                    "optimizer too: hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
                )
        elif self._binding.is_stale:
            self._binding.follow_ranks()
        self._binding.agree_with_new_ranks()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes of a copy of this object, for the modules `copy` and `pickle`. A copy is used for
        another model, so the copy does not contain the parameters of this model.

        Raises:
            ConfigurationError: if a training run already uses this `Compression`, because the copy would send the same
                residuals again.
        """
        if self._binding is not None:
            raise ConfigurationError(
                "this hvdcomp.Compression is already used by a training run, so it can no longer be copied or pickled. "
                "Copy the Compression before the first step, or make a new Compression and load the state_dict() of "
                "the used Compression. To keep a Compression in an elastic state of Horovod, use hvdcomp.track"
            )
        return self.__dict__ | {"_parameters": None}

    def __hash__(self) -> int:
        for framework in frameworks.named_or_all(self._framework).values():
            framework.check_wrapping()
        return object.__hash__(self)

    @HorovodMethod
    @frameworks.not_compiled
    @frameworks.left_as_written
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Horovod calls this method for each gradient that is ready. It returns the tensor that Horovod allreduces, and
        a context for `decompress`."""
        if self._binding is None:
            self._framework = frameworks.of_gradient(tensor, self._framework)
            self.serve(frameworks.maker(self._framework, tensor), self._optimizer)
        return self._binding.compress(tensor)

    @HorovodMethod
    @frameworks.not_compiled
    @frameworks.left_as_written
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Horovod calls this method for each gradient, after `compress` was called for all gradients. It returns the
        mean gradient."""
        return tensor if ctx is None else self._binding.decompress(tensor, ctx)

    def serve(self, make_binding: Callable[[Setup], Any], optimizer: Any = None) -> Any:
        """Creates and returns the binding, which connects this `Compression` to a training run.

        Args:
            make_binding: function that creates the binding.
            optimizer: the optimizer whose gradients are compressed; None if the binding finds it itself.

        Raises:
            ConfigurationError: if this `Compression` already has a binding.
        """
        if self._binding is not None:
            raise ConfigurationError(
                "this hvdcomp.Compression is already used by a training run; make a separate Compression for each model"
            )
        binding = make_binding(Setup(self, self._parameters, self._process_set, self._grad_scaler, optimizer))
        # The binding is kept even if loading a state fails below, because the framework keeps the hooks of the binding.
        self._binding = binding
        restored, self._restored = self._restored, None
        if restored is not None:
            binding.begin_from(restored)
        if self._level is not None:
            binding.set_level(self._level)
        return binding

    def _bind(self, optimizer: Any) -> bool:
        """Creates the binding before the first gradient if this is possible. Returns whether it was possible.

        Args:
            optimizer: the optimizer from hvd.DistributedOptimizer; None if it is unknown.
        """
        if self._framework is None and optimizer is not None:
            self._framework = frameworks.of_optimizer(optimizer)
        if not self._framework or not frameworks.framework_named(self._framework).can_bind(self._parameters, optimizer):
            return False
        self.serve(frameworks.maker(self._framework), self._optimizer if optimizer is None else optimizer)
        return True
