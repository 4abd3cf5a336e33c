"""Chooses where to compress: on the GPU of the gradients, with PyTorch and its kernels, or on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdcomp.errors import warn_alone
from hvdcomp.kernels import cuda

if TYPE_CHECKING:
    from hvdcomp.arrays.tensorflow_on_device import DeviceTensors


def device_of(variables: Iterable[tf.Variable], warns: bool) -> DeviceTensors | None:
    """The converter between TensorFlow's gradients and PyTorch on the GPU of the first variable; None to compress on
    the host.

    Args:
        variables: the trained variables.
        warns: whether to warn if gradients are on a GPU but are compressed on the host.
    """
    on_gpu = [
        variable
        for variable in variables
        if (cuda.serves_host() or _on_gpu(variable)) and variable.shape.num_elements()
    ]
    if not on_gpu or tf.is_symbolic_tensor(getattr(on_gpu[0], "handle", on_gpu[0])):  # a session of TensorFlow 1
        return None
    reason = _why_not(on_gpu[0])
    if not reason:
        from hvdcomp.arrays.tensorflow_on_device import DeviceTensors

        with tf.init_scope():  # TensorFlow may be tracing the first step
            return DeviceTensors(on_gpu[0].read_value())
    if warns:
        warn_alone(f"gradients on the GPU are copied to the host and compressed there: {reason}")
    return None


def _why_not(variable: tf.Variable) -> str:
    """The reason why PyTorch cannot use the device of a variable; "" if it can."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"compression on the GPU needs PyTorch, which cannot be imported ({error})"
    if _on_gpu(variable) and not torch.cuda.is_available():
        return f"compression on the GPU needs PyTorch for CUDA, but PyTorch {torch.__version__} finds no CUDA device"
    return cuda.why_not() and f"{cuda.why_not()}. {cuda.way_out()}"


def _on_gpu(variable: tf.Variable) -> bool:
    return "GPU" in (variable.device or "")
