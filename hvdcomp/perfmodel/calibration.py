"""The calibration file: measured (or published) times of a network, of models and of compressors on one machine.

The file is JSON, version 1; `docs/calibration-file.md` documents its fields. The package's presets are files of this
kind. The presets of current machines name a GPU from `cards` instead of listing models, and the times of the models are
then estimated (`workloads`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import FIRST, TensorInfo
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import parse_json, replace_text
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.fields import CalibrationError, Fields
from hvdcomp.perfmodel.network import (
    ALGORITHMS,
    Among,
    CollectiveCost,
    Inner,
    Network,
    TwoLevelCosts,
    network_of_nodes,
)
from hvdcomp.perfmodel.shapes import MODELS, tensors_of
from hvdcomp.perfmodel.workloads import models_on

FORMAT = "hvdcomp-calibration"
VERSION = 1
OTHER = "other"
"""The name in a calibration file for every kind of optimizer that hvdcomp's own training runs
(`hvdcomp.compressors.evidence`) do not include."""
_OPTIMIZERS = (*FIRST, OTHER)
_PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True)
class ModelFacts:
    """What is known about one model on the calibrated machine.

    Attributes:
        tensors: the names, shapes and element types of the model's parameters.
        compute: the times of the model's computation on one rank.
        bucket_bytes: bytes of gradients that the framework sends at a time during the backward pass. If `compute.ready`
            is known, this number is an upper limit (Horovod's fusion threshold).
        early_bytes: the smallest number of bytes of gradients in a bucket of hvdcomp, if hvdcomp uses the library's
            buckets (DistributedDataParallel); None if `hvdcomp.Compression` sets the size of buckets.
        shapes: name of the model in `hvdcomp.perfmodel.shapes`; None if that module does not list the model.
        sources: the source of each number, by the name of its field in the file.
        estimated: names of the fields whose numbers were estimated, not measured. `sources` explains how.
        optimizer: the kind of optimizer that the training uses, as in `hvdcomp.compressors.evidence`, or `OTHER`; None
            if the numbers do not come from a user's training.
        sharded: whether the model is sharded over all ranks (FSDP2). Then `bucket_bytes` is the number of bytes of the
            gradients of one module, because FSDP2 gathers weights module by module.
    """

    tensors: tuple[TensorInfo, ...]
    compute: Compute
    bucket_bytes: float
    early_bytes: float | None = None
    shapes: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    estimated: tuple[str, ...] = ()
    optimizer: str | None = None
    sharded: bool = False


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file.

    Attributes:
        name: name of the calibration in messages and reports.
        network: the times of collectives.
        models: the numbers of each model, by its name.
        machine: texts that describe the machine, by keys such as accelerator, link and versions.
        noise: the largest relative difference between two measured step times that may be noise. A method counts as
            faster only if its lead is larger than this difference.
        noise_note: how `noise` was determined.
        network_source: the source of the network's numbers.
        card: the GPU for which unknown encode times are estimated, a key of `hvdcomp.perfmodel.cards.CARDS`; empty if
            the machine has no GPU, or its GPU is not in `CARDS`.
    """

    name: str
    network: Network
    models: Mapping[str, ModelFacts]
    machine: Mapping[str, str] = field(default_factory=dict)
    noise: float = 0.0
    noise_note: str = ""
    network_source: str = ""
    card: str = ""


def presets() -> tuple[str, ...]:
    """The names of the calibrations that the package contains."""
    return tuple(sorted(file.stem for file in _PRESETS.glob("*.json")))


def load(source: str | Path) -> Calibration:
    """Reads a calibration.

    Args:
        source: path of a calibration file, or the name of a preset.

    Raises:
        CalibrationError: if the file does not exist, cannot be read, or has a missing or invalid field. The message
            names the field.
    """
    place = Path(source)
    if isinstance(source, str) and os.sep not in source and not source.endswith(".json") and not Path(source).exists():
        if source not in presets():
            raise CalibrationError(
                f"{source!r} is neither a file nor a preset; the presets are: {', '.join(presets())}"
            )
        place = _PRESETS / f"{source}.json"
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CalibrationError(f"{source} cannot be read: {reason}") from None
    try:
        data = parse_json(text)
    except ValueError as error:
        raise CalibrationError(f"{source} is not JSON: {error}") from None
    return from_json(_completed(data, str(source)), str(source))


def _completed(data: Any, where: str) -> Any:
    """The data of a calibration file. If the data has the field `like`, which names a preset, this preset provides all
    missing fields."""
    if not isinstance(data, dict) or "like" not in data:
        return data
    like = data["like"]
    if like not in presets():
        raise CalibrationError(
            f'{where}: the field "like" is {like!r}, which is not a preset; the presets are: {", ".join(presets())}'
        )
    base = _completed(json.loads((_PRESETS / f"{like}.json").read_text(encoding="utf-8")), like)
    return {**base, **{name: value for name, value in data.items() if name != "like"}}


def save(calibration: Calibration, file: Path) -> None:
    """Writes a calibration to a file that `load` reads.

    Raises:
        OSError: if the file cannot be written. An existing file is then unchanged.
    """
    replace_text(file, json.dumps(as_json(calibration), indent=1, allow_nan=False) + "\n")


def from_json(data: Any, where: str = "the calibration") -> Calibration:
    """Creates a calibration from parsed JSON.

    Args:
        data: the parsed content of a calibration file.
        where: name of the file, for messages.

    Raises:
        CalibrationError: if a field is missing or invalid. The message names the field.
    """
    top = Fields(data, where, "")
    kind, version = top.text("format"), top.number("version", lowest=0)
    if kind != FORMAT:
        raise CalibrationError(f'{where} is not a calibration file: its field "format" is {kind!r}, not {FORMAT!r}')
    if version != VERSION:
        raise CalibrationError(
            f"{where} has version {version:g}, but this hvdcomp reads only version {VERSION}; install the version of "
            "hvdcomp that wrote the file, or calibrate again"
        )
    noise = top.section("noise", optional=True)
    network = top.section("network")
    card = top.text("card", "")
    if card and card not in CARDS:
        raise top.error(f"{card!r} is not known; use one of: {', '.join(CARDS)}", "card")
    models = top.section("models") if top.has("models") or not card else Fields(models_on(CARDS[card]), where, "models")
    calibration = Calibration(
        name=top.text("name"),
        network=_network(network),
        network_source=network.text("source", ""),
        models={name: _model(models.section(name)) for name in models.names()},
        machine=top.section("machine", optional=True).texts(),
        noise=noise.number("relative", 0.0, lowest=0),
        noise_note=noise.text("note", ""),
        card=card,
    )
    if not calibration.models:
        raise models.error("is empty: at least one model is needed")
    for read in (noise, network, top):
        read.finish()
    return calibration


def as_json(calibration: Calibration) -> dict[str, Any]:
    """The content of a calibration file, as dictionaries, lists, numbers and texts."""
    network = calibration.network
    inner = network.inner
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": calibration.name,
        "machine": dict(calibration.machine),
        **({"card": calibration.card} if calibration.card else {}),
        "noise": {"relative": calibration.noise, "note": calibration.noise_note},
        "network": {
            "source": calibration.network_source,
            **_costs_as_json(network),
            **({} if inner is None else {"inner": {"ranks_per_node": inner.ranks_per_node, **_costs_as_json(inner)}}),
            **({} if network.levels is None else {"levels": _levels_as_json(network.levels)}),
        },
        "models": {name: _model_as_json(facts) for name, facts in calibration.models.items()},
    }


