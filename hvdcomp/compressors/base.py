"""What every compressor is: a frozen description of a method, with one knob, and a generator that runs it.

A compressor holds no tensors and may be shared, compared, hashed and printed. All arrays that outlive a step are
passed in and returned as its state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Annotated, Any, ClassVar

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.protocol import Aggregation, Context, SparseVector, TensorInfo, run_alone
from hvdcomp.compressors.sizes import Payload, payloads_of, payloads_of_step
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.kernels.tables import NARROW
from hvdcomp.specs.described import Described, Rule, is_whole
from hvdcomp.specs.levels import Level


class HorovodMethod:
    """A method that Horovod calls on what it was given.

    Of a class, or of a description that has no such method, it says what to write instead.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or self._function is None:
            return refuse_description(owner if instance is None else instance)
        return MethodType(self._function, instance)


def refuse_description(given: Any) -> Callable[..., None]:
    """A function that says what to write in place of `compression=given`."""

    def refuse(*_: Any) -> None:
        if isinstance(given, type):
            what = given.__name__
            instead = f".from_spec({getattr(given, 'examples', ('topk:ratio=0.01',))[0]!r})"
        else:
            what = repr(given)
            instead = f"(hvdcomp.{given!r})"
        raise ConfigurationError(
            f"compression=hvdcomp.{what} is not what Horovod can call; write compression=hvdcomp.Compression{instead}"
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
        sends: what one rank sends for a tensor, in words.
        biased: whether the mean of the result over the method's random choices differs from the gradient. Biased
            methods use error feedback unless told otherwise. A cast's rounding does not count.
        lossless: whether the receivers get the gradient itself.
        variance: for an unbiased method whose error can be larger than x itself, a bound of E|x - C(x)|^2 / |x|^2 that
            holds for any tensor. 0 for all others: biased methods leave out a part of x, and no element's error is
            larger than the largest element of x in `terngrad`, `globalqsgd`, `natural`, `int8`, `int4` and `fp8`.
        sent_is_own: whether C(x) follows from this rank's x alone. If the ranks work on each other's parts it does not,
            and a step does not show how much of x this rank would have kept by itself.
        harms_adam: whether error feedback of the method is known to let Adam learn badly (docs/adam.md).
        in_units: whether the result is in the units of gradients, so that momentum can be made of it.
        nested: whether C, applied at a harder level to what C kept of x at a softer level, gives what C gives of x at
            the harder level. Such methods keep elements of x.
        period: after how many steps the sizes of what is sent repeat.
        keeps_state: whether `prepare` and the outcome have arrays.
        of_matrices: whether a tensor's first dimension matters to it, as that of a matrix's rows.
        form: the method that makes the bucket form, where there is one.
        reference: where the method is published.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    level_name: ClassVar[str | None] = None
    sends: ClassVar[str]
    biased: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    variance: ClassVar[float] = 0.0
    sent_is_own: ClassVar[bool] = True
    harms_adam: ClassVar[bool] = False
    in_units: ClassVar[bool] = True
    nested: ClassVar[bool] = False
    period: ClassVar[int] = 1
    keeps_state: ClassVar[bool] = False
    of_matrices: ClassVar[bool] = False
    form: ClassVar[str] = "aggregate_bucket"
    reference: ClassVar[str] = ""

    # What Horovod calls of a Compression.
    compress: ClassVar[Any] = HorovodMethod()
    decompress: ClassVar[Any] = HorovodMethod()

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Runs one step for one tensor: yields collectives, is sent their answers, returns an `Outcome`.

        Args:
            xp: array functions for the framework of `x` (`hvdcomp.arrays`).
            x: this rank's gradient plus what its memory adds; not to be changed.
            state: what `prepare` returned, with the arrays of the previous step's outcome.
            context: the tensor's name, the step, the seed, the rank and the number of ranks.
        """
        raise NotImplementedError

    @property
    def has_bucket_form(self) -> bool:
        """Whether it has a bucket form. This must be the class's own: a subclass that changes the method would else be
        passed over."""
        return self.form in vars(type(self))

    @property
    def bucket_dtypes(self) -> Set[str]:
        """The element types of gradients that buckets take: float32, and where the method has a bucket form, those of
        16 bits. Without one, `aggregate` is to see the gradient's type."""
        return NARROW.keys() if self.has_bucket_form else {"float32"}

    @property
    def bucket_family(self) -> Hashable:
        """A key that is the same for all compressors whose tensors can share a bucket."""
        fields = {name: value for name, value in vars(self).items() if name != self.level_name}
        return type(self), tuple(fields.items())

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Runs one step for all tensors of a bucket; what `aggregate` does for each, in compiled code.

        A method does not need it: without it, `each_tensor` runs `aggregate` for each tensor of the bucket. Where it
        is, `aggregate` remains the plain statement that it is held against, and the way of tensors that no bucket
        takes.
        """
        raise NotImplementedError

    def preview(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context
    ) -> Array | SparseVector:
        """C(x) as if this rank were the only one that sends; arguments as of `aggregate`."""
        return run_alone(self.aggregate(xp, x, state, context))[0].sent

    def preview_bucket(self, bucket: Bucket) -> None:
        """Runs a bucket's step, which has begun, as if this rank were the only one that sends: its results are C(x)."""
        run_alone(self.aggregate_bucket(bucket), bucket.context.world_size)

    def prepare(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        """State to start a step from: made anew when `state` is empty, fitted to a level that has changed."""
        return ()

    def route(self, tensor: TensorInfo) -> Compressor:
        """The compressor that a tensor really gets: this one, or another where this one does not suit it."""
        return self

    def method_for(self, tensor: TensorInfo) -> Compressor:
        """The method that serves a tensor: as `route`, but at its own level, whether or not that saves anything of this
        tensor. At another level it may."""
        return self

    def leaves(self) -> Iterator[Compressor]:
        """The methods that tensors may get: this one; of a router those that it chooses from."""
        yield self

    def name_patterns(self) -> Iterator[str]:
        """The patterns of tensor names by which it chooses: none, but of a router, or of what has one inside."""
        yield from ()

    def wire_dtype(self, dtype: str) -> str | None:
        """The element type in which a plain allreduce carries the tensor; None if it takes more than a cast."""
        return None

    def payload_bytes(
        self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32", ranks: int = 1
    ) -> int:
        """Bytes that one rank hands to the collectives for a tensor in one step, indices and scales included.

        Counted by running `aggregate` on shapes; the mean of a period's steps.

        Args:
            shape: of the tensor.
            level: this compressor's own by default.
            dtype: element type of the dense tensor.
            ranks: that exchange them; it matters where chunks are scattered, and nowhere else.
        """
        return int(sum(payload.bytes for payload in self.at_level(level).payloads(shape, dtype, ranks)))

    def payloads(self, shape: tuple[int, ...], dtype: str = "float32", ranks: int = 1) -> tuple[Payload, ...]:
        """What `payload_bytes` is made of: the collectives of one step in order, one in each round."""
        return payloads_of(self, tuple(shape), dtype, ranks if self.payloads_sent(ranks) != 1 else 1)

    def payloads_sent(self, ranks: int) -> float:
        """How many payloads' worth one of this number of ranks sends in a step: one, unless chunks travel again."""
        return 1

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        """Bytes that a rank hands to the collectives for a tensor of a bucket in a step: in all, and of these to those
        of its node."""
        payloads = payloads_of_step(self, tensor.shape, tensor.dtype, context.step % self.period)
        sent = sum(payload.bytes for payload in payloads)
        return sent * self.payloads_sent(context.world_size), 0

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        """The same in the papers' unit: values sent, counted as 32-bit floats, indices left out."""
        return self.payload_bytes(shape, level) / 4

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The level whose payload is nearest to dense bytes / `compression_factor`; None without a level."""
        if not compression_factor >= 1:
            raise SpecError(f"compression factor {compression_factor} is not allowed: it must be at least 1")
        return None

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        """The same for a factor of elements, without indices: the level that sends nearest to 1 / `compression_factor`
        of the tensor's elements, or as many numbers of 32 bits in their place.

        That is `level_for` where no indices are sent.
        """
        return self.level_for(compression_factor, shape)

    def least_level(self, ranks: int) -> Level | None:
        """The smallest level that works with this number of ranks; None if every level does."""
        return None

    @property
    def default_memory(self) -> Memory:
        """The memory that the method is used with unless the user names one."""
        return ErrorFeedback() if self.biased else NoMemory()

    @property
    def level(self) -> Level | None:
        """How hard this compressor compresses, in its own terms; None if it has no such knob."""
        return None if self.level_name is None else getattr(self, self.level_name)

    def at_level(self, level: Level | None) -> Compressor:
        """The same method at another level (itself if `level` is None)."""
        if level is None:
            return self
        if self.level_name is None:
            raise SpecError(f"{self.name} has no level to set; it was given level {level}")
        changes: dict[str, Any] = {self.level_name: level}
        return dataclasses.replace(self, **changes)


COUNT = Rule(lambda value: is_whole(value, 1) and value < 2**63, "a whole number of at least 1 and below 2**63")
Count = Annotated[int, COUNT]
"""No index reaches further: more rows, columns or elements than 2**63 have no meaning."""

Rounds = Annotated[
    int, Rule(lambda value: is_whole(value, 1) and value <= 100, "a whole number of at least 1 and at most 100")
]
"""Repetitions within a step: more bring nothing, and a typing error would otherwise run without end."""


def require_count(method: str, **values: Any) -> None:
    """Raises SpecError unless every value is a whole number of at least 1 and below 2**63."""
    for name, value in values.items():
        if not COUNT.allows(value):
            raise SpecError(f"{method}: {name}={value} is not allowed; it must be {COUNT.what}")
