"""The base class of compressors: a frozen description of a method, with one level, and a generator that runs a step.

A compressor holds no tensors and may be shared, compared, hashed and printed. All arrays that outlive a step are
passed in and returned as its state.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Annotated, Any, ClassVar

from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, Context, SparseVector, TensorInfo, run_alone
from hvdcomp.compressors.sizes import SentPayload, payloads_of, payloads_of_step
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.specs.described import Described, Rule, is_whole
from hvdcomp.specs.levels import Level


class HorovodMethod:
    """Descriptor of a method that Horovod calls on its `compression` argument.

    On a class, or on a description without the method, it gives a function that raises and says what to write instead.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or self._function is None:
            return refuse_description(owner if instance is None else instance)
        return MethodType(self._function, instance)


def refuse_description(given: Any) -> Callable[..., None]:
    """A function that raises ConfigurationError: it says what to write in place of `compression=given`."""

    def refuse(*_: Any) -> None:
        if isinstance(given, type):
            name = given.__name__
            instead = f".from_spec({getattr(given, 'examples', ('topk:ratio=0.01',))[0]!r})"
        else:
            name = repr(given)
            instead = f"(hvdcomp.{given!r})"
        raise ConfigurationError(
            f"Horovod cannot use compression=hvdcomp.{name}; write compression=hvdcomp.Compression{instead}"
        )

    return refuse


