"""The binding of `LocalSteps`, which exchanges pseudo-gradients after several local steps of each rank.

A pseudo-gradient is the weights at the latest exchange minus the current weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp.bindings.base import PRESENCE_BYTES
from hvdcomp.bindings.elastic import may_change
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators import SimulatedCommunicator
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.sparse_chunked import ChunkedTopK
from hvdcomp.compressors.sparsification import WithRatio
from hvdcomp.compressors.two_level import within
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.exchange.agreement import refused_on_every_rank
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.wave import Wave
from hvdcomp.policies import Policy
from hvdcomp.torch.local_steps.auto import sketch
from hvdcomp.torch.parameters import by_name, plain_names
from hvdcomp.torch.training import WITHOUT_HOROVOD, TorchTraining, checksums_of


class LocalStepsBinding(TorchTraining):
    """Ties one `Compression` to the parameters of one `LocalSteps`.

    Args:
        setup: the `Compression`, and what the user passed to it. `setup.optimizer` is the outer optimizer.
        inner: the optimizer that makes local steps.
        anchors: the weights at the latest exchange, one for each parameter, in the order of the parameter groups.
        settings: further settings that must be the same on all ranks, in addition to the settings of the compression.
            These settings are read in the first step.
        every: number of steps from one exchange to the next, or the spec of the rule that decides this number.
        communicator: the communicator of the ranks that exchange pseudo-gradients.
    """

    overlaps_with_policy = False
    broadcast = "use the same random seed, or load the same checkpoint, on every rank"
    averaged_by = "hvdcomp.torch.LocalSteps"
    absence = WITHOUT_HOROVOD

    def __init__(
        self,
        setup: Setup,
        inner: torch.optim.Optimizer,
        anchors: Sequence[torch.Tensor],
        settings: Mapping[str, Any],
        every: int | str,
        communicator: Ranks,
    ) -> None:
        self._settings, self._inner = settings, inner
        self._sent: list[str] = []
        self._bytes_beside = 0  # bytes of the latest `agree`
        # In an elastic job, new ranks create the binding while the other ranks train, so no collective is possible.
        with nullcontext() if may_change() else refused_on_every_rank(communicator, torch.empty(0)):
            _check(setup, every, communicator)
            self._stepped = _named(setup, inner.param_groups)
            self._anchors = dict(zip(self._stepped, anchors, strict=True))
            own: dict[str, Any] = {name: local_part(parameter) for name, parameter in self._stepped.items()}
            super().__init__(setup, own, communicator, setup.optimizer)

    def compare(self) -> None:
        """Compares settings and weights in the first local step, and in the first step after a change of the ranks. In
        these steps all ranks wait for each other."""
        self._first_steps.compare()
        if self.communicator.rank == 0:
            _warn_of_momentum(self.engine, self._optimizer.param_groups[0]["momentum"])

    def enter_local_step(self) -> None:
        """Counts a step without an exchange."""
        self.engine.enter_alone(self._parameters.keys())

    def connect(self, communicator: Ranks) -> None:
        self._waves: Sequence[Wave] = ()  # the current exchange, in groups of tensors; dropped if the ranks change
        super().connect(communicator)

    def change_ranks(self, group: dist.ProcessGroup) -> None:
        """Continues with the ranks of another process group from the next step on."""
        if not isinstance(self.communicator, TorchDistributedCommunicator):
            raise ConfigurationError(
                "LocalSteps.change_ranks works only with ranks of torch.distributed; elastic Horovod changes its ranks "
                "by itself"
            )
        self.communicator.move_to(group)
        self.ranks_may_change = True

    @property
    def is_sending(self) -> bool:
        """Whether an exchange was begun with `send` and not yet ended with `receive`."""
        return bool(self._waves)

    @property
    def is_exact_alone(self) -> bool:
        """Whether this is the only rank and its values are sent without loss."""
        return self.communicator.world_size == 1 and all(method.lossless for method in self.engine.plan.values())

    @torch.no_grad()
    def moved(self, places: Sequence[int]) -> list[torch.Tensor]:
        """This rank's pseudo-gradients for the parameters with these indices."""
        parameters = list(self._stepped.values())
        anchors = list(self._anchors.values())
        return [anchors[place] - local_part(parameters[place]) for place in places]

    @torch.no_grad()
    def agree(self, decided: int, moved: Sequence[torch.Tensor]) -> tuple[int, float]:
        """Waits for all ranks, and returns the number of steps that rank 0 has decided on, which is the same on all
        ranks.

        Args:
            decided: the number of steps that this rank has decided on.
            moved: the pseudo-gradients of all parameters.

        Returns:
            The number of steps that rank 0 has decided on, and the drift of the ranks (`RoundLength.learn`), estimated
            from sketches.
        """
        own = sketch(moved)
        head = torch.tensor([float(decided * (self.communicator.rank == 0)), float(own.dot(own))], dtype=own.dtype)
        message = torch.cat([head, own])
        self._bytes_beside = message.nbytes
        ranks = self.communicator
        total = ranks.wait(ranks.start_allreduce(message, "sum", "hvdcomp.rounds"))
        mean = total[1:] / ranks.world_size
        return round(float(total[0])), max(0.0, float(mean[0] - mean[1:].dot(mean[1:])))

    def presence_bytes(self, tensors: int) -> int:
        return PRESENCE_BYTES + self._bytes_beside

    @torch.no_grad()
    def send(self, places: Sequence[int], moved: Sequence[torch.Tensor], background: bool, earlier: int = 0) -> None:
        """Begins an exchange of pseudo-gradients, which `receive` ends.

        Args:
            places: the indices of the parameters that are sent.
            moved: the pseudo-gradients of these parameters.
            background: whether local steps are made between `send` and `receive`. If so, do not change `moved` before
                `receive`.
            earlier: if the exchange is begun again after a restart, the number of steps since it was first begun;
                otherwise 0.
        """
        names = list(self._parameters)
        self._sent = [names[place] for place in places]
        step_number = self.engine.step_number
        self.engine.step_number = step_number - earlier  # random numbers and schedules depend on the step number
        self.begin()
        started = self.communicator.start_allreduce(torch.full((1,), self.presence), "sum", "hvdcomp.presence")
        self.check_presence(int(self.communicator.wait(started)))
        sent = dict(zip(self._sent, moved, strict=True))
        self._waves = self.engine.start(sent, in_place=not background, alone=not background)
        self.engine.step_number = step_number

    @torch.no_grad()
    def receive(self) -> list[torch.Tensor]:
        """Ends the current exchange. Returns the means of the ranks' pseudo-gradients, in the order of `send`.

        Raises:
            ConfigurationError: on every rank, if a pseudo-gradient of any rank is not finite. In this case, the outer
                momentum, the residuals and the weights of the latest exchange have not changed.
        """
        waves, self._waves = self._waves, ()
        means = self.engine.finish(waves, self._parameters.keys() - set(self._sent))
        # `found_inf` is NaN, and therefore not 0, if a value is not finite.
        if self.engine.found_inf is not None and float(self.engine.found_inf) != 0:
            raise ConfigurationError(self._describe_not_finite())
        return [means[name] for name in self._sent]

    def _describe_not_finite(self) -> str:
        bad = [name for name, one in self._stepped.items() if not torch.isfinite(local_part(one)).all()]
        where = (
            f"on this rank in {', '.join(bad[:3])}"
            if bad
            else ("on another rank, whose error message names the tensors")
        )
        return (
            f"LocalSteps: weights became inf or NaN in the local steps, {where}. Nothing was exchanged: outer "
            "momentum, residuals and the weights of the latest exchange are unchanged, but the inner optimizer of that "
            "rank is no longer usable. Continue from the latest checkpoint on every rank, with a smaller learning rate "
            "or clipped gradients"
        )

    # Methods of `Training`.

    def now(self) -> float:
        ranks: object = self.communicator
        return ranks.now() if isinstance(ranks, SimulatedCommunicator) else super().now()

    def facts(self) -> dict[str, Any]:
        if (reason := self.reason_to_refuse()) is not None:
            raise ConfigurationError(reason)
        return dict(self._settings)

    def trained(self) -> Set[str]:
        return self._parameters.keys()

    def reason_to_refuse(self) -> str | None:
        count = sum(len(group["params"]) for group in self._inner.param_groups)
        return None if count == len(self._parameters) else NO_NEW_GROUP

    def checksums(self, names: Sequence[str]) -> list[int]:
        """Checksums of the anchors. The weights themselves would differ between ranks, except directly after an
        exchange."""
        return checksums_of(self._anchors, names)


