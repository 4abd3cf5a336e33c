"""Which matrix a variable of TensorFlow is to PowerSGD, beside PyTorch's of the same layer."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.choice import Chooser
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.tensorflow.layout import matrix_of


@pytest.mark.parametrize(
    ("keras", "matrix"),
    [
        ((), ()),
        ((64,), (64,)),
        ((784, 10), (784, 10)),
        ((3, 3, 64, 128), (576, 128)),  # a convolution
        ((7, 7, 3, 64), (147, 64)),
        ((1, 1, 64, 256), (64, 256)),
        ((3, 3, 512, 1), (9, 512)),  # a depthwise convolution
        ((768, 12, 64), (768, 768)),  # queries of attention
        ((12, 64, 768), (768, 768)),  # what is behind its heads
        ((3, 0, 5), (3, 0)),
    ],
)
def test_rows_and_columns_are_fewest(keras: tuple[int, ...], matrix: tuple[int, ...]) -> None:
    assert matrix_of(keras) == matrix


def _info(shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("kernel", matrix_of(shape), in_framework=shape)


@pytest.mark.parametrize(("keras", "torch"), [((3, 3, 64, 128), (128, 64, 3, 3)), ((7, 7, 3, 64), (64, 3, 7, 7))])
def test_as_much_is_sent_as_in_pytorch(keras: tuple[int, ...], torch: tuple[int, ...]) -> None:
    for spec in ("powersgd:rank=4", "powersgd:rank=2,alternating=True", "atomo:rank=2"):
        compressor = parse_compressor(spec)
        ours, theirs = _info(keras), TensorInfo("kernel", torch)
        assert compressor.route(ours) is compressor.route(theirs) is compressor
        assert compressor.payload_floats(ours.shape) == compressor.payload_floats(theirs.shape)
        assert compressor.payload_bytes(ours.shape) == compressor.payload_bytes(theirs.shape)


def test_powersgd_finds_the_numbers_of_pytorch() -> None:
    """Of a gradient whose mean over the ranks has no more than the rank, both find all of it."""
    height, width, inputs, outputs = 3, 3, 16, 32
    rng = np.random.default_rng(0)
    factors = rng.standard_normal((2, outputs, 1)), rng.standard_normal((2, 1, inputs * height * width))
    torch = (factors[0] @ factors[1]).astype(np.float32).reshape(2, outputs, inputs, height, width)
    keras = np.ascontiguousarray(torch.transpose(0, 3, 4, 2, 1))

    def step(tensor: TensorInfo, gradients: np.ndarray) -> np.ndarray:
        def work(communicator: InProcessCommunicator) -> np.ndarray:
            engine = Engine(communicator, [tensor], parse_compressor("powersgd:rank=2"), min_numel=0)
            engine.begin()
            assert engine.plan["kernel"].name == "powersgd"
            given = gradients[communicator.rank].reshape(tensor.shape)
            return engine.step({"kernel": given})["kernel"].reshape(tensor.own_shape)

        first, second = run_ranks(2, work)
        np.testing.assert_array_equal(first, second)
        return first

    ours = step(_info(keras.shape[1:]), keras)
    theirs = step(TensorInfo("kernel", torch.shape[1:]), torch)
    np.testing.assert_allclose(ours, keras.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.transpose(3, 2, 0, 1), theirs, rtol=1e-4, atol=1e-4)


def test_rules_see_the_variable_s_own_dimensions() -> None:
    kernel, dense = _info((3, 3, 64, 128)), TensorInfo("dense", (64, 128))
    chosen = parse_compressor('{"ndim<4": "none", "*": "fp16"}')
    assert (chosen.route(kernel).name, chosen.route(dense).name) == ("fp16", "none")
    plan = Chooser([kernel, dense], parse_compressor("powersgd:rank=2"), min_ndim=3)
    assert plan.choose(plan.compressor, kernel).name == "powersgd"
    assert plan.choose(plan.compressor, dense).name == "none"
