"""`LocalSteps`: several steps of each rank alone between two exchanges, and an outer optimizer (DiLoCo)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.sparse_chunked import ChunkedTopK
from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_number, is_whole
from hvdcomp.torch.compressed_adam import CompressedAdam
from hvdcomp.torch.local_steps_binding import NO_NEW_GROUP, NO_SCALER, LocalStepsBinding

_OWN = "local_steps"  # our part of a state


class LocalSteps(torch.optim.Optimizer):
    """Wraps an optimizer: each rank steps `every` times by itself, then the ranks exchange how far they have moved.

    The pseudo-gradient of a rank is its weights at the latest exchange minus those now. It goes through the compressor
    with its memory, the mean over the ranks is the gradient by which an outer SGD moves the weights of the latest
    exchange, and all ranks go on from there (Douillard et al. 2023, DiLoCo, arXiv:2311.08105, algorithm 1).

        compression = hvdcomp.Compression(hvdcomp.Int4())
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
        optimizer = hvdcomp.torch.LocalSteps(optimizer, every=30, compression=compression)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    The model is not wrapped in DistributedDataParallel, and the inner optimizer not in hvd.DistributedOptimizer.
    Between two exchanges the weights of the ranks differ: save, evaluate and end when `in_sync`. Statistics of batch
    normalization are buffers, and never exchanged. Weights are to be in float32 (with torch.autocast for the rest):
    the weights of the latest exchange have the type of the parameters.

    To be made on every rank, and stepped the same number of times. Learning rate schedulers work as with the inner
    optimizer, whose parameter groups these are. Beside it, each rank keeps the weights of the latest exchange, an outer
    momentum, and what the memory keeps.

    Args:
        optimizer: the inner one, of any kind; with its own clipping and learning rate.
        every: steps from one exchange to the next; 30 to 500 were published.
        compression: of this optimizer alone. Default: float32 as it is. Rules by name and checkpoints go by the names
            that it was given as `named_parameters`, or the inner optimizer was (PyTorch 2.6), or else by numbers.
        outer_lr, outer_momentum, nesterov: of `torch.optim.SGD` on the mean of the pseudo-gradients. 1 and 0 average
            the weights of the ranks.
        communicator: of the ranks that exchange. Default: all ranks of torch.distributed, or if that was not started,
            of Horovod.

    Attributes:
        inner, outer: the two optimizers.
        compression: with the ledger, in which a local step has no bytes.
        in_sync: whether all ranks have the same weights now.

    Raises:
        ConfigurationError: for numbers that are none, an inner optimizer that exchanges by itself, or where no ranks
            were started; on every rank, for what does not go with local steps (policies that rank 0 decides, a
            torch.amp.GradScaler, methods without a magnitude, elastic Horovod).
        RankMismatchError: on every rank, in the first step, if the ranks were told different things, or if their
            weights differ.
    """

    _binding: LocalStepsBinding | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int = 30,
        *,
        compression: UsedCompression | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        communicator: Ranks | None = None,
    ) -> None:
        _check(optimizer, every, outer_lr, outer_momentum)
        if compression is None:
            compression = _made(NoCompression())
        require_compression(compression, "hvdcomp.torch.LocalSteps")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._step_supports_amp_scaling = True  # so that a GradScaler calls `step` always, which refuses it
        self.inner, self.every, self.compression = optimizer, every, compression
        self._share_groups()
        self._steps = 0  # since the latest exchange
        self._restored = False  # whether the anchors are those of a checkpoint
        anchors = [one.detach().clone() for one in self._parameters()]
        self.outer = torch.optim.SGD(
            anchors, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov and outer_momentum > 0
        )
        ranks = started_ranks() if communicator is None else communicator
        self._told: dict[str, Any] = {}
        self._binding = compression.serve(
            lambda setup: LocalStepsBinding(setup, optimizer, anchors, self._told, ranks), self.outer
        )

    @classmethod
    def diloco(cls, optimizer: torch.optim.Optimizer, every: int = 500, **options: Any) -> LocalSteps:
        """DiLoCo as published (arXiv:2311.08105): 500 steps, then Nesterov momentum 0.9 at rate 0.7, dense.

        Args:
            optimizer: AdamW in the paper.
            every, options: as of the class; any compressor may be given.
        """
        return cls(optimizer, every, **options)

    @classmethod
    def sparseloco(
        cls, optimizer: torch.optim.Optimizer, every: int = 30, named_parameters: Any = None, **options: Any
    ) -> LocalSteps:
        """SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706): the largest 64 of each 4096 elements in 2 bits, error
        feedback that decays by 0.95, and the mean of what was sent taken from the weights, without an outer momentum.

        Args:
            optimizer: AdamW with betas (0.9, 0.95) in the paper.
            named_parameters: as of `Compression`.
            every, options: as of the class, without `compression`.
        """
        sparse = _made(ChunkedTopK(), memory=ErrorFeedback(decay=0.95), named_parameters=named_parameters)
        return cls(optimizer, every, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options}, compression=sparse)

    @property
    def in_sync(self) -> bool:
        return self._steps == 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimizer; each `every`-th ends with an exchange, in which all ranks wait for each other.

        Raises:
            ConfigurationError: on every rank, in the exchange, if the weights of any rank are inf or NaN.
        """
        if getattr(self, "found_inf", None) is not None:
            raise ConfigurationError(NO_SCALER)
        binding = self._begin()
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._steps += 1
        if self._steps < self.every:
            binding.enter_local_step()
        else:
            self.exchange()
        return loss

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges now, as at the end of a training whose steps are no multiple of `every`; to be called on every
        rank."""
        means = self._begin().exchange()
        for anchor, mean in zip(self._anchors(), means, strict=True):
            anchor.grad = mean
        self.outer.step()
        self.outer.zero_grad()
        for parameter, anchor in zip(self._parameters(), self._anchors(), strict=True):
            parameter.copy_(anchor)
        self._steps = 0

    def _begin(self) -> LocalStepsBinding:
        """The binding, after the ranks have compared what they were told: in the first step."""
        binding = self._binding
        assert binding is not None
        if not binding.has_begun:
            if not self._restored:  # weights may have been loaded since this was made
                self._anchor()
            outer = self.outer.param_groups[0]
            self._told |= {
                "every": self.every,
                **{f"outer {name}": outer[name] for name in ("lr", "momentum", "nesterov")},
                "local steps since the latest exchange": self._steps,
            }
            binding.compare()
        return binding

    @torch.no_grad()
    def _anchor(self) -> None:
        for anchor, parameter in zip(self._anchors(), self._parameters(), strict=True):
            anchor.copy_(parameter)

    # What an optimizer is asked for.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the inner optimizer."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, with ConfigurationError: give the inner optimizer all groups before."""
        if self._binding is not None:  # else __init__ is not done
            raise ConfigurationError(NO_NEW_GROUP)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, and under "local_steps" all that goes on beside it: the weights of the
        latest exchange, the outer momentum, the steps since then, and the state of the compression.

        Between two exchanges it is, as the model's, another one on each rank: to go on bit for bit, save both on every
        rank.
        """
        state = self.inner.state_dict()
        if self._restored or (self._binding is not None and self._binding.has_begun):
            state[_OWN] = {
                "steps": self._steps,
                "anchors": self._anchors(),
                "outer": self.outer.state_dict(),
                "compression": self.compression.state_dict(),
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned, before the first step; to be called on every rank, which gives what
        it saved itself. The weights of the model are to be loaded too.

        A state of the inner optimizer alone begins anew: with an exchange behind it, and without outer momentum. Where
        every rank gives what rank 0 saved between two exchanges, all go on from there, and what the others did since
        the latest exchange is lost. `outer_lr`, `outer_momentum` and `nesterov` are those that were saved.

        Raises:
            ConfigurationError: after a step, or for a state of other tensors or another compressor.
        """
        if self._binding is not None and self._binding.has_begun:
            raise ConfigurationError("LocalSteps: load_state_dict has to be called before the first step")
        own = state_dict.get(_OWN)
        if own is not None:
            shapes, given = ([tuple(one.shape) for one in each] for each in (self._anchors(), own["anchors"]))
            if shapes != given:
                raise ConfigurationError(
                    f"the state is of parameters of shapes {given}, and this optimizer has {shapes}; give the state of "
                    "a LocalSteps with the same model and parameter groups"
                )
            self.compression.load_state_dict(own["compression"])
        self.inner.load_state_dict({name: one for name, one in state_dict.items() if name != _OWN})
        self._share_groups()
        if own is not None:
            self.outer.load_state_dict(own["outer"])
            for anchor, kept in zip(self._anchors(), own["anchors"], strict=True):
                anchor.copy_(kept)
            self._steps, self._restored = own["steps"], True

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.inner.param_groups for one in group["params"]]

    def _anchors(self) -> list[torch.Tensor]:
        anchors: list[torch.Tensor] = self.outer.param_groups[0]["params"]
        return anchors


