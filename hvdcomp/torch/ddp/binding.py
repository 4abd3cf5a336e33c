"""The binding of `torch.nn.parallel.DistributedDataParallel` (DDP). The binding is a communication hook of DDP.

When all gradients of a DDP bucket are ready, DDP calls the hook with the DDP bucket, and gets a future. The order of
the DDP buckets is the same on all ranks. A step ends when DDP has passed the gradients of all trained parameters to the
hook. DDP also marks one DDP bucket as the last, but this mark is not reliable: in the first pass of a static graph, DDP
marks every DDP bucket as the first and none as the last. There are two kinds of steps, and all ranks choose the same
kind:

- cast: the plan only casts all gradients to one element type, and the policy does not decide or measure anything in
  this step. Each DDP bucket is allreduced in place during the backward pass.
- engine: the engine gets the gradients, and may start collectives during the backward pass. When the hook is called
  with the last DDP bucket, the engine finishes the step, and all futures get their results.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcomp.bindings.frameworks import not_compiled
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.torch_distributed import UNNAMED, TorchDistributedCommunicator
from hvdcomp.compressors.bucket import LEAST_BYTES
from hvdcomp.compressors.choice import Plan
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.torch import half_precision
from hvdcomp.torch.ddp.group_beside import GroupBeside
from hvdcomp.torch.ddp.uses import UsedParameters
from hvdcomp.torch.optimizers.compressed_adam import CompressedAdam
from hvdcomp.torch.parameters import by_name, plain_names, unique
from hvdcomp.torch.presence import PresenceCheck
from hvdcomp.torch.training import WITHOUT_HOROVOD, TorchTraining
from hvdcomp.torch.unaveraged import Unaveraged

_DRIFTING = (
    "DistributedDataParallel does not average the gradients of {}, so the ranks' weights would become different. These "
    "parameters were frozen, or not in the model or the optimizer yet, when DistributedDataParallel was made. Put the "
    "model in DistributedDataParallel while all its parameters need gradients, and freeze parameters after that (with "
    "find_unused_parameters=True). Or delete this DistributedDataParallel and its hvdcomp.Compression (del them, then "
    "gc.collect(), to remove their hooks), and make new ones of model.module."
)


class _DDPBucket(NamedTuple):
    """A DDP bucket of the current step, with its gradients.

    Attributes:
        names: names of the parameters in the DDP bucket.
        buffer: the storage of the DDP bucket's gradients, and later of their means.
        gradients: the gradients as views of the buffer, by name; empty if the gradient is sparse.
        future: the future that DDP waits for. The value of the future is the means.
        whole: whether the bucket is allreduced in place.
    """

    names: Sequence[str]
    buffer: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    future: torch.futures.Future[torch.Tensor]
    whole: bool


class DDPBinding(TorchTraining):
    """Ties one `Compression` to one model in DistributedDataParallel.

    Args:
        setup: the `Compression`, and what the user passed to it. `setup.optimizer` is the optimizer of the model; None
            if unknown.
        model: the model that is wrapped in DDP. The binding has only a weak reference to the model, because DDP has a
            reference to the binding.
    """

    overlaps_with_policy = True
    early_bytes = LEAST_BYTES  # small buckets suffice, because DDP has already joined gradients
    broadcast = "DistributedDataParallel(..., init_sync=True)"
    optimizer_from = "hvdcomp.ddp.register(model, compression, optimizer=optimizer)"
    averaged_by = "DistributedDataParallel"
    absence = WITHOUT_HOROVOD

    def __init__(self, setup: Setup, model: DistributedDataParallel) -> None:
        self._of_model = communicator = TorchDistributedCommunicator(model.process_group)
        trained = _trained(model)
        # torch.distributed matches collectives by their order. On the host, a rank starts the engine's collectives as
        # soon as it knows that all ranks make the step, which may be at a different time on each rank. So the engine
        # has its own process group. All ranks start the presence check and the all-reduces of whole DDP buckets at the
        # same point, so these collectives use the model's process group. If a rank does not make the step, its next
        # collective in the model's process group is matched with one of these collectives. On a device, all collectives
        # use the model's process group. On a device, the presence check also waits for its result instead of polling,
        # so that all ranks start a bucket between the same two collectives. Waiting costs little, because the device is
        # still busy.
        on_device = any(parameter.is_cuda for parameter in trained.values())
        self._beside = None if on_device else GroupBeside.of(communicator, self)
        if self._beside is not None:
            communicator = self._beside.ranks
        with refused_on_every_rank(communicator, torch.empty(0)):
            _check(setup, model)
            parameters = trained if setup.parameters is None else _by_users_names(setup, trained)
            names = unique(
                model.module.named_parameters() if setup.parameters is None else _named_parameters(setup).items()
            )
            finds_unused = model.find_unused_parameters and not model.static_graph
            self._presence_check = PresenceCheck(self._of_model, waits=on_device)
            self.overlaps = not finds_unused
            super().__init__(setup, parameters, communicator, setup.optimizer, names)
            self._unaveraged = Unaveraged(model, trained.values(), _ignored(model), setup.optimizer, _DRIFTING)
            self._register(model)
        self._model = weakref.ref(model)
        self._model_settings = {
            "find_unused_parameters": model.find_unused_parameters,
            "static_graph": model.static_graph,
        }
        # Used parameters are recorded only for a model that may leave parameters unused in a step.
        self._uses = UsedParameters(model, parameters) if any(self._model_settings.values()) else None
        self._unused: Set[str] = frozenset()  # parameters without gradients in a static graph
        self._flag_bytes = 0  # bytes of the flags that mark the parameters used in the current step
        # The key is the identity of a parameter, because hashing a tensor calls a Python function.
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._wire: torch.dtype | None = None  # the element type of a step that only casts
        # the latest plan, and the element type to which it casts
        self._wire_of: tuple[Plan | None, torch.dtype | None] = (None, None)
        self._checks_presence = True
        # tensors of the step whose DDP buckets DDP has not passed to the hook yet; empty between two steps
        self._awaited: set[str] = set()
        self._kept: set[str] | None = None  # tensors of a step that has no exchange; None in other steps
        self._step: list[_DDPBucket] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._batches: list[Sequence[str]] = []  # the names of the tensors in each DDP bucket of the latest step
        self.engine.overlap.follow([], self.early_bytes)

    def _register(self, model: DistributedDataParallel) -> None:
        try:
            model.register_comm_hook(self, compressed_hook)
        except RuntimeError as error:
            raise ConfigurationError(
                f"DistributedDataParallel accepts only one communication hook, and refuses hvdcomp's: {error}. Do not "
                "register another hook, and do not use an optimizer that steps in the backward pass"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None. A copied or pickled model in DDP keeps the state of the hook, but not the hook, so DDP
        averages the gradients of the copy without compression."""
        return type(None), ()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Receives a DDP bucket whose gradients are ready.

        Returns:
            A future of the means. The means are in the storage of the DDP bucket.
        """
        names = list(map(self._names.__getitem__, map(id, bucket.parameters())))
        if self._awaited.isdisjoint(names):
            self._kept = None if self.exchanges else set()
            if self._kept is None:
                self.begin()
            self._awaited = set(self._names.values())
        self._awaited.difference_update(names)
        buffer = bucket.buffer()
        if self._kept is not None:
            return self._keep(buffer, self._kept | set(names))
        gradients = {} if buffer.is_sparse else dict(zip(names, bucket.gradients(), strict=True))
        whole = self._wire is not None or buffer.is_sparse
        if whole:
            self.observe("local", gradients)  # this must happen before the means overwrite the gradients
            if buffer.is_sparse:
                self.engine.count_elsewhere(names[0], _sparse_bytes(buffer))
        future = self._reduce_whole(buffer) if whole else _future(buffer)
        self._step.append(_DDPBucket(names, buffer, gradients, future, whole))
        if not whole:
            used = {name: gradients[name] for name in names if name not in self._unused} if self._unused else gradients
            self._pending.update(used)
            if self._uses is None:  # otherwise `_end` does this, because a gradient that no rank has must not change
                self.add_momenta(used)
                self.engine.overlap.ready(used)
        if not self._awaited:
            self._end()
            if self._beside is not None:
                self._beside.under_way = False
        return future

    def _keep(self, buffer: torch.Tensor, names: set[str]) -> torch.futures.Future[torch.Tensor]:
        """Returns this rank's own gradients without an exchange. `names` are the names of all tensors that DDP has
        passed to the hook in this step so far."""
        self._kept = names
        if not self._awaited:
            self.engine.enter_alone(names)
        future = _future(buffer)
        future.set_result(buffer)
        return future

    def begin(self) -> None:
        """Begins a step like `Binding.begin`, and chooses between casts and the engine."""
        self._step.clear()
        self._pending.clear()
        if self._beside is not None:
            self._beside.under_way = True
        super().begin()
        self._wire = self._wire_of_plan() if self.engine.passthrough and not self.needs_engine else None
        # If all steps of a training run only cast, no presence check is needed. It would only add latency.
        self._checks_presence = self._wire is None or self.plan_may_change
        if self._checks_presence:
            self._presence_check.start(self.presence, UNNAMED)
        if self._wire is None:
            self.expect(self._presence_check.agrees)

    def _wire_of_plan(self) -> torch.dtype | None:
        """The element type to which all gradients are cast; None if their types differ, or gradients are compressed."""
        plan = self.engine.plan
        if self._wire_of[0] is not plan:
            wires = {compressor.wire_dtype(self.engine.tensors[name].dtype) for name, compressor in plan.items()}
            self._wire_of = plan, getattr(torch, wires.pop() or "") if len(wires) == 1 else None
        return self._wire_of[1]

    def _reduce_whole(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Starts the allreduce of a DDP bucket, which is first cast if the plan requires it."""
        if buffer.is_sparse or self._wire in (None, buffer.dtype):
            # The buffer is divided before the sum, as in DDP without a hook, so that the means are the same bit for
            # bit.
            mean = buffer.div_(self.communicator.world_size)
            started = self._of_model.start_allreduce(mean, "sum", UNNAMED)
            return started.work.get_future().then(lambda _: mean)
        # Here, the sum is divided after the all-reduce, as in the engine and in Horovod. A division before the sum
        # would lose bits of small numbers on every rank.
        started = self._of_model.start_allreduce(half_precision.narrow(buffer, self._wire), "mean", UNNAMED)
        return started.work.get_future().then(lambda _: half_precision.widen(started.finish(started.result), buffer))

    @torch.no_grad()
    def _end(self) -> None:
        """Ends a step. The method is called in the hook of the last DDP bucket."""
        if self._checks_presence:
            self.check_presence(self._presence_check.end())
        self.refuse()
        self._flag_bytes = 0
        if self._wire is not None:
            self._end_casts()
            return
        pending, self._pending = self._pending, {}
        if self._uses is not None:
            pending = self._used(pending, self._uses)
            self.add_momenta(pending)
        self.run_in_place(pending)
        for bucket in self._step:
            if not bucket.whole:
                bucket.future.set_result(bucket.buffer)
        self._follow_ddp_buckets()

    def _end_casts(self) -> None:
        if self.coordinator is not None:
            # The coordinator needs the time at which the step ends, and the policy may need the means. DDP would wait
            # at this point anyway.
            for bucket in self._step:
                bucket.future.wait()
            for bucket in self._step:
                self.observe("aggregated", bucket.gradients)
        if self._uses is not None:
            self._uses.names.clear()
        dense = {name for bucket in self._step if bucket.gradients for name in bucket.names}
        self.engine.enter_casts(dense, self._checks_presence)
        self.end_step()

    def presence_bytes(self, tensors: int) -> int:
        return super().presence_bytes(tensors) + self._flag_bytes

    def _used(self, gradients: Mapping[str, torch.Tensor], uses: UsedParameters) -> dict[str, torch.Tensor]:
        """The gradients that at least one rank has. For all other parameters, DDP passes zeros and ignores the
        results."""
        flags = torch.tensor([name in uses.names for name in gradients], dtype=torch.int32)
        uses.names.clear()
        self._flag_bytes = flags.nbytes
        anywhere = self.communicator.wait(self.communicator.start_allreduce(flags, "max", UNNAMED)).tolist()
        used = {name: gradients[name] for name, flag in zip(gradients, anywhere, strict=True) if flag}
        if self._model_settings["static_graph"]:  # the used parameters are the same in every step
            uses.stop()
            self._uses = None
            self._unused = gradients.keys() - used.keys()
        return used

    def _follow_ddp_buckets(self) -> None:
        """Makes the engine use DDP's buckets, which change after DDP's first step. Tensors of the last DDP bucket are
        sent at the end of the step."""
        batches = [bucket.names for bucket in self._step]
        if batches != self._batches:
            self._batches = batches
            self.engine.overlap.follow(batches[:-1], self.early_bytes)

    # Methods of `Training`.

    def facts(self) -> dict[str, Any]:
        return self._model_settings

    def trained(self) -> Set[str]:
        return frozenset(self._names.values())

    def reason_to_refuse(self) -> str | None:
        model = self._model()
        if model is not None and model._join_config.enable:
            return (
                "model.join() does not work with gradient compression, because a rank without batches would continue "
                "to send its residuals. Give every rank the same number of batches, as "
                "torch.utils.data.DistributedSampler does."
            )
        return self._unaveraged.reason_to_refuse()