def _network(fields: Fields) -> Network:
    if fields.has("nodes"):
        return _nodes(fields.section("nodes"))
    inner = None
    if fields.has("inner"):
        section = fields.section("inner")
        per_node = section.whole("ranks_per_node", lowest=1)
        inner = Inner(ranks_per_node=per_node, **_costs(section))
        section.finish()
    levels = _levels(fields.section("levels")) if fields.has("levels") else None
    return Network(**_costs(fields), inner=inner, levels=levels)


def _nodes(fields: Fields) -> Network:
    """A network from the short form, `nodes`. `network_of_nodes` computes the costs from its numbers."""
    network = network_of_nodes(
        ranks_per_node=fields.whole("ranks_per_node", lowest=2),
        bytes_per_s=fields.number("bytes_per_s", above=0),
        latency_s=fields.number("latency_s", lowest=0),
        inside_bytes_per_s=fields.number("inside_bytes_per_s", above=0),
        inside_latency_s=fields.number("inside_latency_s", lowest=0),
    )
    fields.finish()
    return network


def _levels(fields: Fields) -> TwoLevelCosts:
    known = {}
    for name in ("node", "across"):
        section = fields.section(name)
        known[name] = Among(**_costs(section))
        section.finish()
    levels = TwoLevelCosts(fields.whole("ranks_per_node", lowest=2), **known)
    fields.finish()
    return levels


