"""The parts of the training program that differ between frameworks. Only the chosen framework is imported."""

from __future__ import annotations

from typing import Any

from hvdcomp.tools.train.learner import Learner
from hvdcomp.tools.train.options import SIMULATED


def learner_class(framework: str, backend: str = "horovod", fsdp: bool = False) -> type[Learner]:
    """The learner class for a framework and a backend. The framework and the backend are imported only here.

    Args:
        framework: name of the framework, one of `options.FRAMEWORKS`.
        backend: kind of ranks: "horovod", "ddp" or "simulated", as in `Ranks.backend`.
        fsdp: whether each rank has only a shard of the model, with "ddp".

    Raises:
        ImportError: if the framework, or Horovod for this framework, is not installed.
    """
    if backend == SIMULATED and framework == "tensorflow":
        from hvdcomp.tools.train.simulated_keras_learner import SimulatedKerasLearner

        return SimulatedKerasLearner
    if backend == SIMULATED:
        from hvdcomp.tools.train.simulated_learner import SimulatedLearner

        return SimulatedLearner
    if backend == "ddp" and fsdp:
        from hvdcomp.tools.train.fsdp_learner import FSDPLearner

        return FSDPLearner
    if backend == "ddp":
        from hvdcomp.tools.train.ddp_learner import DDPLearner

        return DDPLearner
    if framework == "torch":
        from hvdcomp.tools.train.horovod_learner import HorovodLearner

        return HorovodLearner
    from hvdcomp.tools.train.tensorflow_learner import TensorFlowLearner

    return TensorFlowLearner


def build_model(name: str, *, channels: int, size: int, classes: int, framework: str = "torch") -> Any:
    """Creates a model for data of this shape. The model is a `torch.nn.Module` or a `tf_keras.Model`.

    Args:
        name: name of the model, one of `options.MODELS`. Models in `options.TORCH_MODELS` exist only in PyTorch.
        channels, size: the number of channels of the images, and their height and width in pixels. Language models
            ignore both.
        classes: the number of different labels, or of tokens in the vocabulary.
        framework: name of the framework, one of `options.FRAMEWORKS`.

    Raises:
        SetupError: if the images are too small for the network's pooling.
    """
    if framework == "torch":
        from hvdcomp.tools.train import models_torch

        return models_torch.build_model(name, channels=channels, size=size, classes=classes)
    from hvdcomp.tools.train import models_tensorflow

    return models_tensorflow.build_model(name, channels=channels, size=size, classes=classes)
