"""The models of the reference training program in PyTorch. `models` describes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

import hvdcomp
from hvdcomp.tools.train.models import (
    DLRM_SIZE,
    ENCODER_SIZE,
    GPT_SIZES,
    VGG16,
    VGG19,
    VIT_SIZE,
    DLRMSize,
    LSTMSize,
    TransformerSize,
    check_image_size,
    patch_side,
    pooling,
)


def build_model(name: str, *, channels: int, size: int, classes: int) -> nn.Module:
    """Creates a model of PyTorch, as `frameworks.build_model` describes."""
    check_image_size(name, size)
    if name == "lstm":
        return LSTM(classes, LSTMSize.for_tokens(classes))
    if name in GPT_SIZES:
        return GPT(classes, size, GPT_SIZES[name])
    builders = {
        "cnn1d": lambda: cnn1d(channels, size, classes),
        "mlp": lambda: mlp(channels * size * size, classes),
        "cnn": lambda: cnn(channels, size, classes),
        "resnet8": lambda: ResNet(channels, classes, widths=(16, 32, 64), blocks=1),
        "resnet20": lambda: ResNet(channels, classes, widths=(16, 32, 64), blocks=3),
        "resnet18": lambda: ResNet(channels, classes, widths=(64, 128, 256, 512), blocks=2),
        "vgg16": lambda: vgg(VGG16, channels, size, classes, norm=False),
        "vgg19_bn": lambda: vgg(VGG19, channels, size, classes, norm=True),
        "dlrm": lambda: DLRM(classes, DLRM_SIZE._replace(tables=channels - DLRM_SIZE.dense, rows=size)),
        "vit": lambda: ViT(channels, size, classes, VIT_SIZE),
        "encoder": lambda: Encoder(classes, size, ENCODER_SIZE),
    }
    return builders[name]()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices that Muon trains. The head of a GPT is its embedding."""
    return list(hvdcomp.torch.hidden_matrices(model, head=() if isinstance(model, GPT) else None).values())


def mlp(inputs: int, classes: int) -> nn.Sequential:
    """Two hidden layers on the flattened image."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, classes),
    )


def cnn(channels: int, size: int, classes: int) -> nn.Sequential:
    """Two convolutions and two linear layers. There is no normalization, because its buffers would differ between
    ranks."""
    first_pool, second_pool = pooling(size)
    side = size // first_pool // second_pool
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(first_pool),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(second_pool),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, classes),
    )


def cnn1d(channels: int, size: int, classes: int) -> nn.Sequential:
    """Three convolutions over a signal, and two linear layers. Two of the convolutions halve the length of the
    signal."""
    side = -(-size // 4)
    return nn.Sequential(
        nn.Conv1d(channels, 64, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.Conv1d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv1d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * side, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, classes),
    )


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut. If the shape changes, the shortcut is a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _conv3x3(inputs, outputs, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            _conv3x3(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for small images: a 3x3 stem, and then a stage of basic blocks for each width.

    `widths=(16, 32, 64), blocks=3` gives ResNet-20, and `blocks=1` gives ResNet-8. `widths=(64, 128, 256, 512),
    blocks=2` gives ResNet-18 in the form for CIFAR.

    References: He et al., Deep Residual Learning for Image Recognition, 2016, sections 3.3 and 4.2.
    """

    def __init__(self, channels: int, classes: int, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(channels, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(_Block(inputs, width, stride=2 if stage > 0 and block == 0 else 1))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        _initialize_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x))
        return self.head(features.mean(dim=(2, 3)))


def vgg(layers: tuple[int | str, ...], channels: int, size: int, classes: int, norm: bool) -> nn.Sequential:
    """The convolutions of a VGG network, followed by one linear layer.

    References: Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition,
    2015.
    """
    modules: list[nn.Module] = []
    inputs = channels
    for layer in layers:
        if isinstance(layer, str):
            modules.append(nn.MaxPool2d(2))
            continue
        modules.append(nn.Conv2d(inputs, layer, 3, padding=1))
        if norm:
            modules.append(nn.BatchNorm2d(layer))
        modules.append(nn.ReLU(inplace=True))
        inputs = layer
    side = size // 2 ** layers.count("M")
    model = nn.Sequential(*modules, nn.Flatten(), nn.Linear(inputs * side * side, classes))
    _initialize_convolutions(model)
    return model