def _check(optimizer: Any, every: Any, rate: Any, momentum: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"LocalSteps was given a {type(optimizer).__name__}; give it an optimizer of PyTorch, such as "
            "torch.optim.AdamW(model.parameters())"
        )
    if isinstance(optimizer, CompressedAdam | LocalSteps) or hasattr(optimizer, "_requires_update"):  # of Horovod
        raise ConfigurationError(
            f"LocalSteps was given a {type(optimizer).__name__} that exchanges by itself; give it the optimizer of one "
            "rank alone, such as torch.optim.AdamW(model.parameters())"
        )
    if any(hasattr(one, "device_mesh") for group in optimizer.param_groups for one in group["params"]):
        raise ConfigurationError(
            "LocalSteps exchanges whole parameters, and these are sharded (FSDP, tensor parallelism); exchange the "
            "gradients between the replicas instead, with hvdcomp.fsdp.register"
        )
    if not is_whole(every, 1):
        raise ConfigurationError(f"LocalSteps: every={every!r} is not possible; give the steps between two exchanges")
    if not (is_number(rate) and rate > 0):
        raise ConfigurationError(f"LocalSteps: outer_lr={rate!r} is not possible; give a number above 0, such as 0.7")
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ConfigurationError(f"LocalSteps: outer_momentum={momentum!r} is not possible; give 0, or a share below 1")


def _made(compressor: Compressor, **options: Any) -> UsedCompression:
    """A `hvdcomp.Compression`, beside which this folder stands: it may serve another framework."""
    made: UsedCompression = import_module("hvdcomp").Compression(compressor, **options)
    return made


def started_ranks() -> Ranks:
    """All ranks of torch.distributed, or where that was not started, of Horovod."""
    started = dist.is_available() and dist.is_initialized()
    hvd = sys.modules.get("horovod.torch")
    if started or hvd is None or not hvd.is_initialized():
        return TorchDistributedCommunicator()
    from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator

    return HorovodTorchCommunicator()
