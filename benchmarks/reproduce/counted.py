"""Counterparts that are computed from the shapes of models: the number of parameters, and the number of floats that a
whole training run sends.

They do not need training, because a compressor's payload depends only on shapes. `COUNTERPARTS` also includes the
counterpart in `bagpipe`, which is counted on synthetic ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.reproduce import networks
from benchmarks.reproduce.bagpipe import look_ahead
from benchmarks.reproduce.networks import parameters_of
from benchmarks.reproduce.outcome import Outcome, Row, within
from benchmarks.reproduce.published import Artifact
from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import exchange_of
from hvdcomp.perfmodel.shapes import tensors_of

WIKITEXT_WORDS = 34_069
"""The number of words in WikiText-2 in the Accordion paper. The paper does not state it; it is computed from the
paper's number of parameters, for an LSTM of 650 units whose output shares the weights of its embedding."""
EPOCHS = 300
STEPS_OF_AN_EPOCH = 98
"""Steps in an epoch of CIFAR's 50,000 images. A batch has 512 images, 128 from each of 4 ranks; the last batch is not
full."""
STEPS_BY_BATCH = {("cifar10", "512"): 98, ("cifar100", "512"): 97, ("cifar10", "4096"): 12, ("cifar100", "4096"): 12}
"""Steps in an epoch in tables 5 and 6. The numbers in these tables imply that, in three of four cases, the last,
incomplete batch is left out."""
TOPK_WORKERS, TOPK_PARTS = 4, 2
"""The authors count TopK's values and indices of all four ranks."""


def _size(tensors: tuple[TensorInfo, ...]) -> int:
    return sum(tensor.size for tensor in tensors)


def floats_of_a_step(tensors: tuple[TensorInfo, ...], spec: str) -> float:
    """How many 32-bit numbers, including indices, a rank passes to collectives in a step if every matrix is
    compressed."""
    return exchange_of(parse_compressor(spec), tensors, 4, min_numel=0).bytes / 4


def parameters(artifact: Artifact) -> Outcome:
    """Tables 8 to 10."""
    data = artifact.settings["data"]
    rows = []
    for network, published in artifact.published.items():
        if data == "wikitext2":
            tensors = parameters_of("lstm", WIKITEXT_WORDS)
            ours = _size(tensors) - next(tensor.size for tensor in tensors if len(tensor.shape) == 2)
            note = f"650 units and {WIKITEXT_WORDS:,} words, with one matrix for embedding and output"
            rows.append(Row(what=network, published=published, ours=ours, note=note))
            why = "the paper does not state the number of words; we chose it so that the published number comes out"
            return Outcome(name=artifact.name, rows=rows, why=why)
        tensors_or_none = networks.tensors_of(network, data)
        if tensors_or_none is None:
            rows.append(Row(what=network, published=published, note="its shapes are not known here"))
            continue
        ours = _size(tensors_or_none)
        rows.append(Row(what=network, published=published, ours=ours, holds=ours == published))
    return Outcome(name=artifact.name, rows=rows, ours="Counted from shapes.")


def sizes(artifact: Artifact) -> Outcome:
    """GraVAC's table 1, in MiB of float32."""
    names = {"ResNet101": "resnet101", "LSTM": "gravac-lstm", "VGG16": "vgg16"}
    rows = []
    for network, published in artifact.published.items():
        ours = _size(tuple(tensors_of(names[network]))) * 4 / 2**20
        rows.append(Row(what=f"{network}: MiB", published=published, ours=ours, holds=within(ours, published, 0.01)))
    return Outcome(name=artifact.name, rows=rows, ours="Computed from the shapes that `hvdcomp bench encode` uses.")


def floats_sent(artifact: Artifact) -> list[Row]:
    """For Accordion's tables 1 to 6, the number of floats that fixed levels send in a whole training run. It follows
    from the number of steps and the shapes. The number of floats that Accordion sends is between the numbers of its two
    levels, but only training can show it."""
    data, compressor = str(artifact.settings.get("data")), artifact.settings.get("compressor")
    chosen = artifact.settings.get("network")
    rows = []
    for network, levels in artifact.published.items() if data in networks.CLASSES else ():
        tensors = networks.tensors_of(network, data)
        if chosen not in (None, network) or tensors is None:
            continue
        for level, numbers in levels.items():
            if level == "Accordion":
                continue
            published = numbers["floats"]
            ours = _floats_of_a_training(tensors, data, compressor, level)
            unit, scale = ("million", 1e6) if compressor == "powersgd" else ("billion", 1e9)
            rows.append(
                Row(
                    what=f"{network}, {_level(compressor, level)}: {unit} floats sent",
                    published=published / scale,
                    ours=ours / scale,
                    holds=within(ours, published, 0.015),
                    note="counted from the shapes, over 300 epochs",
                )
            )
    return rows


def _level(compressor: str | None, level: str) -> str:
    return f"batch {level}" if compressor is None else f"TopK {level}" if compressor == "topk" else level


def _floats_of_a_training(tensors: tuple[TensorInfo, ...], data: str, compressor: str | None, level: str) -> float:
    if compressor is None:
        return _size(tensors) * EPOCHS * STEPS_BY_BATCH[data, level]
    steps = EPOCHS * STEPS_OF_AN_EPOCH
    if compressor == "powersgd":
        return floats_of_a_step(tensors, f"powersgd:{level.replace(' ', '=')}") * steps
    return _size(tensors) * float(level.rstrip(" %")) / 100 * TOPK_WORKERS * TOPK_PARTS * steps


COUNTERPARTS: Mapping[str, Callable[[Artifact], Outcome]] = {
    "parameters": parameters,
    "sizes": sizes,
    "look_ahead": look_ahead,
}
