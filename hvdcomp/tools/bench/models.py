"""The names of models that can be timed on random data. This module does not import a framework."""

from __future__ import annotations

from hvdcomp.tools.train.options import IMAGE_MODELS, TEXT_MODELS, SetupError

TIMED = IMAGE_MODELS + TEXT_MODELS
"""The models of `hvdcomp train` whose inputs are images or text. Models whose inputs are signals, clicks or numbers to
sort are left out, because there are no random data for such inputs."""

IMAGES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "digits": (1, 8, 10)}
"""For each data set, the number of channels, the size in pixels, and the number of classes of its images."""


def split_model(model: str) -> tuple[str, str]:
    """Splits a text into the name of a model and the name of a data set, which determines the shape of random images.
    The second name is empty if the text does not name a data set.

    Args:
        model: name of a model, which may contain the name of its data, such as "lstm", "resnet20" or "cnn@digits".

    Raises:
        SetupError: if the model is unknown, or the data set does not suit the model.

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
            f"{model!r} is not a valid model. To choose the size of the random images, write @ and a data set after "
            f"the name of an image model. The data sets are: {', '.join(IMAGES)}"
        )
    return name, data
