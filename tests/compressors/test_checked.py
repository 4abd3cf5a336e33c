"""What hvdcomp says of mistakes in compressors of a user's own; ranks of one process. Real ranks: `multirank`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import hvdcomp
from hvdcomp import ConfigurationError, ErrorFeedback, SpecError, TwoLevel
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import checked
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.protocol import AllReduce, Context, Outcome, TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS, as_numpy, make
from tests.own_mistakes import BEFORE_STEPS, IN_STEPS, InPlace, Mine, OnRank1InStep2

NAME, SHAPE = "layer.weight", (4, 6)
# By ways to `aggregate`: a bucket's, of a small tensor in NumPy and of a large one in the framework; and no bucket's.
WAYS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "bucket": (SHAPE, "float32"), "large": ((300, 400), "float32"), "array": (SHAPE, "float64"),
}  # fmt: skip


def steps(
    compressor: Compressor, backend: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float32", count: int = 3
) -> Any:
    """The results of both ranks' last step, in NumPy, and what they keep back."""

    def work(communicator: InProcessCommunicator) -> tuple[np.ndarray, np.ndarray]:
        tensors = [TensorInfo(NAME, shape, dtype)]
        engine = Engine(communicator, tensors, compressor, ErrorFeedback(), min_numel=0)
        result = np.zeros(0)
        for step in range(count):
            x = np.random.default_rng([communicator.rank, step]).normal(size=shape)
            result = engine.step({NAME: make(backend, x, dtype)})[NAME]
        return as_numpy(result), as_numpy((engine.states[NAME].memory or (result,))[0])

    return run_ranks(2, work)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_half_of_x_is_sent_and_the_other_half_kept(way: str, backend: str) -> None:
    shape, dtype = WAYS[way]
    (first, left), (second, _) = steps(Mine(), backend, shape, dtype, count=1)
    x, other = (np.random.default_rng([rank, 0]).normal(size=shape) for rank in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, (x + other) / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(left, x / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", BEFORE_STEPS)
def test_a_mistake_is_named_before_the_first_step(kind: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        steps(kind(), "numpy", count=0)
    said = str(caught.value)
    assert kind.says in said
    assert said.startswith(f"mine, tensor '{NAME}' of shape [4, 6]: tests.own_mistakes.{kind.__name__}.")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*IN_STEPS, OnRank1InStep2])
def test_a_mistake_is_named_in_the_step(kind: type[Mine], way: str, backend: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        steps(kind(), backend, *WAYS[way])
    assert kind.says in str(caught.value)
    assert f"tensor '{NAME}' of shape {list(WAYS[way][0])}" in str(caught.value)


def test_the_cause_is_not_lost() -> None:
    with pytest.raises(ConfigurationError) as caught:
        steps(OnRank1InStep2(), "numpy")
    assert isinstance(caught.value.__cause__, KeyError)


def test_two_levels_name_the_method_within() -> None:
    with pytest.raises(ConfigurationError, match=r"InPlace\.aggregate changes x in place"):
        steps(TwoLevel(InPlace()), "numpy")


@dataclass(frozen=True)
class _ChangesAnswers(Mine):
    """Its own are the answers, which it may change."""

    def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
        mean = yield AllReduce(x)
        mean *= 0.5
        return Outcome(mean, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_may_be_changed_where_a_rank_is_alone_too(backend: str) -> None:
    x = make(backend, np.ones(SHAPE), "float32")
    sent = _ChangesAnswers().preview(arrays_for(x), x, (), Context(NAME, 0, 0, 0, 1))
    assert as_numpy(sent).tolist() == np.ones(SHAPE).tolist()


def test_a_result_may_be_x_itself_and_can_be_written_to() -> None:
    class Same(Mine):
        def aggregate(self, xp: Any, x: Any, state: Any, context: Any) -> Any:
            yield AllReduce(x)
            return Outcome(x, x)

    (result, _), _ = steps(Same(), "numpy", dtype="float64")
    result[0, 0] = 7
    assert result.flags.writeable


def test_the_class_is_looked_at_when_the_compression_is_made() -> None:
    @dataclass(frozen=True)
    class NoName(Compressor):
        rank: int = 1

    with pytest.raises(SpecError, match=r'NoName has no name, .*write name = "noname" in the class'):
        hvdcomp.Compression(NoName())

    @dataclass(frozen=True)
    class Lists(Mine):
        places: Any = ()

    hvdcomp.Compression(Lists((1, 2)))
    with pytest.raises(SpecError, match=r"Lists cannot be hashed \(unhashable type: 'list'\)"):
        hvdcomp.Compression(Lists([1, 2]))


def test_methods_of_hvdcomp_are_called_without_checks() -> None:
    x = np.ones(SHAPE, np.float32)
    method = hvdcomp.TopK(0.5)
    generator = checked.aggregate(method, arrays_for(x), x, (), Context(NAME, 0, 0, 0, 1))
    assert generator.gi_code is type(method).aggregate.__code__  # type: ignore[attr-defined]
