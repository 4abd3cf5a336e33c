"""The calibration file: written and read again, presets, and an error for everything that can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import (
    Calibration,
    CalibrationError,
    CollectiveCost,
    Compute,
    EncodeTime,
    Inner,
    ModelFacts,
    Network,
    as_json,
    from_json,
    load,
    presets,
    save,
)

FAST = CollectiveCost("ring", 1e-6, 1e11)
MEASURED = Calibration(
    name="here",
    network=Network(
        CollectiveCost(
            "tree",
            2e-5,
            1e9,
            transfer=((1e3, 1e-5), (1e6, 1e-3)),
            start_s=1e-3,
            fusion_s_per_byte=1e-10,
            reduction_s_per_byte={"float16": 1e-9},
        ),
        CollectiveCost("ring", 1e-5, 9e8, incast=((2, 1.0), (16, 1.4))),
        Inner(FAST, FAST, ranks_per_node=8, alltoall=replace(FAST, algorithm="direct")),
        alltoall=CollectiveCost("pairwise", 3e-5, 8e8, transfer=((1e3, 2e-5),)),
        reducescatter=CollectiveCost("ring", 2e-5, 1e9, reduction_s_per_byte={"float16": 1e-9}),
    ),
    models={
        "mine": ModelFacts(
            tensors=(TensorInfo("w", (300, 20)), TensorInfo("b", (20,), "float16"), TensorInfo("s", ())),
            compute=Compute(
                0.1,
                0.05,
                1.05,
                32,
                {"powersgd:rank=4": EncodeTime(0.01, 0.02, 0.001, "measured")},
                optimizer_s=0.01,
                engine_s=0.002,
                horovod_s=0.001,
                ready=((0.25, 0.5), (1.0, 1.0)),
            ),
            bucket_bytes=64e6,
            early_bytes=1e6,
            sources={"gamma": "guessed"},
            estimated=("gamma",),
            optimizer="Adam",
        )
    },
    machine={"gpu": "none"},
    noise=0.05,
    noise_note="medians of 10",
    network_source="measured",
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    save(MEASURED, file)
    assert load(file) == load(str(file)) == MEASURED


@pytest.mark.parametrize("name", presets())
def test_presets_are_written_as_they_are_read(name: str) -> None:
    preset = load(name)
    assert preset.name == name
    assert from_json(as_json(preset)) == preset
    assert preset.network_source
    for facts in preset.models.values():
        assert {"backward_s", "gamma", "bucket_bytes", "shapes"} <= set(facts.sources)


def test_there_are_presets() -> None:
    assert "v100-p3.8xlarge-2021" in presets()


def test_compressors_are_found_however_they_are_written() -> None:
    data = as_json(MEASURED)
    encode = data["models"]["mine"]["encode"]
    encode["powersgd: rank=8, alternating=yes"] = encode.pop("powersgd:rank=4")
    assert list(from_json(data).models["mine"].compute.encode) == ["powersgd:rank=8,alternating=True"]


def test_the_example_of_the_manual_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "calibration-file.md").read_text(encoding="utf-8")
    example = from_json(json.loads(text.partition("```json\n")[2].partition("```")[0]))
    assert example.network.inner is not None
    assert example.network.allreduce.transfer
    assert example.network.allgather.incast


def test_what_may_be_left_out() -> None:
    least = {
        "format": "hvdcomp-calibration",
        "version": 1,
        "name": "least",
        "network": {
            kind: {"algorithm": "ring", "latency_s": 0, "bytes_per_s": 1} for kind in ("allreduce", "allgather")
        },
        "models": {"m": {"shapes": "vgg16", "backward_s": 1, "bucket_bytes": 1}},
    }
    read = from_json(least)
    assert read.models["m"].compute == Compute(1)
    assert read.noise == 0
    assert (read.network.alltoall, read.network.reducescatter) == (None, None)
    assert not {"alltoall", "reducescatter"} & as_json(read)["network"].keys()
    assert len(read.models["m"].tensors) == 32


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for part in path[:-1]:
            data = data[part]
        del data[path[-1]]

    return change


MINE = ("models", "mine")
WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (drop("format"), "format is missing"),
    (put("format", value="other"), "is not a calibration file: its field \"format\" is 'other'"),
    (put("version", value=2), "has version 2, but this hvdcomp reads only version 1"),
    (drop("name"), "name is missing"),
    (drop("network"), "network is missing"),
    (drop("models"), "models is missing"),
    (put("models", value={}), "models is empty"),
    (put("network", value=[]), "network must be a JSON object, not []"),
    (put("network", "allreduce", "algorithm", value="star"), "algorithm 'star' is not known; use one of: ring"),
    (put("network", "allreduce", "latency_s", value=-1), "network.allreduce.latency_s is -1, and must be at least 0"),
    (put("network", "allgather", "bytes_per_s", value=0), "allgather.bytes_per_s is 0, and must be more than 0"),
    (put("network", "allgather", "bytes_per_s", value="fast"), "must be a finite number, not 'fast'"),
    (put("network", "allgather", "bytes_per_s", value=True), "must be a finite number, not True"),
    (put("network", "allreduce", "latency_s", value=float("nan")), "must be a finite number, not nan"),
    (put("network", "allreduce", "transfer", value=[[1, 2], [1, 3]]), "ascending order, but [1, 3] follows"),
    (put("network", "allreduce", "transfer", value=[[1, 2], [2, 1]]), "ascending order, but [2, 1] follows"),
    (put("network", "allreduce", "transfer", value=[3]), "must contain pairs (bytes, seconds), and 3 is not"),
    (put("network", "allgather", "incast", value=[[2, 0.5]]), "allgather.incast is 0.5, and must be at least 1"),
    (put("network", "inner", "ranks_per_node", value=1.5), "ranks_per_node must be a whole number"),
    (put("network", "alltoall", "algorithm", value="ring"), "'ring' is not known; use one of: direct, pairwise"),
    (drop("network", "allgather"), "network.allgather is missing"),
    (put("network", "latency", value=1), "network.latency is not a known field; the known"),
    (put("noise", "relative", value=-0.1), "noise.relative is -0.1"),
    (put("machine", "gpus", value=4), "machine.gpus: 4 must be text"),
    (drop(*MINE, "backward_s"), "models.mine.backward_s is missing"),
    (put(*MINE, "gamma", value=0.9), "models.mine.gamma is 0.9, and must be at least 1"),
    (put(*MINE, "batch_size", value=0), "models.mine.batch_size is 0"),
    (put(*MINE, "backwards_s", value=1), "models.mine.backwards_s is not a known field"),
    (put(*MINE, "shapes", value="resnet50"), "models.mine needs either 'shapes'"),
    (put(*MINE, "tensors", value=None), "models.mine needs either 'shapes'"),
    (put(*MINE, "tensors", value=[]), "models.mine.tensors contains no tensor"),
    (put(*MINE, "tensors", value=[{"name": "w", "shape": [2.5]}]), "tensors[0].shape[0]: 2.5 must be a whole number"),
    (put(*MINE, "tensors", value=[{"name": "w", "shape": [2]}] * 2), "tensors contains two tensors with the same"),
    (put(*MINE, "tensors", value=[{"name": "w", "shape": [2], "dtype": "int8"}]), "tensors[0].dtype 'int8' is not a"),
    (put(*MINE, "encode", value={"nope": {"encode_s": 1}}), "models.mine.encode.nope unknown compressor 'nope'"),
    (put(*MINE, "encode", value={"signsgd": {}}), "models.mine.encode.signsgd.encode_s is missing"),
    (put(*MINE, "encode", value={"signsgd": {"encode_s": -1}}), "models.mine.encode.signsgd.encode_s is -1"),
    (put(*MINE, "encode", value={"signsgd": {"encode_s": 1, "estimated": 1}}), "1 must be true or false"),
    (put(*MINE, "optimizer", value="adam"), "'adam' is not known; use one of: SGD, Adam, CompressedAdam, Muon, other"),
    (put(*MINE, "estimated", value=[1]), "models.mine.estimated[0]: 1 must be text"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    data = copy.deepcopy(as_json(MEASURED))
    change(data)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(data))
    with pytest.raises(CalibrationError) as caught:
        load(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_unknown_model_of_shapes() -> None:
    data = as_json(MEASURED)
    data["models"]["mine"] = {"shapes": "alexnet", "backward_s": 1, "bucket_bytes": 1}
    with pytest.raises(CalibrationError, match=r"models\.mine\.shapes 'alexnet' is not known; use one of: resnet50"):
        from_json(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="'a100' is neither a file nor a preset; the presets are: a100x8"):
        load("a100")
    with pytest.raises(CalibrationError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(CalibrationError, match="cannot be read: Is a directory"):
        load(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": ')
    with pytest.raises(CalibrationError, match=r"broken\.json is not JSON: Expecting value"):
        load(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load(broken)
    broken.write_text("[" * 100_000)
    with pytest.raises(CalibrationError, match=r"broken\.json is not JSON: .* nested more than"):
        load(broken)
    data = as_json(MEASURED)
    data["machine"]["gpu"] = json.loads("[" * 400 + "]" * 400)
    broken.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=r"broken\.json is not JSON: .* nested more than"):
        load(broken)
    broken.write_text("[1]")
    with pytest.raises(CalibrationError, match=r"must be a JSON object, not \[1\]"):
        load(broken)
