"""Controls: training runs that send the same number of floats as a policy, but ignore the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.reproduce.compared import Compared, Trained, Trainings
from benchmarks.reproduce.outcome import Row
from benchmarks.reproduce.workloads import spec


def of_levels(t: Trainings, compared: Compared, policy: str, compressor: str) -> tuple[Compared, Row]:
    """The control of a policy between two levels: low compression for the same number of steps in mid-training, or a
    fixed ratio for TopK.

    Args:
        compared: the training runs, which include "low", "high" and the policy.
        policy: label of the policy's training runs.
        compressor: name of the compressor whose level the policy chooses.
    """
    workload = compared.workload
    low, high = workload.levels[compressor]
    floats = {label: compared.floats(label) for label in ("low", "high", policy)}
    share = (floats[policy] - floats["high"]) / (floats["low"] - floats["high"])
    if compressor == "topk":
        ratio = spec(compressor, float(f"{high + share * (low - high):.4g}"))
        return _with(compared, policy, f"fixed ratio like {policy}", ratio, t.train(workload, ratio))
    if share >= 1:
        rank = spec(compressor, round(high + share * (low - high)))
        return _with(compared, policy, f"fixed rank like {policy}", rank, t.train(workload, rank))
    steps = len(compared.runs["low"][0].sent)
    at_low = max(1, round(share * steps))
    first = max(1, (steps - at_low) // 2)
    words = spec(compressor, high), f"schedule:levels={high:g}|{low:g},steps={first}|{first + at_low}"
    label = f"low in mid-training like {policy}"
    return _with(compared, policy, label, " ".join(words), t.train(workload, *words))


def of_sparsity(t: Trainings, compared: Compared, policy: str, compressor: str, **changes: Any) -> tuple[Compared, Row]:
    """The control of a policy that chooses a sparsifier's ratio: a fixed ratio.

    Args:
        compared: the training runs, which include "dense" and the policy.
        policy: label of the policy's training runs.
        compressor: name of the compressor whose ratio the policy chooses.
        changes: the options of the policy's training run that are also used for the control.
    """
    workload, dense = compared.workload, compared.floats("dense")
    wanted = compared.floats(policy)
    # Small tensors are sent whole, so the number of floats is linear in the ratio, but not proportional to it. A
    # training run with about this ratio shows the share of the small tensors.
    first = float(f"{min(wanted / dense, 0.5):.3g}")
    sent = t.train(workload, f"{compressor}:ratio={first:g}", seeds=1, **changes)[0].floats
    ratio = first + (wanted - sent) * (1 - first) / (dense - sent)
    fixed = f"{compressor}:ratio={min(max(ratio, first / 10), 1):.4g}"
    return _with(compared, policy, f"fixed ratio like {policy}", fixed, t.train(workload, fixed, **changes))


def of_batch_size(t: Trainings, compared: Compared, policy: str, rate: float) -> tuple[Compared, Row]:
    """The control of a policy that chooses the smallest or a larger batch size: a fixed batch size, with a learning
    rate in proportion to it.

    Args:
        compared: the training runs, which include "small" and the policy.
        policy: label of the policy's training runs.
        rate: learning rate of the training run "small".
    """
    workload = compared.workload
    times = compared.floats("small") / compared.floats(policy)
    size = round(workload.batch_sizes[0] / workload.ranks * times)
    scaled = float(f"{rate * size * workload.ranks / workload.batch_sizes[0]:.4g}")
    runs = t.train(workload, "none", batch_size=size, lr=scaled)
    return _with(compared, policy, f"fixed batch like {policy}", f"batch_size={size * workload.ranks}", runs)


def beside(compared: Compared, policy: str, label: str, words: str) -> Row:
    """The row that compares a policy with its control.

    Args:
        compared: the training runs, which include the policy and the control.
        policy, label: labels of the policy's training runs and of the control.
        words: words that describe the control.
    """
    share = compared.floats(label) / compared.floats(policy)
    note = f"the control: {words} sends {share:.0%} of {policy}'s floats, and ignores the gradients"
    return replace(compared.gain(policy, label, "", note=note), control=words, share=share)


def _with(compared: Compared, policy: str, label: str, words: str, runs: list[Trained]) -> tuple[Compared, Row]:
    """Trains the control. Returns the training runs including the control, and the row that compares the policy with
    the control."""
    compared = compared.also(label, runs)
    return compared, beside(compared, policy, label, f"`{words}`")
