"""Lists the frameworks that hvdcomp supports, and finds the framework of a training run.

Each framework has a folder `hvdcomp/NAME/` with a module `framework`, which has the functions and constants of the
class `Framework` below. These modules, and the present module, import a framework only when they get a gradient,
variable or optimizer of this framework. Therefore `import hvdcomp` is quick, and works if only one framework is
installed.
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
    """The functions and constants of a module `hvdcomp.NAME.framework`.

    Attributes:
        TITLE: name of the framework in messages.
        ARGUMENT: name of the argument of `Compression` that gets the framework's parameters.
        EXAMPLE: an example of that argument with a value, for messages.
        SCALER: words for the framework's loss scalers, for messages.
    """

    TITLE: str
    ARGUMENT: str
    EXAMPLE: str
    SCALER: str

    def owns_gradient(self, gradient: Any) -> bool:
        """Whether `gradient` is a tensor of the framework."""

    def owns_optimizer(self, optimizer: Any) -> bool:
        """Whether `optimizer` is an optimizer of the framework, or Horovod's wrapper around such an optimizer."""

    def owns_scaler(self, scaler: Any) -> bool:
        """Whether `scaler` is a loss scaler of the framework."""

    def is_model(self, value: Any) -> bool:
        """Whether `value` is a model of the framework, which a user passed instead of its parameters."""

    def by_name(self, value: Any) -> dict[str, Any]:
        """The parameters, by name.

        Args:
            value: what the user passed as the argument `ARGUMENT`. If the user passed a function, its result.

        Raises:
            ConfigurationError: if two parameters have the same name, or if the value contains something other than
                parameters.
        """

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ConfigurationError if a user must not pass this optimizer to `Compression`."""

    def prepare(self, kind: type) -> None:
        """Prepares the framework for a new `Compression`.

        Args:
            kind: class of the `Compression`.

        Raises:
            ConfigurationError: if a `Compression` cannot be created at this moment.
        """

    def check_wrapping(self) -> None:
        """Raises ConfigurationError if Horovod is about to wrap an optimizer that does not work with Horovod."""

    def can_bind(self, parameters: Any, optimizer: Any) -> bool:
        """Whether these parameters and this optimizer suffice to create a binding before the first gradient. Each of
        the two may be None."""

    def make_binding(self, setup: Setup, gradient: Any) -> Binding:
        """Creates the binding for a training run.

        Args:
            setup: the `Compression`, and what the user passed to it.
            gradient: the first gradient from Horovod; None if `can_bind` returned True.
        """


def framework_named(name: str) -> Framework:
    """The framework with this name, which is one of `NAMES`."""
    return cast(Framework, import_module(f"hvdcomp.{name}.framework"))


def maker(name: str, gradient: Any = None) -> Callable[[Setup], Binding]:
    """A function that creates a binding of the framework `name`. `gradient` is as in `Framework.make_binding`."""
    return lambda setup: framework_named(name).make_binding(setup, gradient)


def named_or_all(name: str | None) -> dict[str, Framework]:
    """A mapping from names to frameworks: only the framework `name`, or all frameworks if `name` is None."""
    return {chosen: framework_named(chosen) for chosen in (NAMES if name is None else (name,))}


def of_arguments(parameters: Mapping[str, Any], optimizer: Any, scaler: Any = None) -> tuple[str | None, Any]:
    """Finds the framework and the parameters in the arguments of a `Compression`.

    Args:
        parameters: the values of the arguments that are named `ARGUMENT` in the frameworks, by the name of the
            argument. A value is None if the user did not pass the argument.
        optimizer: the optimizer that the user passed; None if the user did not.
        scaler: the loss scaler that the user passed; None if the user did not.

    Returns:
        Two values. The first is the framework's name; None if the arguments do not determine the framework. The second
        is the parameters by name, or the function that returns them; None if the user did not pass parameters.

    Raises:
        ConfigurationError: if the arguments belong to two frameworks, or cannot be used.
    """
    require_optimizer(optimizer, "hvdcomp.Compression")
    every = named_or_all(None)
    given = {argument: value for argument, value in parameters.items() if value is not None}
    if len(given) > 1:
        examples = " or ".join(f"{framework.EXAMPLE} ({framework.TITLE})" for framework in every.values())
        raise ConfigurationError(
            "hvdcomp.Compression was given the parameters of more than one framework. Pass only one of these "
            f"arguments, or none: {examples}"
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
    # Models are refused first, because a model is callable like a function, and because a Keras model that is not built
    # has no variables.
    if any(framework.is_model(value) for framework in every):
        examples = " or ".join(framework.EXAMPLE for framework in every)
        raise ConfigurationError(
            f"hvdcomp.Compression was given a model ({type(value).__name__}); pass {examples} instead of the model"
        )
    return value if callable(value) else framework.by_name(value)


def of_gradient(gradient: Any, expected: str | None) -> str:
    """The name of a gradient's framework.

    Args:
        gradient: the gradient that Horovod has passed.
        expected: name of the framework that the arguments of `Compression` determined; None if they did not.

    Raises:
        ConfigurationError: if the gradient belongs to no framework, or not to the expected framework.
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
        f"{' and '.join(uses)}{f'. This Compression was made for {expected}' if expected else ''}"
    )


def of_optimizer(optimizer: Any) -> str:
    """The name of an optimizer's framework.

    Raises:
        ConfigurationError: if `optimizer` is not an optimizer of a framework.
    """
    require_optimizer(optimizer, "load_state_dict")
    return next(name for name, framework in named_or_all(None).items() if framework.owns_optimizer(optimizer))


def require_optimizer(value: Any, function: str, name: str | None = None) -> None:
    """Raises ConfigurationError if a value is neither an optimizer nor None.

    Args:
        value: the value that the user passed as an optimizer.
        function: name of the function that the user passed it to, for the message.
        name: name of the framework whose optimizers are allowed; None for all frameworks.
    """
    if value is not None and not any(framework.owns_optimizer(value) for framework in named_or_all(name).values()):
        kind = type(value)
        raise ConfigurationError(
            f"{function} was given a {kind.__module__}.{kind.__qualname__} as optimizer, which is not an optimizer; "
            "pass the optimizer that updates the weights, or leave the argument out"
        )


def require_scaler(value: Any, name: str | None) -> None:
    """Raises ConfigurationError if a value is neither a loss scaler nor None. `name` is as in `require_optimizer`."""
    frameworks = named_or_all(name).values()
    if value is not None and not any(framework.owns_scaler(value) for framework in frameworks):
        raise ConfigurationError(
            f"grad_scaler={value!r} is not a loss scaler; give "
            f"{' or '.join(framework.SCALER for framework in frameworks)}, or leave grad_scaler out"
        )


def not_compiled(function: Function) -> Function:
    """Excludes a function, and all functions that it calls, from `torch.compile`. This matters if the user compiles a
    whole training step.

    On CPUs, hooks of the backward pass run in the thread that is being compiled, so Dynamo would trace them.
    `torch.compiler.disable` would exclude the function at once, but needs PyTorch, which takes seconds to import.
    Therefore the function is excluded in its first call after Dynamo was imported.
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
    """Marks a function that TensorFlow's AutoGraph must not rewrite. AutoGraph looks for the attribute that this
    function sets.

    `tf.autograph.experimental.do_not_convert` has the same effect, but needs TensorFlow.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
