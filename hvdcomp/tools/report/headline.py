"""Summarizes the results of a section in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich import filesize

from hvdcomp.tools.report.groups import Group
from hvdcomp.tools.report.runs import shown_quality, three_digits
from hvdcomp.tools.report.series import mean_to_target
from hvdcomp.tools.report.table import Section
from hvdcomp.tools.report.turns import RATES

_AS_GOOD = {"accuracy": "within one point of", "perplexity": "within 10% of", "rmse": "within 10% of"}
_ENDED_AT = {"accuracy": "{}% accuracy", "perplexity": "a perplexity of {}", "rmse": "an RMSE of {}"}
_POINT, _TIMES = 0.01, 1.1  # the limits for "as good as dense training", as in docs/convergence.md
_MORE = 1.1  # a sentence is written only if bytes differ by at least this factor


def headline(section: Section) -> list[str]:
    """The sentences that summarize a section. The result is empty for a single run.

    The first sentences name the series that reached the target first, and the series that sent the fewest bytes to
    reach the target. Without targets, the first sentences name the series that sent the fewest bytes, and the series
    with the best quality. The last sentence compares the step times on the slowest link.
    """
    # the quality of unfinished runs is not their final quality
    finished = [group for group in section.groups if group.finished]
    measured_groups = [group for group in finished if group.quality is not None and group.factor is not None]
    if len(measured_groups) < 2 or section.metric is None:
        return []
    sentences = _at_target(section) if section.has_targets else _bytes_and_quality(section, measured_groups)
    return [*sentences, *_slow_link(section)]


def _at_target(section: Section) -> Iterator[str]:
    """The sentences that name the series that reached the target first, and the series that reached it with the fewest
    bytes. The result is empty unless all series have the same work and target."""
    groups = [group for group in section.groups if group.target is not None]
    reached = [group for group in groups if group.always_reached]
    if len({(group.work, group.target) for group in groups}) != 1 or len(reached) < 2:
        return
    times = {group: mean_to_target(group, "trained_seconds") or 0.0 for group in reached}
    sent = {group: mean_to_target(group, "bytes_sent") or 0.0 for group in reached}
    fastest, fewest = min(reached, key=lambda group: times[group]), min(reached, key=lambda group: sent[group])
    dense = section.reference if section.reference in reached else None
    sentence = f"{_name(fastest)} reached {fastest.target} first, in {three_digits(times[fastest])} seconds of training"
    if dense is not None and dense is not fastest and times[fastest]:
        sentence += f", {times[dense] / times[fastest]:.1f} times faster than {_name(dense)}"
    yield f"{sentence}." if section.simulated is None else f"{sentence} ({section.simulated})."
    sentence = (
        f"{_name(fewest)} sent the fewest bytes to reach {fewest.target}, {filesize.decimal(round(sent[fewest]))}"
    )
    if dense is not None and dense is not fewest and sent[fewest]:
        sentence += f", {sent[dense] / sent[fewest]:.1f} times fewer than {_name(dense)}"
    yield f"{sentence}."


def _bytes_and_quality(section: Section, measured_groups: list[Group]) -> Iterator[str]:
    best = _best(section, measured_groups)
    reference = next((group for group in measured_groups if group is section.reference), best)
    good = [group for group in measured_groups if _as_good(section, group, reference)]
    fewest, most = _fewest_bytes(section, good), _fewest_bytes(section, measured_groups)
    if fewest is reference:
        as_good = _AS_GOOD[section.metric or "accuracy"]
        yield (
            f"None of the methods that sent fewer bytes ended {as_good} {_name(reference)} "
            f"({_quality(section, reference)})."
        )
    else:
        yield (
            f"{_name(fewest)} sent {_times(fewest)} fewer bytes than dense training, and ended at "
            f"{_quality(section, fewest)}; {_name(reference)} ended at {_quality(section, reference)}."
        )
    if _saved(most) > _MORE * _saved(fewest):
        yield (
            f"{_name(most)} sent the fewest bytes, {_times(most)} fewer than dense training, but ended at "
            f"{_quality(section, most)}."
        )
    if best not in (fewest, reference):
        yield (
            f"{_name(best)} had the best result, {_quality(section, best)}, and sent {_times(best)} fewer bytes than "
            "dense training."
        )


def _slow_link(section: Section) -> Iterator[str]:
    turns = section.turns
    if turns is None:
        return
    rate, words = next(iter(RATES.items()))
    measured = rate in turns.measured_ms
    kind, noise = ("measured", 0.0) if measured else ("predicted", turns.noise)
    was, took = ("was", "took") if measured else ("is predicted to be", "is predicted to take")
    times_of = ((group, group.columns()[f"{kind}_ms_{rate}"]) for group in section.groups)
    times = {group: ms for group, ms in times_of if ms is not None}
    if not times:
        yield f"There is no prediction for a link of {words}, because this machine was too busy to calibrate."
        return
    fastest = min(times, key=lambda group: times[group])
    reference = section.reference
    if reference not in times:
        yield f"On a link of {words}, a step of {_name(fastest)} {was} the fastest."
    elif times[reference] / times[fastest] - 1 <= noise:
        yield f"On a link of {words}, no method {was} faster than {_name(reference)}."
    else:
        yield (
            f"On a link of {words}, a step of {_name(fastest)} {took} {times[fastest]:.3g} ms instead of "
            f"{times[reference]:.3g}: {times[reference] / times[fastest]:.1f} times faster than {_name(reference)}."
        )
        if reference.turns_ms and fastest.turns_ms:
            place = "On this machine" if measured else "Measured on this machine"
            ratio = reference.turns_ms / fastest.turns_ms
            compared = "faster" if ratio > 1 else "slower"
            yield (
                f"{place}, without the slow link, {_name(fastest)} is {compared} than {_name(reference)} "
                f"({ratio:.2f}x)."
            )


def _as_good(section: Section, group: Group, reference: Group) -> bool:
    own_quality, reference_quality = group.quality, reference.quality
    assert own_quality is not None
    assert reference_quality is not None
    if section.metric == "accuracy":
        return own_quality >= reference_quality - _POINT
    return own_quality <= reference_quality * _TIMES


def _best(section: Section, groups: list[Group]) -> Group:
    sign = 1 if section.metric == "accuracy" else -1
    return max(groups, key=lambda group: sign * (group.quality or 0.0))


def _fewest_bytes(section: Section, groups: list[Group]) -> Group:
    """The group that sends the fewest bytes. If several groups send equally few bytes, the result is the group with the
    best quality among them."""
    least = max(map(_saved, groups))
    return _best(section, [group for group in groups if _saved(group) >= least])


def _saved(group: Group) -> float:
    return round(group.factor or 0.0, 1)


def _times(group: Group) -> str:
    return f"{group.factor:.1f} times"


def _quality(section: Section, group: Group) -> str:
    return _ENDED_AT[section.metric or "accuracy"].format(shown_quality(section.metric, group.quality or 0.0))


def _name(group: Group) -> str:
    return group.label if group.label != "none" else "dense training"
