"""The models of the reference training program in TensorFlow (tf_keras). `models` describes them.

The models compute the same functions as the models in PyTorch. Layers have the names of PyTorch's modules, so
`stem.0/kernel:0` is `stem.0.weight` transposed. The inputs are images of shape (N, channels, size, size). Inside the
models, the shape is (N, size, size, channels), because TensorFlow's convolutions need this shape on a CPU. Initial
weights have the same distributions as in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers
from tf_keras.initializers import RandomNormal, RandomUniform, VarianceScaling

from hvdcomp.tools.train.models import GPT_SIZES, VGG16, VGG19, LSTMSize, TransformerSize, check_image_size, pooling

# He et al., Delving Deep into Rectifiers, 2015, equation 14.
_HE = {"scale": 2.0, "mode": "fan_out", "distribution": "untruncated_normal"}


def build_model(name: str, *, channels: int, size: int, classes: int) -> tf_keras.Model:
    """Creates a model of TensorFlow, as `frameworks.build_model` describes."""
    check_image_size(name, size)
    if name == "lstm":
        tokens = layers.Input((None,), dtype="int64")
        return tf_keras.Model(tokens, lstm(tokens, classes, LSTMSize.for_tokens(classes)))
    if name in GPT_SIZES:
        tokens = layers.Input((None,), dtype="int64")
        return tf_keras.Model(tokens, gpt(tokens, classes, size, GPT_SIZES[name]))
    if name == "cnn1d":
        signals = layers.Input((channels, size))
        return tf_keras.Model(signals, cnn1d(signals, classes))
    images = layers.Input((channels, size, size))
    builders = {
        "mlp": lambda: mlp(images, classes),
        "cnn": lambda: cnn(images, classes),
        "resnet8": lambda: resnet(images, classes, widths=(16, 32, 64), blocks=1),
        "resnet20": lambda: resnet(images, classes, widths=(16, 32, 64), blocks=3),
        "resnet18": lambda: resnet(images, classes, widths=(64, 128, 256, 512), blocks=2),
        "vgg16": lambda: vgg(images, VGG16, classes, norm=False),
        "vgg19_bn": lambda: vgg(images, VGG19, classes, norm=True),
    }
    return tf_keras.Model(images, builders[name]())


def mlp(images: Any, classes: int) -> Any:
    """Two hidden layers on the flattened image."""
    x = layers.Flatten()(images)
    x = _linear("1", x, 256, "relu")
    x = _linear("3", x, 128, "relu")
    return _linear("5", x, classes)


def cnn(images: Any, classes: int) -> Any:
    """Two convolutions and two linear layers."""
    first_pool, second_pool = pooling(images.shape[-1])
    x = _channels_last(images)
    x = _default_convolution("0", x, 32)
    x = layers.MaxPooling2D(first_pool)(x)
    x = _default_convolution("3", x, 64)
    x = layers.MaxPooling2D(second_pool)(x)
    x = _linear("7", _flattened(x), 128, "relu")
    return _linear("9", x, classes)


def cnn1d(signals: Any, classes: int) -> Any:
    """Three convolutions over a signal, and two linear layers. Two of the convolutions halve the length of the
    signal."""
    x = layers.Permute((2, 1))(signals)
    for name, size, stride in (("0", 5, 1), ("2", 3, 2), ("4", 3, 2)):
        initializers = _default_initializers(size * x.shape[-1])
        x = layers.ZeroPadding1D(size // 2)(x)
        x = layers.Conv1D(64, size, strides=stride, activation="relu", name=name, **initializers)(x)
    x = _linear("7", layers.Flatten()(layers.Permute((2, 1))(x)), 128, "relu")
    return _linear("9", x, classes)


def gpt(tokens: Any, classes: int, length: int, size: TransformerSize) -> Any:
    """A decoder. Its token embedding also computes the logits (`models_torch.GPT`)."""
    embedding = TokenEmbedding(classes, size.width)
    x = PositionEmbedding(length, size.width)(embedding(tokens))
    for number in range(size.layers):
        path = f"blocks.{number}"
        attention = _gpt_linear(f"{path}.attention", _layer_norm(f"{path}.norm1", x), 3 * size.width)
        mixed = CausalAttention(size.heads, name=f"{path}.heads")(attention)
        x = layers.Add()([x, _gpt_linear(f"{path}.projection", mixed, size.width, size.layers)])
        expanded = _gpt_linear(f"{path}.expansion", _layer_norm(f"{path}.norm2", x), 4 * size.width)
        expanded = layers.Activation("gelu")(expanded)
        x = layers.Add()([x, _gpt_linear(f"{path}.contraction", expanded, size.width, size.layers)])
    return embedding(_layer_norm("norm", x), logits=True)


class TokenEmbedding(layers.Layer):
    """Maps tokens to vectors, or vectors to the logits of all tokens."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(name="embedding")
        self._shape = (tokens, width)

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight("embeddings", self._shape, initializer=RandomNormal(0, 0.02))
        self.built = True

    def call(self, inputs: tf.Tensor, logits: bool = False) -> tf.Tensor:
        return tf.matmul(inputs, self.table, transpose_b=True) if logits else tf.gather(self.table, inputs)


