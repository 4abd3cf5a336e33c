"""The parameter shapes of well-known models: gradients to compress, without the models or their data.

The counts of tensors and parameters are those of torchvision's ResNets and VGG-16, of BERT-base (uncased, with
pooler), of the 252 MB two-layer LSTM of GraVAC (Tyagi and Swany 2023, table 1): Penn Treebank's 10,000 words, 1,500
units; and of ResNet-20 for CIFAR-10 (He et al. 2016, section 4.2), whose shortcuts have no parameters. `small-tensors`
is no model: 200 matrices of 64 x 64, for which the cost of a tensor outweighs that of its elements.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdcomp.compressors import TensorInfo

Shapes = dict[str, tuple[int, ...]]


def _resnet(blocks: tuple[int, int, int, int]) -> Shapes:
    """Bottleneck ResNet for 1,000 classes."""
    shapes: Shapes = {}

    def convolution(name: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (outputs,)

    convolution("conv1", 64, 3, 7)
    inputs = 64
    for layer, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            name = f"layer{layer}.{block}"
            convolution(f"{name}.conv1", width, inputs, 1)
            convolution(f"{name}.conv2", width, width, 3)
            convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.downsample", 4 * width, inputs, 1)
            inputs = 4 * width
    return {**shapes, "fc.weight": (1000, 2048), "fc.bias": (1000,)}


def _resnet20() -> Shapes:
    """Basic blocks for CIFAR-10: three stages of three blocks."""
    shapes: Shapes = {}

    def convolution(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, 3, 3)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (outputs,)

    convolution("conv1", 16, 3)
    inputs = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(3):
            convolution(f"layer{stage}.{block}.conv1", width, inputs)
            convolution(f"layer{stage}.{block}.conv2", width, width)
            inputs = width
    return {**shapes, "fc.weight": (10, 64), "fc.bias": (10,)}


def _vgg16() -> Shapes:
    shapes: Shapes = {}
    inputs = 3
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for number, width in enumerate(widths):
        shapes[f"features.{number}.weight"] = (width, inputs, 3, 3)
        shapes[f"features.{number}.bias"] = (width,)
        inputs = width
    for number, (outputs, inputs) in enumerate(((4096, 25088), (4096, 4096), (1000, 4096))):
        shapes[f"classifier.{number}.weight"] = (outputs, inputs)
        shapes[f"classifier.{number}.bias"] = (outputs,)
    return shapes


def _bert_base() -> Shapes:
    hidden = 768
    shapes: Shapes = {
        "embeddings.word": (30522, hidden),
        "embeddings.position": (512, hidden),
        "embeddings.token_type": (2, hidden),
        "embeddings.norm.weight": (hidden,),
        "embeddings.norm.bias": (hidden,),
    }
    for layer in range(12):
        for name, outputs, inputs in (
            *((part, hidden, hidden) for part in ("query", "key", "value", "attention.output")),
            ("intermediate", 4 * hidden, hidden),
            ("output", hidden, 4 * hidden),
        ):
            shapes[f"layer.{layer}.{name}.weight"] = (outputs, inputs)
            shapes[f"layer.{layer}.{name}.bias"] = (outputs,)
        for norm in ("attention.norm", "output.norm"):
            shapes[f"layer.{layer}.{norm}.weight"] = shapes[f"layer.{layer}.{norm}.bias"] = (hidden,)
    return {**shapes, "pooler.weight": (hidden, hidden), "pooler.bias": (hidden,)}


def _gravac_lstm() -> Shapes:
    words, units = 10_000, 1_500
    shapes: Shapes = {"embedding": (words, units)}
    for layer in range(2):
        for side in ("input", "hidden"):
            shapes[f"lstm.{layer}.{side}.weight"] = (4 * units, units)
            shapes[f"lstm.{layer}.{side}.bias"] = (4 * units,)
    return {**shapes, "decoder.weight": (words, units), "decoder.bias": (words,)}


_MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": lambda: _resnet((3, 4, 6, 3)),
    "resnet101": lambda: _resnet((3, 4, 23, 3)),
    "vgg16": _vgg16,
    "bert-base": _bert_base,
    "gravac-lstm": _gravac_lstm,
    "resnet20": _resnet20,
    "small-tensors": lambda: {f"matrix{number}": (64, 64) for number in range(200)},
}

MODELS = tuple(_MODELS)


def tensors_of(model: str) -> list[TensorInfo]:
    """All parameters of a model, float32.

    Raises:
        KeyError: if `model` is not one of `MODELS`.
    """
    return [TensorInfo(name, shape) for name, shape in _MODELS[model]().items()]
