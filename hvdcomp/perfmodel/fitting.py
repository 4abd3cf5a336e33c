"""Finds the model of a calibration that has the same tensors as a training run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hvdcomp.arrays.types import number_of_elements
from hvdcomp.compressors import TensorInfo
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts
from hvdcomp.perfmodel.fields import CalibrationError


def model_of(calibration: Calibration, tensors: Iterable[TensorInfo], source: str, model: str | None) -> ModelFacts:
    """Finds the model of a calibration whose tensors have the same shapes and element types as the tensors of a
    training run. The names of tensors may differ.

    Args:
        calibration: the calibration to search.
        tensors: the tensors of the training run.
        source: file or preset that the calibration comes from, for messages.
        model: name of the only model to consider; None for all models.

    Raises:
        CalibrationError: if no model has the same tensors, or if several models do.
    """
    own = _shapes(tensors)
    if model is not None and model not in calibration.models:
        raise CalibrationError(f"{source} has no model {model!r}; its models are: {', '.join(calibration.models)}")
    named = {name: facts for name, facts in calibration.models.items() if model in (None, name)}
    # A sharded model may have the same shapes as an unsharded one. Policies do not support sharded models.
    unsharded = {name: facts for name, facts in named.items() if not facts.sharded}
    fitting = [name for name, facts in unsharded.items() if _shapes(facts.tensors) == own]
    if not fitting:
        sizes = ", ".join(f"{name} ({_size(_shapes(facts.tensors))})" for name, facts in named.items())
        raise CalibrationError(
            f"{source} was measured with a different model: the model of this training run has {_size(own)}, and the "
            f"calibration has {sizes}; calibrate with the model of this training run"
        )
    if len(fitting) > 1:
        raise CalibrationError(
            f"{source} has several models with the tensors of this training run; name one of them: "
            f"model={' or model='.join(fitting)}"
        )
    return calibration.models[fitting[0]]


def _shapes(tensors: Iterable[TensorInfo]) -> Counter[tuple[tuple[int, ...], str]]:
    return Counter((tensor.shape, tensor.dtype) for tensor in tensors if tensor.size)


def _size(shapes: Counter[tuple[tuple[int, ...], str]]) -> str:
    elements = sum(count * number_of_elements(shape) for (shape, _), count in shapes.items())
    return f"{sum(shapes.values())} tensors with {elements:,} elements"
