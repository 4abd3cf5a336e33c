"""The shapes of the parameters of well-known models, for measurements and predictions that need neither the models nor
their data.

- `resnet50`, `resnet101`, `vgg16`, `vit-l-16`: as in torchvision.
- `resnet20`: ResNet-20 for CIFAR-10 (He et al. 2016, section 4.2). Its shortcuts have no parameters.
- `bert-base`, `bert-large` (both uncased), `roberta-base`: with the pooler.
- `gpt2`, `gpt2-xl`, `llama-1b` (Llama 3.2 1B): their output weights are the embedding.
- `llama-7b`: Llama 2 7B. It has its own output weights.
- `dlrm`: the perceptrons of DLRM as in MLPerf Training v0.7, without the embedding tables.
- `gravac-lstm`: the two-layer LSTM of GraVAC, 252 MB (Tyagi and Swany 2023, table 1), with the 10,000 words of Penn
  Treebank and 1,500 units.
- `small-tensors`: not a model, but 200 matrices of 64 x 64. The time to compress them depends more on the number of
  tensors than on the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hvdcomp.compressors import TensorInfo

Shapes = dict[str, tuple[int, ...]]


def _resnet(blocks: tuple[int, int, int, int]) -> Shapes:
    """A ResNet with bottleneck blocks, for 1,000 classes. `blocks` has the number of blocks in each stage."""
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
    """ResNet-20 for CIFAR-10: three stages of three basic blocks."""
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


def _bert(layers: int, hidden: int, words: int, positions: int, types: int) -> Shapes:
    """A BERT encoder."""
    shapes: Shapes = {
        "embeddings.word": (words, hidden),
        "embeddings.position": (positions, hidden),
        "embeddings.token_type": (types, hidden),
        "embeddings.norm.weight": (hidden,),
        "embeddings.norm.bias": (hidden,),
    }
    for layer in range(layers):
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


def _gpt2(layers: int, hidden: int) -> Shapes:
    """GPT-2. Its matrices have the shape (inputs, outputs), as in the published weights."""
    shapes: Shapes = {"wte": (50257, hidden), "wpe": (1024, hidden)}
    for layer in range(layers):
        for name, inputs, outputs in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (inputs, outputs)
            shapes[f"h.{layer}.{name}.bias"] = (outputs,)
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = (hidden,)
    return {**shapes, "ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}


def _llama(layers: int, hidden: int, inner: int, keys: int, words: int, tied: bool) -> Shapes:
    """Llama. `keys` is the number of columns of keys and values. If `tied`, the output weights are the embedding."""
    shapes: Shapes = {"embed_tokens": (words, hidden)}
    for layer in range(layers):
        for name, outputs, inputs in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = (outputs, inputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{norm}.weight"] = (hidden,)
    return {**shapes, "norm.weight": (hidden,), **({} if tied else {"lm_head.weight": (words, hidden)})}


def _dlrm() -> Shapes:
    """The two perceptrons of DLRM. The input of the bottom perceptron is 13 numbers. The input of the top perceptron is
    the result of the bottom perceptron, and the products of all pairs of this result and 26 embeddings. The result and
    each embedding have 128 numbers."""
    pairs = 27 * 26 // 2
    shapes: Shapes = {}
    for part, widths in (("bottom", (13, 512, 256, 128)), ("top", (pairs + 128, 1024, 1024, 512, 256, 1))):
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            shapes[f"{part}.{layer}.weight"] = (outputs, inputs)
            shapes[f"{part}.{layer}.bias"] = (outputs,)
    return shapes


def _vit_l_16() -> Shapes:
    """ViT-L/16 for 1,000 classes and images of 224 pixels."""
    hidden, patches = 1024, (224 // 16) ** 2
    shapes: Shapes = {
        "class_token": (1, 1, hidden),
        "conv_proj.weight": (hidden, 3, 16, 16),
        "conv_proj.bias": (hidden,),
        "encoder.pos_embedding": (1, patches + 1, hidden),
    }
    for layer in range(24):
        for name, outputs, inputs in (
            ("self_attention.in_proj", 3 * hidden, hidden),
            ("self_attention.out_proj", hidden, hidden),
            ("mlp.0", 4 * hidden, hidden),
            ("mlp.3", hidden, 4 * hidden),
        ):
            shapes[f"encoder.layers.{layer}.{name}.weight"] = (outputs, inputs)
            shapes[f"encoder.layers.{layer}.{name}.bias"] = (outputs,)
        for norm in ("ln_1", "ln_2"):
            names = (f"encoder.layers.{layer}.{norm}.{part}" for part in ("weight", "bias"))
            shapes |= dict.fromkeys(names, (hidden,))
    shapes |= {"encoder.ln.weight": (hidden,), "encoder.ln.bias": (hidden,)}
    return {**shapes, "heads.weight": (1000, hidden), "heads.bias": (1000,)}


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
    "bert-base": lambda: _bert(12, 768, words=30522, positions=512, types=2),
    "bert-large": lambda: _bert(24, 1024, words=30522, positions=512, types=2),
    "roberta-base": lambda: _bert(12, 768, words=50265, positions=514, types=1),
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2-xl": lambda: _gpt2(48, 1600),
    "llama-1b": lambda: _llama(16, 2048, inner=8192, keys=512, words=128256, tied=True),
    "llama-7b": lambda: _llama(32, 4096, inner=11008, keys=4096, words=32000, tied=False),
    "vit-l-16": _vit_l_16,
    "dlrm": _dlrm,
    "gravac-lstm": _gravac_lstm,
    "resnet20": _resnet20,
    "small-tensors": lambda: {f"matrix{number}": (64, 64) for number in range(200)},
}

MODELS = tuple(_MODELS)


def tensors_of(model: str) -> list[TensorInfo]:
    """All parameters of a model, in float32.

    Raises:
        KeyError: if `model` is not one of `MODELS`.
    """
    return [TensorInfo(name, shape) for name, shape in _MODELS[model]().items()]
