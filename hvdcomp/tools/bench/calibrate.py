"""Puts a calibration together: the network once, then each model, then what was too noisy to trust. PyTorch."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvdcomp.compressors import Compressor, NoCompression, TensorInfo
from hvdcomp.files import VERSION
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts
from hvdcomp.perfmodel.exchanges import exchange_of
from hvdcomp.perfmodel.network import ALGORITHMS
from hvdcomp.perfmodel.noise import NOISY
from hvdcomp.perfmodel.ways import in_each_way, in_two_levels
from hvdcomp.tools.bench.carrier import Carrier
from hvdcomp.tools.bench.fit import Reading
from hvdcomp.tools.bench.levels import Levels, find_levels
from hvdcomp.tools.bench.marks import HOST
from hvdcomp.tools.bench.probe_model import probe_model
from hvdcomp.tools.bench.probe_network import IN_LEVELS, Kind, NetworkProbe, probe_network
from hvdcomp.tools.bench.workload import build

NETWORK_SHARE = 0.3  # of the time of a calibration
Show = Callable[[str], None]


@dataclass(frozen=True)
class Calibrated:
    """A calibration, and the readings of it that are too noisy, by what they are."""

    calibration: Calibration
    noisy: dict[str, Reading]


def calibrate(
    carrier: Carrier,
    models: Sequence[str],
    compressors: Sequence[Compressor],
    *,
    name: str,
    batch_size: int,
    seed: int,
    seconds: float,
    device: torch.device = HOST,
    show: Show = lambda _: None,
    beside: Callable[[], None] = lambda: None,
) -> Calibrated:
    """Measures network and models. To be called on every rank, two or more, with the same arguments.

    Args:
        carrier: of the gradients.
        models: as for `hvdcomp.tools.bench.workload.build`.
        compressors: whose encoding to time.
        name: of the calibration.
        batch_size: of one rank.
        seed: of weights and data.
        seconds: about how long to measure.
        device: that trains, and where what is sent lies.
        show: called with what comes next.
        beside: called on every rank after each round of the kinds of steps: what is compared with the calibration is
            measured there, as machines are not equally fast all the time. What it takes is not among the seconds.

    Raises:
        SpecError: for a compressor in two levels, where there are none.
        ConfigurationError: as of `find_levels`.
    """
    levels = levels_for(compressors, carrier)
    tensors = [build(model, batch_size, seed, rank=0, device=device).tensors() for model in models]
    network = network_for(tensors, compressors, carrier, levels, device, NETWORK_SHARE * seconds, show)
    readings: dict[str, Reading] = {}
    facts = {}
    for model in models:
        probe = probe_model(
            model,
            compressors,
            network.network,
            carrier,
            levels,
            device=device,
            batch_size=batch_size,
            seed=seed,
            seconds=(1 - NETWORK_SHARE) * seconds / len(models),
            show=lambda what, model=model: show(f"{model}: {what}"),  # type: ignore[misc]
            beside=beside,
        )
        facts[model] = probe.facts
        readings |= {f"{model}, {what}": reading for what, reading in probe.readings.items()}
        gc.collect()  # optimizers and their hooks hold each other
    return put_together(name, "hvdcomp calibrate", network, facts, readings, carrier, device)


def levels_for(compressors: Sequence[Compressor], carrier: Carrier) -> Levels:
    """The levels of all ranks, in which these compressors can be used. To be called on every rank.

    Raises:
        SpecError: for a compressor in two levels, where there are none.
        ConfigurationError: as of `find_levels`.
    """
    levels = find_levels(carrier.communicator())
    for compressor in compressors:
        levels.check(compressor)
    return levels


def network_for(
    models: Sequence[Sequence[TensorInfo]],
    compressors: Sequence[Compressor],
    carrier: Carrier,
    levels: Levels,
    device: torch.device,
    seconds: float,
    show: Show,
) -> NetworkProbe:
    """Measures the network, up to the largest collectives of these models with any of these compressors.

    Args:
        models: the tensors of each.
        carrier, levels, device, seconds, show: as of `probe_network`.
    """
    largest = largest_collectives(models, compressors, carrier.ranks.size, levels.ranks_per_node)
    return probe_network(largest, carrier, levels, device, seconds, lambda what: show(f"network: {what}"))


def put_together(
    name: str,
    source: str,
    network: NetworkProbe,
    models: Mapping[str, ModelFacts],
    readings: Mapping[str, Reading],
    carrier: Carrier,
    device: torch.device,
) -> Calibrated:
    """The calibration of what was measured.

    Args:
        source: the command that has measured.
        readings: of the models, by what they are.
    """
    every = {f"network, {what}": reading for what, reading in network.readings.items()} | dict(readings)
    noisy = {what: one for what, one in every.items() if one.noisy}
    calibration = Calibration(
        name=name,
        network=network.network,
        models=models,
        machine=machine_facts(carrier, device),
        noise=float(np.median([one.spread for one in every.values()])),
        noise_note=noise_note(noisy),
        network_source=f"{source}, {carrier.ranks.size} ranks of {carrier.network}",
    )
    return Calibrated(calibration, noisy)


def noise_note(noisy: dict[str, Reading]) -> str:
    """What to say of noise in a calibration."""
    said = "the median, over all measurements, of the relative difference between repeated medians"
    if not noisy:
        return f"{said}; none differs by more than {NOISY:.0%}"
    which = "; ".join(f"{what}: {one.spread:.0%}" for what, one in noisy.items())
    return f"{said}. Too noisy to trust, as repeated medians differ by more than {NOISY:.0%}: {which}"


def machine_facts(carrier: Carrier, device: torch.device) -> dict[str, str]:
    """What the numbers depend on, in words."""
    return {
        **({"accelerator": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "host": platform.node(),
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "ranks": str(carrier.ranks.size),
        "ranks per host": str(carrier.ranks.local_size),
        "threads of PyTorch": str(torch.get_num_threads()),
        "backend": carrier.ranks.backend,
        **carrier.facts(),
        "hvdcomp": VERSION,
        "torch": torch.__version__,
    }


def largest_collectives(
    models: Sequence[Sequence[TensorInfo]], compressors: Sequence[Compressor], ranks: int, ranks_per_node: int | None
) -> dict[Kind, int]:
    """By kind of collective, and among whom, the bytes of the largest in a step of any model, of one rank; every way to
    exchange counts, because `advise` shows them all.

    Args:
        models: the tensors of each.
        ranks_per_node: None where there are no two levels.
    """
    found: dict[Kind, float] = {(kind, "all"): 0.0 for kind in ALGORITHMS}
    ways: list[Compressor] = [NoCompression(), *(way for one in compressors for way in in_each_way(one))]
    if ranks_per_node is not None:
        found |= dict.fromkeys(IN_LEVELS, 0.0)
        ways += [both for one in ways if (both := in_two_levels(one)) is not None]
    for tensors in models:
        for compressor in ways:
            for collectives in exchange_of(compressor, tensors, ranks, ranks_per_node).rounds:
                for one in collectives:
                    if (kind := (one.kind, one.among)) in found:
                        found[kind] = max(found[kind], one.bytes)
    return {kind: int(size) for kind, size in found.items()}
