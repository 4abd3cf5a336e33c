"""The frameworks that hvdcomp supports, and the choice of a training's framework.

The folder `hvdcomp/NAME/` has a module `framework` with the names that `Framework` lists. These modules, and this one,
import no framework before there is a gradient, a variable or an optimizer of it: `import hvdcomp` stays quick, and
works where only one framework is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hvdcomp.bindings.setup import Setup
from hvdcomp.errors import ConfigurationError

if TYPE_CHECKING:
    from hvdcomp.bindings.base import Binding

NAMES = ("torch", "tensorflow")
Function = TypeVar("Function", bound=Callable[..., Any])


class Framework(Protocol):
    """The interface of a module `hvdcomp.NAME.framework`.

    Attributes:
        TITLE: the framework's name in messages.
        ARGUMENT: the argument of `Compression` for its parameters.
        EXAMPLE: an example of that argument.
        SCALER: its loss scalers, in words.
    """

    TITLE: str
    ARGUMENT: str
    EXAMPLE: str
    SCALER: str

    def owns_gradient(self, gradient: Any) -> bool:
        """Whether this is a tensor of the framework."""

    def owns_optimizer(self, optimizer: Any) -> bool:
        """Whether this is an optimizer of the framework, or Horovod's wrapper of it."""

    def owns_scaler(self, scaler: Any) -> bool:
        """Whether this is a loss scaler of the framework."""

    def is_model(self, value: Any) -> bool:
        """Whether a user gave a model instead of its parameters."""

    def by_name(self, value: Any) -> dict[str, Any]:
        """The parameters by name, from the value of `ARGUMENT`, if it is no function.

        Raises:
            ConfigurationError: if names are not unique, or the value holds anything but parameters.
        """

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ConfigurationError if `Compression` cannot take this optimizer, or cannot take an optimizer."""

    def prepare(self, kind: type) -> None:
        """Prepares for making a `Compression` of class `kind`.

        Raises:
            ConfigurationError: if it cannot be made at this moment.
        """

    def check_wrapping(self) -> None:
        """Raises ConfigurationError if Horovod must not wrap the optimizer that it is about to wrap."""

    def can_bind(self, parameters: Any, optimizer: Any) -> bool:
        """Whether these suffice to make a binding before the first gradient; each may be None."""

    def make_binding(self, setup: Setup, gradient: Any) -> Binding:
        """The binding of a training.

        Args:
            setup: the user's settings and objects.
            gradient: the first gradient from Horovod; None if `can_bind` is true.
        """


def framework_named(name: str) -> Framework:
    """The framework of this name, one of `NAMES`."""
    return cast(Framework, import_module(f"hvdcomp.{name}.framework"))


def maker(name: str, gradient: Any = None) -> Callable[[Setup], Binding]:
    """The function that makes a framework's binding; arguments as in `framework_named` and `make_binding`."""
    return lambda setup: framework_named(name).make_binding(setup, gradient)


def named_or_all(name: str | None) -> dict[str, Framework]:
    """The framework of this name, by name; all frameworks if the name is None."""
    return {chosen: framework_named(chosen) for chosen in (NAMES if name is None else (name,))}


def of_arguments(parameters: Mapping[str, Any], optimizer: Any, scaler: Any = None) -> tuple[str | None, Any]:
    """The framework and the parameters in the arguments of a `Compression`.

    Args:
        parameters: the value of each framework's `ARGUMENT`, or None.
        optimizer: the optimizer, or None.
        scaler: the loss scaler, or None.

    Returns:
        The framework's name, None if the arguments do not determine it; and the parameters by name, or the function
        that returns them, or None.

    Raises:
        ConfigurationError: if the arguments are of two frameworks, or cannot be used.
    """
    require_optimizer(optimizer, "hvdcomp.Compression")
    every = named_or_all(None)
    given = {argument: value for argument, value in parameters.items() if value is not None}
    if len(given) > 1:
        examples = " or ".join(f"{framework.EXAMPLE} ({framework.TITLE})" for framework in every.values())
        raise ConfigurationError(
            "hvdcomp.Compression was given the parameters of more than one framework; pass only one of these "
            f"arguments: {examples}; or leave out both"
        )
    framework_name = None
    for name, framework in every.items():
        owns_optimizer = optimizer is not None and framework.owns_optimizer(optimizer)
        if optimizer is not None and (owns_optimizer or framework.ARGUMENT in given):
            framework.check_optimizer(optimizer)
        if framework.ARGUMENT in given or (owns_optimizer and not given):
            framework_name = name
    require_scaler(scaler, framework_name)
    if framework_name is None or not given:
        return framework_name, None
    return framework_name, _parameters_of(framework_named(framework_name), *given.values())


