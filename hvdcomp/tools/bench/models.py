"""The names of models that can be timed on random data. Imports no framework."""

from __future__ import annotations

from hvdcomp.tools.train.options import IMAGE_MODELS, TEXT_MODELS, SetupError

TIMED = IMAGE_MODELS + TEXT_MODELS
"""The models of `hvdcomp train` that take images or text; signals, clicks and numbers to sort have no random data."""

IMAGES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "digits": (1, 8, 10)}
"""Channels, size and classes of the images of a data set."""


def split_model(model: str) -> tuple[str, str]:
    """The names of a model and of the data set whose shape its random images have; the latter is empty if not given.

    Args:
        model: such as "lstm", "resnet20" or "cnn@digits".

    Raises:
        SetupError: for an unknown model, or data that do not suit the model.

    Example:
        >>> split_model("cnn@digits")
        ('cnn', 'digits')
    """
    name, at, data = model.partition("@")
    if name not in TIMED:
        raise SetupError(
            f"the model {name!r} is not known; give one of {', '.join(TIMED)}, or package.module:function for a model "
            "of your own"
        )
    if at and (name in TEXT_MODELS or data not in IMAGES):
        raise SetupError(
            f"{model!r} is not possible: after the name of an image model, you can write @ and a data set, whose image "
            f"size the random images then have, one of {', '.join(IMAGES)}"
        )
    return name, data
