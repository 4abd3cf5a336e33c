"""Steps the generators of all buckets and tensors of a step in lockstep: every round it collects one request from each,
fuses them into few collectives and hands the answers back."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.compressors.protocol import Request
from hvdcomp.exchange.bucket_step import BucketStep
from hvdcomp.exchange.clock import Clock, Span
from hvdcomp.exchange.finiteness import flag_of, flag_of_outcomes, of_framework, with_flag
from hvdcomp.exchange.fusion import communicate, request_bytes
from hvdcomp.exchange.tensor_step import TensorStep


def run_in_lockstep(
    xp: ModuleType,
    communicator: Communicator,
    clock: Clock,
    buckets: Sequence[BucketStep],
    tensors: Sequence[TensorStep],
) -> tuple[Array, list[Span], int]:
    """Steps all generators to their end.

    Returns:
        The element that is NaN if what any rank would send, or what came of it, is not finite, when each round of
        collectives was under way, and the bytes that this rank handed to them.
    """
    steps: list[BucketStep | TensorStep] = [*buckets, *tensors]
    like = steps[0].like
    bytes_sent = 0
    rounds: list[Span] = []

    def turn(one: BucketStep | TensorStep, answer: Any) -> tuple[BucketStep | TensorStep, Request | None]:
        request = one.advance(answer)
        clock.lap(one.spans.decoding if request is None else one.spans.encoding)
        return one, request

    clock.start()
    waiting = [turn(one, None) for one in steps]
    of_tensors = [(one.x, request) for one, (_, request) in zip(tensors, waiting[len(buckets) :], strict=True)]
    flag = flag_of(xp, of_tensors, [one.found_inf for one in buckets])
    found_inf = flag
    while waiting := [(one, request) for one, request in waiting if request is not None]:
        requests = [request for _, request in waiting]
        take_flag = None
        if not rounds:
            requests, take_flag = with_flag(xp, requests, flag, like)
        bytes_sent += sum(request_bytes(xp, request) for request in requests)
        if not clock.turns_only:
            clock.start()
        answers, padding = communicate(xp, communicator, requests, f"hvdcomp.round{len(rounds)}", like)
        if take_flag is not None:
            found_inf = take_flag(answers)
        clock.lap(rounds)
        bytes_sent += padding
        waiting = [turn(one, answer) for (one, _), answer in zip(waiting, answers, strict=True)]
    after = [one.found_inf_after for one in buckets]
    if any(one for one in after if isinstance(one, bool)):
        found_inf = found_inf + float("nan")
    found_inf = sum((one for one in after if not isinstance(one, bool)), of_framework(xp, found_inf, like))
    if tensors:
        found_inf = found_inf + flag_of_outcomes(xp, [one.made for one in tensors])
    return found_inf, rounds, bytes_sent
