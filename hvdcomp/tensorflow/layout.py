"""The matrix shape of a variable, for methods that work on matrices.

These methods use the first dimension as the rows, as in PyTorch: (out, in, height, width). In Keras the kernel of a
convolution is (height, width, in, out), that of a dense layer for attention (in, heads, size), and that of the layer
after it (heads, size, out).
"""

from __future__ import annotations

from hvdcomp.arrays.types import number_of_elements


def matrix_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a variable for compressors, with the same elements in the same order.

    Dimensions are split, in their order, where the sum of rows and columns is smallest, so that the fewest bytes are
    sent: usually before the last dimension of a kernel. Shapes of two dimensions or fewer do not change.

    >>> matrix_of((3, 3, 64, 128)), matrix_of((768, 12, 64)), matrix_of((3, 3, 512, 1))
    ((576, 128), (768, 768), (9, 512))
    """
    if len(shape) <= 2:
        return shape
    divided = ((number_of_elements(shape[:place]), number_of_elements(shape[place:])) for place in range(1, len(shape)))
    return min(divided, key=sum)
