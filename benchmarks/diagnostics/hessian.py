"""The largest eigenvalue of the Hessian of a loss, by power iteration with Hessian-vector products (PyTorch).

A Hessian-vector product is the gradient of (gradient . vector), so the Hessian itself, whose number of elements is the
square of the number of parameters, is never formed. Each product passes once over all batches and costs a few backward
passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdcomp.policies import is_number, is_whole

_ONCE_ONLY = ("not implemented", "differentiate twice")  # words of PyTorch's errors for a missing second derivative


@dataclass(frozen=True)
class HessianEigenvalue:
    """The result of `largest_hessian_eigenvalue`.

    Attributes:
        value: the largest eigenvalue in the algebraic sense: the greatest upward curvature. It is negative only if the
            loss curves down in every direction.
        dominant: the signed Rayleigh quotient at the end of plain power iteration. It estimates the eigenvalue of
            largest magnitude: `value` itself, or a negative eigenvalue. If the largest and the smallest eigenvalue are
            equally far from zero, `dominant` may be anywhere between them.
        iterations: the number of Hessian-vector products. Each product is a pass over all batches.
        relative_change: the change of the estimate in the last iteration, relative to `value`.
        converged: whether the relative change fell to the tolerance within the allowed iterations, in the plain power
            iteration and, if there was one, in the shifted power iteration.
    """

    value: float
    dominant: float
    iterations: int
    relative_change: float
    converged: bool


def largest_hessian_eigenvalue(
    model: nn.Module,
    loss_function: Callable[[Any, Tensor], Tensor],
    batches: Iterable[tuple[Any, Tensor]],
    parameters: Iterable[Tensor] | None = None,
    *,
    iterations: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> HessianEigenvalue:
    """The largest eigenvalue of the Hessian of the mean loss over `batches`.

    Power iteration finds the eigenvalue of largest magnitude. If a negative eigenvalue is at least as far from zero as
    the largest eigenvalue, a second power iteration follows, on Hessian + |dominant| * identity. The dominant
    eigenvalue of this sum, minus |dominant|, is the largest eigenvalue of the Hessian.

    The model is used in its current mode (`model.eval()`, `model.train()`). The function does not change the model's
    gradients, its buffers (batch normalization updates copies), or PyTorch's random generators on the CPU and on the
    parameters' devices. Random numbers of model and batches come from `seed` and are the same in every pass: dropout,
    for example, has a fixed mask per batch.

    Args:
        model: the model, which is called with the inputs of a batch.
        loss_function: function that gets the model's output and the targets, and returns a scalar: the mean loss over
            the elements of the targets.
        batches: pairs of inputs and targets, on the model's device, which can be iterated many times, such as a list or
            a DataLoader. A batch is weighted by the number of elements of its targets.
        parameters: the parameters with respect to which the Hessian is computed; by default all parameters of the
            model. Parameters that do not require a gradient are left out.
        iterations: the largest number of Hessian-vector products in each of the two power iterations.
        tolerance: the estimate has converged when its relative change is at most this number. The number bounds the
            last change, not the error. The error is larger if the largest eigenvalues are close together.
        seed: seed of the random start vectors, and of the random numbers of model and batches.
        reduce: function that gets the Hessian-vector product of this rank's batches, (parameters,), and returns its
            mean over the ranks; for Horovod, use `lambda vector: hvd.allreduce(vector, name="hessian")`. All ranks must
            make the same call and must have the same amount of data. An error on one rank then raises an error on all
            ranks.

    A custom autograd function that detaches tensors in its backward pass, and is not marked `once_differentiable`,
    gives a wrong second derivative, which cannot be detected.

    Raises:
        ValueError: if an argument is not allowed; if no parameter requires a gradient; if there are no batches, or if
            they can be iterated only once; if the loss is not a scalar, is not finite, or does not depend on the
            parameters; or if a product is not finite.
        RuntimeError: if an operation of the model or loss cannot be differentiated twice.

    References:
        Jastrzebski et al., On the relation between the sharpest directions of DNN loss and the SGD step length, 2019;
        Agarwal et al., Accordion, 2021, section 4.1 and figure 3; Pearlmutter, Fast exact multiplication by the
        Hessian, 1994.
    """
    _check(iterations, tolerance, seed, batches)
    hessian = _Hessian(model, loss_function, batches, parameters, seed, reduce)
    generator = torch.Generator().manual_seed(seed)
    plain = last = _power_iteration(hessian, generator, 0.0, iterations, tolerance)
    rising = plain.rayleigh > 0 and not plain.converged  # too early to tell
    if plain.rayleigh < (1 - tolerance) * plain.norm and not rising:
        last = _power_iteration(hessian, generator, plain.norm, iterations, tolerance)
    return HessianEigenvalue(
        value=last.rayleigh,
        dominant=plain.rayleigh,
        iterations=hessian.products,
        relative_change=last.relative_change,
        converged=plain.converged and last.converged,
    )


def _check(iterations: int, tolerance: float, seed: int, batches: object) -> None:
    if not is_whole(iterations, 1):
        raise ValueError(f"iterations={iterations!r} is not allowed; give a whole number, 1 or more")
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance!r} is not allowed; give a number above 0 and below 1")
    if not is_whole(seed, 0):
        raise ValueError(f"seed={seed!r} is not allowed; give a whole number, 0 or more")
    if isinstance(batches, Iterator):
        raise ValueError(
            f"batches is a {type(batches).__name__}, which can be iterated only once, but every iteration of the "
            "method needs all batches; give a list of batches or a DataLoader"
        )


@dataclass(frozen=True)
class _Iterated:
    """The result at the end of a power iteration."""

    rayleigh: float  # the Rayleigh quotient of the Hessian, without the shift
    norm: float  # the norm of (Hessian + shift) . unit vector
    relative_change: float
    converged: bool


def _power_iteration(
    hessian: _Hessian, generator: torch.Generator, shift: float, iterations: int, tolerance: float
) -> _Iterated:
    """Power iteration on Hessian + shift * identity, from a random vector.

    Convergence is judged by the norm, which never falls from one iteration to the next. Unlike the Rayleigh quotient,
    the norm does not settle at a wrong value if two dominant eigenvalues have opposite signs and equal magnitudes.
    """
    vector = torch.randn(hessian.size, generator=generator).to(hessian.device, hessian.dtype)
    vector /= torch.linalg.vector_norm(vector)
    resolution = 8 * torch.finfo(hessian.dtype).eps * shift  # the rounding error of `norm - shift`
    last = math.inf
    for _ in range(iterations):
        product = hessian(vector)
        rayleigh = (vector * product).sum(dtype=torch.float64).item()
        product = product.add_(vector, alpha=shift)
        norm = torch.linalg.vector_norm(product, dtype=torch.float64).item()
        change, estimate = abs(norm - last), abs(norm - shift)
        relative = change / estimate if estimate else math.inf
        if norm == 0:  # Hessian + shift * identity is zero
            return _Iterated(rayleigh, norm, 0.0, True)
        if change <= max(tolerance * estimate, resolution):
            return _Iterated(rayleigh, norm, relative, True)
        last = norm
        vector = product / norm
    return _Iterated(rayleigh, norm, relative, False)


class _Hessian:
    """The Hessian as a function from vectors to vectors, all of shape (size,).

    Attributes:
        size: number of elements of all parameters together.
        dtype: element type of the vectors: single precision, or double if a parameter is double.
        device: device of the vectors.
        products: number of Hessian-vector products so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: Callable[[Any, Tensor], Tensor],
        batches: Iterable[tuple[Any, Tensor]],
        parameters: Iterable[Tensor] | None,
        seed: int,
        reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._model = model
        self._loss_function = loss_function
        self._batches = batches
        self._parameters = _trainable(model.parameters() if parameters is None else parameters)
        self._seed = seed
        self._reduce = reduce
        self.size = sum(parameter.numel() for parameter in self._parameters)
        double = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self.dtype = torch.float64 if double else torch.float32
        self.device = self._parameters[0].device
        self.products = 0

    def __call__(self, vector: Tensor) -> Tensor:
        """The mean over all batches, and over the ranks, of Hessian . vector.

        A rank that fails sends NaN to the other ranks, so that they do not wait for it, and then raises its error.
        """
        self.products += 1
        error: Exception | None = None
        try:
            product = self._over_batches(vector)
        except Exception as raised:
            error, product = raised, torch.full_like(vector, math.nan)
        if self._reduce is not None:
            product = self._reduce(product)
        if error is not None:
            raise error
        if not torch.isfinite(product).all():
            raise ValueError(
                "a Hessian-vector product is not finite, here or on another rank; the weights are too large or the "
                "training has diverged"
            )
        return product

    def _over_batches(self, vector: Tensor) -> Tensor:
        parts = [
            part.view_as(parameter).to(parameter)
            for part, parameter in zip(
                vector.split([parameter.numel() for parameter in self._parameters]), self._parameters, strict=True
            )
        ]
        total, elements = torch.zeros_like(vector), 0
        # The loop over the batches is inside this context, because a DataLoader draws a seed from PyTorch's global
        # generator when its iteration starts.
        with _own_randomness(self._seed, self._parameters), torch.enable_grad():
            for number, batch in enumerate(self._batches):
                inputs, targets = _pair(batch, number)
                weight = targets.numel()
                if weight:
                    product = self._of_batch(parts, inputs, targets, number)
                    total.add_(torch.cat([part.flatten().to(total) for part in product]), alpha=weight)
                elements += weight
        if not elements:
            raise ValueError("batches is empty; the mean loss needs at least one sample")
        return total / elements

    def _of_batch(self, parts: Sequence[Tensor], inputs: Any, targets: Tensor, number: int) -> list[Tensor]:
        """The product of a vector and the Hessian of one batch's loss, by parameter."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        loss = self._loss_function(torch.func.functional_call(self._model, buffers, (inputs,)), targets)
        _check_loss(loss, number)
        try:
            # This factor requires a gradient, so that PyTorch detects operations that can be differentiated only once.
            weight = torch.ones_like(loss, requires_grad=True)
            gradients = torch.autograd.grad(loss, self._parameters, weight, create_graph=True, allow_unused=True)
            if self.products == 1:
                _check_twice_differentiable(gradients)
            if all(gradient is None for gradient in gradients):
                raise ValueError(
                    f"the loss of batch {number} does not depend on any of the parameters; give the parameters of "
                    "this model"
                )
            # A gradient without a graph is constant: the loss is linear in that parameter.
            curved = [
                (gradient, part)
                for gradient, part in zip(gradients, parts, strict=True)
                if gradient is not None and gradient.requires_grad
            ]
            if not curved:
                return [torch.zeros_like(part) for part in parts]
            outputs, vectors = zip(*curved, strict=True)
            products = torch.autograd.grad(outputs, self._parameters, vectors, allow_unused=True)
        except RuntimeError as error:
            if not any(words in str(error) for words in _ONCE_ONLY):
                raise
            raise RuntimeError(
                f"the model or the loss has an operation that cannot be differentiated twice ({error}); use another "
                "implementation of it: torch.backends.cudnn.flags(enabled=False) for recurrent layers, "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for attention"
            ) from error
        return [
            torch.zeros_like(part) if product is None else product
            for product, part in zip(products, parts, strict=True)
        ]


def _trainable(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that require a gradient, without duplicates."""
    all_parameters = list(parameters)
    chosen = list({id(parameter): parameter for parameter in all_parameters if parameter.requires_grad}.values())
    if not chosen:
        raise ValueError(
            f"none of the {len(all_parameters)} parameters requires a gradient; give parameters for which "
            "requires_grad is True"
        )
    return chosen


