"""Shapes of the Accordion paper's networks, which come from two collections: kuangliu/pytorch-cifar for CIFAR-10 and
weiaicunzai/pytorch-cifar100 for CIFAR-100. They match the paper's parameter counts (tables 8 and 9) exactly.

ResNet-18 and the layers of VGG-19 come from models of `hvdcomp train`; the other networks exist only as shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from hvdcomp.compressors import TensorInfo

CLASSES = {"cifar10": 10, "cifar100": 100}
_VGG_HEAD = {"cifar10": (512, 512), "cifar100": (4096, 4096)}
"""The widths of two layers before the last layer of the authors' VGG-19. The VGG-19 of `hvdcomp train` does not have
these two layers."""


class _Shapes:
    """Collects the parameters of layers."""

    def __init__(self) -> None:
        self.tensors: list[TensorInfo] = []

    def add(self, *shape: int) -> None:
        self.tensors.append(TensorInfo(f"parameter{len(self.tensors):04}", shape))

    def convolution(self, outputs: int, inputs: int, kernel: int, bias: bool = False) -> None:
        self.add(outputs, inputs, kernel, kernel)
        if bias:
            self.add(outputs)

    def norm(self, width: int) -> None:
        self.add(width)
        self.add(width)

    def linear(self, outputs: int, inputs: int) -> None:
        self.add(outputs, inputs)
        self.add(outputs)


def tensors_of(network: str, data: str) -> tuple[TensorInfo, ...] | None:
    """The parameters of a network for a data set of `CLASSES`; None if its shapes are unknown."""
    if network in _TRAINED:
        return _trained(network, data)
    if network not in _OTHERS or (network == "SENet" and data != "cifar10"):
        return None  # CIFAR-100's SENet has other shapes
    shapes = _Shapes()
    _OTHERS[network](shapes, CLASSES[data])
    return tuple(shapes.tensors)


_TRAINED = {"ResNet-18": "resnet18", "VGG-19bn": "vgg19_bn"}


def _trained(network: str, data: str) -> tuple[TensorInfo, ...]:
    tensors = parameters_of(_TRAINED[network], CLASSES[data])
    if network != "VGG-19bn":
        return tensors
    *body, last, bias = tensors
    (first, second), classes, inputs = _VGG_HEAD[data], last.shape[0], last.shape[1]
    widths = ((first, inputs), (second, first))
    head = [TensorInfo(f"head{number}.weight", shape) for number, shape in enumerate(widths)]
    head += [TensorInfo(f"head{number}.bias", (outputs,)) for number, (outputs, _) in enumerate(widths)]
    return (*body, *head, TensorInfo(last.name, (classes, second)), bias)


@cache
def parameters_of(model: str, classes: int) -> tuple[TensorInfo, ...]:
    """The parameters of a model of `hvdcomp train`, without their values. This function needs PyTorch."""
    import torch

    from hvdcomp.tools.train.frameworks import build_model

    with torch.device("meta"):
        built = build_model(model, channels=3, size=32, classes=classes)
    return tuple(TensorInfo(name, tuple(parameter.shape)) for name, parameter in built.named_parameters())


def _densenet(shapes: _Shapes, classes: int) -> None:
    """A DenseNet with growth 12. Half of the channels remain after each block (Huang et al. 2017)."""
    growth, width = 12, 24
    shapes.convolution(width, 3, 3)
    for block, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            shapes.norm(width)
            shapes.convolution(4 * growth, width, 1)
            shapes.norm(4 * growth)
            shapes.convolution(growth, 4 * growth, 3)
            width += growth
        shapes.norm(width)  # the normalization of the transition, or of the network's end
        if block < 3:
            shapes.convolution(width // 2, width, 1)
            width //= 2
    shapes.linear(classes, width)


def _googlenet(shapes: _Shapes, classes: int) -> None:
    """GoogLeNet (Szegedy et al. 2015) with normalization, and with two convolutions of size 3 instead of one of size
    5."""

    def unit(outputs: int, inputs: int, kernel: int) -> None:
        shapes.convolution(outputs, inputs, kernel, bias=True)
        shapes.norm(outputs)

    unit(192, 3, 3)
    inputs = 192
    for conv1, reduce3, three, reduce5, five, pool in (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    ):
        unit(conv1, inputs, 1)
        unit(reduce3, inputs, 1)
        unit(three, reduce3, 3)
        unit(reduce5, inputs, 1)
        unit(five, reduce5, 3)
        unit(five, five, 3)
        unit(pool, inputs, 1)
        inputs = conv1 + three + five + pool
    shapes.linear(classes, inputs)


def _senet(shapes: _Shapes, classes: int) -> None:
    """A ResNet-18 with normalization first, in which each block weights its channels (Hu et al. 2018)."""
    shapes.convolution(64, 3, 3)
    shapes.norm(64)
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes.norm(inputs)
            shapes.convolution(width, inputs, 3)
            shapes.norm(width)
            shapes.convolution(width, width, 3)
            if block == 0 and stage > 0:
                shapes.convolution(width, inputs, 1)
            shapes.convolution(width // 16, width, 1, bias=True)
            shapes.convolution(width, width // 16, 1, bias=True)
            inputs = width
    shapes.linear(classes, inputs)


def _wide_resnet(shapes: _Shapes, classes: int) -> None:
    """A ResNet with 28 layers that are ten times wider than usual (Zagoruyko and Komodakis 2016)."""
    shapes.convolution(16, 3, 3, bias=True)
    inputs = 16
    for width in (160, 320, 640):
        for block in range(4):
            shapes.norm(inputs)
            shapes.convolution(width, inputs, 3, bias=True)
            shapes.norm(width)
            shapes.convolution(width, width, 3, bias=True)
            if block == 0:
                shapes.convolution(width, inputs, 1, bias=True)
            inputs = width
    shapes.norm(inputs)
    shapes.linear(classes, inputs)


_OTHERS: dict[str, Callable[[_Shapes, int], None]] = {
    "DenseNet": _densenet,
    "GoogLeNet": _googlenet,
    "SENet": _senet,
    "WideResNet": _wide_resnet,
}
