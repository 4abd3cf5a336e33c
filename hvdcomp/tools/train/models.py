"""The models of the reference training program: small models for a laptop, and those of the compression papers.

Image models map float batches of shape (N, channels, size, size) to logits (N, classes); the signal model has inputs
(N, channels, size), and the click model (N, channels): dense features, and then an id for each table of `size` rows.
Language models and the encoder map token ids (N, length) to logits (N, length, classes). The convolutional networks
have their CIFAR form: no early downsampling, and one linear layer at the end. This module has the parts that all
frameworks share; `models_torch` and `models_tensorflow` build the same networks, with the same parameters under the
same names. Only PyTorch has the vision transformer, the encoder and the click model.
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

# Widths of convolutions, and "M" for max-pooling: configurations D and E of Simonyan and Zisserman (2015), Table 1.
VGG16: tuple[int | str, ...] = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
VGG19: tuple[int | str, ...] = (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "M")


class LSTMSize(NamedTuple):
    """Widths and dropout rate of the LSTM language model."""

    embedding: int
    hidden: int
    dropout: float

    @classmethod
    def for_tokens(cls, tokens: int) -> LSTMSize:
        """A small LSTM for characters; for words the widths of the LSTM in PowerSGD (Vogels et al., 2019)."""
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
"""Sizes by model; for bytes and 128 tokens they have 0.37, 10.8 and 85 million parameters."""

VIT_SIZE = TransformerSize(4, 64, 4)
ENCODER_SIZE = TransformerSize(2, 64, 4)


class DLRMSize(NamedTuple):
    """Dense features of a sample, tables, their rows and columns, and the width of hidden layers; tables and rows are
    the data's, and here those of the synthetic clicks."""

    dense: int
    tables: int
    rows: int
    columns: int
    hidden: int


DLRM_SIZE = DLRMSize(13, 8, 20_000, 16, 64)


def patch_side(size: int) -> int:
    """Side of the vit's patches, in pixels: 16 patches for the digits, 64 for images of CIFAR."""
    return 4 if size >= 16 else 2


def pooling(size: int) -> tuple[int, int]:
    """Factors of the cnn's two poolings; images of 8x8 pixels are pooled once."""
    return (2, 2) if size >= 16 else (1, 2)


def check_image_size(name: str, size: int) -> None:
    """Raises SetupError if images are too small for a network's pooling."""
    smallest = _SMALLEST_IMAGE.get(name, 0)
    if size < smallest:
        fitting = [model for model, needed in _SMALLEST_IMAGE.items() if needed <= size]
        raise SetupError(
            f"--model {name} needs images of at least {smallest}x{smallest} pixels, and these have {size}x{size}; "
            f"choose one of {', '.join(fitting)}"
        )