def _check_twice_differentiable(gradients: Sequence[Tensor | None]) -> None:
    """Raises an error for operations that are marked as differentiable only once. PyTorch's second derivative would
    silently omit them."""
    pending = [gradient.grad_fn for gradient in gradients if gradient is not None]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("differentiate twice: a custom torch.autograd.Function is marked once_differentiable")
        seen.add(node)
        pending += [following for following, _ in node.next_functions]


def _pair(batch: Any, number: int) -> tuple[Any, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(
            f"batch {number} is a {type(batch).__name__}; give pairs (inputs, targets), in which targets is a tensor"
        )
    return batch[0], batch[1]


def _check_loss(loss: object, number: int) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_function returned {shown}; it must return a scalar, the mean over the targets")
    if not math.isfinite(loss.item()):
        raise ValueError(f"the loss of batch {number} is {loss.item()}; the Hessian needs a finite loss")
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of batch {number} does not depend on the parameters by differentiable operations; look for "
            ".detach(), .item() or torch.no_grad() in the model and the loss function"
        )


@contextlib.contextmanager
def _own_randomness(seed: int, parameters: Sequence[Tensor]) -> Iterator[None]:
    """A context manager in which random numbers come from `seed`. Afterwards, the random generators of the CPU and of
    the parameters' GPUs continue as before."""
    devices = sorted({parameter.device.index for parameter in parameters if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
