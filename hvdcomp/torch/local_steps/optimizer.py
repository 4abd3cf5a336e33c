"""`LocalSteps`: each rank makes local steps between exchanges, and an outer optimizer applies the result (DiLoCo)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvdcomp.bindings.frameworks import not_compiled
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.memory import ErrorFeedback
from hvdcomp.compressors.quantization_blocks import Int8
from hvdcomp.compressors.routing import with_small
from hvdcomp.compressors.signs import EFSignSGD
from hvdcomp.compressors.sparse_chunked import ChunkedTopK
from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_number
from hvdcomp.specs.parsing import parse
from hvdcomp.torch.local_steps.auto import AutoRounds, RoundLength
from hvdcomp.torch.local_steps.binding import NO_NEW_GROUP, LocalStepsBinding, local_part
from hvdcomp.torch.local_steps.rounds import Rounds, Sent, in_fragments
from hvdcomp.torch.optimizers.compressed_adam import CompressedAdam
from hvdcomp.torch.optimizers.learning_rate import rates_of
from hvdcomp.torch.ranks import started_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OWN = "local_steps"  # the key of this optimizer's part of a state


class LocalSteps(torch.optim.Optimizer):
    """Wraps an optimizer. Each rank makes `every` local steps, and then the ranks exchange pseudo-gradients.

    The pseudo-gradient of a rank is its weights at the latest exchange minus its current weights. The ranks compress
    their pseudo-gradients and average the results. An outer SGD applies the mean to the weights of the latest exchange,
    and all ranks continue from the result (Douillard et al. 2023, DiLoCo, arXiv:2311.08105, algorithm 1).

        compression = hvdcomp.Compression(hvdcomp.Int4())
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
        optimizer = hvdcomp.torch.LocalSteps(optimizer, every=30, compression=compression)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    Do not wrap the model in DistributedDataParallel, and do not wrap the inner optimizer in hvd.DistributedOptimizer.
    Between two exchanges, the weights differ between ranks. Therefore evaluate, and end the training run, only when
    `in_sync` is true. You can also evaluate inside `outer_weights`: these weights are the same on all ranks after every
    step. Statistics of batch normalization are buffers, and are not exchanged. Keep the weights in float32 (with
    torch.autocast for the computation), because the weights of the latest exchange have the same type as the
    parameters.

    With `fragments`, parts of the parameters are exchanged at different steps. With `delay`, the exchange overlaps with
    later steps (Douillard et al. 2025, Streaming DiLoCo, arXiv:2501.18512, algorithm 2).

    Create a LocalSteps on every rank, and call its `step` the same number of times on each rank. A torch.amp.GradScaler
    works as with any optimizer. Do not pass the scaler to the compression: each rank has its own scale, and skips the
    steps in which its own gradients overflow. Learning rate schedulers work as with the inner optimizer, because both
    share the parameter groups. Each rank also keeps the weights of the latest exchange, an outer momentum, and the
    residuals.

    Args:
        optimizer: the inner optimizer, of any kind, with its own learning rate. Clip gradients as usual.
        every: the number of steps between exchanges; papers use 30 to 500. With 1, the ranks exchange the change of the
            weights in each step instead of the gradient, and all ranks have the same weights after every step. With
            "auto", or for example "auto:share=0.05,start=10", rank 0 decides on the number after each exchange, with
            the rule of `hvdcomp.torch.AutoRounds`. "auto" does not work with `fragments`, `delay` or `local_share`.
        compression: a `Compression` that only this optimizer uses. Default: no compression; values are sent in float32.
            Checkpoints, and rules that choose a compressor by the name of a parameter, use the names in its
            `named_parameters`. If there are no such names, they use the names in the inner optimizer (with PyTorch 2.6
            or later), or else numbers.
        fragments: the number of fragments. A fragment is a set of whole parameters. All fragments have about the same
            size. Each fragment is exchanged once in `every` steps.
        delay: the number of steps between sending a fragment and applying its mean; less than `every / fragments`. In
            methods with several exchanges (PowerSGD, scatter), only the first exchange overlaps with steps.
        local_share: after an exchange, a rank's weights are a mix of its own weights and the outer weights, and
            `local_share` is the share of its own weights. If there is a delay and `local_share` is 0, the rank loses
            the steps that it has made since sending. With 0.5, the rank keeps half of these steps.
        outer_lr, outer_momentum, nesterov: the settings of the outer `torch.optim.SGD`, which applies the mean of the
            pseudo-gradients. With a rate of 1 and no momentum, the new weights are the mean of the ranks' weights.
        communicator: the communicator of the ranks that exchange pseudo-gradients. Default: all ranks of
            torch.distributed, or all ranks of Horovod if torch.distributed was not started.
        model: the model, if FSDP2 shards it on a mesh that has a dimension of replicas, or if you have passed it to
            `replicate`. Each replica makes its own steps, and the ranks with the same shards exchange these steps. FSDP
            then averages gradients only within each replica.
        mesh: the dimension of the replicas, `mesh["replicate"]`, if you have passed only the dimension of the shards,
            `mesh["shard"]`, to `fully_shard`. The steps are the same as with `model`.

    Attributes:
        inner, outer: the two optimizers.
        every: the number of steps of the current round.
        compression: the compression. The ledger of this compression counts only exchanges, because local steps send
            nothing.
        in_sync: whether all ranks have the same weights now. With several fragments, a delay or a local share, this is
            true only after `exchange`.

    Raises:
        ConfigurationError: if a number is invalid, the inner optimizer itself exchanges gradients, or no ranks were
            started. The error is raised on every rank if a setting does not work with local steps, such as a policy for
            which rank 0 makes decisions, or a method whose results have no magnitude.
        RankMismatchError: on every rank, in the first step, if settings or weights differ between ranks.
    """

    _binding: LocalStepsBinding | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int | str = 30,
        *,
        compression: UsedCompression | None = None,
        fragments: int = 1,
        delay: int = 0,
        local_share: float = 0.0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        communicator: Ranks | None = None,
        model: torch.nn.Module | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        _check(optimizer, outer_lr, outer_momentum)
        # The parameters that the ranks exchange. If parameters are added later, the binding raises an error on every
        # rank.
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if mesh is None and model is None:
            _require_whole(self._parameters)
        else:
            from hvdcomp.torch.local_steps.replicas import replicas_of  # imported here, because it needs FSDP2

            communicator = replicas_of(self._parameters, mesh, model, communicator)
        sizes = [own.numel() for own in self._own()]
        self._auto = parse(every, {AutoRounds.name: AutoRounds}, "round length") if isinstance(every, str) else None
        first = every if self._auto is None else self._auto.start
        self._rounds = Rounds(first, fragments, delay, local_share)  # type: ignore[arg-type]
        self._rounds.check(len(sizes))
        if self._auto is not None and not self._rounds.end_in_sync:
            raise ConfigurationError(
                f"LocalSteps: every={every!r} does not work with fragments, delay or local_share, because then no "
                "round ends with the same weights on all ranks; set every to a number of steps, or omit these three"
            )
        self._length = None if self._auto is None else RoundLength(self._auto.start)
        self._fragments = in_fragments(sizes, fragments)
        if compression is None:
            compression = _compression_of(NoCompression())
        require_compression(compression, "hvdcomp.torch.LocalSteps")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._step_supports_amp_scaling = True  # a GradScaler then always calls `step`, which counts the step
        self.inner, self.compression = optimizer, compression
        self._share_groups()
        optimizer.register_load_state_dict_post_hook(lambda _: self._share_groups())
        self._steps = 0  # number of steps since all ranks had the same weights
        self._sent: Sent | None = None
        # a time in seconds, and the number of steps of the round at this time
        self._timed_from: tuple[float, int] | None = None
        self._anchored = False  # whether the anchors are the weights of the latest exchange
        anchors = [own.clone() for own in self._own()]
        self.outer = torch.optim.SGD(
            anchors, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov and outer_momentum > 0
        )
        ranks = started_ranks() if communicator is None else communicator
        self._settings: dict[str, Any] = {}
        self._binding = compression.serve(
            lambda setup: LocalStepsBinding(setup, optimizer, anchors, self._settings, every, ranks), self.outer
        )
        if model is not None:
            from hvdcomp.torch.fsdp.replicas import leave_to_nobody

            leave_to_nobody(model)  # this is done last, after all checks that may refuse the settings

    @classmethod
    def diloco(cls, optimizer: torch.optim.Optimizer, every: int = 500, **options: Any) -> LocalSteps:
        """DiLoCo as published (arXiv:2311.08105): an exchange every 500 steps, without compression, and an outer SGD
        with Nesterov momentum 0.9 at rate 0.7.

        Args:
            optimizer: the inner optimizer, AdamW in the paper.
            every, options: the arguments of the class `LocalSteps`. Any compressor is allowed.
        """
        return cls(optimizer, every, **options)

    @classmethod
    def sparseloco(
        cls, optimizer: torch.optim.Optimizer, every: int = 30, named_parameters: Any = None, **options: Any
    ) -> LocalSteps:
        """SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706): sends the largest 64 of each 4096 elements with 2 bits
        each. SparseLoCo uses error feedback with a decay of 0.95, and an outer SGD at rate 1 without momentum.

        Args:
            optimizer: the inner optimizer, AdamW with betas (0.9, 0.95) in the paper.
            named_parameters: pairs of name and parameter, as in `Compression`.
            every, options: the arguments of the class `LocalSteps`, without `compression`.
        """
        sparse = _compression_of(ChunkedTopK(), memory=ErrorFeedback(decay=0.95), named_parameters=named_parameters)
        return cls(optimizer, every, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options}, compression=sparse)

    @classmethod
    def compressed(
        cls,
        optimizer: torch.optim.Optimizer,
        every: int = 4,
        compressor: Compressor | None = None,
        named_parameters: Any = None,
        **options: Any,
    ) -> LocalSteps:
        """Makes a LocalSteps whose ranks exchange compressed changes of their weights, with error feedback
        (docs/compressed-steps.md). Each rank sends the change of its weights since the latest exchange, and all ranks
        continue from the mean of these changes.

            optimizer = hvdcomp.torch.MuonWithAdamW(model, lr=16e-3)
            optimizer = hvdcomp.torch.LocalSteps.compressed(optimizer, every=4)

        The outer optimizer is SGD at rate 1 without momentum. Tensors with fewer than 1,024 elements or fewer than two
        dimensions are sent as `Int8`. The part of a change that is not sent is kept for the next exchange, in units of
        weights.

        Args:
            optimizer: the inner optimizer. The best choice is Muon, such as `MuonWithAdamW`.
            every: the number of steps between exchanges. With 1, all ranks have the same weights after every step.
            compressor: the compressor of all tensors that are not small. Default: `EFSignSGD()`.
            named_parameters: pairs of name and parameter, as in `Compression`.
            options: the arguments of the class `LocalSteps`, without `compression`.
        """
        compressor = EFSignSGD() if compressor is None else compressor
        compression = _compression_of(
            compressor if compressor.lossless else with_small(compressor, small=Int8()),
            memory=ErrorFeedback(),
            named_parameters=named_parameters,
            min_numel=0,
            min_ndim=0,
        )
        return cls(optimizer, every, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options}, compression=compression)

    @property
    def every(self) -> int:
        return self._rounds.every

    @property
    def in_sync(self) -> bool:
        return self._steps == 0

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the inner optimizer. After every `every` steps there is an exchange, in which all ranks wait
        for each other.

        Raises:
            ConfigurationError: on every rank, in the exchange, if the weights of any rank are inf or NaN.
        """
        binding = self._begin()
        loss = None
        if self._unscaled():
            loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._steps += 1
        rounds, number = self._rounds, self._rounds.due(self._steps)
        if self._sent is not None and self._steps >= self._sent.at + rounds.delay:
            self._receive(self._sent.places, rounds.local_share)
        elif number is None or rounds.delay:
            binding.enter_local_step()
        if number is not None:
            self._send(self._fragments[number], background=rounds.delay > 0)
            if rounds.delay == 0:
                self._receive(self._fragments[number], rounds.local_share)
                if rounds.end_in_sync:
                    self._end_round()
        return loss

    def _unscaled(self) -> bool:
        """Divides the gradients by the loss scale of a torch.amp.GradScaler.

        Returns whether no gradient has overflowed. While a GradScaler steps an optimizer, it stores the scale and its
        check for overflows as attributes of the optimizer. The scale is None if `unscale_` was called.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return False
        if scale is not None:
            gradients = [local_part(one.grad) for one in self._parameters if one.grad is not None]
            torch._foreach_mul_(gradients, 1 / scale.item())
        return True

    @not_compiled
    def exchange(self) -> None:
        """Exchanges all parameters now, so that all ranks have the same weights, for example at the end of a training
        run. Call this method on every rank. If a fragment was sent and its mean is not yet applied, the mean is applied
        first. Nothing happens if the ranks are `in_sync`."""
        self._begin()
        if self.in_sync:
            return
        if self._sent is not None:
            self._receive(self._sent.places, self._rounds.local_share)
        places = list(range(len(self._anchors())))
        self._send(places, background=False)
        self._receive(places, 0.0)
        self._end_round()

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """A context manager in which the model has its outer weights. The outer weights are the result of the latest
        exchange of each parameter, and are the same on all ranks. Use the outer weights to evaluate or publish the
        model. No step is allowed inside."""
        before = [own.clone() for own in self._own()]
        if self._anchored:
            put(self._own(), self._anchors())
        try:
            yield
        finally:
            put(self._own(), before)

    def _send(self, places: list[int], background: bool) -> None:
        assert self._binding is not None
        moved = self._binding.moved(places)
        if self._length is not None:  # this is done before the exchange, which may overwrite `moved`
            self._agreed = self._binding.agree(self._length.steps, moved)
            self._met_at = self._binding.now()
        self._binding.send(places, moved, background)
        self._sent = Sent(places, self._steps, moved) if background else None

    @torch.no_grad()
    def _receive(self, places: Sequence[int], local_share: float) -> None:
        """Ends the exchange of the parameters with these indices, and applies the mean."""
        assert self._binding is not None
        self._sent = None
        means = self._binding.receive()
        anchors, parameters = self._anchors(), self._own()
        outer = self.outer.param_groups[0]
        if self._binding.is_exact_alone and (outer["lr"], outer["momentum"]) == (1, 0):
            # This rank exchanges with no other rank, so the mean is its own change of the weights. The weights stay as
            # they are, because subtracting the change from the anchor would add a rounding error.
            put((anchors[place] for place in places), (parameters[place] for place in places))
            return
        for place, mean in zip(places, means, strict=True):
            anchors[place].grad = mean
        self.outer.step()  # skips parameters without a gradient
        self.outer.zero_grad()
        for place in places:
            if local_share:
                parameters[place].lerp_(anchors[place], 1 - local_share)
            else:
                parameters[place].copy_(anchors[place])

    def _end_round(self) -> None:
        """Begins the next round, with the number of steps that rank 0 has decided on."""
        steps, self._steps = self._steps, 0
        if self._auto is None or self._length is None:
            return
        assert self._binding is not None
        assert self._timed_from is not None
        now, (began, before) = self._binding.now(), self._timed_from
        decided, drift = self._agreed
        if steps == self.every:  # only if `exchange` has not ended the round early
            seconds = (self._met_at - began) / max(1, steps - before)
            self._length.learn(self._auto, steps, drift, max(rates_of(self.inner)), seconds, now - self._met_at)
        self._rounds = self._rounds._replace(every=decided)
        self._timed_from = now, 0

    def _begin(self) -> LocalStepsBinding:
        """Returns the binding. In the first step, and in the first step after a change of the ranks, this method first
        compares the ranks' settings."""
        binding = self._binding
        if binding is None:
            raise ConfigurationError(
                "this LocalSteps was copied or unpickled, so it cannot exchange weights with other ranks; make a new "
                "LocalSteps from the inner optimizer, and load the state_dict() of the old LocalSteps"
            )
        if binding.is_stale:
            binding.follow_ranks()
        if not binding.has_begun:
            if not self._anchored:  # weights may have been loaded after __init__
                put(self._anchors(), self._own())
                self._anchored = True
            outer = self.outer.param_groups[0]
            self._settings |= {
                **self._rounds._asdict(),
                **{f"outer {name}": outer[name] for name in ("lr", "momentum", "nesterov")},
                "local steps since the latest exchange": self._steps,
                "sent after local steps": None if self._sent is None else self._sent.at,
                "every": self.every if self._auto is None else f"{self._auto}, now {self.every}",
            }
            binding.compare()
            if self._sent is not None:
                binding.send(self._sent.places, self._sent.moved, True, self._steps - self._sent.at)
            # + 1, because the gradients of this step are already computed
            self._timed_from = binding.now(), self._steps + 1
        return binding

    # Methods of an optimizer.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients to zero, as `zero_grad` of the inner optimizer does."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigurationError, because the inner optimizer must have all its parameter groups before LocalSteps
        is created."""
        if self._binding is not None:  # it is None during __init__
            raise ConfigurationError(NO_NEW_GROUP)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, with an additional key "local_steps". The state contains the weights at the
        latest exchange, the outer momentum, the number of steps since the latest exchange, an exchange that has not
        ended yet, and the state of the compression.

        Between two exchanges, this state and the state of the model differ between ranks. To continue with the same
        results, bit for bit, save both states on every rank.
        """
        state = self.inner.state_dict()
        if self._anchored:
            state[OWN] = {
                "steps": self._steps,
                "sent": None if self._sent is None else self._sent._asdict(),
                "rounds": self._rounds._asdict(),
                "auto": None if self._length is None else dataclasses.asdict(self._length),
                "anchors": self._anchors(),
                "outer": self.outer.state_dict(),
                "compression": self.compression.state_dict(),
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict` before the first step. Call this method on every rank, with the state that
        this rank has saved. Also load the weights of the model.

        You can also pass a state of the inner optimizer alone. Training then starts in the same way as after an
        exchange, without outer momentum. If all ranks load a state that rank 0 has saved between two exchanges, all
        ranks continue from this state. The steps of the other ranks since the latest exchange are then lost.
        `outer_lr`, `outer_momentum` and `nesterov` are restored.

        Raises:
            ConfigurationError: after a step, or if the state belongs to other tensors or another compressor.
        """
        if self._binding is not None and self._binding.has_begun:
            raise ConfigurationError(
                "LocalSteps: load_state_dict was called after the first step; call it before the first step"
            )
        self._load(state_dict, self.compression.load_state_dict)

    def roll_back(self, state_dict: Mapping[str, Any]) -> None:
        """Restores an earlier state from `state_dict` after steps were made. Elastic Horovod does this after a failure.
        Call this method on every rank, and also restore the weights that the model had when the state was saved."""
        self._load(state_dict, self.compression.roll_back)

    def join(self, state_dict: Mapping[str, Any]) -> None:
        """Joins other ranks as a new rank. Pass the result of `state_dict` from any of these ranks. The model gets the
        outer weights, the inner optimizer gets the moments of the other rank, and pseudo-gradients are zero. If the
        other rank has made no step, the model keeps its weights. The caller restores the state of the compression."""
        self._load(state_dict, lambda _: None)
        if self._anchored:
            put(self._own(), self._anchors())
            for moved in () if self._sent is None else self._sent.moved:
                moved.zero_()

    def change_ranks(self, group: dist.ProcessGroup) -> None:
        """Continues with a different set of ranks of torch.distributed, beginning with the next step. Call this method
        between two steps, on every rank of the new process group, and on no other rank. You can call this method in the
        middle of a round.

            group = torch.distributed.new_group([0, 1, 3])  # without rank 2
            if torch.distributed.get_rank() != 2:
                optimizer.change_ranks(group)

        A rank that has made steps keeps its weights, its moments and its residuals. The residuals are multiplied by a
        factor, so that they contribute to the mean with the same weight as before. A rank that has made no step is
        treated as a new rank. A new rank begins with the outer weights and the outer momentum, with the moments of the
        first rank of the process group, and at the same step of the round. A rank that is not in the new process group
        loses its steps since its latest exchanges. If an exchange has not ended, it is sent again in the new process
        group.

        A rank that has made fewer steps than the first rank of the process group continues at the step number of the
        first rank. If both ranks are in the same round, the rank keeps its steps. If the first rank has made an
        exchange without this rank, this rank begins like a new rank, but keeps its residuals.

        Args:
            group: the process group. The first rank of the process group must have made a step.

        Raises:
            ConfigurationError: on every rank, if the first rank of the process group has not made a step.
        """
        if self._binding is None:
            self._begin()  # raises the error
        assert self._binding is not None
        self._binding.change_ranks(group)
        own = self.state_dict()
        own.get(OWN, {}).pop("compression", None)  # the binding exchanges the compression's state in the next step
        message = [own if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(message, dist.get_global_rank(group, 0), group)
        common: Any = message[0]
        if OWN not in common:
            raise ConfigurationError(
                "the first rank of the process group that was given to LocalSteps.change_ranks has not made a step, so "
                "it cannot give the other ranks the trained weights. Give a process group whose first rank has made a "
                "step"
            )
        if OWN not in own or not self._has_exchanged_like(common[OWN]):
            self.join(common)
        else:
            self._steps = common[OWN]["steps"]

    @torch.no_grad()
    def _load(self, state_dict: Mapping[str, Any], load_compression: Callable[[dict[str, Any]], None]) -> None:
        own = state_dict.get(OWN)
        if own is not None:
            shapes, saved_shapes = (
                [tuple(anchor.shape) for anchor in anchors] for anchors in (self._anchors(), own["anchors"])
            )
            if shapes != saved_shapes:
                raise ConfigurationError(
                    f"the state has parameters of shapes {saved_shapes}, but this optimizer has {shapes}; give the "
                    "state of a LocalSteps with the same model and parameter groups"
                )
            if own.get("sent") is not None and own["rounds"] != self._rounds._asdict():
                raise ConfigurationError(
                    f"the state was saved while an exchange was under way, with {own['rounds']}, but this LocalSteps "
                    f"has {self._rounds._asdict()}; use the same settings as the saved LocalSteps"
                )
        load_compression({} if own is None else own.get("compression", {}))
        self.inner.load_state_dict({name: entry for name, entry in state_dict.items() if name != OWN})
        self._anchored, self._steps, self._sent = own is not None, 0, None
        if self._auto is not None:
            saved = None if own is None else own.get("auto")
            self._length = RoundLength(self._auto.start) if saved is None else RoundLength(**saved)
            every = self._auto.start if own is None or saved is None else own["rounds"]["every"]
            self._rounds = self._rounds._replace(every=every)
        self.outer.state.clear()
        if own is not None:
            self.outer.load_state_dict(own["outer"])
            put(self._anchors(), own["anchors"])
            self._steps = own["steps"]
            if (sent := own.get("sent")) is not None:
                moved = [torch.empty_like(self._anchors()[place]) for place in sent["places"]]
                put(moved, sent["moved"])
                self._sent = Sent(sent["places"], sent["at"], moved)

    def _has_exchanged_like(self, other: Mapping[str, Any]) -> bool:
        """Whether this rank has taken part in the same exchanges as the rank that saved the state `other`. This
        includes an exchange that has begun and not ended."""
        pairs = zip(self._anchors(), other["anchors"], strict=True)
        sent = None if self._sent is None else (self._sent.at, self._sent.places)
        other_sent = None if other["sent"] is None else (other["sent"]["at"], other["sent"]["places"])
        return sent == other_sent and all(torch.equal(own, anchor.to(own.device)) for own, anchor in pairs)

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _own(self) -> list[torch.Tensor]:
        """This rank's part of each parameter: the parameter itself, or its shard."""
        return [local_part(parameter) for parameter in self._parameters]

    def _anchors(self) -> list[torch.Tensor]:
        anchors: list[torch.Tensor] = self.outer.param_groups[0]["params"]
        return anchors


@torch.no_grad()
def put(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Copies values into tensors."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _check(optimizer: Any, rate: Any, momentum: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"LocalSteps was given a {type(optimizer).__name__}; pass a PyTorch optimizer, such as "
            "torch.optim.AdamW(model.parameters()). TensorFlow and Keras have no local steps"
        )
    # Only Horovod's optimizer has the attribute `_requires_update`.
    if isinstance(optimizer, CompressedAdam | LocalSteps) or hasattr(optimizer, "_requires_update"):
        raise ConfigurationError(
            f"LocalSteps was given a {type(optimizer).__name__}, which exchanges gradients by itself; pass an "
            "optimizer that works on one rank alone, such as torch.optim.AdamW(model.parameters())"
        )
    if not (is_number(rate) and rate > 0):
        raise ConfigurationError(f"LocalSteps: outer_lr={rate!r} is not allowed; give a number above 0, such as 0.7")
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ConfigurationError(
            f"LocalSteps: outer_momentum={momentum!r} is not allowed; give a number of at least 0 and below 1"
        )


def _require_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError if a parameter is sharded."""
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise ConfigurationError(
            "the parameters are sharded (FSDP, tensor parallelism), but LocalSteps does not know which ranks have the "
            "same shards. If the mesh of fully_shard or replicate has replicas, use LocalSteps(..., model=model). "
            "Otherwise call fully_shard(model, mesh=mesh['shard']), and use LocalSteps(..., mesh=mesh['replicate']) "
            "with the same mesh"
        )


def _compression_of(compressor: Compressor, **options: Any) -> UsedCompression:
    """Creates an `hvdcomp.Compression`. The class is imported late, because this layer must not import a higher
    layer."""
    compression: UsedCompression = import_module("hvdcomp").Compression(compressor, **options)
    return compression
