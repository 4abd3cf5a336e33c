"""The base class of compressors. A compressor is a frozen description of a method and its level. The generator
`aggregate` runs one step.

A compressor contains no tensors, so it may be shared, compared, hashed and printed. Arrays that a method needs in the
next step are its state: the caller passes the state in, and `aggregate` returns the new state.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Annotated, Any, ClassVar

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, Context, SparseVector, TensorInfo, run_alone
from hvdcomp.compressors.sizes import SentPayload, payloads_of, payloads_of_step
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.specs.described import Described, Rule, is_whole
from hvdcomp.specs.levels import Level


class HorovodMethod:
    """A descriptor for a method that Horovod calls on its `compression` argument, but that a compressor does not have.

    Users may pass a compressor, or its class, where Horovod expects a `Compression`. The descriptor then returns a
    function that raises an error, and the message shows what to write instead.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or self._function is None:
            return refuse_description(owner if instance is None else instance)
        return MethodType(self._function, instance)


def refuse_description(given: Any) -> Callable[..., None]:
    """A function that raises ConfigurationError. The message shows what to write in place of `compression=given`."""

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
        examples: example spec strings of the method, the most common first. The manual shows the first example. The
            tests of all compressors, and `hvdcomp bench encode`, use all examples.
        level_name: the name of the field that sets how strongly to compress (such as "ratio"), or None if the method
            has no such field.
        sends: a description, in words, of the payload that one rank sends for a tensor.
        biased: whether the expectation of the result over the method's random choices differs from the gradient. By
            default, biased methods use error feedback. The rounding of a cast does not count as bias.
        lossless: whether the receivers get the exact gradient.
        variance: a bound on E|x - C(x)|^2 / |x|^2 that holds for any tensor. The bound is given for unbiased methods
            whose error can be larger than x itself, and is 0 for all other methods. Biased methods omit a part of x, so
            their error is not larger than x. For `terngrad`, `globalqsgd`, `natural`, `int8`, `int4` and `fp8` it is 0
            too, because no element's error is larger than the largest element of x. The expected error of `eden` is
            smaller than x (`known_error`).
        known_error: the expectation of |x - C(x)|^2 / |x|^2, if it is about the same for every large x. Policies then
            need not compress x to measure the error. `known_error` is None for all other methods.
        sent_is_own: whether C(x), the decoded form of this rank's payload, depends only on this rank's x. `sent_is_own`
            is False if ranks compress each other's chunks. In this case, a step does not show how much of x this rank's
            compressor alone would have kept.
        in_units: whether the result is in the units of the gradient. If False, an optimizer cannot compute momentum
            from the result.
        nested: whether two compressions, first at a milder level and then at a stronger level, give the same result as
            one compression at the stronger level. `nested` is true for methods that keep elements of x unchanged.
        period: number of steps after which payload sizes repeat.
        keeps_state: whether the method has a state from step to step.
        of_matrices: whether the method treats a tensor as a matrix whose rows are the first dimension.
        form: name of the method of the class that implements the bucket form.
        reference: the publication that describes the method.
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

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Runs one step for one tensor. The generator yields requests for collectives, receives their results from the
        engine, and returns an `Outcome`.

        Args:
            xp: array functions for the framework of `x` (`hvdcomp.arrays`). `ArrayFunctions` lists the functions.
            x: this rank's gradient plus the residual or momentum that the memory adds. Do not change it. `Array` lists
                the attributes and operators that you may use.
            state: the state of the compressor, as returned by `prepare`.
            context: the tensor's name, the step, the seed, the rank and the number of ranks.
        """
        raise NotImplementedError

    @property
    def has_bucket_form(self) -> bool:
        """Whether the class itself defines a bucket form. An inherited bucket form does not count, because it would
        ignore the changes of a subclass to `aggregate`."""
        return self.form in vars(type(self))

    @property
    def bucket_family(self) -> Hashable:
        """A key that is the same for all compressors whose tensors can share a bucket."""
        fields = {name: value for name, value in vars(self).items() if name != self.level_name}
        return type(self), tuple(fields.items())

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Runs one step for all tensors of a bucket in compiled code, with the same results as calling `aggregate` for
        each tensor.

        This form is optional. Tensors that are in no bucket use `aggregate`. Tests also compare the bucket form with
        `aggregate`, which is the reference implementation.
        """
        raise NotImplementedError

    def preview(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Array | SparseVector:
        """Compresses x as if this rank were the only rank, and returns C(x), the decoded result. The arguments are
        those of `aggregate`."""
        return run_alone(checked.aggregate(self, xp, x, state, context))[0].sent

    def preview_bucket(self, bucket: Bucket) -> None:
        """Runs a bucket's step as if this rank were the only rank, so that the results are C(x). Call `bucket.begin`
        first."""
        run_alone(self.aggregate_bucket(bucket), bucket.context.world_size)

    def prepare(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        """The state at the beginning of a step. If `state` is empty, this is a new state; otherwise it is `state`,
        adapted to the current level."""
        return ()

    def route(self, tensor: TensorInfo) -> Compressor:
        """The compressor for a tensor. The result is this compressor, or a different compressor if this compressor does
        not suit the tensor."""
        return self

    def method_for(self, tensor: TensorInfo) -> Compressor:
        """The method for a tensor, at the method's own level. Unlike `route`, this function returns the method even if
        this level saves no bytes, because another level may save bytes."""
        return self

    def leaves(self) -> Iterator[Compressor]:
        """The methods that tensors may get: this method, or the choices of a router."""
        yield self

    def name_patterns(self) -> Iterator[str]:
        """The patterns of tensor names by which a router chooses. Other compressors have no patterns."""
        yield from ()

    def wire_dtype(self, dtype: str) -> str | None:
        """The element type in which a plain allreduce sends the tensor; None if the method is more than a cast."""
        return None

    def payload_bytes(
        self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32", ranks: int = 1
    ) -> int:
        """The bytes that one rank passes to the collectives for a tensor in one step, including indices and scales.

        The bytes are counted by running `aggregate` on arrays without values. If the bytes differ from step to step,
        the result is the mean over a period.

        Args:
            shape: shape of the tensor.
            level: the level at which the payload is sent. Default: the compressor's own level.
            dtype: element type of the uncompressed tensor.
            ranks: number of ranks. This number matters only for exchange "scatter".
        """
        return int(sum(payload.bytes for payload in self.at_level(level).payloads(shape, dtype, ranks)))

    def payloads(self, shape: tuple[int, ...], dtype: str = "float32", ranks: int = 1) -> tuple[SentPayload, ...]:
        """The payloads of a step, one for each collective, in order. `payload_bytes` adds up the bytes of the
        payloads."""
        return payloads_of(self, tuple(shape), dtype, ranks if self.scatters(ranks) else 1)

    def scatters(self, ranks: int) -> bool:
        """Whether, with this number of ranks, each rank averages one chunk of a tensor for all ranks (`gathering`)."""
        return False

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        """The bytes that a rank passes to collectives for a tensor of a bucket in a step: the total, and the bytes sent
        within its node."""
        payloads = payloads_of_step(self, tensor.shape, tensor.dtype, context.step % self.period)
        return sum(payload.bytes for payload in payloads), 0

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        """The payload in the unit that papers use: the values sent, counted as 32-bit floats, without indices."""
        return self.payload_bytes(shape, level) / 4

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The level whose payload is closest to dense bytes / `compression_factor`; None if the method has no level."""
        if not compression_factor >= 1:
            raise SpecError(f"compression factor {compression_factor} is not allowed: it must be at least 1")
        return None

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The level for a compression factor that counts elements instead of bytes. Indices do not count.

        At this level, the number of elements sent is closest to the tensor's elements / `compression_factor`. If a
        method sends numbers other than elements, its payload is counted in 32-bit numbers. For methods without indices,
        the result is the same as from `level_for`.
        """
        return self.level_for(compression_factor, shape)

    def least_level(self, ranks: int) -> Level | None:
        """The smallest level that works with this number of ranks; None if every level works."""
        return None

    @property
    def default_memory(self) -> Memory:
        """The memory that the method uses unless the user names a memory."""
        return ErrorFeedback() if self.biased else NoMemory()

    @property
    def level(self) -> Level | None:
        """How strongly this compressor compresses, in its own unit; None if it has no level."""
        return None if self.level_name is None else getattr(self, self.level_name)

    def at_level(self, level: Level | None) -> Compressor:
        """The same method at a different level. Returns this compressor if `level` is None."""
        if level is None:
            return self
        if self.level_name is None:
            raise SpecError(f"{self.name} has no level, so it cannot be set to level {level}")
        changes: dict[str, Any] = {self.level_name: level}
        return dataclasses.replace(self, **changes)


COUNT = Rule(lambda value: is_whole(value, 1) and value < 2**63, "a whole number of at least 1 and below 2**63")
Count = Annotated[int, COUNT]
"""A number of rows, columns or elements. No index is larger than 2**63 - 1, so larger numbers would have no meaning."""

Rounds = Annotated[
    int, Rule(lambda value: is_whole(value, 1) and value <= 100, "a whole number of at least 1 and at most 100")
]
"""A number of repetitions within a step. More repetitions bring no benefit. Without the limit, a typing error could
make a step run almost forever."""


def require_count(method: str, **values: Any) -> None:
    """Raises SpecError unless every value is a whole number of at least 1 and below 2**63."""
    for name, value in values.items():
        if not COUNT.allows(value):
            raise SpecError(f"{method}: {name}={value} is not allowed; it must be {COUNT.allowed_text}")


def most_level_for(method: Compressor, compression_factor: float, shape: tuple[int, ...], allowed: range) -> int:
    """The highest level whose payload is at most dense bytes / `compression_factor`; if there is no such level, the
    lowest allowed level."""
    budget = 4 * number_of_elements(shape) / compression_factor
    within = bisect_right(allowed, budget, key=lambda level: method.payload_bytes(shape, level))
    return allowed[max(0, within - 1)]
