"""Which matrix a variable is to methods that take tensors for matrices.

To them the first dimension is that of the rows, as PyTorch has it: (out, in, height, width). In Keras the kernel of a
convolution is (height, width, in, out), that of a dense layer for attention (in, heads, size), and that of the layer
behind it (heads, size, out).
"""

from __future__ import annotations

from hvdcomp.arrays.types import number_of_elements


def matrix_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a variable as compressors see it, of the same elements in the same order.

    Dimensions are divided, in their order, where rows and columns are fewest together, so that least is sent: the last
    one of a kernel is that of the columns, as a rule. Of two dimensions or fewer, they stay.

    >>> matrix_of((3, 3, 64, 128)), matrix_of((768, 12, 64)), matrix_of((3, 3, 512, 1))
    ((576, 128), (768, 768), (9, 512))
    """
    if len(shape) <= 2:
        return shape
    divided = ((number_of_elements(shape[:place]), number_of_elements(shape[place:])) for place in range(1, len(shape)))
    return min(divided, key=sum)
