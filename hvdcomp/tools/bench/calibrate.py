"""Makes a calibration: measures the network and then each model, and lists measurements that are too noisy. This module
needs PyTorch."""

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

NETWORK_SHARE = 0.3  # the share of a calibration's time for measuring the network
Show = Callable[[str], None]


@dataclass(frozen=True)
class Calibrated:
    """A calibration, and a dictionary of the measurements that are too noisy, by name."""

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
    known_network: Calibration | None = None,
    show: Show = lambda _: None,
    beside: Callable[[], None] = lambda: None,
) -> Calibrated:
    """Measures the network and the models. Every rank must call this function with the same arguments.

    Args:
        carrier: the library that exchanges the gradients.
        models: names of the models, as for `hvdcomp.tools.bench.workload.build`.
        compressors: specs of the compressors to measure.
        name: name of the calibration.
        batch_size: batch size of one rank.
        seed: seed of the weights and the data.
        seconds: approximate duration of the measurements.
        device: device of the model and of the sent tensors.
        known_network: a calibration whose network is used instead of measuring the network. This argument is required
            if there is only one rank.
        show: a function that is called with the name of each measurement before it starts.
        beside: a function that is called on every rank after each round of steps. The function can make measurements to
            compare with the calibration. The measurements and the calibration must be made at the same time, because
            the speed of the machine changes. The time that the function takes is not part of `seconds`.

    Raises:
        SpecError: if a compressor is two-level but the run does not have two levels.
        ConfigurationError: if `find_levels` raises this error.
    """
    levels = levels_for(compressors, carrier)
    tensors = [build(model, batch_size, seed, rank=0, device=device).tensors() for model in models]
    network_s = NETWORK_SHARE * seconds if known_network is None else 0.0
    network = network_for(tensors, compressors, carrier, levels, device, network_s, show, known_network)
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
            seconds=(seconds - network_s) / len(models),
            show=lambda part, model=model: show(f"{model}: {part}"),  # type: ignore[misc]
            beside=beside,
        )
        facts[model] = probe.facts
        readings |= {f"{model}, {part}": reading for part, reading in probe.readings.items()}
        gc.collect()  # optimizers and hooks refer to each other, so only the collector frees them
    return put_together(name, "hvdcomp calibrate", network, facts, readings, carrier, device)


def levels_for(compressors: Sequence[Compressor], carrier: Carrier) -> Levels:
    """Finds the levels of the run, and checks that these compressors can use the levels. Every rank must call this
    function.

    Raises:
        SpecError: if a compressor is two-level but the run does not have two levels.
        ConfigurationError: if `find_levels` raises this error.
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
    known: Calibration | None = None,
) -> NetworkProbe:
    """Measures the network, for sizes up to the largest collective that these models need with these compressors.

    Args:
        models: the tensors of each model, by name.
        carrier, levels, device, seconds, show: the arguments of `probe_network`.
        known: a calibration whose network is used; None to measure the network.
    """
    if known is not None:
        return NetworkProbe(known.network, {}, f"{known.network_source} ({known.name})")
    largest = largest_collectives(models, compressors, carrier.ranks.size, levels.ranks_per_node)
    return probe_network(largest, carrier, levels, device, seconds, lambda part: show(f"network: {part}"))


def put_together(
    name: str,
    source: str,
    network: NetworkProbe,
    models: Mapping[str, ModelFacts],
    readings: Mapping[str, Reading],
    carrier: Carrier,
    device: torch.device,
) -> Calibrated:
    """Makes the calibration from the measurements.

    Args:
        name: name of the calibration.
        source: the command that made the measurements.
        network, models: the measured network, and the measured models by name.
        readings: the measured times of all models, with their spread. A name begins with the name of the model.
        carrier, device: the library and the device of the measurements.
    """
    all_readings = {f"network, {part}": reading for part, reading in network.readings.items()} | dict(readings)
    noisy = {part: reading for part, reading in all_readings.items() if reading.noisy}
    calibration = Calibration(
        name=name,
        network=network.network,
        models=models,
        machine=machine_facts(carrier, device),
        noise=float(np.median([reading.spread for reading in all_readings.values()])),
        noise_note=noise_note(noisy),
        network_source=network.source or f"{source}, {carrier.ranks.size} ranks of {carrier.network}",
    )
    return Calibrated(calibration, noisy)


def noise_note(noisy: dict[str, Reading]) -> str:
    """A text for the calibration that lists the noisy measurements."""
    meaning = (
        "the relative difference between the medians of repeated measurements; this number is the median over all "
        "measurements"
    )
    if not noisy:
        return f"{meaning}; no measurement differs by more than {NOISY:.0%}"
    spreads = "; ".join(f"{part}: {reading.spread:.0%}" for part, reading in noisy.items())
    return (
        f"{meaning}. These measurements are too noisy to trust, because their repeated medians differ by more than "
        f"{NOISY:.0%}: {spreads}"
    )


def machine_facts(carrier: Carrier, device: torch.device) -> dict[str, str]:
    """A description of the properties of the machine that affect the measurements."""
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
    """For each kind of collective and each group of ranks, the most bytes that a rank sends in one collective, over the
    steps of all models. The function considers all kinds of exchange, because `advise` shows all kinds.

    Args:
        models: the tensors of each model, by name.
        ranks_per_node: number of ranks per node; None if no two-level exchange is possible.
    """
    largest: dict[Kind, float] = {(kind, "all"): 0.0 for kind in ALGORITHMS}
    ways: list[Compressor] = [NoCompression(), *(way for compressor in compressors for way in in_each_way(compressor))]
    if ranks_per_node is not None:
        largest |= dict.fromkeys(IN_LEVELS, 0.0)
        ways += [two_level for way in ways if (two_level := in_two_levels(way)) is not None]
    for tensors in models:
        for compressor in ways:
            for collectives in exchange_of(compressor, tensors, ranks, ranks_per_node).rounds:
                for collective in collectives:
                    if (kind := (collective.kind, collective.among)) in largest:
                        largest[kind] = max(largest[kind], collective.bytes)
    return {kind: int(size) for kind, size in largest.items()}
