"""The matrix shape of a variable, for methods that work on matrices.

These methods use the first dimension as the rows of the matrix. This suits the convolution kernels of PyTorch, which
have the shape (out, in, height, width). Keras has other shapes: (height, width, in, out) for a convolution, (in, heads,
size) for a dense layer before attention, and (heads, size, out) for the dense layer after attention.
"""

from __future__ import annotations

from hvdcomp.arrays.types import number_of_elements


def matrix_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The matrix shape of a variable for compressors. The elements keep their order.

    The first dimensions become the rows, and the other dimensions become the columns. The dimensions are split so that
    the number of rows plus the number of columns is as small as possible, because this number determines how many bytes
    are sent. Kernels are usually split before the last dimension. Shapes with at most two dimensions do not change.

    >>> matrix_of((3, 3, 64, 128)), matrix_of((768, 12, 64)), matrix_of((3, 3, 512, 1))
    ((576, 128), (768, 768), (9, 512))
    """
    if len(shape) <= 2:
        return shape
    divided = ((number_of_elements(shape[:place]), number_of_elements(shape[place:])) for place in range(1, len(shape)))
    return min(divided, key=sum)
