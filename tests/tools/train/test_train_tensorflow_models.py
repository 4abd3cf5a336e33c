"""The models of `hvdcomp train` in TensorFlow: the same functions and initial distributions as in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
tf_keras = pytest.importorskip("tf_keras")
pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here: run `hvdcomp build-horovod`")

from hvdcomp.tools.train.frameworks import build_model  # noqa: E402
from hvdcomp.tools.train.options import IMAGE_MODELS, TEXT_MODELS, TORCH_MODELS, SetupError  # noqa: E402

# Of the VGG networks the quick tests have a small one, of one channel.
_SHAPES: list[Any] = [
    pytest.param(name, 3, 32, 10, marks=[pytest.mark.thorough] * (name in ("resnet18", "vgg16", "vgg19_bn")))
    for name in IMAGE_MODELS
    if name not in TORCH_MODELS
]
_WITHOUT_IMAGES = [("cnn1d", 2, 40, 10), ("lstm", 0, 0, 60), ("lstm", 0, 0, 1200), ("gpt", 0, 9, 60)]

_LSTM_NAMES = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh", "bias": "bias_ih", "recurrent_bias": "bias_hh"}


def torch_name(name: str) -> str:
    """The parameter or buffer of the PyTorch twin that is this variable."""
    path, *cell, kind = name.removesuffix(":0").split("/")
    if cell:
        layer, number = path.split(".")
        return f"{layer}.{_LSTM_NAMES[kind]}_{number}"
    kinds = {"kernel": "weight", "embeddings": "weight", "gamma": "weight", "beta": "bias"}
    kinds |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
    return f"{path}.{kinds.get(kind, kind)}"


def _as_torch(name: str, value: np.ndarray) -> torch.Tensor:
    """A variable's value in PyTorch's order of dimensions."""
    order = {4: (3, 2, 0, 1), 3: (2, 1, 0), 2: (1, 0)}.get(value.ndim)
    transposed = order is not None and not name.endswith("embeddings:0")
    return torch.from_numpy(np.ascontiguousarray(value.transpose(order)) if transposed else value)


def as_tensorflow(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter's value in TensorFlow's order of dimensions; undoes `_as_torch`."""
    order = {4: (2, 3, 1, 0), 3: (2, 1, 0), 2: (1, 0)}.get(value.ndim)
    return value if order is None or name.endswith("embeddings:0") else value.transpose(order)


def _twins(name: str, channels: int, size: int, classes: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    tf_keras.utils.set_random_seed(0)
    shape = {"channels": channels, "size": size, "classes": classes}
    return build_model(name, **shape), build_model(name, **shape, framework="tensorflow")


@pytest.mark.parametrize(
    ("name", "channels", "size", "classes"),
    [
        *(*_SHAPES, ("mlp", 1, 8, 5), ("cnn", 1, 8, 5), ("cnn", 3, 17, 5), ("resnet20", 1, 7, 5), ("vgg16", 1, 33, 5)),
        *_WITHOUT_IMAGES,
    ],
)
def test_models_are_the_same_function_of_the_same_parameters(name: str, channels: int, size: int, classes: int) -> None:
    ours, theirs = _twins(name, channels, size, classes)
    parameters = dict(ours.named_parameters())
    named = {torch_name(variable.name): variable for variable in theirs.trainable_variables}
    assert named.keys() == parameters.keys()
    state = {torch_name(v.name): _as_torch(v.name, v.numpy()) for v in theirs.variables}
    counters = {key: value for key, value in ours.state_dict().items() if key.endswith("num_batches_tracked")}
    ours.load_state_dict(state | counters)  # it is strict: the same names, the same shapes
    draws = np.random.default_rng(1)
    if name in TEXT_MODELS:
        inputs, targets = draws.integers(classes, size=(2, 2, 9))
    else:
        shape = (4, channels, size) if name == "cnn1d" else (4, channels, size, size)
        inputs = draws.standard_normal(shape).astype(np.float32)
        targets = draws.integers(classes, size=4)
    ours.eval()
    found = theirs(inputs, training=False).numpy()
    np.testing.assert_allclose(found, ours(torch.from_numpy(inputs)).detach().numpy(), rtol=1e-3, atol=1e-4)
    if name == "lstm" and classes >= 1000:
        return  # in training it drops out other values
    # In training: the loss, its gradients, and the running statistics that the step leaves.
    ours.train()
    logits = ours(torch.from_numpy(inputs))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(targets).flatten())
    loss.backward()
    with tf.GradientTape() as tape:
        logits = theirs(inputs, training=True)
        tf_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))
    gradients = tape.gradient(tf_loss, theirs.trainable_variables)
    assert float(tf_loss) == pytest.approx(loss.item(), rel=1e-3)
    for variable, gradient in zip(theirs.trainable_variables, gradients, strict=True):
        expected = parameters[torch_name(variable.name)].grad
        assert expected is not None
        got = _as_torch(variable.name, tf.convert_to_tensor(gradient).numpy())
        # Batch normalization of four samples, layer upon layer, magnifies what rounding differs by.
        assert torch.linalg.vector_norm(got - expected) <= 0.03 * torch.linalg.vector_norm(expected) + 1e-4
    buffers = dict(ours.named_buffers())
    for variable in theirs.non_trainable_variables:
        expected = buffers[torch_name(variable.name)].numpy()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "channels", "size", "classes"), [*_SHAPES, *_WITHOUT_IMAGES])
def test_initial_weights_have_the_same_distributions(name: str, channels: int, size: int, classes: int) -> None:
    ours, theirs = _twins(name, channels, size, classes)
    parameters = dict(ours.named_parameters())
    for variable in theirs.trainable_variables:
        expected, found = parameters[torch_name(variable.name)].detach().numpy(), variable.numpy()
        if found.size < 50:
            continue  # so few numbers tell nothing
        spread = 0.1 if found.size > 2000 else 0.4
        assert found.std() == pytest.approx(expected.std(), rel=spread), variable.name
        assert np.abs(found).max() == pytest.approx(np.abs(expected).max(), rel=0.5), variable.name
        assert abs(found.mean() - expected.mean()) <= 8 * expected.std() / found.size**0.5, variable.name


@pytest.mark.parametrize("name", ["mlp", "resnet20", "lstm", "gpt"])
def test_names_of_variables_do_not_depend_on_models_built_before(name: str) -> None:
    first, second = (_twins(name, 1, 8, 5)[1] for _ in range(2))
    assert [v.name for v in first.variables] == [v.name for v in second.variables]


def test_too_small_images_are_refused() -> None:
    with pytest.raises(SetupError, match="--model vgg16 needs images of at least 32x32"):
        build_model("vgg16", channels=1, size=8, classes=10, framework="tensorflow")
