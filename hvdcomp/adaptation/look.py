"""Gives observers access to x before it is compressed, and to the compression error. x is the gradient of a tensor plus
the residual."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from hvdcomp.adaptation.energies import Energies, of_arrays, of_errors
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.exchange.buckets import BucketOrGroup
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.tensor_group import TensorGroup


class Look(Mapping[str, Array]):
    """A mapping from the name of every tensor of a step to its x, with methods that compute energies and errors.
    Nothing is computed before it is needed.

    An array contains x only until the tensor is compressed. Do not change the arrays.

    Args:
        engine: the engine. The engine's step must have begun.
        buckets: the buckets and tensor groups of the step, before they are opened.
        factor: the number by which the memory multiplies gradients; None for 1.

    Attributes:
        xp: the array functions of the gradients.
        context: the context of the step.
        like: an array of the framework, on the device of the gradients.
    """

    def __init__(self, engine: Engine, buckets: Sequence[BucketOrGroup], factor: Array | None = None) -> None:
        self.like = buckets[0].like
        self.xp = arrays_for(self.like)
        self.context = engine.context("")
        self._plan = engine.plan
        self._buckets = buckets
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self._factor = factor

    def __iter__(self) -> Iterator[str]:
        return iter(self._bucket_of)

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, name: object) -> bool:
        return name in self._bucket_of

    def __getitem__(self, name: str) -> Array:
        return self._bucket_of[name].x(name)

    def energies(self, names: Sequence[str]) -> Energies:
        """||x||^2 of some tensors."""
        energies = Energies()
        for bucket, own in self._by_bucket(names):
            if isinstance(bucket, TensorGroup):
                energies.extend(of_arrays(self.xp, {name: bucket.x(name) for name in own}))
            else:
                energies.add(own, bucket.make_x(), places=[bucket.places[name] for name in own])
        return energies

    def gradient_energies(self, names: Sequence[str]) -> Energies:
        """||g||^2 of some tensors. g is this rank's gradient, without the residual or momentum. The function reads all
        elements of g."""
        return of_arrays(self.xp, {name: self._bucket_of[name].gradient(name) for name in names}, self._factor)

    @property
    def addresses(self) -> dict[str, int]:
        """The address of x for each tensor that is in a bucket, by name. x is computed if it was not yet computed."""
        return {name: place for bucket in self._buckets for name, place in bucket.addresses.items()}

    def lost_when_sent(self, names: Sequence[str]) -> tuple[Energies, set[str]]:
        """The squared error of what this step sends, ||x - C(x)||^2. Read the result when the step has ended.

        Returns:
            The errors of the tensors whose errors can be computed, and the names of these tensors. An error cannot be
            computed if this rank's C(x) does not depend on its x alone, or if the step keeps no residual.
        """
        for bucket in self._buckets:
            bucket.make_x()
        known = {name for name in names if self._plan[name].sent_is_own and self._bucket_of[name].keeps_x}
        energies = Energies()
        for bucket, own in self._by_bucket(known):
            bucket.when_compressed.append(functools.partial(self._add_lost, energies, bucket, own))
        return energies, known

    def _add_lost(self, energies: Energies, bucket: BucketOrGroup, names: list[str]) -> None:
        if isinstance(bucket, TensorGroup):
            energies.extend(of_errors(self.xp, {name: (bucket.x(name), bucket.sent(name)) for name in names}))
        else:
            energies.add(names, bucket.measure_left(), places=[bucket.places[name] for name in names])

    def _by_bucket(self, names: Sequence[str] | set[str]) -> Iterator[tuple[BucketOrGroup, list[str]]]:
        """Yields each bucket or tensor group that contains some of these tensors, with the names of these tensors in
        the order of the bucket."""
        wanted = set(names)
        for bucket in self._buckets:
            if own := [name for name in bucket.names if name in wanted]:
                yield bucket, own


def observe(engine: Engine, function: Callable[[Look], Mapping[str, Array]] | None) -> None:
    """Calls a function in each step with a `Look`, before x is compressed.

    Args:
        engine: the engine that compresses.
        function: function that gets the `Look`. The function returns the arrays that are compressed in place of x, by
            tensor name. Pass None to end the calls.
    """
    if function is None:
        engine.before_compress = None
    else:
        engine.before_compress = lambda buckets, factor: function(Look(engine, buckets, factor))
