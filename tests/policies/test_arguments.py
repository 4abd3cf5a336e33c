"""What `hvdcomp.Compression` is given: what cannot be is refused when it is made, and what it is, it says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdcomp import Accordion, Compression, ConfigurationError, SpecError, TopK, WarmUp
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.policies import parse_policy
from tests.bindings.test_bindings import bound, gradients


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "None is not a spec string of a compressor; give a string, such as 'topk:ratio=0.01'"),
        (3, "3 is not a spec string of a compressor"),
        (TopK(0.1), "TopK(ratio=0.1, values='same') is not a spec string of a compressor; give a string, such as "
         "'topk:ratio=0.01', or give the object itself without from_spec"),
    ],
)  # fmt: skip
def test_what_is_no_spec_string(spec: Any, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        Compression.from_spec(spec)


def test_what_is_no_spec_string_of_a_policy() -> None:
    with pytest.raises(SpecError, match="None is not a spec string of a policy; give a string, such as 'schedule:"):
        parse_policy(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": "a"}, "seed='a' is not allowed; give a whole number"),
        ({"seed": 1.5}, "seed=1.5 is not allowed"),
        ({"min_numel": -1}, "min_numel=-1 is not allowed; give a whole number of at least 0"),
        ({"min_ndim": True}, "min_ndim=True is not allowed; give a whole number of at least 0"),
        ({"min_ndim": "2"}, "min_ndim='2' is not allowed"),
        ({"bucket_bytes": "5"}, "bucket_bytes='5' is not allowed; give a whole number of at least 1, or None"),
        ({"steps_per_epoch": 5.5}, "steps_per_epoch=5.5 is not allowed; give a whole number of at least 1, or None"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0 is not allowed"),
        ({"steps_per_epoch": "9", "policy": Accordion(low=0.1, high=0.01)}, "steps_per_epoch='9' is not allowed"),
        ({"decision_log": "log.jsonl"}, "decision_log='log.jsonl' records the decisions of a policy, but this"),
        ({"decision_log": Path("log.jsonl"), "policy": WarmUp(dense_steps=3)},
         "no policy (warmup:dense_steps=3 is a schedule, which makes no decisions). Give a policy"),
        ({"policy": WarmUp(levels=(0.05,), steps=1)},
         "the last level, 0.05, compresses more than the compressor's own level, 0.1, which follows; give levels that"),
        ({"policy": WarmUp(start=0.05, steps=1)}, "the last level, 0.05, compresses more than the compressor's own"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_value(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        Compression(TopK(0.1), **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": (0.01, 0.5)}, "levels=(0.01, 0.5) goes from strong to weak compression; give levels that"),
        ({"levels": (0.5, 0.1, 0.2)}, "goes from strong to weak compression"),
        ({"levels": ("half",)}, "levels=('half',) is not allowed; it must be numbers"),
        ({"levels": 0.5}, "levels=0.5 is not allowed; it must be numbers"),
        ({"start": "0.5"}, "start='0.5' is not allowed; it must be a number"),
        ({"dense_steps": "3"}, "dense_steps='3' is not allowed; it must be a whole number of at least 0"),
    ],
)
def test_a_warm_up_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        WarmUp(**{"steps": 2, **settings})


@pytest.mark.parametrize("scaler", [True, "scaler", object()])
def test_what_scales_no_loss(scaler: Any) -> None:
    words = f"grad_scaler={scaler!r} is not a loss scaler; give a torch.amp.GradScaler or a Keras LossScaleOptimizer"
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Compression(TopK(0.1), grad_scaler=scaler)
    with pytest.raises(ConfigurationError, match=r"give a torch\.amp\.GradScaler, or leave grad_scaler out"):
        Compression(TopK(0.1), named_parameters=[("w", np.zeros(3))], grad_scaler=scaler)


# The parts of a state, as small as they can be.
_SHARED = {
    "format": 2, "compressor": "topk", "tensors": {}, "step": 0, "level": None, "warm_starts": {}, "coordinator": None,
}  # fmt: skip
_OWN = {"rank": 0, "size": 1, "residuals": {}, "coordinator": None, "totals": {}, "steps": 0}


def test_what_is_no_optimizer() -> None:
    words = r"was given a types\.SimpleNamespace as optimizer, which is not an optimizer"
    with pytest.raises(ConfigurationError, match=f"hvdcomp.Compression {words}"):
        Compression(TopK(0.1), optimizer=SimpleNamespace(step=1))
    with pytest.raises(ConfigurationError, match=f"load_state_dict {words}"):
        Compression(TopK(0.1)).load_state_dict({"shared": _SHARED, "own": _OWN}, optimizer=SimpleNamespace())


def test_texts_in_messages_keep_their_quotes() -> None:
    with pytest.raises(SpecError, match="topk: ratio='a' is not allowed"):
        TopK("a")  # type: ignore[arg-type]


# What it says of itself.


def test_it_says_what_it_is() -> None:
    assert repr(Compression(TopK(0.1))) == "<hvdcomp.Compression topk:ratio=0.1>"
    policy = Accordion(low=0.1, high=0.01)
    assert repr(Compression(TopK(0.1), policy=policy, steps_per_epoch=3)) == (
        f"<hvdcomp.Compression topk:ratio=0.1, policy {policy}>"
    )


def test_it_says_how_many_tensors_are_compressed_and_what_that_saves() -> None:
    def work(communicator: InProcessCommunicator) -> list[str]:
        binding = bound(communicator)
        compression = binding.setup.compression
        compression._binding = binding  # as `serve` does
        told = [repr(compression)]
        binding.average(gradients(communicator))
        return [*told, repr(compression)]

    before, after = run_ranks(2, work)[0]
    assert before == "<hvdcomp.Compression topk:ratio=0.1, 1 of 1 tensors compressed>"
    factor = re.fullmatch(re.escape(before[:-1]) + r", factor (\d+\.\d\d)>", after)
    assert factor is not None
    assert float(factor[1]) == pytest.approx(4096 * 4 / (410 * 6 + 8), rel=0.02)