@not_compiled
def compressed_hook(binding, bucket):
    """The hook that DDP calls. The hook has no annotations, because annotations are strings in this file, and DDP would
    compare them with types."""
    return binding.reduce(bucket)


def _check(setup: Setup, model: DistributedDataParallel) -> None:
    if setup.process_set is not None:
        raise ConfigurationError(
            "process_set works only with Horovod; pass process_group to DistributedDataParallel instead: hvdcomp uses "
            "the same process group"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ConfigurationError(
            "DistributedDataParallel(mixed_precision=...) converts gradients before hvdcomp receives them; leave "
            "mixed_precision out, and use torch.autocast, or the compressor fp16 or bf16"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigurationError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) skips buckets, but hvdcomp needs the last "
            "bucket to end a step. Leave skip_all_reduce_unused_params out, and use find_unused_parameters=True: then "
            "hvdcomp sends nothing for parameters that no rank uses"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigurationError(
            'torch._dynamo.config.optimize_ddp="python_reducer" passes gradients to hvdcomp one at a time inside '
            'compiled code, where hvdcomp cannot exchange gradients; leave optimize_ddp at "ddp_optimizer" when you '
            "make the DistributedDataParallel"
        )
    trained = _trained(model).items()
    stepping = [name for name, parameter in trained if hasattr(parameter, "_in_backward_optimizers")]
    if stepping:
        raise ConfigurationError(
            f"_apply_optimizer_in_backward updates {', '.join(stepping)} in the backward pass, before their gradients "
            "are exchanged; call optimizer.step() after the backward pass instead"
        )
    steps_alone = isinstance(setup.optimizer, CompressedAdam) and setup.optimizer.local_steps > 1
    if steps_alone and model.find_unused_parameters and not model.static_graph:
        raise ConfigurationError(
            f"CompressedAdam: local_steps={setup.optimizer.local_steps} does not work with "
            "find_unused_parameters=True: a parameter that was used since the latest exchange, but not in the step of "
            "the next exchange, would not be exchanged. Leave out one of the two, or use DistributedDataParallel(..., "
            "static_graph=True)"
        )
    settings = setup.compression.settings
    if settings.bucket_bytes is not None:
        raise ConfigurationError(
            f"bucket_bytes={settings.bucket_bytes} has no effect with DistributedDataParallel, because hvdcomp uses "
            "the buckets of DistributedDataParallel; pass bucket_cap_mb to DistributedDataParallel instead"
        )
    if settings.overlap is True and model.find_unused_parameters and not model.static_graph:
        raise ConfigurationError(
            "overlap=True does not work with find_unused_parameters=True, because only the end of the backward pass "
            'shows which parameters have gradients; leave overlap at "auto", or use DistributedDataParallel(..., '
            "static_graph=True)"
        )


def _trained(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients DDP averages, by their names in DDP's module."""
    ignored = model.parameters_to_ignore
    named = dict(model.module.named_parameters())
    return {
        plain: parameter
        for plain, (name, parameter) in zip(plain_names(named), named.items(), strict=True)
        if parameter.requires_grad and name not in ignored
    }


def _ignored(model: DistributedDataParallel) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters of the model that DDP ignores."""
    for name, parameter in model.module.named_parameters():
        if name in model.parameters_to_ignore:
            yield parameter


def _by_users_names(setup: Setup, trained: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """The parameters, by the names that the user gave."""
    named = _named_parameters(setup)
    names = {parameter: name for name, parameter in named.items()}
    missing = [name for name, parameter in trained.items() if parameter not in names]
    if missing:
        raise ConfigurationError(
            f"the argument named_parameters of hvdcomp.Compression lacks {', '.join(missing)}, which "
            "DistributedDataParallel trains; leave named_parameters out, or give all parameters of the model"
        )
    return {names[parameter]: parameter for parameter in trained.values()}


def _named_parameters(setup: Setup) -> dict[str, torch.nn.Parameter]:
    return by_name(setup.parameters, None)


def _sparse_bytes(gradient: torch.Tensor) -> int:
    """The number of bytes that a rank sends for a sparse gradient: the row numbers and the values of the rows."""
    rows = gradient.coalesce()  # the process group also adds up equal rows before it sends them
    return int(rows.indices().nbytes + rows.values().nbytes)


def _future(like: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=None if like.device.type == "cpu" else [like.device])
