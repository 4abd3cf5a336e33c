"""The models of the reference training program in TensorFlow (tf_keras); `models` says what they are.

They compute what their PyTorch twins compute: layers are named by the paths of the twin's modules, so that
`stem.0/kernel:0` is `stem.0.weight` transposed, and images come as (N, channels, size, size). Inside they are
(N, size, size, channels), as TensorFlow's convolutions need it on a CPU. Initial weights are drawn from the same
distributions.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras import layers
from tf_keras.initializers import RandomNormal, RandomUniform, VarianceScaling

from hvdcomp.train.models import VGG16, VGG19, LSTMSize, check_image_size, pooling

# He et al., Delving Deep into Rectifiers, 2015, equation 14.
_HE = {"scale": 2.0, "mode": "fan_out", "distribution": "untruncated_normal"}


def build_model(name: str, *, channels: int, size: int, classes: int) -> tf_keras.Model:
    """See `frameworks.build_model`."""
    check_image_size(name, size)
    if name == "lstm":
        tokens = layers.Input((None,), dtype="int64")
        return tf_keras.Model(tokens, lstm(tokens, classes, LSTMSize.for_tokens(classes)))
    images = layers.Input((channels, size, size))
    builders = {
        "mlp": lambda: mlp(images, classes),
        "cnn": lambda: cnn(images, classes),
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
    """Two 3x3 convolutions around a shortcut; where the shape changes, the shortcut is a 1x1 convolution."""
    branch = layers.ReLU()(_norm(f"{path}.branch.1", _convolution(f"{path}.branch.0", x, width, stride)))
    branch = _norm(f"{path}.branch.4", _convolution(f"{path}.branch.3", branch, width))
    if stride != 1 or x.shape[-1] != width:
        x = _norm(f"{path}.shortcut.1", _convolution(f"{path}.shortcut.0", x, width, stride, kernel=1))
    return layers.ReLU()(layers.Add()([branch, x]))


def vgg(images: Any, widths: tuple[int | str, ...], classes: int, norm: bool) -> Any:
    """The convolutions of a VGG network, then one linear layer."""
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
    """A language model: embedding, two LSTM layers, linear layer. Each sequence starts from a zero state."""
    x = layers.Embedding(classes, size.embedding, embeddings_initializer=RandomNormal(0, 1), name="embedding")(tokens)
    for number in range(2):
        x = layers.Dropout(size.dropout)(x)
        x = layers.RNN(LSTMCell(size.hidden), return_sequences=True, name=f"lstm.l{number}")(x)
    return _linear("head", layers.Dropout(size.dropout)(x), classes)


class LSTMCell(layers.Layer):
    """An LSTM with the parameters that PyTorch gives it: one bias for the input and one for the state.

    State: (hidden, cell), each (N, units). Gates are in PyTorch's order: input, forget, cell, output.
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


def _default_convolution(path: str, x: Any, width: int) -> Any:
    """A 3x3 convolution with PyTorch's own initial weights, and a ReLU."""
    initializers = _default_initializers(9 * x.shape[-1])
    return layers.Conv2D(width, 3, padding="same", activation="relu", name=path, **initializers)(x)


def _default_initializers(inputs: int) -> dict[str, Any]:
    """How PyTorch draws the weights of layers with this number of inputs to each output."""
    bound = 1 / math.sqrt(inputs)
    return {"kernel_initializer": RandomUniform(-bound, bound), "bias_initializer": RandomUniform(-bound, bound)}


def _convolution(path: str, x: Any, width: int, stride: int = 1, kernel: int = 3, bias: bool = False) -> Any:
    if kernel > 1:
        # TensorFlow's own padding is at other sides where the stride is 2.
        x = layers.ZeroPadding2D(kernel // 2)(x)
    return layers.Conv2D(
        width, kernel, strides=stride, use_bias=bias, kernel_initializer=VarianceScaling(**_HE), name=path
    )(x)


def _norm(path: str, x: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=path)(x)  # PyTorch's momentum is 1 - 0.9


def _channels_last(images: Any) -> Any:
    return layers.Permute((2, 3, 1))(images)


def _flattened(x: Any) -> Any:
    """All of an image in one row, channel by channel."""
    return layers.Flatten()(layers.Permute((3, 1, 2))(x))