def _costs(fields: Fields) -> dict[str, Any]:
    """The costs of each kind of collective. Files of earlier versions have no costs of alltoall and reduce-scatter."""
    optional = [kind for kind in ("alltoall", "reducescatter") if fields.has(kind)]
    return {kind: _cost(kind, fields) for kind in ("allreduce", "allgather", *optional)}


def _cost(kind: str, parent: Fields) -> CollectiveCost:
    fields = parent.section(kind)
    algorithm = fields.text("algorithm")
    if algorithm not in ALGORITHMS[kind]:
        raise fields.error(f"{algorithm!r} is not known; use one of: {', '.join(ALGORITHMS[kind])}", "algorithm")
    reduction = fields.section("reduction_s_per_byte", optional=True)
    cost = CollectiveCost(
        algorithm=algorithm,
        latency_s=fields.number("latency_s", lowest=0),
        bytes_per_s=fields.number("bytes_per_s", above=0),
        transfer=fields.pairs("transfer", "bytes, seconds", second_rises=True),
        incast=fields.pairs("incast", "ranks, factor", lowest_second=1),
        start_s=fields.number("start_s", 0.0, lowest=0),
        fusion_s_per_byte=fields.number("fusion_s_per_byte", 0.0, lowest=0),
        reduction_s_per_byte={name: reduction.number(name, lowest=0) for name in reduction.names()},
    )
    fields.finish()
    return cost


def _levels_as_json(levels: TwoLevelCosts) -> dict[str, Any]:
    costs = {"node": _costs_as_json(levels.node), "across": _costs_as_json(levels.across)}
    return {"ranks_per_node": levels.ranks_per_node, **costs}


def _costs_as_json(costs: Network | Among) -> dict[str, Any]:
    known = {kind: getattr(costs, kind) for kind in ALGORITHMS}
    return {kind: _cost_as_json(cost) for kind, cost in known.items() if cost is not None}


def _cost_as_json(cost: CollectiveCost) -> dict[str, Any]:
    tables = {"transfer": cost.transfer, "incast": cost.incast}
    optional = {
        "start_s": cost.start_s,
        "fusion_s_per_byte": cost.fusion_s_per_byte,
        "reduction_s_per_byte": dict(cost.reduction_s_per_byte),
        **{name: [list(pair) for pair in table] for name, table in tables.items()},
    }
    return {
        "algorithm": cost.algorithm,
        "latency_s": cost.latency_s,
        "bytes_per_s": cost.bytes_per_s,
        **{name: value for name, value in optional.items() if value},
    }


def _model(fields: Fields) -> ModelFacts:
    shapes = fields.text("shapes", "") or None
    if (shapes is None) == (not fields.has("tensors")):
        raise fields.error("needs either 'shapes' (the name of a known model) or 'tensors' (a list of tensors)")
    if shapes is not None and shapes not in MODELS:
        raise fields.error(f"{shapes!r} is not known; use one of: {', '.join(MODELS)}", "shapes")
    encode = fields.section("encode", optional=True)
    facts = ModelFacts(
        tensors=tuple(tensors_of(shapes)) if shapes is not None else _tensors(fields),
        compute=Compute(
            backward_s=fields.number("backward_s", above=0),
            forward_s=fields.number("forward_s", lowest=0) if fields.has("forward_s") else None,
            gamma=fields.number("gamma", 1.0, lowest=1),
            hides=fields.share("hides", 1.0),
            batch_size=fields.whole("batch_size", lowest=1) if fields.has("batch_size") else None,
            encode={_spec(encode, name): _encode(encode.section(name)) for name in encode.names()},
            optimizer_s=fields.number("optimizer_s", 0.0, lowest=0),
            engine_s=fields.number("engine_s", 0.0, lowest=0),
            horovod_s=fields.number("horovod_s", 0.0, lowest=0),
            ready=_ready(fields),
        ),
        bucket_bytes=fields.number("bucket_bytes", above=0),
        early_bytes=fields.number("early_bytes", above=0) if fields.has("early_bytes") else None,
        shapes=shapes,
        sources=fields.section("sources", optional=True).texts(),
        estimated=tuple(fields.list_of_texts("estimated")),
        optimizer=_optimizer(fields),
        sharded=fields.truth("sharded", False),
    )
    fields.finish()
    return facts


