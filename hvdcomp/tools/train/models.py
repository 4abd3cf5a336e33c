"""The models of the reference training program: small models for a laptop, and the models in the papers on compression.

Image models map float batches of shape (N, channels, size, size) to logits (N, classes). The signal model has inputs
(N, channels, size). The click model has inputs (N, channels), which are dense features, followed by an id for each
table of `size` rows. Language models and the encoder map token ids (N, length) to logits (N, length, classes). The
convolutional networks have the form that is usual for CIFAR: no early downsampling, and one linear layer at the end.
This module has the parts that all frameworks share. `models_torch` and `models_tensorflow` create the same networks
with the same parameters and names. Only PyTorch has the vision transformer, the encoder and the click model.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdcomp.tools.train.options import SetupError

_SMALLEST_IMAGE = {
    "mlp": 1,
    **dict.fromkeys(("cnn", "resnet8", "resnet20", "vit"), 4),
    "resnet18": 8,
    **dict.fromkeys(("vgg16", "vgg19_bn"), 32),
}

# The widths of convolutions, with "M" for max-pooling. These are configurations D and E of Simonyan and Zisserman
# (2015), Table 1.
VGG16: tuple[int | str, ...] = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
VGG19: tuple[int | str, ...] = (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M")


class LSTMSize(NamedTuple):
    """Widths and dropout rate of the LSTM language model."""

    embedding: int
    hidden: int
    dropout: float

    @classmethod
    def for_tokens(cls, tokens: int) -> LSTMSize:
        """The size for a number of tokens. For characters, the model is a small LSTM. For words, it has the widths of
        the LSTM in the PowerSGD paper (Vogels et al., 2019)."""
        return cls(64, 128, 0.0) if tokens < 1000 else cls(650, 650, 0.5)


class TransformerSize(NamedTuple):
    """Layers, width and attention heads of a transformer.

    References: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, Table 2 (gpt-small).
    """

    layers: int
    width: int
    heads: int


GPT_SIZES = {
    "gpt": TransformerSize(3, 96, 4),
    "gpt-mini": TransformerSize(6, 384, 6),
    "gpt-small": TransformerSize(12, 768, 12),
}
"""The sizes by model. For bytes and sequences of 128 tokens, the models have 0.37, 10.8 and 85 million parameters."""

VIT_SIZE = TransformerSize(4, 64, 4)
ENCODER_SIZE = TransformerSize(2, 64, 4)


class DLRMSize(NamedTuple):
    """The size of a click model: dense features of a sample, tables, their rows and columns, and the width of hidden
    layers. Tables and rows depend on the data. The defaults are for the synthetic clicks."""

    dense: int
    tables: int
    rows: int
    columns: int
    hidden: int


DLRM_SIZE = DLRMSize(13, 8, 20_000, 16, 64)


def patch_side(size: int) -> int:
    """The side of the patches of the model vit, in pixels. An image of digits has 16 patches, and a CIFAR image has
    64."""
    return 4 if size >= 16 else 2


def pooling(size: int) -> tuple[int, int]:
    """The factors of the two poolings of the model cnn. Images of 8x8 pixels are pooled only once."""
    return (2, 2) if size >= 16 else (1, 2)


def check_image_size(name: str, size: int) -> None:
    """Raises SetupError if images are too small for a network's pooling."""
    smallest = _SMALLEST_IMAGE.get(name, 0)
    if size < smallest:
        fitting = [model for model, needed in _SMALLEST_IMAGE.items() if needed <= size]
        raise SetupError(
            f"--model {name} needs images of at least {smallest}x{smallest} pixels, but these have {size}x{size}; "
            f"choose one of {', '.join(fitting)}"
        )
