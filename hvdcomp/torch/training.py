"""The base of all PyTorch bindings."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdcomp.bindings.base import Binding
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors.bucket import least_early_bytes
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.torch.optimizers.compressed_adam import CompressedAdam, LocalMomenta, Momentum
from hvdcomp.torch.optimizers.learning_rate import ScaledSteps, has_rates, rates_of
from hvdcomp.torch.parameters import with_plain_names

# The message `Training.absence` of bindings that use torch.distributed, which matches collectives only by their order.
WITHOUT_HOROVOD = (
    "the other ranks took part in a different collective at the same time. Give every rank the same number of batches, "
    "and start your own collectives at the same places on all ranks."
)


def refuse_capture() -> None:
    """Raises ConfigurationError while a CUDA graph captures the current stream.

    The host chooses random numbers, addresses of residuals and decisions of a policy again in each step. A captured
    graph would repeat old values.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "hvdcomp does not exchange gradients while a CUDA graph is captured, because the graph would repeat one "
            "step, with the same random numbers and the same addresses of residuals. Capture the model with "
            "torch.cuda.make_graphed_callables before you pass it to DistributedDataParallel or "
            "hvd.DistributedOptimizer, and leave backward() and optimizer.step() outside of torch.cuda.graph"
        )


class TorchTraining(Binding):
    """Ties one `Compression` to parameters of PyTorch.

    Args:
        setup: the `Compression`, and what the user passed to it.
        parameters: all parameters that may have a gradient, by name.
        communicator: the communicator of the ranks that exchange gradients.
        optimizer: the optimizer of these parameters; None if unknown.
        names: names of all parameters of the model, as in `Binding`.
        shared: names of the parameters whose gradients are also exchanged by other groups of ranks
            (`TensorInfo.is_shared`).

    Class attributes:
        optimizer_from: the code with which a user passes the optimizer to hvdcomp. The code is shown in messages.
        averaged_by: the name of the object that averages the model's gradients, if it is not Horovod's optimizer.
    """

    results_in_place = True
    optimizer_from: str
    averaged_by: str

    def __init__(
        self,
        setup: Setup,
        parameters: Mapping[str, torch.nn.Parameter],
        communicator: Ranks,
        optimizer: Any,
        names: Collection[str] = (),
        shared: Collection[str] = (),
    ) -> None:
        self._parameters = {
            name: parameter  # quantized weights never have a gradient, and are not exchanged
            for name, parameter in parameters.items()
            if parameter.requires_grad or parameter.dtype.is_floating_point
        }
        self._optimizer = optimizer
        self._scaled: ScaledSteps | None = None
        if isinstance(optimizer, CompressedAdam):
            b1 = max(float(group["betas"][0]) for group in optimizer.param_groups)
            setup.compression.settings.require_momenta(optimizer.compressor_before, optimizer.local_steps, b1)
            if optimizer.local_steps > 1:
                self._require_local_steps(setup, optimizer)
        self.early_bytes = early_bytes(self.early_bytes, self._parameters.values())
        tensors = [_describe(name, parameter, name in shared) for name, parameter in self._parameters.items()]
        super().__init__(setup, tensors, communicator, torch.empty(0), names)
        self.learning_rates()  # raises an error if a policy needs the rates but the optimizer is unknown

    def _require_local_steps(self, setup: Setup, optimizer: CompressedAdam) -> None:
        """Raises ConfigurationError if a setting does not work with local steps."""
        local_steps = optimizer.local_steps
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if others := [name for name, parameter in self._parameters.items() if parameter not in stepped]:
            raise ConfigurationError(
                f"CompressedAdam: local_steps={local_steps} skips the exchange in most steps, but this optimizer "
                f"does not train {', '.join(others[:3])}. Without an exchange, their weights would differ between "
                "ranks. Give the optimizer all parameters of the model that are trained, or omit local_steps"
            )
        if self.is_summed:
            raise ConfigurationError(
                f"CompressedAdam: local_steps={local_steps} does not work with op=hvd.Sum, because a rank that makes a "
                "step on its own has no sum over the ranks; use op=hvd.Average"
            )
        if setup.grad_scaler is not None and setup.grad_scaler.is_enabled():
            raise ConfigurationError(
                f"CompressedAdam: local_steps={local_steps} does not work with a torch.amp.GradScaler: only the rank "
                "whose gradients overflow would skip the step, and from then on it would exchange at different times "
                "than the other ranks. Train in bfloat16, which needs no scaler, or leave out local_steps"
            )

    def run_engine(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        like = next(iter(gradients.values()), self.like)
        with torch.autocast(like.device.type, enabled=False):  # in case the backward pass runs inside torch.autocast
            return super().run_engine(gradients)

    def run_in_place(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Calls `run_engine`, and writes the means to the gradients."""
        for name, mean in self.run_engine(gradients).items():
            gradient = gradients[name]
            if mean is not gradient and mean.data_ptr() != gradient.data_ptr():
                gradient.copy_(mean)

    def begin(self) -> None:
        refuse_capture()
        super().begin()
        if self.coordinator is not None and self.coordinator.decision.sets_batch_size:
            self._scaled_steps().begin_step()

    def add_momenta(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds the momenta to gradients, in place. Call this method once for each gradient, before the engine gets the
        gradient."""
        momenta = self.units.momenta
        for name in momenta.keys() & gradients.keys() if momenta else ():
            momenta[name].add_to(gradients[name], self.units.of_momenta)

    def take_back(self, means: Mapping[str, torch.Tensor]) -> None:
        for name in self.units.momenta.keys() & means.keys():
            self.units.momenta[name].take_from(means[name], self.units.of_momenta)

    @property
    def plan_may_change(self) -> bool:
        """Whether gradients that are only cast in one step may be compressed in another step."""
        settings = self.setup.compression.settings
        follows = isinstance(self._optimizer, CompressedAdam)
        return settings.policy is not None or settings.compressor.level is not None or follows

    def compress(self, tensor: torch.Tensor) -> Any:
        """Raises ConfigurationError, because another object already averages the gradients that Horovod passes."""
        raise ConfigurationError(
            f"this hvdcomp.Compression is used by a model in {self.averaged_by}, which averages its gradients already; "
            "use the optimizer without hvd.DistributedOptimizer"
        )

    # Methods of `Training`.

    def checksums(self, names: Sequence[str]) -> list[int]:
        tensors: Mapping[str, torch.Tensor] = self._parameters
        if isinstance(self._optimizer, CompressedAdam):  # the first step of a resumed training run may be a local step
            tensors = {name: self._optimizer.at_latest_exchange(tensors[name]) for name in names}
        return checksums_of(tensors, names)

    def learning_rates(self) -> tuple[float, ...]:
        if self._scaled is not None:
            return self._scaled.rates
        follows = self.coordinator is not None and self.coordinator.follows_rates
        known = self._optimizer is not None and has_rates(self._optimizer)
        return rates_of(self._known_optimizer()) if follows or known else ()

    def follow_batch_size(self, batch_size: BatchSize) -> None:
        self._scaled_steps().factor = batch_size.learning_rate_factor

    def loss_scale(self) -> float | None:
        scaler = self.setup.grad_scaler
        return None if scaler is None else float(scaler.get_scale())

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def warm_up(self) -> str | None:
        optimizer = self._optimizer
        waits = isinstance(optimizer, CompressedAdam) and not optimizer.frozen
        return optimizer.compressor_before if waits else None

    def refreshes(self) -> bool:
        return isinstance(self._optimizer, CompressedAdam) and self._optimizer.refreshes

    @property
    def exchanges(self) -> bool:
        """Whether this step exchanges gradients. The result is the same on all ranks."""
        return not isinstance(self._optimizer, CompressedAdam) or self._optimizer.exchanges

    def momenta_of_step(self) -> Mapping[str, Momentum | LocalMomenta]:
        if not isinstance(self._optimizer, CompressedAdam):
            return {}
        momenta = self._optimizer.momenta()
        return {name: momenta[parameter] for name, parameter in self._parameters.items() if parameter in momenta}

    def momentum_of_optimizer(self) -> str | None:
        for group in getattr(self._optimizer, "param_groups", ()):
            if group.get("momentum"):
                return f"momentum={group['momentum']}"
            if "betas" in group and group["betas"][0]:
                return f"betas={tuple(group['betas'])}"
        return None

    def pack(self, state: Mapping[str, Any]) -> bytes:
        return packed(state)

    def unpack(self, message: bytes) -> dict[str, Any]:
        return unpacked(message)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(with_plain_names(state))

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().clone()

    def place(self, array: torch.Tensor, name: str) -> torch.Tensor:
        return array.detach().to(self._parameters[name].device, copy=True)

    def _scaled_steps(self) -> ScaledSteps:
        if self._scaled is None:
            self._scaled = ScaledSteps(self._known_optimizer())
        return self._scaled

    def _known_optimizer(self) -> Any:
        if self._optimizer is None:
            raise ConfigurationError(
                f"the policy {self.setup.compression.settings.policy} needs the optimizer: use {self.optimizer_from}"
            )
        return self._optimizer


def _describe(name: str, parameter: torch.nn.Parameter, is_shared: bool) -> TensorInfo:
    if not parameter.dtype.is_floating_point:
        raise ConfigurationError(
            f"parameter {name!r} has type {parameter.dtype}, but gradient compression needs floating-point parameters"
        )
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(parameter.shape), dtype, is_shared=is_shared)


def checksums_of(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[int]:
    """Computes a checksum of each of these tensors."""
    return [_checksum(tensors[name]) for name in names]


def _checksum(parameter: torch.Tensor) -> int:
    """The sum of the bit patterns of all elements, read as integers."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return int(parameter.detach().view(bits).sum(dtype=torch.int64)) & 2**64 - 1


def early_bytes(least: int, parameters: Iterable[torch.Tensor]) -> int:
    """The fewest bytes of gradients in a bucket that starts before the gradients of all parameters are ready."""
    parameters = list(parameters)
    on_device = any(parameter.is_cuda for parameter in parameters)
    return least_early_bytes(least, sum(p.numel() * p.element_size() for p in parameters), on_device)


def packed(state: Mapping[str, Any]) -> bytes:
    """Converts a state to bytes, from which `unpacked` restores the state."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """Restores a state from the bytes of `packed`. The tensors of the state are on the host."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state
