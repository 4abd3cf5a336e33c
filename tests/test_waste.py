"""Compression that sends more than it saves is said once, on rank 0."""

from __future__ import annotations

import warnings

import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.waste import WasteWarning, what_is_wasted
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
    for part in (f"2 of 3 tensors in more bytes than they have: {sent} in place of {plain} a step",
                 "a (100, 100) with topk:ratio=0.99", "min_numel", '"none" by a rule'):  # fmt: skip
        assert part in text


def test_a_few_small_tensors_are_not_worth_a_word() -> None:
    assert said("topk:ratio=0.01", min_numel=0, min_ndim=0) is None  # "small" sends 6 of 40 bytes
    assert said('{"small": "topk:ratio=1", "*": "topk:ratio=0.01"}', min_numel=0, min_ndim=0) is None  # 60 of 40


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
