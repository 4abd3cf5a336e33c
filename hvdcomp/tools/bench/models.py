"""The names of models that can be timed on random data. Imports no framework."""

from __future__ import annotations

from hvdcomp.tools.train.options import IMAGE_MODELS, TEXT_MODELS, SetupError

TIMED = IMAGE_MODELS + TEXT_MODELS
"""Those of `hvdcomp train` that take images or text; signals and clicks have no random data."""

IMAGES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "digits": (1, 8, 10)}
"""Channels, size and classes of the images of a data set."""


def split_model(model: str) -> tuple[str, str]:
    """The name of a model and that of the data whose shape it is timed on, empty if it is left open.

    Args:
        model: such as "lstm", "resnet20" or "cnn@digits".

    Raises:
        SetupError: for a model that is not there, or data that do not suit it.

    Example:
        >>> split_model("cnn@digits")
        ('cnn', 'digits')
    """
    name, at, data = model.partition("@")
    if name not in TIMED:
        raise SetupError(
            f"the model {name!r} is not known; there are: {', '.join(TIMED)}, or write package.module:function for "
            "one of your own"
        )
    if at and (name in TEXT_MODELS or data not in IMAGES):
        raise SetupError(
            f"{model!r}: after @ stands the data whose shape an image model is timed on, one of {', '.join(IMAGES)}"
        )
    return name, data
