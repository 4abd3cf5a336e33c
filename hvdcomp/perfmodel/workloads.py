"""Estimates the times of well-known models on any GPU, for a calibration's field `models`.

A step of a transformer needs 3 times as many operations as its forward pass. Its time is estimated from the share of
the GPU's peak rate that published training runs of transformers reach. The times of convolutional networks and of DLRM
depend on the bandwidth of the memory, so their published times are scaled by this bandwidth. For ResNet-50, the time on
an A100 with 2.04 TB/s, scaled from a V100 with 0.9 TB/s, is off by 10 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.bucket import BUCKET_BYTES, least_early_bytes
from hvdcomp.perfmodel.cards import Card
from hvdcomp.perfmodel.kernel_times import KERNELS, REACHED, encode_time
from hvdcomp.perfmodel.shapes import tensors_of

_GAMMA = 1.07
_ADAM_BYTES = 28  # per element: Adam reads gradient, weight and both moments, and writes weight and both moments
_STATE_BYTES, _OF_MEMORY = 16, 0.7
"""Bytes per element of a parameter together with its gradient and AdamW's state, all in float32; and the share of the
GPU's memory that these bytes may fill."""
_MOST_BUCKETS = 32
"""Largest number of entries in `ready`. Large models have more buckets; several buckets then share an entry."""


class Workload(NamedTuple):
    """A training run whose times can be estimated: a model with a batch size.

    Attributes:
        shapes: name of the model in `shapes`.
        batch_size: samples per rank and step, chosen by us.
        step_s: function that returns the seconds of a forward and a backward pass on a GPU.
        source: the source of the time of a step.
        modules: if the model is sharded over all ranks (FSDP2), the number of modules that FSDP2 gathers one after the
            other: the model's layers, and one module with all other parameters. 0 if every rank has the whole model.
    """

    shapes: str
    batch_size: int
    step_s: Callable[[Card], float]
    source: str
    modules: int = 0


def _by_operations(batch_size: int, forward: float) -> Callable[[Card], float]:
    """A function that returns the seconds of both passes on a GPU. `forward` is the number of floating-point operations
    of the forward pass of one sample."""
    return lambda card: 3 * forward * batch_size / (card.flops * card.utilisation)


def _by_bandwidth(seconds: float, bytes_per_s: float) -> Callable[[Card], float]:
    """A function that returns the seconds of both passes on a GPU, if they take `seconds` on a GPU whose memory has the
    bandwidth `bytes_per_s`."""
    return lambda card: seconds * bytes_per_s / card.bytes_per_s


def _transformer(
    shapes: str, batch_size: int, tokens: int, layers: int, hidden: int, tied: int = 0, sharded: bool = False
) -> Workload:
    """The workload of a transformer. If the output weights are the embedding, `tied` is the embedding's number of
    words."""
    multiplied = sum(tensor.size for tensor in tensors_of(shapes) if _is_multiplied(tensor)) + tied * hidden
    forward = 2 * multiplied * tokens + 4 * layers * hidden * tokens**2
    source = (
        f"estimated: {batch_size} sequences of {tokens:,} tokens, {3 * forward / 1e12:.2f}e12 operations each in both "
        "passes, at the card's utilisation"
    )
    return Workload(shapes, batch_size, _by_operations(batch_size, forward), source, layers + 1 if sharded else 0)


def _images(shapes: str, batch_size: int, per_s: float, bytes_per_s: float, source: str) -> Workload:
    return Workload(shapes, batch_size, _by_bandwidth(batch_size / per_s, bytes_per_s), source)


_RESNET = "2,470 images a second on an A100 of 80 GB (NVIDIA, README of ResNet-50 v1.5), scaled by the bandwidth"

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "resnet50": lambda: _images("resnet50", 256, 2470, 2039e9, f"estimated: {_RESNET}"),
    "resnet101": lambda: _images(
        "resnet101", 128, 2470 * 4.09 / 7.80, 2039e9, f"estimated: {_RESNET}, by the operations of both models"
    ),
    "bert-base": lambda: _transformer("bert-base", 32, 512, 12, 768),
    "bert-large": lambda: _transformer("bert-large", 16, 512, 24, 1024),
    "gpt2": lambda: _transformer("gpt2", 32, 1024, 12, 768, tied=50257),
    "gpt2-xl": lambda: _transformer("gpt2-xl", 16, 1024, 48, 1600, tied=50257),
    "llama-1b": lambda: _transformer("llama-1b", 8, 2048, 16, 2048, tied=128256),
    "llama-1b-fsdp": lambda: _transformer("llama-1b", 8, 2048, 16, 2048, tied=128256, sharded=True),
    "llama-7b-fsdp": lambda: _transformer("llama-7b", 4, 2048, 32, 4096, sharded=True),
    "vit-l-16": lambda: Workload(
        "vit-l-16", 64, _by_operations(64, 2 * 61.55e9),
        "estimated: 61.55e9 multiply-adds of an image's forward pass (torchvision), at the card's utilisation",
    ),
    "dlrm": lambda: Workload(
        "dlrm", 8192, _by_bandwidth(3.1e-3, 1555e9),
        "estimated: 3.3 minutes for 64,000 steps of 65,536 samples on eight A100 (MLPerf Training v0.7), scaled by the "
        "memory's bandwidth; with the exchange of embeddings, which compression does not change",
    ),
}  # fmt: skip
"""The workloads, by the name that they have in a calibration."""


