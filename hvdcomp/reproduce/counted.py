"""Counterparts that follow from the shapes of models: parameters, and the floats that a whole training sends.

No training is needed: a compressor's payload depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from hvdcomp.compressors import TensorInfo
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import exchange_of
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.reproduce.outcome import Outcome, Row, within
from hvdcomp.reproduce.published import Artefact

NETWORKS = {"ResNet-18": "resnet18", "VGG-19bn": "vgg19_bn"}
"""Of the papers' networks, the models of `hvdcomp train`."""
CLASSES = {"cifar10": 10, "cifar100": 100}
VGG_HEAD = {"cifar10": (512, 512), "cifar100": (4096, 4096)}
"""Widths of two layers that the authors' VGG-19 has before its last one; that of `hvdcomp train` has none."""
WIKITEXT_WORDS = 34_069
"""Words of WikiText-2 as Accordion's authors cut it, which they do not state: what their number of parameters says of
an LSTM of 650 units whose output has the weights of its embedding."""
EPOCHS = 300
STEPS_OF_AN_EPOCH = {512: 98, 4096: 12}
"""Of CIFAR's 50,000 images in batches of 4 ranks together; the last one of 512 is not full, that of 4,096 left out."""
TOPK_WORKERS, TOPK_PARTS = 4, 2
"""The authors count what all four ranks gather of TopK, values and indices."""


@cache
def _tensors(model: str, classes: int) -> tuple[TensorInfo, ...]:
    """The parameters of a model of `hvdcomp train`, without their values. Needs PyTorch."""
    import torch

    from hvdcomp.train.frameworks import build_model

    with torch.device("meta"):
        built = build_model(model, channels=3, size=32, classes=classes)
    return tuple(TensorInfo(name, tuple(parameter.shape)) for name, parameter in built.named_parameters())


def network_of(network: str, data: str) -> tuple[TensorInfo, ...]:
    """The parameters of a network of the Accordion paper, one of `NETWORKS`."""
    tensors = _tensors(NETWORKS[network], CLASSES[data])
    if network != "VGG-19bn":
        return tensors
    *body, last, bias = tensors
    (first, second), classes, inputs = VGG_HEAD[data], last.shape[0], last.shape[1]
    widths = ((first, inputs), (second, first))
    head = [TensorInfo(f"head{number}.weight", shape) for number, shape in enumerate(widths)]
    head += [TensorInfo(f"head{number}.bias", (outputs,)) for number, (outputs, _) in enumerate(widths)]
    return (*body, *head, TensorInfo(last.name, (classes, second)), bias)


def _size(tensors: tuple[TensorInfo, ...]) -> int:
    return sum(tensor.size for tensor in tensors)


def floats_of_a_step(tensors: tuple[TensorInfo, ...], spec: str) -> float:
    """Numbers of 32 bits that a rank hands to the collectives, every matrix compressed, indices counted too."""
    return exchange_of(parse_compressor(spec), tensors, 4, min_numel=0).bytes / 4


def parameters(artefact: Artefact) -> Outcome:
    """Tables 8 to 10."""
    data = artefact.settings["data"]
    rows = []
    for network, published in artefact.published.items():
        if data == "wikitext2":
            tensors = _tensors("lstm", WIKITEXT_WORDS)
            ours = _size(tensors) - next(tensor.size for tensor in tensors if len(tensor.shape) == 2)
            note = f"650 units and {WIKITEXT_WORDS:,} words, with one matrix for embedding and output"
            rows.append(Row(what=network, published=published, ours=ours, note=note))
            why = "the paper does not state the number of words, which is chosen so that the number comes out"
            return Outcome(name=artefact.name, rows=rows, why=why)
        if network not in NETWORKS:
            rows.append(Row(what=network, published=published, note="is none of hvdcomp's models"))
            continue
        ours = _size(network_of(network, data))
        note = "with the authors' two more layers" if network == "VGG-19bn" else ""
        rows.append(Row(what=network, published=published, ours=ours, holds=ours == published, note=note))
    return Outcome(name=artefact.name, rows=rows, ours="Parameters of the models of `hvdcomp train`.")


def sizes(artefact: Artefact) -> Outcome:
    """GraVAC's table 1, in MiB of float32."""
    names = {"ResNet101": "resnet101", "LSTM": "gravac-lstm", "VGG16": "vgg16"}
    rows = []
    for network, published in artefact.published.items():
        ours = _size(tuple(tensors_of(names[network]))) * 4 / 2**20
        rows.append(Row(what=f"{network}: MiB", published=published, ours=ours, holds=within(ours, published, 0.01)))
    return Outcome(name=artefact.name, rows=rows, ours="Of the shapes that `hvdcomp bench encode` takes.")


def floats_sent(artefact: Artefact) -> list[Row]:
    """Of Accordion's tables 1 to 6: what fixed levels send in a whole training, which the numbers of steps and the
    shapes determine. What Accordion sends is between them, and only a training says where."""
    data, compressor = artefact.settings.get("data"), artefact.settings.get("compressor")
    networks = artefact.published if data in CLASSES else {}
    chosen = artefact.settings.get("network")
    rows = []
    for network, levels in networks.items():
        if chosen not in (None, network) or network not in NETWORKS:
            continue
        tensors = network_of(network, data)
        for level, numbers in levels.items():
            if level == "Accordion":
                continue
            published = numbers["floats"]
            ours = _floats_of_a_training(tensors, compressor, level)
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


def _floats_of_a_training(tensors: tuple[TensorInfo, ...], compressor: str | None, level: str) -> float:
    if compressor is None:
        return _size(tensors) * EPOCHS * STEPS_OF_AN_EPOCH[int(level)]
    steps = EPOCHS * STEPS_OF_AN_EPOCH[512]
    if compressor == "powersgd":
        return floats_of_a_step(tensors, f"powersgd:{level.replace(' ', '=')}") * steps
    return _size(tensors) * float(level.rstrip(" %")) / 100 * TOPK_WORKERS * TOPK_PARTS * steps


COUNTERPARTS: Mapping[str, Callable[[Artefact], Outcome]] = {"parameters": parameters, "sizes": sizes}