def _optimizer(fields: Fields) -> str | None:
    optimizer = fields.text("optimizer", "") or None
    if optimizer not in (None, *_OPTIMIZERS):
        raise fields.error(f"{optimizer!r} is not known; use one of: {', '.join(_OPTIMIZERS)}", "optimizer")
    return optimizer


def _ready(fields: Fields) -> tuple[tuple[float, float], ...]:
    pairs = fields.pairs("ready", "share of the bytes, share of the backward pass", second_rises=True)
    if pairs and (pairs[-1][0] != 1 or pairs[-1][1] > 1):
        raise fields.error(
            "must end with a pair whose first number is 1 (all bytes) and whose second number is at most 1 (the end of "
            f"the backward pass), not with {list(pairs[-1])}",
            "ready",
        )
    return pairs


def _spec(fields: Fields, spec: str) -> str:
    """The spec in its canonical form, so that equal compressors have equal specs."""
    try:
        return str(parse_compressor(spec))
    except SpecError as error:
        raise fields.error(str(error), spec) from None


def _encode(fields: Fields) -> EncodeTime:
    time = EncodeTime(
        encode_s=fields.number("encode_s", lowest=0),
        decode_s=fields.number("decode_s", 0.0, lowest=0),
        decode_per_rank_s=fields.number("decode_per_rank_s", 0.0, lowest=0),
        source=fields.text("source", ""),
        estimated=fields.truth("estimated", False),
        host_s=fields.number("host_s", 0.0, lowest=0),
    )
    fields.finish()
    return time


def _tensors(fields: Fields) -> tuple[TensorInfo, ...]:
    tensors = []
    for section in fields.sections("tensors"):
        dtype = section.text("dtype", "float32")
        try:
            dtype_bytes(dtype)
        except KeyError:
            raise section.error(f"{dtype!r} is not a floating-point type that hvdcomp can send", "dtype") from None
        tensors.append(TensorInfo(section.text("name"), section.shape("shape"), dtype))
        section.finish()
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise fields.error("contains two tensors with the same name; give each tensor its own name", "tensors")
    if not any(tensor.size for tensor in tensors):
        raise fields.error("contains no tensor that has elements; at least one is needed", "tensors")
    return tuple(tensors)


def _model_as_json(facts: ModelFacts) -> dict[str, Any]:
    compute = facts.compute
    tensors = [{"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype} for tensor in facts.tensors]
    known = {"forward_s": compute.forward_s, "batch_size": compute.batch_size}
    optional: dict[str, Any] = {name: getattr(compute, name) for name in ("optimizer_s", "engine_s", "horovod_s")}
    optional["ready"] = [list(pair) for pair in compute.ready]
    return {
        **({"tensors": tensors} if facts.shapes is None else {"shapes": facts.shapes}),
        "backward_s": compute.backward_s,
        **{name: value for name, value in known.items() if value is not None},
        "gamma": compute.gamma,
        **{name: value for name, value in optional.items() if value},
        **({} if compute.hides == 1 else {"hides": compute.hides}),
        "bucket_bytes": facts.bucket_bytes,
        **({} if facts.early_bytes is None else {"early_bytes": facts.early_bytes}),
        **({} if facts.optimizer is None else {"optimizer": facts.optimizer}),
        **({"sharded": True} if facts.sharded else {}),
        "sources": dict(facts.sources),
        "estimated": list(facts.estimated),
        "encode": {
            spec: {
                "encode_s": time.encode_s,
                "decode_s": time.decode_s,
                "decode_per_rank_s": time.decode_per_rank_s,
                "source": time.source,
                "estimated": time.estimated,
                **({"host_s": time.host_s} if time.host_s else {}),
            }
            for spec, time in compute.encode.items()
        },
    }
