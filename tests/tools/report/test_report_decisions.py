"""What `hvdcomp report` makes of decisions.jsonl, written here by policies that get made-up statistics."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.policies import Policy, parse_policy
from hvdcomp.policies.request import GravacGains, LearningRates, Statistics, Timing
from hvdcomp.tools.cli import main
from hvdcomp.tools.report.decision_curves import draw_decisions
from hvdcomp.tools.report.decisions import load_decisions
from hvdcomp.tools.report.runs import RunError, find_runs
from hvdcomp.tools.report.table import make_sections, policy_line
from tests.adaptation.test_coordinator_auto import run as drive_auto
from tests.decision_lines import whole_lines, write_as_before

EPOCH = 20  # steps
TENSORS = ("conv.weight", "fc1.weight", "fc2.weight")
Told = Callable[[Any, int], Statistics]
"""The statistics after this number of steps, in a state of the policy."""


def write_log(
    path: Path,
    spec: str,
    told: Told,
    *,
    steps: int = 100,
    tensors: Sequence[str] = TENSORS,
    compressor: str = "powersgd:rank=4",
    start: int = 0,
) -> Path:
    """Drive a policy for `steps` steps from step `start` on, and write its decisions as `hvdcomp train` does."""
    policy = parse_policy(spec)
    assert isinstance(policy, Policy)
    state = policy.initial_state(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = DecisionLog(path)
    log.start(
        step=start,
        epoch=start // EPOCH,
        policy=spec,
        compressor=compressor,
        tensors=dict.fromkeys(tensors, (8, 8)),
        steps_per_epoch=EPOCH,
        ranks=2,
        state=policy.to_json(state),
        decision=policy.decision(state).to_json(),
    )
    period = policy.request(state).period
    assert period is not None
    every = period.steps or period.epochs * EPOCH
    for step in range(start + every, start + steps + 1, every):
        statistics = told(state, step)
        state, decision = policy.decide(state, statistics)
        log.decision(
            step=step,
            epoch=step // EPOCH,
            from_step=step + policy.lag,
            statistics=statistics,
            state=policy.to_json(state),
            decision=decision.to_json(),
        )
    log.close()
    return path


def regimes(norms: Mapping[int, Sequence[float]], falls: Sequence[int] = (), tensors: Sequence[str] = TENSORS) -> Told:
    """Norms of the tensors by epoch, those of the last epoch before where there are none; falls of the rate."""

    def told(state: Any, step: int) -> Statistics:
        epoch = step // EPOCH
        latest = norms[max(known for known in norms if known <= epoch)]
        rates = LearningRates((0.1,), (0.01 if epoch in falls else 0.1,))
        by_name = dict(zip(tensors, latest, strict=True))
        return Statistics(step, epoch, learning_rates=rates, norms=by_name, model_norm=float(sum(latest)))

    return told


def falling_ratios(state: Any, step: int) -> Statistics:
    """Each tensor's mean-to-standard-deviation ratio falls faster than that of the one before."""
    ratios = {name: (1.0 - 0.1 * place) ** (step // EPOCH) for place, name in enumerate(TENSORS, start=1)}
    return Statistics(step, step // EPOCH, mean_to_std=ratios)


def gains(state: Any, step: int) -> Statistics:
    """Gains fall with the logarithm of the factor and rise over time; the times are the same for all."""
    rising = 0.3 * (1 - np.exp(-step / 200))

    def gain(factor: float) -> float:
        return float(min(1.0, 1.0 - 0.25 * np.log10(factor) + rising + 0.05 * np.sin(step)))

    candidate = None if state.candidate is None else gain(state.candidate)
    timing = Timing(samples=64, seconds=0.01 + 0.001 * np.cos(step), evaluation_seconds=0.002)
    return Statistics(step, gains=GravacGains(gain(state.minimum), candidate, ranks=4), timing=timing)


def write_steps(folder: Path, steps: int = 100, falls: Sequence[int] = ()) -> Path:
    """Write steps.jsonl with a loss that decays; the learning rate falls after each of some steps."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).normal(0, 0.05, steps)
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            rate = 0.1 * 0.1 ** sum(step > fall for fall in falls)
            loss = 2.3 * float(np.exp(-3 * step / steps)) + 0.1 + noise[step - 1]
            record = {"step": step, "epoch": (step - 1) // EPOCH + 1, "loss": loss, "learning_rate": rate, "ms": 20.0}
            file.write(json.dumps(record | {"bytes_sent": 4000, "dense_bytes": 40000}) + "\n")
    return folder


def write_summary(folder: Path, **fields: Any) -> None:
    record = {"status": "finished", "model": "mlp", "data": "digits", "spec": "powersgd:rank=4", "world_size": 2}
    (folder / "summary.json").write_text(json.dumps(record | fields))


def report(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["report", *map(str, arguments)])


def panels(folder: Path) -> Iterator[Any]:
    (run,), _ = find_runs([folder])
    for _, _, figure in draw_decisions(run):
        figure.canvas.draw()
        yield from figure.axes


def test_levels_and_critical_share_over_time(tmp_path):
    told = regimes({1: (1, 1, 1), 2: (1, 1, 4), 4: (3, 1, 4)}, falls=[5])
    log = load_decisions(write_log(tmp_path / "log", "accordion:low=4,high=1,interval=1", told))
    assert log is not None
    assert (log.policy, log.compressor) == ("accordion:low=4,high=1,interval=1", "powersgd:rank=4")
    assert (log.tensors, log.count, log.end) == (TENSORS, 5, 100)
    assert log.steps.tolist() == [0, 21, 41, 61, 81, 101]
    assert log.levels["conv.weight"].tolist() == [4, 4, 1, 1, 4, 4]
    assert log.levels["fc1.weight"].tolist() == [4, 4, 1, 1, 1, 4]
    assert log.levels["fc2.weight"].tolist() == [4, 4, 4, 1, 1, 4]
    assert log.critical == pytest.approx([1, 1, 1 / 3, 0, 1 / 3, 1])
    assert log.factors == {}
    assert np.isnan(log.sent).all()
    assert log.in_force(np.array([0, 20, 21, 40, 80, 100])).tolist() == [0, 0, 1, 1, 3, 4]


def test_factors_of_tensors(tmp_path):
    log = load_decisions(write_log(tmp_path / "log", "adaqs:start=64,fall=0.2", falling_ratios))
    assert log is not None
    assert log.factors["conv.weight"].tolist() == [64, 64, 64, 64, 32, 32]
    assert log.factors["fc2.weight"].tolist() == [64, 64, 32, 16, 8, 4]
    assert log.levels == {}
    assert np.isnan(log.critical).all()


def test_factors_gains_and_throughput_of_the_whole_model(tmp_path):
    spec = "gravac:min=10,max=100,window=30"
    policy: Any = parse_policy(spec)
    path = write_log(tmp_path / "log", spec, gains)
    log = load_decisions(path)
    assert log is not None
    assert log.steps.tolist() == [0, *range(2, 102)]
    assert log.minimum[0] == 10
    assert log.candidate[[0, 31, 62]].tolist() == [20, 40, 100]
    assert set(log.gains) == set(policy.candidates) | {10}
    assert set(log.sent) == set(log.throughput)
    last = whole_lines(path)[-1]["state"]
    for name, arrays in (("gains", log.gains), ("throughput", log.throughput)):
        assert {repr(cf): column[-1] for cf, column in arrays.items() if np.isfinite(column[-1])} == last[name]


def test_batch_size(tmp_path):
    told = regimes({1: (1, 1, 1), 2: (1, 1, 4)})
    log = load_decisions(write_log(tmp_path / "batch", "accordion_batch_size:low=64,high=512,interval=1", told))
    assert log is not None
    assert log.accumulation.tolist() == [1, 1, 1, 8, 8, 8]
    assert log.levels == {}


def test_resumed_run_counts_the_later_decisions(tmp_path):
    calm, changing = regimes({1: (1, 1, 1)}), regimes({1: (1, 1, 1), 2: (1, 1, 1), 3: (3, 3, 3)})
    path = write_log(tmp_path / "log", "accordion:low=4,high=1,interval=1", calm)
    write_log(path, "accordion:low=4,high=1,interval=1", changing, start=40, steps=40)
    log = load_decisions(path)
    assert log is not None
    assert log.steps.tolist() == [0, 21, 40, 61, 81]
    assert log.count == 7
    assert log.end == 80


def test_half_a_last_line_is_left_out(tmp_path):
    path = write_log(tmp_path / "log", "accordion:low=4,high=1,interval=1", regimes({1: (1, 1, 1)}))
    path.write_bytes(path.read_bytes()[:-30])
    log = load_decisions(path)
    assert log is not None
    assert log.count == 4
    path.write_bytes(b'{"kind": "start", "st')
    assert load_decisions(path) is None


@pytest.mark.parametrize(
    ("number", "old", "new", "said"),
    [
        (3, '"kind": "decision"', '"kind": "other"', "line 3"),
        (3, '{"kind"', '{"kind', "line 3"),
        (2, '"kind": "levels"', '"kind": "volumes"', "line 2.*volumes"),
        (2, '"fc1.weight": 4', '"fc1.weight": "much"', "line 2.*much"),
        (1, '{"kind": "start"', '\n{"kind": "start"', "line 1"),
        (2, '"fc1.weight": 4', f'"fc1.weight": {10**400}', "line 2.*OverflowError"),
        (2, '"from_step": 21', f'"from_step": {2**70}', "line 2: the step number is out of range"),
    ],
)
def test_damaged_log_is_an_error_that_names_the_line(tmp_path, number, old, new, said):
    told = regimes({1: (1, 1, 1)})
    path = write_log(tmp_path / "run/decisions.jsonl", "accordion:low=4,high=1,interval=1", told)
    write_as_before(path, whole_lines(path))
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    path.write_text("".join(lines))
    with pytest.raises(RunError, match=rf"decisions\.jsonl, {said}"):
        find_runs([path.parent])
    result = report(path.parent, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert str(path) in result.output
    assert not (tmp_path / "out").exists()


def test_log_without_its_start_is_an_error(tmp_path):
    path = write_log(tmp_path / "run/decisions.jsonl", "adaqs:start=64,fall=0.2", falling_ratios)
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(RunError, match="line 1: the first line of a decision log must be a start line"):
        find_runs([path.parent])


def test_killed_run_is_named_by_its_decisions(tmp_path):
    folder = write_steps(tmp_path / "killed")
    write_log(folder / "decisions.jsonl", "adaqs:start=64,fall=0.2", falling_ratios)
    write_steps(tmp_path / "no-policy")
    sections = make_sections(find_runs([tmp_path])[0])
    killed, plain = (group for section in sections for group in section.groups)
    assert killed.label == "killed (unfinished): powersgd:rank=4, adaqs:start=64,fall=0.2"
    assert plain.label == "no-policy (unfinished)"
    row, plain_row = (row for section in sections for row in section.rows)
    assert (row["spec"], row["policy"], row["decisions"]) == ("powersgd:rank=4", "adaqs:start=64,fall=0.2", 5)
    assert policy_line(plain_row) is None


def test_table_and_page_show_the_policy(tmp_path):
    told = regimes({1: (1, 1, 1)})
    for seed in (0, 1):
        folder = write_steps(tmp_path / f"runs/accordion-{seed}", falls=[40])
        write_log(folder / "decisions.jsonl", "accordion:low=4,high=1,interval=1", told)
        write_summary(folder, seed=seed, options={"policy": "accordion:low=4,high=1,interval=1"})
    folder = write_steps(tmp_path / "runs/warmup")
    write_summary(folder, options={"policy": "warmup:levels=4|2,epochs=1"})
    folder = write_steps(tmp_path / "runs/gravac")
    write_log(folder / "decisions.jsonl", "gravac:max=100,window=30", gains)
    write_summary(folder, options={"policy": "gravac:max=100,window=30"})
    result = report(tmp_path / "runs", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    sections = make_sections(find_runs([tmp_path / "runs"])[0])
    assert [group.label for section in sections for group in section.groups] == [
        "powersgd:rank=4, accordion:low=4,high=1,interval=1",
        "powersgd:rank=4, gravac:max=100,window=30",
        "powersgd:rank=4, warmup:levels=4|2,epochs=1",
    ]
    rows = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    found = {row["run"]: (row["policy"], row["decisions"]) for row in rows}
    assert found["mean of 2 runs"] == found["accordion-1"] == ("accordion:low=4,high=1,interval=1", 5)
    assert found["gravac"] == ("gravac:max=100,window=30", 100)
    assert found["warmup"] == ("warmup:levels=4|2,epochs=1", None)
    page = (tmp_path / "out/report.html").read_text()
    for text in ("accordion:low=4,high=1,interval=1 (5 decisions)", "warmup:levels=4|2,epochs=1"):
        assert text in page
        assert text in result.output
    drawn = {path.name for path in (tmp_path / "out").glob("*-run*.png")}
    assert drawn == {"1-run1-decisions.png", "1-run2-decisions.png", "1-run3-decisions.png", "1-run3-gains.png"}
    for name in drawn:
        assert (tmp_path / "out" / name).with_suffix(".svg").stat().st_size > 1000
    # Of the seeds, only the first is shown without unfolding its details.
    assert page.count('<figure class="card') == 6
    assert page.count("<figure") == 7


def test_a_policy_that_was_taken_out_is_named_and_not_drawn(tmp_path):
    """The report of all runs stopped at such a log."""
    folder = write_steps(tmp_path / "runs/old")
    log = write_log(folder / "decisions.jsonl", "accordion:low=4,high=1,interval=1", regimes({1: (1, 1, 1)}))
    log.write_text(log.read_text().replace('"accordion:low=4', '"accordion_joint:low=4'))
    write_summary(folder, options={"policy": "accordion_joint:low=4,high=1,interval=1"})
    write_steps(tmp_path / "runs/new")
    write_log(tmp_path / "runs/new/decisions.jsonl", "adaqs:start=64,fall=0.2", falling_ratios)
    result = report(tmp_path / "runs", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    old = "accordion_joint:low=4,high=1,interval=1"
    said = f"The decisions of old are not plotted: {old!r}: the policy accordion_joint was removed"
    page = (tmp_path / "out/report.html").read_text().replace("&#39;", "'")
    for text in (" ".join(result.output.split()), page):
        assert text.count(said) == 1
    rows = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    assert [(row["policy"], row["decisions"]) for row in rows if row["run"] == "old"] == [(old, None)]
    assert len(list((tmp_path / "out").glob("*-decisions.png"))) == 1
    (run,) = find_runs([folder])[0]
    assert list(draw_decisions(run)) == []


def test_heat_map_stays_legible_with_many_tensors(tmp_path):
    names = [f"layer{place // 10}.{place % 10}.a-long-name-of-a-module.conv.weight" for place in range(161)]
    told = regimes({1: (1.0,) * 161, 2: tuple(np.linspace(1, 2, 161).tolist())}, tensors=names)
    folder = write_steps(tmp_path / "run")
    write_log(folder / "decisions.jsonl", "accordion:low=4,high=1,interval=1", told, tensors=names)
    _, heat_map, *_ = panels(folder)
    shown = [text.get_text() for text in heat_map.get_yticklabels()]
    assert 20 <= len(shown) <= 40
    assert all(len(text) <= 34 for text in shown)
    image = np.asarray(heat_map.images[0].get_array())
    assert image.shape == (161, 100)
    assert image[:, 0].tolist() == [1] * 161  # of the two levels the greater
    assert image[0, 50] == 0
    assert image[160, 50] == 1
    boxes = [text.get_window_extent() for text in heat_map.get_yticklabels()]
    assert all(above.y0 >= below.y1 - 1 for above, below in itertools.pairwise(boxes))


def test_critical_regimes_and_falling_rates_are_marked_on_the_loss(tmp_path):
    told = regimes({1: (1, 1, 1), 2: (1, 1, 4), 3: (1, 1, 4)})
    folder = write_steps(tmp_path / "run", falls=[40, 70])
    write_log(folder / "decisions.jsonl", "accordion:low=4,high=1,interval=1", told)
    loss, *_ = panels(folder)
    shares = np.asarray(loss.images[0].get_array())[0]
    assert shares[[0, 40, 41, 60, 61]] == pytest.approx([1, 1, 1 / 3, 1 / 3, 0])
    assert [line.get_xdata()[0] for line in loss.lines[2:]] == [40, 70]
    assert 0 < loss.get_ylim()[1] < 3
    write_steps(folder, falls=range(1, 90))
    (run,), _ = find_runs([folder])
    ((_, caption, figure),) = draw_decisions(run)
    assert len(figure.axes[0].lines) == 2
    assert "falls 89 times, which is not marked" in caption


def test_gains_are_drawn_with_epsilon_and_shares(tmp_path):
    folder = write_steps(tmp_path / "run")
    write_log(folder / "decisions.jsonl", "gravac:min=10,max=100,window=30,epsilon=0.6", gains)
    (run,), _ = find_runs([folder])
    log = run.decisions
    assert log is not None
    (_, _, _), (name, _, figure) = draw_decisions(run)
    assert name == "gains"
    gain, share, throughput = figure.axes
    assert gain.lines[-1].get_ydata()[0] == 0.6
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    sent = log.sent[log.in_force(np.arange(100))]
    expected = [f"{name}: {100 * np.mean(sent == cf):.0f}%" for cf, name in
                ((1, "dense"), (10, "10x"), (20, "20x"), (40, "40x"), (100, "100x"))]  # fmt: skip
    assert labels == [*expected, "epsilon = 0.6"]
    tops = np.max([patch.get_data().values for patch in share.patches], axis=0)
    assert tops == pytest.approx(1)
    assert [text.get_text() for text in throughput.get_yticklabels()] == [
        {1.0: "dense"}.get(cf, f"{cf:g}x") for cf in sorted(log.throughput)
    ]


def test_an_absurd_number_of_steps_takes_no_more_memory(tmp_path):
    folder = write_steps(tmp_path / "run")
    write_log(folder / "decisions.jsonl", "gravac:min=10,max=100,window=30,epsilon=0.6", gains, start=10**12)
    (run,), _ = find_runs([folder])
    (_, _, _), (_, _, figure) = draw_decisions(run)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label for label in labels if label.endswith("100%")] == ["dense: 100%"]  # as at the start
    assert np.max([patch.get_data().values for patch in figure.axes[1].patches], axis=0) == pytest.approx(1)


@pytest.mark.parametrize(("times", "top"), [(0.5, 1.05), (4.0, 4.2)])
def test_gains_above_one_are_seen(times: float, top: float, tmp_path: Path) -> None:
    """As raw gains may be; the scale of all others is that of a share."""

    def told(state: Any, step: int) -> Statistics:
        return Statistics(step, gains=GravacGains(times, state.candidate and times, ranks=4), timing=Timing(64, 0.01))

    folder = write_steps(tmp_path / "run")
    write_log(folder / "decisions.jsonl", "gravac:min=10,max=100,window=30,gain=raw,factor=elements", told)
    (run,), _ = find_runs([folder])
    (_, _, _), (_, _, figure) = draw_decisions(run)
    assert figure.axes[0].get_ylim() == pytest.approx((0, top))


def test_strange_names_and_logs_alone_are_drawn(tmp_path):
    names = ("$x_{", "<script>", "\x1b[31m")
    told = regimes({1: (1, 1, 1)}, tensors=names)
    path = write_log(tmp_path / "run/decisions.jsonl", "accordion:low=4,high=1,interval=1", told, tensors=names)
    result = report(path.parent, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "<script" not in (tmp_path / "out/1-run1-decisions.svg").read_text()
    short = write_log(tmp_path / "short/decisions.jsonl", "accordion:low=4,high=1", told, steps=0, tensors=names)
    (run,), _ = find_runs([short.parent])
    assert list(draw_decisions(run)) == []


def test_what_auto_chose_is_drawn_with_the_times_that_it_chose_by(tmp_path):
    folder = write_steps(tmp_path / "run", steps=40)
    drive_auto(40, log=DecisionLog(folder / "decisions.jsonl"))
    write_summary(folder)
    log = load_decisions(folder / "decisions.jsonl")
    assert log is not None
    assert set(log.chosen) == {"dense", "fp16", "compressed", "compressed and dense"}
    assert np.array_equal(sum(log.chosen.values()), np.ones(len(log.steps)))
    assert log.chosen["compressed"][0] == log.chosen["fp16"][-1] == 1
    assert log.predicted["dense"][-1] == 1.0
    assert log.measured["compressed"][-1] == pytest.approx(1.1)
    assert log.measured["dense"][-1] == pytest.approx(1.0)
    (one,), _ = find_runs([folder])
    ((_, caption, figure),) = draw_decisions(one)
    assert "the method in use" in caption
    figure.canvas.draw()
    labels = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert "fp16: 500 ms (predicted 950)" in labels
    assert report(folder, "--output", tmp_path / "out").exit_code == 0
