"""Trains in PyTorch. Subclasses connect the ranks.

On a CPU with two ranks, the same seed gives the same weights, bit for bit. With more ranks, the order of additions in a
fused allreduce may change the last bits.
"""

from __future__ import annotations

import io
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.files import write_file
from hvdcomp.tools.train import environment
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.learner import Arrays, Learner, reading
from hvdcomp.tools.train.models_torch import build_model
from hvdcomp.tools.train.optimizers_torch import build_optimizer, prepare
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.torch import CompressedAdam, LocalSteps, RowExchange

_SHARED, OWN = "model.pt", "rank-{}.pt"  # the files of a checkpoint
OWN_ENTRIES = ("buffers", "random", "cuda_random")  # the keys of `_own_state`


class TorchLearner(Learner):
    """The base class of a `Learner` that trains with PyTorch. If there are GPUs, each rank of a host uses a different
    GPU."""

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        if options.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            raise SetupError(
                f"--optimizer muon needs PyTorch 2.9 or later, but this is PyTorch {torch.__version__}; use "
                "--optimizer adamw"
            )
        self._options = options
        self._rank = ranks.rank
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        model = build_model(options.model, channels=data.channels, size=data.size, classes=data.classes)
        self._model = model.to(self._device)
        self._optimizer: Any = None
        self._compression: Compression | None = None
        self._rows: RowExchange | None = None
        apart = ranks.size > 1 and not self._steps_alone
        bags = [name for name, module in self._model.named_modules() if isinstance(module, nn.EmbeddingBag)]
        self._tables = [f"{name}.weight" for name in bags] if apart else []

    @staticmethod
    def prepare(local_rank: int, local_size: int) -> None:
        environment.use_threads(local_size)
        environment.use_device("auto", local_rank)

    def _begin(self) -> None:
        """Creates the optimizer. Call this at the end of `broadcast`."""
        self._optimizer = build_optimizer(self._options, self._model)
        torch.manual_seed(self._options.seed + self._rank * 2**31)

    def compression(self, spec: str, **options: Any) -> Compression:
        layers = [(name, parameter) for name, parameter in self._model.named_parameters() if name not in self._tables]
        return Compression.from_spec(spec, named_parameters=layers, **options)

    def _serve_tables(self, **options: Any) -> None:
        """Sets up the exchange of the rows of embedding tables, if the model has such tables. options: options of
        `RowExchange`."""
        if self._tables:
            self._rows = RowExchange(self._model, self._tables, **options)

    @contextmanager
    def _without_tables(self) -> Iterator[None]:
        """A context manager in which the tables do not require gradients, so that the compression does not exchange
        them."""
        tables = [self._model.get_parameter(name) for name in self._tables]
        for table in tables:
            table.requires_grad_(False)
        try:
            yield
        finally:
            for table in tables:
                table.requires_grad_(True)

    @property
    def row_ledger(self) -> Any:
        return None if self._rows is None else self._rows.ledger

    def set_learning_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self, inputs: np.ndarray, targets: np.ndarray, accumulation: int) -> float:
        passes = accumulation * self._options.backward_passes_per_step
        self._model.train()
        prepare(self._optimizer, training=True)
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        parts = [self._tensor(array).chunk(passes) for array in (inputs, targets)]
        for number, (x, y) in enumerate(zip(*parts, strict=True), 1):
            total += self._backward(x, y, passes, last=number == passes)
        if self._rows is not None:
            self._rows.exchange()
        self._update()
        return total.item()  # On an accelerator, `item` waits until the step has finished.

    @abstractmethod
    def _backward(self, inputs: Tensor, targets: Tensor, passes: int, last: bool) -> Tensor:
        """Runs a forward and a backward pass, which accumulates gradients. Returns this pass's share of the loss.

        Args:
            inputs, targets: the samples of the pass.
            passes: the number of passes of the step.
            last: whether this is the last pass, after which the gradients are exchanged.
        """

    def _update(self) -> None:
        """Takes the optimizer's step with the averaged gradients, which are clipped if `clip_norm` is set."""
        if self._clips:
            self._clip()
        self._optimizer.step()

    @property
    def _steps_alone(self) -> bool:
        """Whether the ranks exchange weights after several steps, instead of gradients."""
        return self._options.steps_alone and self._options.optimizer != "compressed-adam"

    def _distribute_steps(self, compression: Compression, **options: Any) -> None:
        """Does the work of `distribute` for local steps. options: options of `LocalSteps`."""
        self._compression = compression
        own = self._options
        for name in ("outer_lr", "outer_momentum"):
            if (value := getattr(own, name)) is not None:
                options[name] = value
        options |= {"fragments": own.fragments, "delay": own.delay, "local_share": own.local_share}
        try:
            self._optimizer = LocalSteps(self._optimizer, own.local_steps, compression=compression, **options)
        except SpecError as error:
            raise ConfigurationError(f"--local-steps {error}") from None

    def end(self) -> None:
        if isinstance(self._optimizer, LocalSteps) and not self._optimizer.in_sync:
            self._optimizer.exchange()

    @property
    def _clips(self) -> bool:
        """Whether the norm of the averaged gradient is limited. It is not limited while the ranks send compressed
        momenta, because the norm of these momenta is mostly noise."""
        optimizer = self._optimizer
        noisy = isinstance(optimizer, CompressedAdam) and optimizer.frozen and not optimizer.refreshes
        return bool(self._options.clip_norm) and not noisy

    def _clip(self) -> None:
        """Limits the norm of the averaged gradient."""
        nn.utils.clip_grad_norm_(self._model.parameters(), self._options.clip_norm or 0.0)

    @torch.no_grad()
    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        self._model.eval()
        prepare(self._optimizer, training=False)
        answers = self._tensor(targets)
        outputs = self._model(self._tensor(inputs))
        right = 0 if answers.is_floating_point() else int((outputs.argmax(dim=-1) == answers).sum().item())
        return loss_of(outputs, answers).item(), right

    def parameters(self) -> Arrays:
        return {name: as_array(parameter) for name, parameter in self._model.named_parameters()}

    def common_weights(self) -> AbstractContextManager[None]:
        return self._optimizer.outer_weights() if isinstance(self._optimizer, LocalSteps) else nullcontext()

    def buffers(self) -> Arrays:
        return {name: as_array(buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()}

    def set_buffers(self, values: Mapping[str, np.ndarray]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in values:
                buffer.copy_(torch.from_numpy(values[name]))

    def save(self, folder: Path) -> list[Path]:
        assert self._compression is not None
        contents: dict[Path, Any] = {}
        if not self._steps_alone:  # otherwise, weights differ between ranks
            shared = self._shared_state()
            if self._rank == 0:
                contents[folder / _SHARED] = shared
        rank_content: dict[str, Any] = {
            **self._own_state(),
            "compression": self._compression.state_dict(),
            "rows": None if self._rows is None else (asdict(self._rows.ledger.totals), self._rows.ledger.steps),
        }
        if self._steps_alone:
            rank_content |= self._shared_state()
            rank_content["optimizer"].get("local_steps", {}).pop("compression", None)  # it is saved separately above
        contents[folder / OWN.format(self._rank)] = rank_content
        for file, content in contents.items():
            write_content(file, content)
        return list(contents)

    def restore(self, folder: Path, sources: Sequence[int], ranks: int) -> None:
        assert self._compression is not None
        first, *other_sources = sources
        of_rank, of_all, alone = (*OWN_ENTRIES, "compression"), ("model", "optimizer"), self._steps_alone
        rank_content = self._read(folder / OWN.format(first), *of_rank, *(of_all if alone else ()))
        shared = rank_content if alone else self._read(folder / _SHARED, *of_all)
        if isinstance(self._optimizer, LocalSteps) and first != self._rank:
            self._model.load_state_dict(shared["model"])
            self._optimizer.join(shared["optimizer"])
        else:
            self._load_shared(shared)
        self._load_own(rank_content, of_this_rank=first == self._rank)
        if self._rows is not None and rank_content["rows"] is not None:
            totals, steps = rank_content["rows"]
            self._rows.ledger.continue_from(replace(self._rows.ledger.totals, **totals), steps)
        other_states = (
            self._read(folder / OWN.format(source), "compression")["compression"] for source in other_sources
        )
        states = itertools.chain([rank_content["compression"]], other_states)
        state = hvdcomp.state_for(states, self._rank, ranks, self._options.residuals)
        self._compression.load_state_dict(state, optimizer=self._optimizer)

    def _own_state(self) -> dict[str, Any]:
        """The buffers and random generators of this rank."""
        return {
            "buffers": dict(self._model.named_buffers()),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self._device.type == "cuda" else None,
        }

    def _load_own(self, state: dict[str, Any], of_this_rank: bool) -> None:
        """Loads the result of `_own_state`. If the result belongs to a different rank, only the buffers are loaded."""
        self._model.load_state_dict(state["buffers"], strict=False)
        if of_this_rank:
            torch.set_rng_state(state["random"].cpu())
            if state["cuda_random"] is not None and self._device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_random"].cpu())

    def _read(self, file: Path, *entries: str) -> dict[str, Any]:
        """The content of a file, which must have these entries."""
        with reading():
            content = dict(torch.load(file, map_location=self._device, weights_only=True))
            if missing := [entry for entry in entries if entry not in content]:
                raise KeyError(*missing)
            return content

    def _shared_state(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks: the weights and the optimizer's state."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load_shared(self, state: dict[str, Any]) -> None:
        """Loads the result of `_shared_state`."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy or, for a regression (whose targets are floats), the mean squared error."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs.flatten(), targets)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


def write_content(file: Path, content: Any) -> None:
    """Writes a file for `torch.load`. PyTorch's own file writer is not used, because it does not report the reason for
    a failure."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(file, buffer.getbuffer())
