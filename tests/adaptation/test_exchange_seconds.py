"""How long exchanges take by the bytes that are sent: as `hvdcomp advise` says of each level, and by arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.exchange_seconds import exchange_seconds_of
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import Adviser, CalibrationError, EncodeTime, Setting, load
from hvdcomp.perfmodel.ways import encode_time_at
from tests.adaptation.test_candidates import SHAPES, calibration
from tests.harness import infos

READY = [[0.2, 0.1], [0.5, 0.3], [1, 1]]


def with_encode(encode: dict[str, float], **model: Any) -> dict[str, Any]:
    known = calibration()
    times = {spec: {"encode_s": seconds, "decode_per_rank_s": seconds / 4} for spec, seconds in encode.items()}
    known["models"]["mine"] |= {"encode": times, **model}
    return known


def found(
    folder: Path, known: dict[str, Any], spec: str, around: tuple[float, ...], ranks: int, **options: Any
) -> dict[int, float]:
    file = folder / "cluster.json"
    file.write_text(json.dumps(known))

    def work(communicator: InProcessCommunicator) -> dict[int, float]:
        engine = Engine(communicator, infos(SHAPES), parse_compressor(spec), overlap_bytes=1_000_000)
        return exchange_seconds_of(engine, str(file), around, **options)

    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("ready", [[], READY])
@pytest.mark.parametrize(
    ("spec", "levels"),
    [
        ("topk:ratio=0.01", (0.001, 0.01, 0.1)),
        ("powersgd:rank=2", (1, 2, 8)),
        ("qsgd:bits=4,exchange=scatter", (2, 4, 8)),
    ],
)
def test_of_each_level_it_is_what_advise_says(
    spec: str, levels: tuple[float, ...], ready: list[Any], ranks: int, tmp_path: Path
) -> None:
    """A step's time without that of one rank."""
    own = parse_compressor(spec)
    assert own.level is not None
    specs = [str(own.at_level(level)) for level in levels]
    known = with_encode({one: 0.002 * (place + 1) for place, one in enumerate(specs)}, ready=ready)
    around = tuple(level / own.level for level in levels)
    seconds = found(tmp_path, known, spec, around, ranks)
    adviser = Adviser(load(tmp_path / "cluster.json"), specs=specs, early_bytes=1_000_000)
    right = [float(adviser.step_s(one, Setting(ranks)) - adviser.step_s("none", Setting(1))) for one in specs]
    assert list(seconds) == sorted(seconds)
    np.testing.assert_allclose(list(seconds.values()), right, rtol=1e-5, atol=1e-12)


def test_it_is_the_time_of_encoding_and_of_the_bytes_by_arithmetic(tmp_path: Path) -> None:
    """Encode times of two levels: between them, and beyond the lower of them, and other methods' do not count."""
    encode = {"topk:ratio=0.01": 0.02, "topk:ratio=0.02": 0.04, "powersgd:rank=2": 9.0, "randomk:ratio=0.01": 9.0}
    known = with_encode(encode)
    seconds = found(tmp_path, known, "topk:ratio=0.01", (0.1, 1.0, 1.5, 4.0), 4)
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    right = {}
    for ratio, encode_s in ((0.001, 0.02), (0.01, 0.02), (0.015, 0.03), (0.04, 0.04)):
        chosen = [math.ceil(ratio * size) for size in sizes[:3]]  # the bias goes dense
        # Two bytes say where in its block of 65,536 elements an element is; of several blocks each has a count.
        sent = 6 * sum(chosen) + 4 * math.ceil(sizes[1] / 2**16)
        encoding = encode_s + 4 * encode_s / 4
        gathering = 3 * 1e-4 + 3 * sent / 1e8
        adding_up = 6 * 1e-4 + 2 * 3 / 4 * 4 * sizes[3] / 1e8
        right[sent + 4 * sizes[3]] = encoding + gathering + adding_up
    assert list(seconds) == list(right)
    np.testing.assert_allclose(list(seconds.values()), list(right.values()), rtol=1e-5)


def test_routed_methods_are_each_at_so_many_times_their_own_level(tmp_path: Path) -> None:
    spec = '{"conv": "topk:ratio=0.01", "*": "powersgd:rank=2"}'
    known = with_encode({str(parse_compressor(spec)): 0.004})
    # Half and twice the levels; a tenth of rank 2 is none, so that the nearest there is stands in: 1.
    seconds = found(tmp_path, known, spec, (0.1, 0.5, 1.0, 2.0), 2)
    conv, narrow = math.prod(SHAPES["conv"]), 4 * 2 * 1024
    rest = 4 * math.prod(SHAPES["bias"])
    sent = {}
    for ratio, rank in ((0.001, 1), (0.005, 1), (0.01, 2), (0.02, 4)):
        sent[ratio] = 6 * math.ceil(ratio * conv) + 4 * rank * (1000 + 1280) + rest
        sent[ratio] += min(narrow, 4 * rank * (2 + 1024))
    assert list(seconds) == list(sent.values())
    assert np.all(np.diff(list(seconds.values())) > 0)


@pytest.mark.parametrize(("factor", "right"), [(0.25, 0.01), (0.5, 0.01), (1.0, 0.02), (1.5, 0.03), (4.0, 0.03)])
def test_encode_times_lie_between_those_of_known_levels(factor: float, right: float) -> None:
    known = {"powersgd:rank=2": EncodeTime(0.01), "powersgd:rank=6": EncodeTime(0.03), "atomo:rank=4": EncodeTime(9.0)}
    time = encode_time_at(parse_compressor("powersgd:rank=4"), factor, known)
    assert time is not None
    assert time.encode_s == pytest.approx(right)
    assert encode_time_at(parse_compressor("topk:ratio=0.1"), factor, known) is None


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            "topk:ratio=0.01",
            {},
            "no encode time of 'topk:ratio=0.01' for this model. It has encode times of: qsgd:bits=4. The encode time "
            "is",
        ),
        ("qsgd:bits=4", {"model": "other"}, "has no model 'other'; its models are: mine"),
        ("two_level(qsgd:bits=4)", {}, "needs the number of ranks on each node, but the calibration does not"),
    ],
)
def test_a_calibration_that_says_too_little_is_refused(
    spec: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CalibrationError, match=words):
        found(tmp_path, with_encode({"qsgd:bits=4": 0.01}), spec, (0.5, 1.0), 2, **options)