def models_on(card: Card) -> dict[str, dict[str, Any]]:
    """The models that fit on a card, as in the field `models` of a calibration file."""
    every = {name: workload() for name, workload in WORKLOADS.items()}
    return {name: _model(workload, card) for name, workload in every.items() if _fits(workload, card)}


def _fits(workload: Workload, card: Card) -> bool:
    elements = sum(tensor.size for tensor in tensors_of(workload.shapes))
    return workload.modules > 0 or _STATE_BYTES * elements <= _OF_MEMORY * card.memory


def _model(workload: Workload, card: Card) -> dict[str, Any]:
    tensors = tensors_of(workload.shapes)
    elements = sum(tensor.size for tensor in tensors)
    seconds = workload.step_s(card)
    times = {spec: encode_time(spec, card, elements, workload.shapes) for spec in KERNELS}
    data_parallel = {
        "bucket_bytes": BUCKET_BYTES,
        "optimizer_s": _ADAM_BYTES * elements / (REACHED * card.bytes_per_s),
        "early_bytes": least_early_bytes(BUCKET_BYTES, 4 * elements, on_device=True),
        "ready": [list(pair) for pair in ready_times(tensors, 4 * elements)],
    }
    sharded = {"bucket_bytes": 4 * elements / max(1, workload.modules), "sharded": True}
    return {
        "shapes": workload.shapes,
        "forward_s": seconds / 3,
        "backward_s": seconds * 2 / 3,
        "batch_size": workload.batch_size,
        "gamma": _GAMMA,
        **(sharded if workload.modules else data_parallel),
        "sources": {
            "shapes": "the model's own publication (hvdcomp/perfmodel/shapes.py)",
            "forward_s": f"a third of a step: {workload.source}; {card.sources}",
            "backward_s": f"two thirds of a step: {workload.source}; {card.sources}",
            "gamma": "Agarwal et al. 2022, section 4.1: between 1.04 and 1.1; we use the middle",
            "bucket_bytes": "the default of DistributedDataParallel; for a sharded model, the gradients of a module",
            "optimizer_s": "estimated: AdamW reads and writes 28 bytes per element",
            "early_bytes": "hvdcomp's default on GPUs: a quarter of the gradients",
            "ready": "estimated: the backward pass visits the tensors from last to first, and takes time for each "
            "matrix in proportion to its elements, the same time for each convolution, and none for embeddings",
        },
        "estimated": ["forward_s", "backward_s"],
        "encode": {
            spec: {
                "encode_s": time.encode_s,
                "decode_per_rank_s": time.decode_per_rank_s,
                "host_s": time.host_s,
                "source": time.source,
                "estimated": time.estimated,
            }
            for spec, time in times.items()
        },
    }


def ready_times(tensors: Iterable[TensorInfo], size: float) -> list[tuple[float, float]]:
    """Estimates when the library can send gradients during the backward pass, as in `Compute.ready`. The result has a
    pair for each bucket.

    Args:
        tensors: the model's tensors in the order of the forward pass. All have the same element type.
        size: bytes of all gradients.

    Example:
        >>> layers = [TensorInfo("embed", (100, 10)), TensorInfo("a", (50, 10)), TensorInfo("b", (50, 10))]
        >>> ready_times(layers, size=4 * BUCKET_BYTES)
        [(0.25, 0.5), (0.5, 1.0), (1.0, 1.0)]
    """
    backwards = list(reversed(list(tensors)))
    works = [_work(tensor) for tensor in backwards]
    elements, work = sum(tensor.size for tensor in backwards), sum(works)
    least = elements * max(BUCKET_BYTES / size, 1 / _MOST_BUCKETS)
    pairs, ready, done, begin = [], 0, 0.0, 0
    for tensor, spent in zip(backwards, works, strict=True):
        ready, done = ready + tensor.size, done + spent
        if ready - begin >= least or ready == elements:
            pairs.append((ready / elements, min(1.0, done / work)))
            begin = ready
    return pairs


def _work(tensor: TensorInfo) -> float:
    """The time of the backward pass through the layer of a tensor, relative to other layers."""
    if len(tensor.shape) == 4:
        return 1e6  # the time of a convolution does not follow from its number of elements
    return tensor.size if _is_multiplied(tensor) else 0


def _is_multiplied(tensor: TensorInfo) -> bool:
    """Whether the forward pass multiplies each sample by the tensor. The forward pass does not multiply by embeddings,
    whose rows are only looked up."""
    return len(tensor.shape) == 2 and not tensor.name.startswith(("embed", "wte", "wpe"))
