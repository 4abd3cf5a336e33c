"""Counterparts of Accordion's tables and figures, from training runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from benchmarks.reproduce import controls
from benchmarks.reproduce.compared import MARGIN, Compared, Trained, Trainings
from benchmarks.reproduce.counted import floats_sent
from benchmarks.reproduce.outcome import Curve, Outcome, Row
from benchmarks.reproduce.published import Artifact
from benchmarks.reproduce.workloads import Workload, spec


def _fixed_and_accordion(t: Trainings, compressor: str, workload: Workload) -> Compared:
    low, high = (workload.level(compressor, which) for which in ("low", "high"))
    return Compared(
        workload,
        {
            "low": t.train(workload, low),
            "high": t.train(workload, high),
            "Accordion": t.train(workload, low, workload.accordion(compressor)),
        },
    )


def _table(artifact: Artifact) -> tuple[dict[str, float], str]:
    """The published accuracies, floats and seconds with low compression, high compression and Accordion, and the
    network that they belong to."""
    networks = artifact.published
    name = artifact.settings.get("network", "ResNet-18")
    if name not in networks:
        return {}, name
    values: dict[str, float] = {}
    for label, (_, numbers) in zip(("low", "high", "Accordion"), networks[name].items(), strict=True):
        values |= {f"{label} {quantity}": value for quantity, value in numbers.items()}
    return values, name


def _of(numbers: Mapping[str, float], quantity: str, a: str, b: str, ratio: bool = False) -> float | None:
    if not numbers:
        return None
    first, second = numbers[f"{a} {quantity}"], numbers[f"{b} {quantity}"]
    return second / first if ratio else first - second


def levels(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's tables 1 to 4 and their curves: fixed levels, Accordion, and a control that sends the same number of
    floats."""
    compressor = artifact.settings["compressor"]
    workload = t.of(artifact, artifact.settings.get("workload", "images"))
    compared, control = controls.of_levels(t, _fixed_and_accordion(t, compressor, workload), "Accordion", compressor)
    numbers, network = _table(artifact)
    gap, closed = (_of(numbers, "accuracy", label, "high") for label in ("low", "Accordion"))
    recovered = None if gap is None or closed is None else 100 * closed / gap
    rows = [
        *floats_sent(artifact),
        *(compared.quality(level, numbers.get(f"{level} accuracy")) for level in ("low", "high", "Accordion")),
        compared.gain("high", "low", "worse", _of(numbers, "accuracy", "high", "low")),
        compared.gain("Accordion", "low", "no loss", _of(numbers, "accuracy", "Accordion", "low"), main=True),
        compared.times_fewer_floats("Accordion", "low", _of(numbers, "floats", "Accordion", "low", ratio=True)),
        compared.times_as_fast("Accordion", "low", _of(numbers, "seconds", "Accordion", "low", ratio=True)),
        control,
        compared.recovered("Accordion", recovered),
        compared.recovered(list(compared.runs)[-1]),
    ]
    beside = f" The published numbers of trainings are for {network}." if numbers else ""
    low, high = (workload.level(compressor, which) for which in ("low", "high"))
    note = f"Low compression is {low}, high compression is {high}.{beside}"
    return compared.outcome(artifact, rows, note)


_OF_LOGS = {
    "ResNet-18 on CIFAR-100": {"network": "ResNet-18", "data": "cifar100"},
    "VGG-19": {"network": "VGG-19bn", "data": "cifar10"},
}


