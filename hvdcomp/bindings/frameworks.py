"""The frameworks that hvdcomp serves: what the folder of each offers, and which one a training uses.

The folder `hvdcomp/NAME/` has a module `framework` with the names that `Framework` lists. These modules, and this one,
import no framework before there is a gradient, a variable or an optimizer of it: `import hvdcomp` stays quick, and
works where only one framework is installed.
"""

from __future__ import annotations

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
    """What a module `hvdcomp.NAME.framework` offers.

    Attributes:
        TITLE: the framework's name in messages.
        ARGUMENT: the argument of `Compression` that takes its parameters.
        EXAMPLE: how a user writes that argument.
        SCALER: what scales a loss in it, in words.
    """

    TITLE: str
    ARGUMENT: str
    EXAMPLE: str
    SCALER: str

    def owns_gradient(self, gradient: Any) -> bool:
        """Whether this is a tensor of the framework."""

    def owns_optimizer(self, optimizer: Any) -> bool:
        """Whether this is an optimizer of the framework, or one of Horovod's around it."""

    def owns_scaler(self, scaler: Any) -> bool:
        """Whether this scales losses in the framework."""

    def is_model(self, given: Any) -> bool:
        """Whether a user gave a model where its parameters were asked for."""

    def by_name(self, given: Any) -> dict[str, Any]:
        """The parameters by name, from what was given as `ARGUMENT` and is no function.

        Raises:
            ConfigurationError: if names are not unique, or it holds anything but parameters.
        """

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ConfigurationError if `Compression` may not be given this optimizer, or none at all."""

    def prepare(self, kind: type) -> None:
        """Prepares for a `Compression`, the `kind`, that is being made.

        Raises:
            ConfigurationError: if none may be made at this moment.
        """

    def check_wrapping(self) -> None:
        """Raises ConfigurationError if Horovod may not wrap the optimizer that it is about to wrap."""

    def can_bind(self, parameters: Any, optimizer: Any) -> bool:
        """Whether these tell enough to make a binding before the first gradient; each may be None."""

    def make_binding(self, setup: Setup, gradient: Any) -> Binding:
        """The binding of a training.

        Args:
            gradient: the first that Horovod hands over; None where `can_bind` says that it is not needed.
        """


def framework_named(name: str) -> Framework:
    """The framework of this name, one of `NAMES`."""
    return cast(Framework, import_module(f"hvdcomp.{name}.framework"))


def maker(name: str, gradient: Any = None) -> Callable[[Setup], Binding]:
    """What makes the binding of a framework; the arguments are those of `framework_named` and `make_binding`."""
    return lambda setup: framework_named(name).make_binding(setup, gradient)


def named_or_all(name: str | None) -> dict[str, Framework]:
    """By name, the framework of this name; all of them where it is None, because that is not known yet."""
    return {each: framework_named(each) for each in (NAMES if name is None else (name,))}


def of_arguments(parameters: Mapping[str, Any], optimizer: Any, scaler: Any = None) -> tuple[str | None, Any]:
    """Which framework the arguments of a `Compression` are of, None if they do not tell, and its parameters.

    Args:
        parameters: what was given as each framework's `ARGUMENT`; None for nothing.
        optimizer, scaler: that were given, or None.

    Returns:
        The framework's name, and the parameters by name, or the function that was given, or None.

    Raises:
        ConfigurationError: if they are of two frameworks, or if they cannot be used.
    """
    require_optimizer(optimizer, "hvdcomp.Compression")
    every = named_or_all(None)
    given = {argument: value for argument, value in parameters.items() if value is not None}
    if len(given) > 1:
        examples = " or ".join(f"{framework.EXAMPLE} ({framework.TITLE})" for framework in every.values())
        raise ConfigurationError(
            f"give hvdcomp.Compression {examples}, one of these or none: residuals and warm starts are kept by "
            "parameter name"
        )
    framework_name = None
    for name, framework in every.items():
        owns_optimizer = optimizer is not None and framework.owns_optimizer(optimizer)
        if optimizer is not None and (owns_optimizer or framework.ARGUMENT in given):
            framework.check_optimizer(optimizer)
        if framework.ARGUMENT in given or (owns_optimizer and not given):
            framework_name = name
    _require_scaler(scaler, framework_name)
    if framework_name is None or not given:
        return framework_name, None
    return framework_name, _parameters_of(framework_named(framework_name), *given.values())


def _parameters_of(framework: Framework, given: Any) -> Any:
    every = named_or_all(None).values()
    # A model, which can be called. One of Keras that is not built fails when it is asked for its variables.
    if any(framework.is_model(given) for framework in every):
        examples = " or ".join(framework.EXAMPLE for framework in every)
        raise ConfigurationError(
            f"hvdcomp.Compression was given the model {type(given).__name__} itself; give it {examples}"
        )
    return given if callable(given) else framework.by_name(given)


def of_gradient(gradient: Any, expected: str | None) -> str:
    """Which framework a gradient is of.

    Args:
        expected: of the arguments; None if they did not tell.

    Raises:
        ConfigurationError: if it is of none, or not of the expected one.
    """
    for name, framework in named_or_all(expected).items():
        if framework.owns_gradient(gradient):
            return name
    uses = [
        f"{framework.TITLE} (horovod.{name}, {framework.ARGUMENT}=...)"
        for name, framework in named_or_all(None).items()
    ]
    raise ConfigurationError(
        f"hvdcomp.Compression was given a {type(gradient).__module__}.{type(gradient).__qualname__}; it works with "
        f"{' and '.join(uses)}{f', and was made for {expected}' if expected else ''}"
    )


def of_optimizer(optimizer: Any) -> str:
    """Which framework an optimizer is of.

    Raises:
        ConfigurationError: if it is no optimizer.
    """
    require_optimizer(optimizer, "load_state_dict")
    return next(name for name, framework in named_or_all(None).items() if framework.owns_optimizer(optimizer))


def require_optimizer(given: Any, function: str, name: str | None = None) -> None:
    """Raises ConfigurationError if a user gave a function something else as an optimizer; None is no optimizer.

    Args:
        name: of the framework; None for any.
    """
    if given is not None and not any(framework.owns_optimizer(given) for framework in named_or_all(name).values()):
        kind = type(given)
        raise ConfigurationError(
            f"{function} was given a {kind.__module__}.{kind.__qualname__} as optimizer, which is none; give it the "
            "one that steps with the gradients, or leave it out"
        )


def _require_scaler(given: Any, name: str | None) -> None:
    """Raises ConfigurationError if a user gave something else as what scales the loss; arguments as of
    `require_optimizer`."""
    known = named_or_all(name).values()
    if given is not None and not any(framework.owns_scaler(given) for framework in known):
        raise ConfigurationError(
            f"grad_scaler={given!r} does not scale a loss; give "
            f"{' or '.join(framework.SCALER for framework in known)}, or leave it out"
        )


def left_as_written(function: Function) -> Function:
    """Marks a function that no framework may rewrite when it traces: TensorFlow's AutoGraph looks for this attribute.

    `tf.autograph.experimental.do_not_convert` does the same, but needs TensorFlow.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
