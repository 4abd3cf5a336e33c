"""The training runs that we use instead of the papers' training runs. If a folder has the published data, Accordion's
original training runs are repeated instead.

Two small workloads replace the papers' workloads: a convolutional network on MNIST-1D (Greydanus and Kobak 2020), and
an LSTM on text. As in the papers, low compression gives better results than high compression. Learning rate and length
were chosen so that low compression loses little compared with dense gradients. The loss of a policy is therefore due to
its decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOB = {"powersgd": "rank", "topk": "ratio"}
LINK = "100mbit"
"""The rate of the links of simulated ranks, for which times are predicted."""

_CHANCE = {"mnist1d": 10.0, "cifar10": 10.0, "cifar100": 1.0, "stdlib-text": 256.0, "wikitext2": 33_278.0}


@dataclass(frozen=True)
class Workload:
    """A way to train a network. Counterparts vary its compression or batch size.

    Attributes:
        name: name of the folder of the workload's training runs.
        shown: the network and the data, in words.
        options: the options of `hvdcomp train`.
        steps_of_an_epoch: number of steps in an epoch. All ranks take the same number of steps.
        accordion_steps: number of steps between two decisions of Accordion. Its authors use 10 of 300 epochs.
        gravac_window: number of steps between two decisions of GraVAC.
        interval: number of epochs between two choices of a batch size. On the published data, also the number of epochs
            between all decisions of Accordion.
        levels: for each compressor, the levels of low and of high compression.
        eta: Accordion's threshold: the smallest relative change of the norm in a critical regime.
        batch_sizes: the small, the large and the extreme batch size, over all ranks together.
        ranks: number of simulated ranks.
    """

    name: str
    shown: str
    options: Mapping[str, Any]
    steps_of_an_epoch: int
    accordion_steps: int
    gravac_window: int
    levels: Mapping[str, tuple[float, float]]
    interval: int = 1
    eta: float = 0.5
    batch_sizes: tuple[int, int, int] = (50, 200, 800)
    ranks: int = 2

    @property
    def is_text(self) -> bool:
        return bool(self.options["model"] == "lstm")

    @property
    def chance(self) -> float:
        """The accuracy in percent, or the perplexity, that guessing reaches."""
        return _CHANCE[self.options["data"]]

    @property
    def epochs(self) -> int:
        return int(self.options["epochs"])

    @property
    def fall(self) -> int:
        """The step after which the learning rate falls for the first time."""
        return round(self.options["milestones"][0] * self.steps_of_an_epoch)

    def level(self, compressor: str, which: str) -> str:
        """The spec of "low" or "high" compression."""
        return spec(compressor, self.levels[compressor][which == "high"])

    def accordion(self, compressor: str, levels: tuple[float, float] | None = None) -> str:
        """The spec of the policy Accordion. It chooses between `levels`, or between the workload's levels if `levels`
        is None."""
        low, high = levels or self.levels[compressor]
        rule = f"interval={self.interval}" if "data_dir" in self.options else f"steps={self.accordion_steps}"
        eta = "" if self.eta == 0.5 else f",eta={self.eta:g}"
        return f"accordion:low={low:g},high={high:g},{rule}{eta}"


def spec(compressor: str, level: float) -> str:
    return f"{compressor}:{KNOB[compressor]}={level:g}"


_SMALL_LEVELS = {"powersgd": (4.0, 1.0), "topk": (0.05, 0.002)}


def small(kind: str, quick: bool) -> Workload:
    """The small workload for "images" or "text". It is shorter if `quick`."""
    if kind == "images":
        epochs = 8 if quick else 24
        options: dict[str, Any] = {
            "model": "cnn1d", "data": "mnist1d", "epochs": epochs, "lr": 0.05, "warm_up": epochs / 8,
            "milestones": (epochs * 5 / 8, epochs * 7 / 8),
        }  # fmt: skip
        shown, steps, eta = "a small convolutional network on MNIST-1D", 80, 0.5
        accordion_steps, gravac_window = steps * epochs // 32, steps * epochs * 3 // 64
    else:
        epochs, size = 6, 40_000 if quick else 160_000
        options = {
            "model": "lstm", "data": "stdlib-text", "text_size": size, "sequence_length": 32, "batch_size": 16,
            "epochs": epochs, "milestones": (4.0, 5.0),
        }  # fmt: skip
        # The norms of the LSTM change by less than a fifth. With a threshold of 0.5, nearly all tensors would stay at
        # high compression.
        shown, steps, eta = "an LSTM on text of Python's library", 35 if quick else 140, 0.1
        accordion_steps, gravac_window = steps * epochs // 30, steps * epochs // 21
    return Workload(
        name=f"{kind}-quick" if quick else kind,
        shown=shown,
        options=options,
        steps_of_an_epoch=steps,
        accordion_steps=accordion_steps,
        gravac_window=gravac_window,
        levels=_SMALL_LEVELS,
        eta=eta,
    )


_MODELS = {"ResNet-18": "resnet18", "VGG-19bn": "vgg19_bn"}
_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
_PUBLISHED_LEVELS: dict[str, dict[str, tuple[float, float]]] = {
    "ResNet-18 cifar10": {"powersgd": (2, 1), "topk": (0.99, 0.1)},
    "ResNet-18 cifar100": {"powersgd": (2, 1), "topk": (0.99, 0.25)},
    "VGG-19bn cifar10": {"powersgd": (4, 1), "topk": (0.99, 0.1)},
    "VGG-19bn cifar100": {"powersgd": (4, 1), "topk": (0.99, 0.25)},
}


def of_accordion(kind: str, network: str, data: str, folder: Path, epochs: int | None = None) -> Workload:
    """The workload of Accordion on the published data, with the settings in its table 7 and four ranks.

    Args:
        kind: "images" or "text".
        network, data: only for images: the names of the network and the data, such as "ResNet-18" and "cifar10". Text
            is an LSTM on WikiText-2.
        folder: the folder with the published data.
        epochs: number of epochs, instead of the authors' 300 or 90. All other lengths are reduced by the same factor.
    """
    ranks, authors, falls = 4, *((300, (150, 250)) if kind == "images" else (90, (60, 80)))
    epochs = epochs or authors
    options: dict[str, Any] = {
        "data_dir": str(folder.resolve()), "epochs": epochs, "nesterov": True, "warm_up": 5 * epochs / authors,
        "milestones": tuple(epochs * at / authors for at in falls),
    }  # fmt: skip
    interval = max(1, round(10 * epochs / authors))
    if kind == "images":
        options |= {"model": _MODELS[network], "data": data, "batch_size": 128, "lr": 0.1 * ranks}
        shown, steps, levels = f"{network} on {_TITLES[data]}", 50_000 // 512, _PUBLISHED_LEVELS[f"{network} {data}"]
        name = f"{options['model']}-{data}-{epochs}"
    else:
        options |= {"model": "lstm", "data": "wikitext2", "batch_size": 20, "lr": 2.5 * ranks}
        shown, steps, levels = "an LSTM on WikiText-2", 745, {"powersgd": (4, 1), "topk": (0.99, 0.02)}
        name = f"lstm-wikitext2-{epochs}"
    return Workload(
        name=name,
        shown=f"{shown}, {epochs} epochs",
        options=options,
        steps_of_an_epoch=steps,
        accordion_steps=interval * steps,
        gravac_window=interval * steps,
        levels=levels,
        interval=interval,
        batch_sizes=(512, 4096, 16_384),
        ranks=ranks,
    )