def logs(artifact: Artifact, t: Trainings) -> Outcome:
    """The final numbers in the authors' published logs."""
    compressor = artifact.settings["compressor"]
    rows, shown = [], []
    for network, numbers in artifact.published.items():
        workload = t.of(artifact, "text") if "LSTM" in network else t.of(artifact, **_OF_LOGS[network])
        compared = _fixed_and_accordion(t, compressor, workload)
        compared, control = controls.of_levels(t, compared, "Accordion", compressor)
        of_network = []
        for a, b, claim in (("high", "low", "worse"), ("Accordion", "low", "no loss")):
            value = 100 * (numbers[b] / numbers[a] - 1) if workload.is_text else numbers[a] - numbers[b]
            of_network.append(compared.gain(a, b, claim, value, main=a == "Accordion"))
        rows += [dataclasses.replace(row, what=f"{network}: {row.what}") for row in (*of_network, control)]
        shown.append(f"{network} is compared with {workload.shown}.")
    return compared.outcome(artifact, rows, " ".join(shown), curves={})


def schedule(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's figures 1 and 2: low compression only in critical regimes, or only outside them."""
    compressor, workload = artifact.settings["compressor"], t.of(artifact)
    low, high = workload.levels[compressor]
    window = workload.accordion_steps
    first, after = 2 * window, window  # the same shares as the paper's 20 and 10 of 300 epochs
    ends = f"{first}|{workload.fall}|{workload.fall + after}"
    critical, reverse = "low in critical regimes", "high in critical regimes"
    compared = _fixed_and_accordion(t, compressor, workload).also(
        critical, t.train(workload, spec(compressor, high), f"schedule:levels={low:g}|{high:g}|{low:g},steps={ends}")
    )
    compared, control = controls.of_levels(t, compared, critical, compressor)
    rows = [
        compared.gain("high", "low", "worse"),
        compared.gain(critical, "low", "no loss", main=True),
        compared.times_fewer_floats(critical, "low"),
        control,
    ]
    if artifact.settings.get("reverse"):
        policy = f"schedule:levels={high:g}|32|{high:g},steps={ends}"
        compared = compared.also(reverse, t.train(workload, spec(compressor, 32), policy))
        rows.append(compared.gain(reverse, "low", "worse", note="rank 32 elsewhere, which is nearly the full rank"))
    curves = compared.curves()
    if artifact.settings.get("norms"):
        norms = norms_of(compared.runs["Accordion"][0])
        curves["norm of the gradient, by tensor"] = [
            Curve(label=tensor, x=list(range(1, len(values) + 1)), y=values) for tensor, values in norms.items()
        ]
        for tensor, values in norms.items():
            at = workload.fall // window  # the first window after the fall
            change = 100 * (1 - values[at] / values[at - 1])
            what = f"{tensor}: fall of the norm in the {window} steps after the learning rate's (%)"
            note = "critical by Accordion's rule from 50 % on"
            named = compared.named("Accordion")
            rows.append(Row(what=what, ours=change, holds=change >= 50, note=note, trainings=named))
    note = (
        f"The critical regimes are the first {first} steps and the {after} steps after the learning rate falls, the "
        "same share of the training as in the paper."
    )
    return compared.outcome(artifact, rows, note, curves=curves)


def norms_of(run: Trained) -> dict[str, list[float]]:
    """The norms of accumulated gradients that Accordion used, by tensor."""
    names = list(run.decisions[0]["tensors"])
    lists = [
        decision["statistics"]["norms"]["by_tensor"]
        for decision in run.decisions
        if "norms" in decision.get("statistics", {})
    ]
    return {name: [float(values[number]) for values in lists] for number, name in enumerate(names)}


def _levels_chosen(run: Trained) -> dict[str, list[float]]:
    """The level in each of Accordion's windows, by tensor."""
    names = list(run.decisions[0]["tensors"])
    now = list(run.decisions[0]["decision"]["levels"]["by_tensor"])
    chosen = [list(now)]
    for decision in run.decisions[1:]:
        new = decision["decision"].get("changed", {}).get("levels", {})
        now = list(new.get("by_tensor", now))
        for number, level in new.get("changed", {}).items():
            now[int(number)] = level
        chosen.append(list(now))
    return {name: [float(window[number]) for window in chosen] for number, name in enumerate(names)}


def ranks(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's figures 18 to 20: low compression early and after the learning rate falls, high compression
    otherwise."""
    compressor, workload = artifact.settings["compressor"], t.of(artifact)
    low, high = workload.levels[compressor]
    length = workload.accordion_steps
    runs = t.train(workload, spec(compressor, low), workload.accordion(compressor))
    compared = Compared(workload, {"Accordion": runs})
    chosen = [_levels_chosen(run) for run in compared.runs["Accordion"]]
    names = list(chosen[0])
    name = names[{"first": 0, "middle": len(names) // 2, "last": -1}[artifact.settings["part"]]]
    rows = []
    fall = workload.fall // length
    for when, windows, at in (
        (f"the first {2 * length} steps", range(2), low),
        (f"the {2 * length} steps after the learning rate falls", range(fall, fall + 2), low),
        (f"the {fall * length // 2} steps before", range(fall // 2, fall), high),
    ):
        share = statistics.fmean(float(levels[name][window] == at) for levels in chosen for window in windows)
        text = f"{name}, {when}: share at {'low' if at == low else 'high'} compression (%)"
        rows.append(Row(what=text, ours=100 * share, holds=share > 0.5, trainings=compared.named("Accordion")))
    steps = [length * window for window in range(len(chosen[0][name]))]
    curves = {"rank": [Curve(label=name, x=steps, y=chosen[0][name]) for name in names]}
    note = f"The network's {len(names)} compressed tensors replace the layers of the paper's network."
    return compared.outcome(artifact, rows, note, curves=curves, x="steps")


def batch(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's tables 5 and 6, and figures 4, 5, 10, 16 and 17: small and large batches compared with Accordion."""
    settings, workload = artifact.settings, t.of(artifact)
    small, large, extreme = workload.batch_sizes
    if settings.get("extreme"):
        large = extreme
    rate, every = workload.options["lr"], workload.interval
    times = large // small
    compared = Compared(
        workload,
        {
            "small": t.train(workload, "none"),
            "large": t.train(workload, "none", lr=rate * times, backward_passes_per_step=times),
            "Accordion": t.train(workload, "none", f"accordion_batch_size:low={small},high={large},interval={every}"),
        },
    )
    if settings.get("smith"):
        smith = t.train(workload, "none", f"increase_batch_size:low={small},high={large}")
        compared = compared.also("Smith et al.", smith)
    table, _ = _table(artifact) if settings.get("data") else ({}, "")
    numbers = {key.replace("low ", "small ").replace("high ", "large "): value for key, value in table.items()}
    published = artifact.published
    rows = [*floats_sent(artifact)]
    rows += [compared.quality(label, numbers.get(f"{label} accuracy")) for label in compared.runs]
    compared, control = controls.of_batch_size(t, compared, "Accordion", rate)
    rows.append(compared.gain("large", "small", "worse", _of(numbers, "accuracy", "large", "small")))
    lost = published.get("Accordion - small batch (points)", _of(numbers, "accuracy", "Accordion", "small"))
    if settings.get("extreme"):
        rows.append(compared.gain("Accordion", "large", "better"))
    margin = MARGIN + (-lost if settings.get("extreme") and lost is not None else 0)
    rows.append(compared.gain("Accordion", "small", "no loss", lost, margin=margin, main=True))
    fewer = published.get("Accordion: times fewer floats", _of(numbers, "floats", "Accordion", "small", ratio=True))
    rows.append(compared.times_fewer_floats("Accordion", "small", fewer))
    if numbers:
        faster = _of(numbers, "seconds", "Accordion", "small", ratio=True)
        rows.append(compared.times_as_fast("Accordion", "small", faster))
    rows.append(control)
    if settings.get("smith"):
        rows.append(compared.times_fewer_floats("Smith et al.", "small", published["Smith et al.: times fewer floats"]))
        more = compared.floats("Smith et al.") / compared.floats("Accordion")
        named = compared.named("Smith et al.", "Accordion")
        what = "floats of Smith et al. / floats of Accordion"
        rows.append(Row(what=what, ours=more, holds=more > 1, trainings=named))
    if settings.get("overlap"):
        from benchmarks.reproduce.gradients import common_of_largest

        common, name = common_of_largest(workload.options), "common to two gradients (%)"
        least = published[name]
        rows.append(Row(what=f"largest 10 %: {name}, more than", published=least, ours=common, holds=common >= least))
    note = f"The batches have {small} and {large} samples, and the learning rate is in proportion."
    return compared.outcome(artifact, rows, note)


def adaqs(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's figure 7."""
    compressor, workload = artifact.settings["compressor"], t.of(artifact)
    compared = _fixed_and_accordion(t, compressor, workload)
    compared = compared.also("AdaQS", t.train(workload, workload.level(compressor, "low"), "adaqs:start=64,fall=0.5"))
    more = compared.floats("AdaQS") / compared.floats("Accordion")
    named = compared.named("AdaQS", "Accordion")
    compared, beside_accordion = controls.of_levels(t, compared, "Accordion", compressor)
    compared, beside_adaqs = controls.of_levels(t, compared, "AdaQS", compressor)
    rows = [
        compared.gain("Accordion", "low", "no loss", main=True),
        compared.gain("AdaQS", "low", "worse"),
        Row(what="floats of AdaQS / floats of Accordion", ours=more, holds=more > 1, trainings=named),
        beside_accordion,
        beside_adaqs,
    ]
    return compared.outcome(
        artifact,
        rows,
        "AdaQS begins at a compression factor of 64. It halves the factor when the ratio of mean and standard "
        "deviation has fallen by half.",
    )


def longer(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's figure 8: high compression for more epochs, until it has sent as much as low compression."""
    compressor, workload = artifact.settings["compressor"], t.of(artifact)
    compared = _fixed_and_accordion(t, compressor, workload)
    times = compared.floats("low") / compared.floats("high")
    epochs = round(workload.epochs * times)
    milestones = tuple(float(round(at * times)) for at in workload.options["milestones"])
    label = f"high for {epochs} epochs"
    runs = t.train(workload, workload.level(compressor, "high"), epochs=epochs, milestones=milestones)
    compared, control = controls.of_levels(t, compared.also(label, runs), "Accordion", compressor)
    rows = [
        compared.gain(label, "low", "worse", main=True),
        compared.gain("Accordion", "low", "no loss", main=True),
        compared.times_fewer_floats("Accordion", label),
        control,
    ]
    return compared.outcome(artifact, rows)


def limits(artifact: Artifact, t: Trainings) -> Outcome:
    """Accordion's figure 9: limits of high compression."""
    workload = t.of(artifact)
    compared = Compared(workload, {f"rank {rank}": t.train(workload, spec("powersgd", rank)) for rank in (4, 2, 1)})
    for high in (1, 2):
        runs = t.train(workload, "powersgd:rank=4", workload.accordion("powersgd", (4, high)))
        compared = compared.also(f"Accordion 4 and {high}", runs)
    published = artifact.published
    rows = [compared.quality(f"rank {rank}", published[f"rank {rank}: accuracy"]) for rank in (1, 2, 4)]
    lost = published["rank 2: accuracy"] - published["rank 4: accuracy"]
    rows += [
        compared.gain("Accordion 4 and 1", "rank 4", "worse", lost),
        compared.gain("Accordion 4 and 2", "rank 4", "no loss", 0.0, main=True),
        compared.times_fewer_floats("Accordion 4 and 2", "rank 4", published["Accordion 4 and 2: times fewer floats"]),
        controls.beside(compared, "Accordion 4 and 1", "rank 2", "rank 2"),
    ]
    return compared.outcome(artifact, rows)


COUNTERPARTS: Mapping[str, Callable[[Artifact, Trainings], Outcome]] = {
    counterpart.__name__: counterpart for counterpart in (levels, logs, schedule, ranks, batch, adaqs, longer, limits)
}
