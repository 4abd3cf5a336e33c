"""Compression that sends more than it saves is said once, on rank 0."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.waste import WasteWarning, what_is_not_compressed, what_is_wasted
from tests.harness import infos

SHAPES = {"a": (100, 100), "b": (50, 40), "small": (10,)}


def said(spec: str, dtype: str = "float32", **options: int) -> str | None:
    engine = Engine(LoopbackCommunicator(2), infos(SHAPES, dtype), parse_compressor(spec), **options)
    return what_is_wasted(engine, engine.plan)


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "topk:ratio=0.6", "qsgd:bits=8", "powersgd:rank=4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_saves_bytes_is_not_spoken_of(spec: str, dtype: str) -> None:
    assert said(spec, dtype) is None


def test_tensors_bytes_and_the_way_out_are_named() -> None:
    text = said("topk:ratio=0.99")
    assert text is not None
    sent, plain = (9900 + 1980) * 6, 12000 * 4
    for part in (f"2 of 3 tensors larger: a rank sends {sent} bytes per step for these tensors instead of {plain} (",
                 "a (100, 100) with topk:ratio=0.99", "min_numel", 'add a rule with "none"'):  # fmt: skip
        assert part in text


def test_a_few_small_tensors_are_not_worth_a_word() -> None:
    assert said("topk:ratio=0.01", min_numel=0, min_ndim=0) is None  # "small" sends 6 of 40 bytes
    assert said('{"small": "topk:ratio=1", "*": "topk:ratio=0.01"}', min_numel=0, min_ndim=0) is None  # 60 of 40


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", '{"a": "powersgd:rank=4", "*": "none"}', "two_level(qsgd:bits=8)"])
def test_a_model_with_nothing_to_compress_is_told_so(spec: str) -> None:
    shapes = {"a": (20, 1), "b": (1,), "c": (5000,)}
    engine = Engine(LoopbackCommunicator(2), infos(shapes), parse_compressor(spec))
    text = what_is_not_compressed(engine, engine.plan)
    assert text is not None
    for part in (f"{spec} compresses no tensor of this model, so all 3 tensors", "fewer than 1024 elements (min_numel)",
                 "2 dimensions (min_ndim)", "The largest tensor is c (5000,)", "train without hvdcomp"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("spec", ["none", '{"a": "none", "*": "none"}', "fp16", '{"a": "topk:ratio=0.1", "*": "none"}'])
def test_what_is_to_be_sent_as_it_is_or_is_compressed_is_not_spoken_of(spec: str) -> None:
    engine = Engine(LoopbackCommunicator(2), infos(SHAPES), parse_compressor(spec))
    assert what_is_not_compressed(engine, engine.plan) is None
    assert what_is_wasted(engine, engine.plan) is None
    engine.set_level("dense")  # as a warm-up begins, or a policy may decide
    assert what_is_not_compressed(engine, engine.begin()) is None
    assert what_is_wasted(engine, engine.plan) is None


def test_a_model_that_sends_more_than_it_has_is_told_so() -> None:
    shapes = {f"small{number}": (3, 5) for number in range(40)}
    options: dict[str, Any] = {"min_numel": 0, "bytes_beside": lambda tensors: 8 * tensors}
    for spec, wasted in (("topk:ratio=0.6", True), ("topk:ratio=0.1", False), ("none", False), ("fp16", False)):
        engine = Engine(LoopbackCommunicator(2), infos(shapes), parse_compressor(spec), **options)
        text = what_is_wasted(engine, engine.plan)
        assert (text is not None) == wasted, spec
        sent = 40 * (9 * 6 + 8)  # of 15 elements 9, of 4 and 2 bytes, and the presence
        told = f"sends {sent} bytes per step, but the uncompressed gradients have only {40 * 60} bytes"
        assert text is None or told in text, text


def test_once_by_rank_0_and_only_when_a_plan_wastes() -> None:
    def work(communicator: InProcessCommunicator) -> list[int]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor("topk:ratio=0.1"))
        waste = WasteWarning(engine)
        counts = []
        for level in (0.1, 0.2, 0.99, 0.99, 0.1, 1.0):
            engine.set_level(level)
            engine.begin()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                waste.look()
            counts.append(len(caught))
        return counts

    assert run_ranks(2, work) == [[0, 0, 1, 0, 0, 0], [0] * 6]