def _parameters_of(framework: Framework, value: Any) -> Any:
    every = named_or_all(None).values()
    # Models are refused first: they are callable, and a Keras model that is not built has no variables.
    if any(framework.is_model(value) for framework in every):
        examples = " or ".join(framework.EXAMPLE for framework in every)
        raise ConfigurationError(
            f"hvdcomp.Compression was given a model ({type(value).__name__}); pass {examples} instead of the model"
        )
    return value if callable(value) else framework.by_name(value)


def of_gradient(gradient: Any, expected: str | None) -> str:
    """The name of a gradient's framework.

    Args:
        gradient: the gradient.
        expected: the framework of the arguments; None if they did not determine it.

    Raises:
        ConfigurationError: if the gradient is of no framework, or not of the expected one.
    """
    for name, framework in named_or_all(expected).items():
        if framework.owns_gradient(gradient):
            return name
    uses = [
        f"{framework.TITLE} (horovod.{name}, {framework.ARGUMENT}=...)"
        for name, framework in named_or_all(None).items()
    ]
    raise ConfigurationError(
        f"hvdcomp.Compression was given a gradient of type {type(gradient).__module__}.{type(gradient).__qualname__}. "
        "hvdcomp.Compression works with "
        f"{' and '.join(uses)}{f'. This one was made for {expected}' if expected else ''}"
    )


def of_optimizer(optimizer: Any) -> str:
    """The name of an optimizer's framework.

    Raises:
        ConfigurationError: if it is no optimizer.
    """
    require_optimizer(optimizer, "load_state_dict")
    return next(name for name, framework in named_or_all(None).items() if framework.owns_optimizer(optimizer))


def require_optimizer(value: Any, function: str, name: str | None = None) -> None:
    """Raises ConfigurationError if the value given as an optimizer is none; None is accepted.

    Args:
        value: the value.
        function: the function that got it, for the message.
        name: name of the framework; None for any.
    """
    if value is not None and not any(framework.owns_optimizer(value) for framework in named_or_all(name).values()):
        kind = type(value)
        raise ConfigurationError(
            f"{function} was given a {kind.__module__}.{kind.__qualname__} as optimizer, which is not an optimizer; "
            "pass the optimizer that updates the weights, or leave the argument out"
        )


def require_scaler(value: Any, name: str | None) -> None:
    """Raises ConfigurationError if the value given as a loss scaler is none; arguments as in `require_optimizer`."""
    frameworks = named_or_all(name).values()
    if value is not None and not any(framework.owns_scaler(value) for framework in frameworks):
        raise ConfigurationError(
            f"grad_scaler={value!r} is not a loss scaler; give "
            f"{' or '.join(framework.SCALER for framework in frameworks)}, or leave grad_scaler out"
        )


def not_compiled(function: Function) -> Function:
    """Lets PyTorch's compiler run a function, and all that it calls, as written, if a whole training step is compiled.

    On CPUs hooks of the backward pass run in the thread that is compiled, and Dynamo would trace them. It knows a
    function that it is to leave alone by `torch.compiler.disable`, which needs PyTorch and takes seconds to load.
    """
    called = function

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal called
        if called is function and "torch._dynamo" in sys.modules:
            called = sys.modules["torch._dynamo"].disable(function)
        return called(*arguments, **options)

    return cast(Function, run)


def left_as_written(function: Function) -> Function:
    """Marks a function that TensorFlow's AutoGraph must not rewrite, by the attribute that it looks for.

    `tf.autograph.experimental.do_not_convert` does the same, but needs TensorFlow.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