@dataclass(frozen=True)
class Compressor(Described):
    """Base of all compressors.

    Class attributes:
        name: the method's name in a spec string.
        examples: specs of the method in each of its forms, the commonest first. The manual shows the first; tests of
            what every compressor must do, and `hvdcomp bench encode`, take all.
        level_name: the field that says how hard to compress, or None if the method has no such knob.
        sends: the payload of one rank for a tensor, in words.
        biased: whether the expectation of the result over the method's random choices differs from the gradient. By
            default biased methods use error feedback. A cast's rounding does not count.
        lossless: whether the receivers get the gradient itself.
        variance: for an unbiased method whose error can be larger than x itself, a bound of E|x - C(x)|^2 / |x|^2 that
            holds for any tensor. 0 for all others: biased methods leave out a part of x, and no element's error is
            larger than the largest element of x in `terngrad`, `globalqsgd`, `natural`, `int8`, `int4` and `fp8`. The
            expected error of `eden` is smaller than x (`known_error`).
        known_error: the expectation of |x - C(x)|^2 / |x|^2, if it is about the same for every x of many elements, so
            that policies need not compress x to learn it; None for all others.
        sent_is_own: whether C(x) follows from this rank's x alone. It does not if ranks compress each other's chunks;
            a step then does not show how much of x this rank's compressor alone would have kept.
        in_units: whether the result is in the gradient's units, so that momentum can be computed from it.
        nested: whether compressing C(x) of a softer level at a harder level gives C(x) of the harder level. This holds
            for methods that keep elements of x.
        period: number of steps after which payload sizes repeat.
        keeps_state: whether the method has a state from step to step.
        of_matrices: whether the method treats a tensor as a matrix whose rows are the first dimension.
        form: name of the class's method that gives it a bucket form.
        reference: the publication.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    level_name: ClassVar[str | None] = None
    sends: ClassVar[str]
    biased: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    variance: ClassVar[float] = 0.0
    known_error: ClassVar[float | None] = None
    sent_is_own: ClassVar[bool] = True
    in_units: ClassVar[bool] = True
    nested: ClassVar[bool] = False
    period: ClassVar[int] = 1
    keeps_state: ClassVar[bool] = False
    of_matrices: ClassVar[bool] = False
    form: ClassVar[str] = "aggregate_bucket"
    reference: ClassVar[str] = ""

    # Methods that Horovod calls on a Compression.
    compress: ClassVar[Any] = HorovodMethod()
    decompress: ClassVar[Any] = HorovodMethod()

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Runs one step for one tensor: yields requests for collectives, is sent their answers, returns an `Outcome`.

        Args:
            xp: array functions for the framework of `x` (`hvdcomp.arrays`).
            x: this rank's gradient plus what its memory adds; not to be changed.
            state: the state from `prepare`.
            context: the tensor's name, the step, the seed, the rank and the number of ranks.
        """
        raise NotImplementedError

    @property
    def has_bucket_form(self) -> bool:
        """Whether the class itself defines a bucket form. An inherited one does not count: it would ignore what a
        subclass changes in `aggregate`."""
        return self.form in vars(type(self))

    @property
    def bucket_family(self) -> Hashable:
        """A key that is the same for all compressors whose tensors can share a bucket."""
        fields = {name: value for name, value in vars(self).items() if name != self.level_name}
        return type(self), tuple(fields.items())

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Runs one step for all tensors of a bucket: `aggregate` of each tensor, in compiled code.

        Optional: `aggregate` serves tensors that are in no bucket, and is the plain statement that tests compare the
        bucket form with.
        """
        raise NotImplementedError

    def preview(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context
    ) -> Array | SparseVector:
        """C(x) as if this rank were the only one; arguments as in `aggregate`."""
        return run_alone(checked.aggregate(self, xp, x, state, context))[0].sent

    def preview_bucket(self, bucket: Bucket) -> None:
        """Runs a bucket's step that has begun as if this rank were the only one, so that its results are C(x)."""
        run_alone(self.aggregate_bucket(bucket), bucket.context.world_size)

    def prepare(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        """The state that a step starts from: made anew if `state` is empty, else fitted to the present level."""
        return ()

    def route(self, tensor: TensorInfo) -> Compressor:
        """The compressor that a tensor gets: this one, or another if this one does not suit the tensor."""
        return self

    def method_for(self, tensor: TensorInfo) -> Compressor:
        """The method that serves a tensor, at its own level. Unlike `route` it does not fall back to dense where that
        level saves nothing, as another level may."""
        return self

    def leaves(self) -> Iterator[Compressor]:
        """The methods that tensors may get: this one, or the choices of a router."""
        yield self

    def name_patterns(self) -> Iterator[str]:
        """The patterns of tensor names by which a router chooses; none for other compressors."""
        yield from ()

    def wire_dtype(self, dtype: str) -> str | None:
        """The element type in which a plain allreduce carries the tensor; None if the method is more than a cast."""
        return None

    def payload_bytes(
        self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32", ranks: int = 1
    ) -> int:
        """Bytes that one rank hands to the collectives for a tensor in one step, indices and scales included.

        Counted by running `aggregate` on shapes; the mean of a period's steps.

        Args:
            shape: shape of the tensor.
            level: level to count at; the compressor's own by default.
            dtype: element type of the dense tensor.
            ranks: number of ranks; matters only if chunks are scattered.
        """
        return int(sum(payload.bytes for payload in self.at_level(level).payloads(shape, dtype, ranks)))

    def payloads(self, shape: tuple[int, ...], dtype: str = "float32", ranks: int = 1) -> tuple[SentPayload, ...]:
        """The payloads that `payload_bytes` adds up: one for each collective of a step, in order."""
        return payloads_of(self, tuple(shape), dtype, ranks if self.scatters(ranks) else 1)

    def scatters(self, ranks: int) -> bool:
        """Whether each of this number of ranks averages one chunk of a tensor for all ranks (`gathering`)."""
        return False

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        """Bytes that a rank hands to collectives for a tensor of a bucket in a step: in all, and within its node."""
        payloads = payloads_of_step(self, tensor.shape, tensor.dtype, context.step % self.period)
        return sum(payload.bytes for payload in payloads), 0

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        """The payload in the papers' unit: values sent, counted as 32-bit floats, without indices."""
        return self.payload_bytes(shape, level) / 4

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The level whose payload is nearest to dense bytes / `compression_factor`; None without a level."""
        if not compression_factor >= 1:
            raise SpecError(f"compression factor {compression_factor} is not allowed: it must be at least 1")
        return None

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The level for a compression factor of elements, without indices: it sends nearest to 1 /
        `compression_factor` of the tensor's elements, or as many 32-bit numbers in their place.

        The same as `level_for` for methods without indices.
        """
        return self.level_for(compression_factor, shape)

    def least_level(self, ranks: int) -> Level | None:
        """The smallest level that works with this number of ranks; None if every level does."""
        return None

    @property
    def default_memory(self) -> Memory:
        """The method's memory unless the user names one."""
        return ErrorFeedback() if self.biased else NoMemory()

    @property
    def level(self) -> Level | None:
        """How hard this compressor compresses, in its own unit; None if it has no level."""
        return None if self.level_name is None else getattr(self, self.level_name)

    def at_level(self, level: Level | None) -> Compressor:
        """The same method at another level (itself if `level` is None)."""
        if level is None:
            return self
        if self.level_name is None:
            raise SpecError(f"{self.name} has no level, so it cannot be set to level {level}")
        changes: dict[str, Any] = {self.level_name: level}
        return dataclasses.replace(self, **changes)


COUNT = Rule(lambda value: is_whole(value, 1) and value < 2**63, "a whole number of at least 1 and below 2**63")
Count = Annotated[int, COUNT]
"""No index is larger: numbers of rows, columns or elements from 2**63 on have no meaning."""

Rounds = Annotated[
    int, Rule(lambda value: is_whole(value, 1) and value <= 100, "a whole number of at least 1 and at most 100")
]
"""Repetitions within a step. More of them bring nothing, and a typing error could otherwise run without end."""


def require_count(method: str, **values: Any) -> None:
    """Raises SpecError unless every value is a whole number of at least 1 and below 2**63."""
    for name, value in values.items():
        if not COUNT.allows(value):
            raise SpecError(f"{method}: {name}={value} is not allowed; it must be {COUNT.allowed_text}")


def most_level_for(method: Compressor, compression_factor: float, shape: tuple[int, ...], allowed: range) -> int:
    """The highest level whose payload is at most dense bytes / `compression_factor`; the lowest allowed if none is."""
    budget = 4 * number_of_elements(shape) / compression_factor
    within = bisect_right(allowed, budget, key=lambda level: method.payload_bytes(shape, level))
    return allowed[max(0, within - 1)]
