"""What the performance model says of a training: candidates, their times, and calibrations that will not do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.adaptation.candidates import candidates_of
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import Adviser, CalibrationError, Setting, load
from hvdcomp.perfmodel.advice import BUCKET_SIZES
from hvdcomp.policies.request import Candidate, Candidates
from tests.harness import infos

SHAPES = {"conv": (64, 32, 3, 3), "linear": (1000, 1280), "narrow": (2, 1024), "bias": (1000,)}


def calibration(**changes: Any) -> dict[str, Any]:
    """A slow network, and encoding that takes as long as the passes."""
    model = {
        "tensors": [{"name": f"other {name}", "shape": list(shape)} for name, shape in SHAPES.items()],
        "backward_s": 0.010, "forward_s": 0.005, "gamma": 1.1, "batch_size": 16, "bucket_bytes": 2e6,
        "encode": {
            "powersgd:rank=2": {"encode_s": 0.004, "decode_s": 0.002},
            "topk:ratio=0.01": {"encode_s": 0.020, "decode_per_rank_s": 0.001},
        },
    }  # fmt: skip
    cost = {"algorithm": "ring", "latency_s": 1e-4, "bytes_per_s": 1e8}
    data = {
        "format": "hvdcomp-calibration", "version": 1, "name": "test", "models": {"mine": model},
        "network": {"allreduce": cost, "allgather": cost},
    }  # fmt: skip
    return data | changes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(calibration()))
    return path


def candidates(
    source: Path | str, spec: str = "powersgd:rank=2", ranks: int = 4, memory: Memory | None = None,
    shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: str = "float32", **options: Any,
) -> Candidates:  # fmt: skip
    def work(communicator: InProcessCommunicator) -> Candidates:
        engine = Engine(communicator, infos(shapes, dtype), parse_compressor(spec), memory=memory)
        return candidates_of(engine, str(source), **options)

    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.01"])
def test_the_three_ways_for_all_tensors_are_what_advise_predicts(spec: str, ranks: int, file: Path) -> None:
    adviser = Adviser(load(file), specs=[spec])
    found = candidates(file, spec, ranks).candidates
    for name, method in {"dense": "none", "fp16": "fp16", "compressed": spec}.items():
        rest = {"compressed": None}.get(name, method)
        assert found[name] == Candidate(float(adviser.step_s(method, Setting(ranks))), 0, rest)


@pytest.mark.parametrize(("given", "noise"), [(False, 0.0), (True, 0.0), (False, 10.0)])
def test_the_calibration_decides_how_much_is_sent_by_itself(given: bool, noise: float, file: Path) -> None:
    """Unless the user has said so, or it makes no difference; all is then predicted with it."""
    known = calibration(noise={"relative": noise})
    known["models"]["mine"]["encode"] = {"powersgd:rank=2": {"encode_s": 0.004}}
    known["models"]["mine"]["ready"] = [[0.2, 0.1], [0.5, 0.3], [1, 1]]
    known["network"] = {kind: cost | {"bytes_per_s": 2e5} for kind, cost in known["network"].items()}
    file.write_text(json.dumps(known))

    def work(communicator: InProcessCommunicator) -> tuple[int | None, float]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("powersgd:rank=2"), overlap_bytes=BUCKET_SIZES[0])
        engine.overlap.from_rank_0 = not given
        found = candidates_of(engine, str(file)).candidates["compressed"]
        return engine.overlap.least_bytes, found.seconds

    least, seconds = run_ranks(2, work)[0]
    steps = {size: float(Adviser(load(file), early_bytes=size).step_s("powersgd:rank=2", Setting(2)))
             for size in BUCKET_SIZES}  # fmt: skip
    best = min(BUCKET_SIZES, key=lambda size: steps[size])
    assert steps[best] < 0.99 * steps[BUCKET_SIZES[0]]
    assert least == (BUCKET_SIZES[0] if given or noise else best)
    assert seconds == pytest.approx(steps[least])


def test_buckets_of_the_library_are_those_of_the_calibration(file: Path) -> None:
    """Nobody chooses them."""
    known = calibration()
    known["models"]["mine"] |= {"ready": [[0.2, 0.1], [0.5, 0.3], [1, 1]], "early_bytes": 1e6}
    known["models"]["mine"]["encode"] = {"powersgd:rank=2": {"encode_s": 0.004}}
    known["network"] = {kind: cost | {"bytes_per_s": 2e5} for kind, cost in known["network"].items()}
    file.write_text(json.dumps(known))

    def work(communicator: InProcessCommunicator) -> tuple[int | None, float]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("powersgd:rank=2"), overlap_bytes=BUCKET_SIZES[0])
        engine.overlap.from_rank_0 = True
        found = candidates_of(engine, str(file)).candidates["compressed"]
        return engine.overlap.least_bytes, found.seconds

    least, seconds = run_ranks(2, work)[0]
    assert least == BUCKET_SIZES[0]
    assert seconds == pytest.approx(float(Adviser(load(file)).step_s("powersgd:rank=2", Setting(2))))
    assert seconds < float(Adviser(load(file), early_bytes=BUCKET_SIZES[0]).step_s("powersgd:rank=2", Setting(2)))


def test_what_dense_gradients_take_beside_counts_where_they_are_carried(file: Path) -> None:
    without = {overlaps: candidates(file, overlaps=overlaps).candidates for overlaps in (True, False)}
    known = calibration()
    known["models"]["mine"]["encode"]["none"] = {"encode_s": 0.5}
    file.write_text(json.dumps(known))
    found = {overlaps: candidates(file, overlaps=overlaps).candidates for overlaps in (True, False)}
    more = {name: one.seconds - without[True][name].seconds for name, one in found[True].items()}
    assert more["dense"] == pytest.approx(0.5)
    assert more["fp16"] == pytest.approx(0.25)  # of half the bytes
    assert more["compressed"] == 0
    assert found[False] == without[False]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("method", "gathered"), [("natural", "natural"), ("bf16", "bf16"), ("fp16", "fp16:exchange=gather")]
)
def test_the_calibration_decides_on_an_exchange_that_is_left_open(
    method: str, gathered: str, ranks: int, file: Path
) -> None:
    known, ways = calibration(), {"gathered": gathered, "scattered": f"{method}:exchange=scatter"}
    known["models"]["mine"]["encode"][ways["gathered"]] = {"encode_s": 0.001, "decode_per_rank_s": 1e-5}
    known["models"]["mine"]["encode"][ways["scattered"]] = {"encode_s": 0.0012, "decode_per_rank_s": 1e-5}
    file.write_text(json.dumps(known))
    adviser = Adviser(load(file))
    found = candidates(file, f"{method}:exchange=auto", ranks).candidates
    mixed = {f"{way} and {rest}" for way in ways for rest in ("dense", "fp16")}
    assert set(found) == {"dense", "fp16", *ways, *mixed}
    for way, spec in ways.items():
        alone = candidates(file, spec, ranks).candidates
        assert alone["compressed"] == Candidate(float(adviser.step_s(spec, Setting(ranks))), 0, None)
        assert found[way] == replace(alone["compressed"], rest=spec)
        for rest in ("dense", "fp16"):
            assert found[f"{way} and {rest}"] == replace(alone[f"compressed and {rest}"], method=spec)
    # As many bytes with two ranks, and a message more; fewer with more ranks.
    assert (found["gathered"].seconds < found["scattered"].seconds) == (ranks == 2)


def test_a_mixture_compresses_what_saves_most_for_its_time(file: Path) -> None:
    found = candidates(file)
    # Of `narrow` PowerSGD would send more than there is. The bias is too small. Neither is ever compressed.
    assert found.order == ("linear", "conv", "narrow")
    dense, fp16 = found.candidates["compressed and dense"], found.candidates["compressed and fp16"]
    assert (dense.compressed, dense.rest) == (1, "none")
    assert (fp16.compressed, fp16.rest) == (1, "fp16")
    # By hand: the passes; the large matrix's share of 6 ms; its P and Q, and all else as it is.
    share = (1280000 + 65536) / (1280000 + 65536 + 18432 + 65536)

    def ring(size: float) -> float:
        return 6 * 1e-4 + 1.5 * size / 1e8

    rest = 18432 + 2048 + 1000
    p, q = sorted([4 * 2 * 1000, 4 * 2 * 1280])
    expected = [0.015 + 0.006 * share + ring(first + 4 * rest) + ring(second) for first, second in ((p, q), (q, p))]
    assert any(dense.seconds == pytest.approx(seconds, rel=1e-9) for seconds in expected)


def test_several_compressors_have_their_specs_for_names_and_the_best_two_are_mixed(file: Path) -> None:
    known = calibration()
    times = {"natural": {"encode_s": 0.001, "decode_per_rank_s": 1e-5}, "onebit": {"encode_s": 0.050}}
    known["models"]["mine"]["encode"].update(times)
    file.write_text(json.dumps(known))
    others = ["topk:ratio=0.01", "natural:exchange=auto", "onebit", "natural", "fp16"]  # the last two are there anyway
    told = candidates(file, ranks=8, others=others)
    found = told.candidates
    own, scattered = "powersgd:rank=2", "natural:exchange=scatter"
    mixed = {f"{one} and {rest}" for one in (own, scattered) for rest in ("dense", "fp16")}
    assert set(found) == {"dense", "fp16", own, "topk:ratio=0.01", "natural", scattered, "onebit", *mixed}
    adviser = Adviser(load(file))
    for name, one in found.items():
        if name not in ("dense", "fp16", *mixed):
            seconds = float(adviser.step_s(name, Setting(8)))
            assert one == Candidate(seconds, 0, None if name == own else name), name
    compressed = sorted(set(found) - {"dense", "fp16", *mixed}, key=lambda name: found[name].seconds)
    assert set(compressed[:2]) == {own, scattered}
    assert found[f"{scattered} and fp16"].method == scattered
    # The fastest says which tensors come first, and what it leaves out the second may compress.
    alone = candidates(file, own, ranks=8)
    assert told.order == alone.order
    assert all(found[f"{own} and {rest}"] == alone.candidates[f"compressed and {rest}"] for rest in ("dense", "fp16"))


def test_two_levels_among_others_are_what_advise_predicts(file: Path) -> None:
    """Their encode time follows from that of the compressor within, as do the nodes from the calibration."""
    known, costs = calibration(), calibration()["network"]
    fast = {kind: {**cost, "bytes_per_s": 1e10} for kind, cost in costs.items()}
    both = {"node": {**fast, "reducescatter": fast["allreduce"]}, "across": costs}
    known["network"]["levels"] = {"ranks_per_node": 4, **both}
    file.write_text(json.dumps(known))
    others = ["two_level(topk:ratio=0.01)", "two_level(powersgd:rank=2)"]
    found = candidates(file, "topk:ratio=0.01", ranks=8, others=others).candidates
    adviser = Adviser(load(file), specs=others)
    for spec in others:
        assert found[spec] == Candidate(float(adviser.step_s(spec, Setting(8))), 0, spec)
    alone = candidates(file, others[0], ranks=8).candidates
    assert alone["compressed"] == replace(found[others[0]], rest=None)


def test_what_only_another_compressor_compresses_comes_behind(file: Path) -> None:
    routed = '{"other linear": "topk:ratio=0.01", "*": "powersgd:rank=2"}'
    known = calibration()
    known["models"]["mine"]["encode"]['{"linear": "powersgd:rank=2", "*": "none"}'] = {"encode_s": 0.0}
    file.write_text(json.dumps(known))
    only_one = '{"linear": "powersgd:rank=2", "*": "none"}'
    told = candidates(file, only_one, others=["topk:ratio=0.01"])
    assert told.order == ("linear", "conv", "narrow")
    mixed = told.candidates["topk:ratio=0.01 and dense"]
    assert 0 < mixed.compressed < 3
    assert not any(name.startswith(f"{only_one} and") for name in told.candidates)  # of one tensor
    with pytest.raises(CalibrationError, match="no encode time of"):
        candidates(file, "topk:ratio=0.01", others=[routed])


def test_a_ways_second_name_is_left_out(file: Path) -> None:
    assert set(candidates(file, "none").candidates) == set(candidates(file, "fp16").candidates) == {"dense", "fp16"}
    half = json.loads(file.read_text())
    for tensor in half["models"]["mine"]["tensors"]:
        tensor["dtype"] = "float16"
    file.write_text(json.dumps(half))
    assert set(candidates(file, "none", dtype="float16").candidates) == {"dense"}


def test_what_horovod_does_not_carry_itself_is_not_hidden(file: Path) -> None:
    """With a memory of its own fp16 goes through the engine; with TensorFlow and a policy everything does."""
    hidden, kept = candidates(file).candidates, candidates(file, memory=ErrorFeedback()).candidates
    assert kept["dense"] == hidden["dense"]
    assert kept["fp16"].seconds > hidden["fp16"].seconds
    shown = candidates(file, overlaps=False).candidates
    assert shown["dense"].seconds > hidden["dense"].seconds
    assert shown["fp16"] == kept["fp16"]


def test_batches_and_ranks_count(file: Path) -> None:
    times = [candidates(file, ranks=ranks, batch=batch).candidates["dense"].seconds
             for ranks, batch in ((2, None), (8, None), (8, 64))]  # fmt: skip
    assert times == sorted(set(times))


def test_a_preset_by_its_name_and_a_model_by_its_shapes() -> None:
    facts = load("v100-p3.8xlarge-2021").models["resnet50"]
    shapes = {f"my {tensor.name}": tensor.shape for tensor in facts.tensors}
    found = candidates("v100-p3.8xlarge-2021", "powersgd:rank=4", ranks=2, shapes=shapes)
    assert set(found.candidates) >= {"dense", "fp16", "compressed", "compressed and dense"}


def test_calibrations_that_will_not_do(file: Path, tmp_path: Path) -> None:
    def refused(match: str, source: Path | str = file, **options: Any) -> None:
        with pytest.raises(CalibrationError, match=match):
            candidates(source, ranks=1, **options)

    refused("nowhere.json cannot be read", tmp_path / "nowhere.json")
    refused("neither a file nor a preset", "nowhere")
    refused(r"no encode time of 'powersgd:rank=3' .* powersgd:rank=2, topk:ratio=0\.01", spec="powersgd:rank=3")
    refused("no encode time of 'bf16'", spec="bf16")
    refused("no encode time of 'natural'", others=["topk:ratio=0.01", "natural"])
    refused("needs the number of ranks on each node", spec="two_level(topk:ratio=0.01)")
    refused("needs the number of ranks on each node", others=["two_level(topk:ratio=0.01)"])
    refused(r"a different model: the model of this training run has 1 tensors with 2,000 elements.* mine \(4 tensors "
            r"with 1,301,480",
            shapes={"w": (2, 1000)})  # fmt: skip
    refused("a different model", dtype="float64")
    refused("has no model 'yours'; its models are: mine", model="yours")
    two = calibration()
    two["models"]["twin"] = two["models"]["mine"]
    del two["models"]["mine"]["batch_size"]
    file.write_text(json.dumps(two))
    refused("several models with the tensors of this training run; name one of them: model=mine or model=twin")
    assert candidates(file, ranks=1, model="twin").candidates
    refused("the batch size for which", model="twin", batch=4)
    file.write_text("{")
    refused("is not JSON")