def _initialize_convolutions(model: nn.Module) -> None:
    """Sets initial weights as in He et al., Delving Deep into Rectifiers, 2015, equation 14. VGG-16 needs these
    weights."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class LSTM(nn.Module):
    """A language model: an embedding, two LSTM layers, and a linear layer. Each sequence starts with a zero state."""

    def __init__(self, tokens: int, size: LSTMSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, size.embedding)
        self.lstm = nn.LSTM(size.embedding, size.hidden, num_layers=2, batch_first=True, dropout=size.dropout)
        self.dropout = nn.Dropout(size.dropout)
        self.head = nn.Linear(size.hidden, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(hidden))


class _TransformerBlock(nn.Module):
    """Attention, and then two linear layers. Each of the two parts begins with a layer norm and has a shortcut.

    Args:
        size: the width and the other sizes of the transformer.
        causal: whether a token attends only to itself and to earlier tokens.
    """

    def __init__(self, size: TransformerSize, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.expansion = nn.Linear(size.width, 4 * size.width)
        self.contraction = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.projection(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.contraction(gelu(self.expansion(self.norm2(x))))


class GPT(nn.Module):
    """A decoder: token and position embeddings, blocks, and a layer norm. The token embedding also computes the logits.

    References: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3.
    """

    def __init__(self, tokens: int, length: int, size: TransformerSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, size.width)
        self.position = nn.Embedding(length, size.width)
        self.blocks = nn.Sequential(*[_TransformerBlock(size, causal=True) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                onto_shortcut = name.endswith(("projection.weight", "contraction.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if onto_shortcut else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return linear(self.norm(self.blocks(x)), self.embedding.weight)


class ViT(nn.Module):
    """A vision transformer: embeddings of patches and positions, blocks, a layer norm, and a linear layer that gets the
    mean over the patches.

    Incomplete patches at the right and lower edges are ignored. Initial weights are PyTorch's defaults. With GPT-2's
    initial weights, which are much smaller, a network of this width learned the digits far more slowly.

    References: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, section 3.1. Beyer et al., Better plain ViT
    baselines for ImageNet-1k, 2022 (the mean instead of a class token).
    """

    def __init__(self, channels: int, size: int, classes: int, shape: TransformerSize) -> None:
        super().__init__()
        side = patch_side(size)
        self.embedding = nn.Conv2d(channels, shape.width, side, stride=side)
        self.position = nn.Embedding((size // side) ** 2, shape.width)
        self.blocks = nn.Sequential(*[_TransformerBlock(shape, causal=False) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(patches + self.position.weight)).mean(dim=1))


class Encoder(nn.Module):
    """An encoder: token and position embeddings, blocks in which each token attends to all tokens, a layer norm, and a
    linear layer.

    Initial weights are PyTorch's defaults. With these weights, a network of this width learned faster than with GPT-2's
    initial weights.

    References: Vaswani et al., Attention Is All You Need, 2017, section 3.1 (the encoder).
    """

    def __init__(self, tokens: int, length: int, size: TransformerSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, size.width)
        self.position = nn.Embedding(length, size.width)
        self.blocks = nn.Sequential(*[_TransformerBlock(size, causal=False) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class DLRM(nn.Module):
    """A click model. The model uses the products of all pairs of vectors: one row of each table, and the dense
    features.

    Inputs have the shape (N, dense + tables): the dense features, and an id for each table.

    References: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
    """

    def __init__(self, classes: int, size: DLRMSize) -> None:
        super().__init__()
        self.dense = size.dense
        self.tables = nn.ModuleList(nn.EmbeddingBag(size.rows, size.columns, mode="sum") for _ in range(size.tables))
        for table in self.tables.parameters():
            nn.init.uniform_(table, -(size.rows**-0.5), size.rows**-0.5)
        self.bottom = nn.Sequential(
            nn.Linear(size.dense, size.hidden), nn.ReLU(), nn.Linear(size.hidden, size.columns), nn.ReLU()
        )
        pairs = size.tables * (size.tables + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(size.columns + pairs, size.hidden), nn.ReLU(), nn.Linear(size.hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        below, ids = self.bottom(x[:, : self.dense]), x[:, self.dense :].long()
        rows = [table(ids[:, place, None]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([below, *rows], 1)
        first, second = torch.triu_indices(len(rows) + 1, len(rows) + 1, offset=1)
        products = (vectors @ vectors.mT)[:, first, second]
        return self.top(torch.cat([below, products], 1))