class PositionEmbedding(layers.Layer):
    """Adds a vector for each position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__(name="position")
        self._shape = (length, width)

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight("embeddings", self._shape, initializer=RandomNormal(0, 0.02))
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + self.table[: tf.shape(inputs)[1]]


class CausalAttention(layers.Layer):
    """Attention of each token to itself and to earlier tokens. Maps (N, length, 3 * width) to (N, length, width)."""

    def __init__(self, heads: int, name: str) -> None:
        super().__init__(name=name)
        self.heads = heads

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        width = inputs.shape[-1] // 3
        count, length = tf.shape(inputs)[0], tf.shape(inputs)[1]
        parts = tf.reshape(inputs, (count, length, 3, self.heads, width // self.heads))
        query, key, value = tf.unstack(tf.transpose(parts, (2, 0, 3, 1, 4)))
        scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(width // self.heads)
        earlier = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)
        weights = tf.nn.softmax(tf.where(earlier, scores, scores.dtype.min))
        return tf.reshape(tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3)), (count, length, width))


def resnet(images: Any, classes: int, widths: tuple[int, ...], blocks: int) -> Any:
    """A residual network for small images; see `models_torch.ResNet`."""
    x = _channels_last(images)
    x = layers.ReLU()(_norm("stem.1", _convolution("stem.0", x, widths[0])))
    number = 0
    for stage, width in enumerate(widths):
        for block in range(blocks):
            x = _block(f"stages.{number}", x, width, stride=2 if stage > 0 and block == 0 else 1)
            number += 1
    return _linear("head", layers.GlobalAveragePooling2D()(x), classes)


def _block(path: str, x: Any, width: int, stride: int) -> Any:
    """Two 3x3 convolutions with a shortcut. If the shape changes, the shortcut is a 1x1 convolution."""
    branch = layers.ReLU()(_norm(f"{path}.branch.1", _convolution(f"{path}.branch.0", x, width, stride)))
    branch = _norm(f"{path}.branch.4", _convolution(f"{path}.branch.3", branch, width))
    if stride != 1 or x.shape[-1] != width:
        x = _norm(f"{path}.shortcut.1", _convolution(f"{path}.shortcut.0", x, width, stride, kernel=1))
    return layers.ReLU()(layers.Add()([branch, x]))


def vgg(images: Any, widths: tuple[int | str, ...], classes: int, norm: bool) -> Any:
    """The convolutions of a VGG network, followed by one linear layer."""
    x = _channels_last(images)
    number = 0
    for width in widths:
        if isinstance(width, str):
            x = layers.MaxPooling2D(2)(x)
            number += 1
            continue
        x = _convolution(str(number), x, width, bias=True)
        if norm:
            x = _norm(str(number + 1), x)
        x = layers.ReLU()(x)
        number += 3 if norm else 2
    return _linear(str(number + 1), _flattened(x), classes)


def lstm(tokens: Any, classes: int, size: LSTMSize) -> Any:
    """A language model: an embedding, two LSTM layers, and a linear layer. Each sequence starts with a zero state."""
    x = layers.Embedding(classes, size.embedding, embeddings_initializer=RandomNormal(0, 1), name="embedding")(tokens)
    for number in range(2):
        x = layers.Dropout(size.dropout)(x)
        x = layers.RNN(LSTMCell(size.hidden), return_sequences=True, name=f"lstm.l{number}")(x)
    return _linear("head", layers.Dropout(size.dropout)(x), classes)


class LSTMCell(layers.Layer):
    """An LSTM with the same parameters as in PyTorch: one bias for the input, and one bias for the state.

    The state is (hidden, cell), each (N, units). Gates are in PyTorch's order: input, forget, cell, output.
    """

    def __init__(self, units: int) -> None:
        super().__init__(name="cell")
        self.units = units
        self.state_size = [units, units]
        self.output_size = units

    def build(self, input_shape: Any) -> None:
        def weight(name: str, *shape: int) -> tf.Variable:
            bound = 1 / math.sqrt(self.units)
            return self.add_weight(name, (*shape, 4 * self.units), initializer=RandomUniform(-bound, bound))

        self.kernel = weight("kernel", input_shape[-1])
        self.recurrent_kernel = weight("recurrent_kernel", self.units)
        self.bias = weight("bias")
        self.recurrent_bias = weight("recurrent_bias")
        self.built = True

    def call(self, inputs: tf.Tensor, states: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        hidden, cell = states
        gates = inputs @ self.kernel + hidden @ self.recurrent_kernel + (self.bias + self.recurrent_bias)
        take, forget, new, give = tf.split(gates, 4, axis=-1)
        cell = tf.sigmoid(forget) * cell + tf.sigmoid(take) * tf.tanh(new)
        hidden = tf.sigmoid(give) * tf.tanh(cell)
        return hidden, [hidden, cell]


def _linear(path: str, x: Any, width: int, activation: str | None = None) -> Any:
    return layers.Dense(width, activation=activation, name=path, **_default_initializers(x.shape[-1]))(x)


def _gpt_linear(path: str, x: Any, width: int, onto_shortcut: int = 0) -> Any:
    """A linear layer with GPT-2's initial weights.

    Args:
        onto_shortcut: the number of layers of the model, if the output of this layer is added to a shortcut; otherwise
            0.
    """
    deviation = 0.02 / math.sqrt(2 * onto_shortcut) if onto_shortcut else 0.02
    return layers.Dense(width, kernel_initializer=RandomNormal(0, deviation), name=path)(x)


def _layer_norm(path: str, x: Any) -> Any:
    return layers.LayerNormalization(epsilon=1e-5, name=path)(x)


def _default_convolution(path: str, x: Any, width: int) -> Any:
    """A 3x3 convolution with PyTorch's default initial weights, and a ReLU."""
    initializers = _default_initializers(9 * x.shape[-1])
    return layers.Conv2D(width, 3, padding="same", activation="relu", name=path, **initializers)(x)


def _default_initializers(inputs: int) -> dict[str, Any]:
    """PyTorch's initializers for layers with this number of inputs to each output."""
    bound = 1 / math.sqrt(inputs)
    return {"kernel_initializer": RandomUniform(-bound, bound), "bias_initializer": RandomUniform(-bound, bound)}


def _convolution(path: str, x: Any, width: int, stride: int = 1, kernel: int = 3, bias: bool = False) -> Any:
    if kernel > 1:
        # With a stride of 2, TensorFlow's own padding is on different sides than PyTorch's.
        x = layers.ZeroPadding2D(kernel // 2)(x)
    return layers.Conv2D(
        width, kernel, strides=stride, use_bias=bias, kernel_initializer=VarianceScaling(**_HE), name=path
    )(x)


def _norm(path: str, x: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=path)(x)  # PyTorch's momentum is 1 - 0.9


def _channels_last(images: Any) -> Any:
    return layers.Permute((2, 3, 1))(images)


def _flattened(x: Any) -> Any:
    """Flattens images to rows, channel by channel."""
    return layers.Flatten()(layers.Permute((3, 1, 2))(x))