def local_part(tensor: Any) -> torch.Tensor:
    """The tensor detached from autograd; for a DTensor, the part on this rank. The result shares the storage."""
    tensor = tensor.detach()
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


FEW = 0.1  # a method sends few elements if it sends less than this share
MUCH = 0.9  # an outer momentum is large from this value on
"""Training runs that combined a method that sends few elements with a large outer momentum were unstable
(docs/local-steps.md)."""


def _warn_of_momentum(engine: Engine, momentum: float) -> None:
    """Warns if a sparsifier that delays most elements is used with a large outer momentum."""
    leaves = dict.fromkeys(engine.compressor.leaves())
    late = [leaf for leaf in leaves if _share_sent(leaf) <= FEW and engine.planner.memory_for(leaf).keeps]
    if momentum >= MUCH and late:
        warn_alone(
            f"LocalSteps: an outer momentum of {momentum} may make the training unstable with "
            f"{', '.join(map(str, late))}, because most of a pseudo-gradient is sent many rounds late. Give "
            f"outer_momentum=0.5 or less, or send more than {FEW:.0%} of the elements "
            "(docs/local-steps.md#outer-momentum-and-few-elements)"
        )


def _share_sent(compressor: Compressor) -> float:
    compressor = within(compressor)
    if isinstance(compressor, ChunkedTopK):
        return compressor.k / compressor.chunk
    return compressor.ratio if isinstance(compressor, WithRatio) else 1.0


