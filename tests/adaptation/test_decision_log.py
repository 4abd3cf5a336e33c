"""The decision log: what is written comes back exactly, and what is not a whole decision log is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp import ConfigurationError
from hvdcomp.adaptation.decision_log import (
    Decided,
    DecisionLog,
    DecisionLogError,
    Start,
    read_decisions,
    to_json,
    with_numbers,
)
from hvdcomp.adaptation.log_lines import Shorthand
from hvdcomp.policies.request import Candidate, Candidates, GravacGains, LearningRates, LevelTable, Statistics, Timing

START: dict[str, Any] = {
    "step": 0,
    "epoch": 0,
    "policy": "accordion:low=4,high=1",
    "compressor": "powersgd:rank=4",
    "tensors": {"conv.weight": (32, 1, 3, 3), "bias": ()},
    "steps_per_epoch": 45,
    "ranks": 2,
    "state": {"policy": "accordion", "critical": {"conv.weight": True}},
    "decision": {"kind": "levels", "levels": {"conv.weight": 4, "bias": None}},
}
MADE: dict[str, Any] = {
    "step": 45,
    "epoch": 1,
    "from_step": 46,
    "statistics": Statistics(step=45, epoch=1, norms={"conv.weight": 0.1}),
    "state": {"policy": "accordion", "previous": {"conv.weight": math.inf, "bias": None}},
    "decision": {"kind": "levels", "levels": {"conv.weight": 1, "bias": None}},
}

# All floats: nan, infinities, subnormals, -0.0. Names: any text, with quotes, line ends and lone surrogates.
names = st.text(max_size=6) | st.sampled_from(["NaN", "Infinity", "1.0"])
floats = st.floats()
finite = st.floats(allow_nan=False, allow_infinity=False)
by_tensor = st.dictionaries(names, floats, max_size=4)
candidates = st.builds(Candidate, floats, st.integers(0, 10**6), st.none() | names)
rate_pairs = st.integers(1, 3).flatmap(lambda groups: st.tuples(*[st.tuples(*[floats] * groups)] * 2))
errors_and_bytes = st.tuples(floats, st.integers(0, 2**53))
level_tables = st.dictionaries(
    names, st.dictionaries(finite | st.integers(1, 64), errors_and_bytes, min_size=1), max_size=4
).map(
    lambda drawn: LevelTable(
        {name: {level: error for level, (error, _) in found.items()} for name, found in drawn.items()},
        {name: {level: sent for level, (_, sent) in found.items()} for name, found in drawn.items()},
        {name: next(iter(found)) for name, found in drawn.items()},
        other_bytes=sum(map(len, drawn)),
        dense_bytes=2**53,
        norm=7.5 if len(drawn) != 1 else None,
    )
)
shapes = {
    "epoch": st.integers(0, 10**6),
    "learning_rates": rate_pairs.map(lambda pair: LearningRates(*pair)),
    "norms": by_tensor,
    "model_norm": floats,
    "mean_to_std": by_tensor,
    "gains": st.builds(GravacGains, floats, st.none() | floats, st.integers(1, 4096)),
    "timing": st.builds(Timing, st.integers(0, 10**9) | finite, floats, floats),
    "candidates": st.builds(Candidates, st.lists(names).map(tuple), st.dictionaries(names, candidates)),
    "step_times": st.lists(floats).map(tuple),
    "level_table": level_tables,
    "exchange_seconds": st.dictionaries(st.integers(0, 2**53), floats, max_size=4),
}
statistics = st.fixed_dictionaries({"step": st.integers(0, 10**12)}, optional=shapes).map(
    lambda drawn: Statistics(**drawn)
)


def exact(value: object) -> str:
    """Tells apart what == does not: 1, 1.0 and True; 0.0 and -0.0; tuples and lists; nan is itself."""
    return repr(value)


def written(folder: Path, *records: Mapping[str, Any], **limits: int) -> Path:
    path = folder / "decisions.jsonl"
    log = DecisionLog(path, **limits)
    for record in records:
        (log.decision if "statistics" in record else log.start)(**record)
    log.close()
    return path


def test_every_shape_of_statistics_is_drawn() -> None:
    fields = {field.name for field in dataclasses.fields(Statistics)}
    assert fields == {"step", *shapes}, "a new statistic needs a shape here"


@given(statistics=statistics)
@example(Statistics(step=1, norms={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 5e-324, "e": -0.0}))
@example(
    Statistics(
        step=1,
        level_table=LevelTable(
            {"a": {10.0: 0.1, 0.1 + 0.2: math.nan, 4: 1.0, 1e300: 0.0}},
            {"a": {10.0: 1, 0.1 + 0.2: 2, 4: 3, 1e300: 4}},
            {"a": 4},
            other_bytes=1,
            dense_bytes=2,
        ),
    )
)
@example(Statistics(step=1, learning_rates=LearningRates((0.1, math.inf), (math.nan, -0.0))))
def test_statistics_come_back_exactly(statistics: Statistics) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), START, {**MADE, "statistics": statistics})
        _, record = read_decisions(path)
        text = path.read_text()
    assert isinstance(record, Decided)
    assert exact(record.statistics) == exact(statistics)
    assert text.count("\n") == 2
    held = json.loads(
        text.splitlines()[1], parse_constant=lambda constant: pytest.fail(f"{constant} is not strict JSON")
    )
    known = [field.name for field in dataclasses.fields(statistics) if getattr(statistics, field.name) is not None]
    # The first versions called candidates a survey, and logs still do.
    assert list(held["statistics"]) == ["survey" if name == "candidates" else name for name in known]


def test_lines_come_back(tmp_path: Path) -> None:
    path = written(tmp_path / "not" / "there", START, MADE, {**START, "step": 50, "steps_per_epoch": None})
    start, made, resumed = read_decisions(path)
    assert start == Start(file=path, line=1, hvdcomp=version("hvdcomp"), **START)
    state = {"policy": "accordion", "previous": {"conv.weight": "Infinity", "bias": None}}
    assert made == Decided(file=path, line=2, **{**MADE, "state": state})
    assert with_numbers(made.state) == MADE["state"]
    assert (resumed.line, resumed.step) == (3, 50)
    first, second, _ = map(json.loads, path.read_text().splitlines())
    assert list(first) == [
        "kind", "format", "step", "epoch", "policy", "compressor", "tensors", "steps_per_epoch", "ranks", "hvdcomp",
        "continues", "state", "decision",
    ]  # fmt: skip
    assert list(second) == ["kind", "step", "epoch", "from_step", "statistics", "state", "decision"]
    assert first["kind"] == "start"
    assert second["kind"] == "decision"
    assert first["tensors"] == {"conv.weight": [32, 1, 3, 3], "bias": []}
    assert second["statistics"] == {"step": 45, "epoch": 1, "norms": {"conv.weight": 0.1}}
    assert second["decision"] == {"changed": {"levels": {"changed": {"0": 1}}}}


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    assert not path.exists()
    log.start(**START)
    assert len(list(read_decisions(path))) == 1
    log.decision(**MADE)
    assert len(list(read_decisions(path))) == 2
    log.close()
    log.close()
    log.decision(**MADE)
    assert len(list(read_decisions(path))) == 3
    log.close()


def test_numbers_of_numpy() -> None:
    numbers = [np.int32(3), np.float64("nan"), np.float32("inf")]
    held = to_json({np.float64(0.5): np.float32(0.25), np.int64(2): numbers})
    assert exact(held) == exact({"0.5": 0.25, "2": [3, "NaN", "Infinity"]})
    with pytest.raises(TypeError, match=r"cannot store.* of type set"):
        to_json({"norms": {1.0}})


def test_names_are_not_taken_for_numbers() -> None:
    data = to_json({"tensors": ["NaN", "fc"], "NaN": math.nan, "deep": {"Infinity": -math.inf}, "send": "dense"})
    back = with_numbers(data)
    assert back["tensors"] == ["NaN", "fc"]
    assert math.isnan(back["NaN"])
    assert back["deep"] == {"Infinity": -math.inf}
    assert back["send"] == "dense"


@pytest.mark.parametrize("cut", [1, 2, 30, 150])
def test_a_last_line_cut_short_is_left_out_and_then_replaced(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, START, MADE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert len(list(read_decisions(path))) == (2 if cut == 1 else 1)  # cut 1: only the line's end is missing
    written(tmp_path, {**START, "step": 45})
    kinds = [type(record) for record in read_decisions(path)]
    assert kinds == ([Start, Decided, Start] if cut == 1 else [Start, Start])
    assert path.read_bytes().startswith(whole if cut == 1 else whole[: whole.index(b"\n") + 1])


def test_a_last_line_nested_without_end_is_left_out_and_then_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, START)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"decision","state":' + b"[" * 100_000)
    assert [type(record) for record in read_decisions(path)] == [Start]
    written(tmp_path, {**START, "step": 45})
    assert [type(record) for record in read_decisions(path)] == [Start, Start]
    assert path.read_bytes().startswith(whole)


def test_a_first_line_cut_short_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, START)
    whole = path.read_bytes()
    for length in (0, 1, 12, 18, 100, len(whole) - 2):
        path.write_bytes(whole[:length])
        assert list(read_decisions(path)) == []
        written(tmp_path, START)
        assert path.read_bytes() == whole


def _change(line: int, old: str, new: str) -> Any:
    def change(lines: list[str]) -> None:
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new, 1)

    return change


_TABLE = '{"errors": {"a": {"x": 0.5}}, "sent": {}, "own": {}, "other_bytes": 0, "dense_bytes": 0}'


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (1, _change(1, '"start"', '"begin"'), 'its "kind" is neither "start" nor "decision"'),
        (1, _change(1, '{"kind"', '["kind"'), "Expecting|delimiter"),
        (1, _change(1, '"ranks":2', '"ranks":"2"'), "ranks: '2' must be a whole number"),
        (1, _change(1, '"ranks":2', '"ranks":true'), "ranks: True must be a whole number"),
        (1, _change(1, '"ranks":2,', ""), "start lacks ranks"),
        (1, _change(1, '"ranks":2', '"ranks":2,"more":1'), "start has an unknown more"),
        (1, _change(1, "[32,1,3,3]", "[32,1.5]"), r"tensors.conv.weight\[1\]: 1.5 must be a whole number"),
        (2, _change(2, "0.1", "NaN"), "NaN is not a number that JSON allows"),
        (2, _change(2, "0.1", '"nan"'), "norms.conv.weight: 'nan' must be a number"),
        (2, _change(2, "0.1", "null"), "norms.conv.weight: None must be a number"),
        (2, _change(2, '"norms"', '"normes"'), "statistics has an unknown normes"),
        (2, _change(2, '"norms"', '"learning_rates"'), "learning_rates lacks next, now"),
        (2, _change(2, '{"conv.weight":0.1}', "{}, "), "Expecting|Illegal"),
        (2, lambda lines: lines.insert(1, "\n"), "Expecting value"),
        (2, lambda lines: lines.insert(1, "17\n"), "not a line of a decision log"),
        (3, lambda lines: lines.append(lines[1][:40] + "\n"), "Expecting|Unterminated|Invalid control"),
        (2, _change(2, '"norms"', '"learning_rates": {"now": [1], "next": []}, "norms"'), "must have the same length"),
        (2, _change(2, '"norms"', f'"level_table": {_TABLE}, "norms"'), "errors.a.x: expected a number"),
        (1, lambda lines: lines.pop(0), "must be a start line"),
        (1, _change(1, '"format":2', '"format":3'), f"logs of format 3; .* {version('hvdcomp')} or later"),
        (1, _change(1, '{"by_tensor":[4,null]}', '{"by_tensor":[4]}'), "lines before this line: ValueError"),
        (2, _change(2, '{"0":1}', '{"2":1}'), "lines before this line: KeyError"),
        (2, _change(2, '{"changed":{"levels"', '{"changed":{"lovels"'), "lines before this line: KeyError"),
        (2, _change(2, '{"conv.weight":0.1}', '{"changed":{"0":0.1}}'), "lines before this line: TypeError"),
        (2, _change(2, '"norms":', '"mean_to_std":{"as":"x"},"norms":'), "lines before this line: KeyError"),
    ],
)  # fmt: skip
def test_damage_is_found_at_its_line(tmp_path: Path, line: int, change: Any, said: str) -> None:
    path = written(tmp_path, START, MADE)
    lines = path.read_text().splitlines(keepends=True)
    change(lines)
    path.write_text("".join(lines))
    with pytest.raises(DecisionLogError, match=said) as caught:
        list(read_decisions(path))
    assert str(caught.value).startswith(f"{path}, line {line}: ")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"\x80\xff\n")
    with pytest.raises(DecisionLogError, match="line 1"):
        list(read_decisions(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | st.sampled_from(["a", "b", "by_tensor", "as", "changed", "plain"]), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: dict(zip("ab", pair, strict=True)))  # by tensor
    ),
    max_leaves=12,
)  # fmt: skip
objects = st.dictionaries(names | st.sampled_from(["a", "b", "as"]), json_values, max_size=4)
parts = st.fixed_dictionaries({"statistics": objects, "state": objects, "decision": objects})


@given(lines=st.lists(st.tuples(parts, st.integers(0, 5)), min_size=1, max_size=4))
@example(
    [
        ({"statistics": {}, "state": {"a": 1, "b": True}, "decision": {"a": 0.0}}, 0),
        ({"statistics": {"norms": {"a": 1.0, "b": 1}}, "state": {"a": 1.0, "b": 1}, "decision": {"a": -0.0}}, 0),
    ]
)
@example([({"statistics": {}, "state": {"a": {"x": 0.0}, "b": {"x": 1}}, "decision": {"as": {"as": "a"}}}, 0)] * 2)
def test_short_lines_come_back_exactly(lines: list[tuple[dict[str, Any], int]]) -> None:
    """Any JSON at all, of any names, and lines that share much with the one before."""
    shorthand = Shorthand(["a", "b"])
    before: dict[str, Any] = {}
    read_before: dict[str, Any] = {}
    for drawn, shared in lines:
        parts = {**drawn, **dict(list(before.items())[:shared])}
        short = json.loads(json.dumps(shorthand.short(parts, before)))
        read_before = shorthand.whole(short, read_before)
        assert exact(read_before) == exact(parts)
        before = parts


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, file / "decisions.jsonl", tmp_path / "pipe", Path("/proc/hvdcomp/decisions.jsonl")):
        with pytest.raises(ConfigurationError, match="cannot be written") as caught:
            DecisionLog(path)
        assert str(path) in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "pipe"]


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1, "loss": 0.5')
    with pytest.raises(ConfigurationError, match="not a decision log"):
        DecisionLog(path)
    assert path.read_text() == '{"step": 1, "loss": 0.5'


def fill_up(path: Path, before: str, most: str, write: str) -> None:
    """Lets a write to a log fail, as on a full disk, in a process of its own; asserts that the failure is said, once.

    Args:
        path: of the log.
        before: what the process does first, in Python; it makes `log`, and knows `path`, START and MADE.
        most: the largest size of a file from then on, in Python.
        write: what fails, in Python.
    """
    code = f"""
import resource, sys
from pathlib import Path
from hvdcomp.errors import ConfigurationError
from tests.adaptation.test_decision_log import MADE, START, DecisionLog
path = Path(sys.argv[1])
{before}
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, resource.RLIM_INFINITY))
try:
    {write}
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    way_out = "choose a different file for decision_log"
    assert done.stdout == f"the decision log {path} cannot be written: File too large; {way_out}\n"
    assert done.stderr == "", "nothing more from closing the file"


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    """In a process of its own, none of whose files can grow beyond what fills it: a real error of a real write."""
    path = tmp_path / "decisions.jsonl"
    fill_up(path, "log = DecisionLog(path)\nlog.start(**START)", "path.stat().st_size + 30", "log.start(**START)")
    assert path.read_bytes().endswith(b"\n")
    assert len(list(read_decisions(path))) == 1


def test_a_disk_that_fills_up_is_told(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    path.symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match=r"decisions\.jsonl cannot be written: No space left"):
        log.start(**START)
