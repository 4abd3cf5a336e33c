"""Names of TensorFlow's variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.tensorflow.names import stable_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["dense_7/kernel:0", "dense_7/bias:0", "dense_9/kernel:0"], ["dense/kernel", "dense/bias", "dense_1/kernel"]),
        (["dense/kernel:0", "dense_1/kernel:0"], ["dense/kernel", "dense_1/kernel"]),
        (["Variable:0", "Variable:0"], ["Variable", "Variable#2"]),
        (["block_2/conv_4/kernel:0", "block_1/conv_4/kernel:0"], ["block/conv/kernel", "block_1/conv/kernel"]),
    ],
)
def test_numbers_are_given_anew(names: list[str], expected: list[str]) -> None:
    assert stable_names(names) == expected


@given(st.lists(st.sampled_from(["dense", "dense_1", "dense_12", "conv", "conv_1#2"]), max_size=8), st.integers(1, 9))
def test_unique_and_the_same_in_a_model_made_later(layers: list[str], later: int) -> None:
    def made(offset: int) -> list[str]:
        return [f"{layer.partition('_')[0]}_{number + offset}/kernel:0" for number, layer in enumerate(layers)]

    names = stable_names(made(1))
    assert len(set(names)) == len(layers)
    assert stable_names(made(1 + later)) == names
    assert len(set(stable_names([f"{layer}/kernel:0" for layer in layers]))) == len(layers)