def _check(setup: Setup, every: int | str, communicator: Ranks) -> None:
    settings = setup.compression.settings
    settings.require_all_turns(None if isinstance(every, str) else every, f"every={every!r} of LocalSteps")
    if isinstance(settings.policy, Policy):
        raise ConfigurationError(
            f"LocalSteps does not work with the policy {settings.policy}, which needs gradients that are exchanged in "
            "every step; use a schedule of levels, such as warmup, or no policy"
        )
    for leaf in (leaf for method in settings.compressors for leaf in method.leaves()):
        if not leaf.in_units:
            raise ConfigurationError(
                f"{leaf} does not work with LocalSteps, because its result has no magnitude, and LocalSteps needs the "
                "distance that the weights of the ranks have moved. Use efsignsgd, which sends the same number of bytes"
            )
    if setup.grad_scaler is not None and setup.grad_scaler.is_enabled():
        raise ConfigurationError(
            "pseudo-gradients have no loss scale: leave out grad_scaler= of the Compression that you pass to "
            "LocalSteps. scaler.step(optimizer) still works: each rank skips the steps in which its own gradients "
            "overflow"
        )
    if settings.bucket_bytes is not None:
        raise ConfigurationError(
            f"bucket_bytes={settings.bucket_bytes} has no effect with LocalSteps, which exchanges outside of the "
            "backward pass; leave bucket_bytes at None"
        )
    if setup.process_set is not None and isinstance(communicator, TorchDistributedCommunicator):
        raise ConfigurationError(
            "process_set works only with Horovod, but LocalSteps exchanges over torch.distributed here; leave "
            "process_set out, or use LocalSteps(..., communicator=hvdcomp.torch.all_ranks('horovod'))"
        )


NO_NEW_GROUP = (
    "LocalSteps does not accept new parameter groups, because the ranks would not exchange the new parameters; add all "
    "parameter groups to the inner optimizer before you pass this optimizer to LocalSteps"
)


def _named(setup: Setup, groups: Sequence[Mapping[str, Any]]) -> dict[str, torch.nn.Parameter]:
    """The parameters of all parameter groups, by name, in their order. Names come from the `Compression`, or else from
    the optimizer. If neither has names, the numbers of the parameter group and of the parameter are used."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if setup.parameters is not None:
        given_names = {parameter: name for name, parameter in by_name(setup.parameters, None).items()}
        if missing := sum(parameter not in given_names for parameter in parameters):
            raise ConfigurationError(
                f"the argument named_parameters of hvdcomp.Compression lacks {missing} of the optimizer's "
                f"{len(parameters)} parameters; use named_parameters=model.named_parameters() of the model that is "
                "trained"
            )
        names = [given_names[parameter] for parameter in parameters]
    # the optimizer was created with model.named_parameters(), which PyTorch 2.6 and later support
    elif all("param_names" in group for group in groups):
        names = plain_names(name for group in groups for name in group["param_names"])
    else:
        names = [f"{place}.{number}" for place, group in enumerate(groups) for number in range(len(group["params"]))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"LocalSteps: several parameters of the inner optimizer have the same name: {', '.join(twice[:3])}. Use "
            "hvdcomp.Compression(..., named_parameters=...) with a different name for each parameter, such as "
            "((f'a.{n}', p) for n, p in ...)"
        )
    return dict(zip(names, parameters, strict=True))
