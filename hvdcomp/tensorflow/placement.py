"""Where gradients are compressed: on the GPU where they lie, by PyTorch and its kernels, or else on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdcomp.errors import warn_alone
from hvdcomp.kernels import cuda

if TYPE_CHECKING:
    from hvdcomp.arrays.tensorflow_on_device import DeviceTensors


def device_of(variables: Iterable[tf.Variable], says: bool) -> DeviceTensors | None:
    """What hands gradients over to PyTorch, on the first variable's GPU; None where they are compressed on the host.

    Args:
        says: whether it warns if gradients lie on a GPU and are compressed on the host all the same.
    """
    there = [
        variable
        for variable in variables
        if (cuda.serves_host() or _on_gpu(variable)) and variable.shape.num_elements()
    ]
    if not there or tf.is_symbolic_tensor(getattr(there[0], "handle", there[0])):  # of a session of TensorFlow 1
        return None
    reason = _why_not(there[0])
    if not reason:
        from hvdcomp.arrays.tensorflow_on_device import DeviceTensors

        with tf.init_scope():  # the first step may be being traced
            return DeviceTensors(there[0].read_value())
    if says:
        warn_alone(f"gradients on the GPU are copied to the host and compressed there: {reason}")
    return None


def _why_not(variable: tf.Variable) -> str:
    """Why PyTorch cannot work where a variable is; empty where it can."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch is needed to compress on the GPU, and cannot be imported ({error})"
    if _on_gpu(variable) and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} is needed to compress on the GPU, and finds no CUDA device"
    return cuda.why_not() and f"{cuda.why_not()}. {cuda.way_out()}"


def _on_gpu(variable: tf.Variable) -> bool:
    return "GPU" in (variable.device or "")
