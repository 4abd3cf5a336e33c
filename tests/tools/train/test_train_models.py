"""The reference models: shapes, sizes as published, and that they learn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp.tools.train.data import load_data  # noqa: E402
from hvdcomp.tools.train.frameworks import build_model  # noqa: E402
from hvdcomp.tools.train.models import DLRM_SIZE  # noqa: E402
from hvdcomp.tools.train.options import IMAGE_MODELS, TEXT_MODELS, SetupError, TrainingOptions  # noqa: E402
from hvdcomp.tools.train.torch_learner import TorchLearner  # noqa: E402


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("classes", [10, 100])
def test_image_models_give_logits_per_class(name: str, classes: int) -> None:
    model = build_model(name, channels=3, size=32, classes=classes)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("mlp", 1, 8),
        ("cnn", 1, 8),
        ("cnn", 3, 4),
        ("cnn", 3, 17),
        ("resnet20", 1, 8),
        ("resnet18", 1, 8),
        ("vgg16", 1, 33),
        ("vit", 1, 8),
        ("vit", 3, 17),
    ],
)
def test_image_models_take_other_sizes(name: str, channels: int, size: int) -> None:
    model = build_model(name, channels=channels, size=size, classes=5)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "millions", "tolerance"),
    [
        ("resnet8", 0.078, 0.0005),
        ("resnet20", 0.27, 0.005),  # He et al. 2016, Table 6
        ("resnet18", 11.17, 0.01),
        # The convolutions of Simonyan and Zisserman's configurations D and E, and 512 x 10 weights.
        ("vgg16", 14.72, 0.01),
        ("vgg19_bn", 20.04, 0.01),
    ],
)
def test_number_of_parameters(name: str, millions: float, tolerance: float) -> None:
    model = build_model(name, channels=3, size=32, classes=10)
    assert _count(model) / 1e6 == pytest.approx(millions, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "convolutions"), [("resnet8", 7), ("resnet20", 19), ("resnet18", 17), ("vgg16", 13), ("vgg19_bn", 16)]
)
def test_depth_is_as_named(name: str, convolutions: int) -> None:
    model = build_model(name, channels=3, size=32, classes=10)
    kernels = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(kernels) == convolutions


def test_the_signal_model_takes_signals_of_any_length() -> None:
    for length in (40, 37):
        model = build_model("cnn1d", channels=2, size=length, classes=5)
        assert model(torch.randn(3, 2, length)).shape == (3, 5)


def test_the_gpt_is_as_large_as_documented_and_its_embedding_gives_the_logits() -> None:
    for name, millions in (("gpt", 0.37), ("gpt-mini", 10.8)):
        model = build_model(name, channels=0, size=128, classes=256)
        assert _count(model) / 1e6 == pytest.approx(millions, abs=0.05)
    found = model(torch.zeros(1, 3, dtype=torch.int64)).sum()
    found.backward()
    assert model.embedding.weight.grad[1:].abs().sum() > 0, "tokens that were not read have logits"


def test_the_vit_reads_patches_wherever_they_are_and_each_attends_to_all() -> None:
    torch.manual_seed(0)
    for size, channels, side in ((8, 1, 2), (32, 3, 4)):
        model = build_model("vit", channels=channels, size=size, classes=10)
        assert model.embedding.weight.shape == (64, channels, side, side)
        assert model.position.weight.shape == ((size // side) ** 2, 64)
    assert _count(build_model("vit", channels=1, size=8, classes=10)) / 1e6 == pytest.approx(0.20, abs=0.005)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    images = torch.randn(1, 3, 32, 32)
    changed = images.clone()
    changed[..., -1, -1] += 9.0  # of the last patch
    moved = images.roll((4, 4), dims=(2, 3))  # the same patches in other places
    for given in (images, changed, moved):
        model(given)
    assert ((seen[0] - seen[1]).abs().amax(dim=2) > 0).all(), "the first patch has seen the last"
    places = torch.arange(64).reshape(8, 8).roll((1, 1), dims=(0, 1)).flatten()
    assert not torch.allclose(seen[0][:, places], seen[2], atol=1e-3), "a place has no vector of its own"
    torch.nn.init.zeros_(model.position.weight)
    for given in (images, moved):
        model(given)
    torch.testing.assert_close(seen[3][:, places], seen[4])


@pytest.mark.parametrize(("name", "tokens", "hidden"), [("lstm", 90, 128), ("lstm", 2000, 650), ("gpt", 90, 96)])
def test_language_models_give_logits_per_token_and_do_not_look_ahead(name: str, tokens: int, hidden: int) -> None:
    model = build_model(name, channels=0, size=6, classes=tokens).eval()
    text = torch.randint(tokens, (2, 6))
    logits = model(text)
    assert logits.shape == (2, 6, tokens)
    assert (model.head.in_features if name == "lstm" else model.embedding.embedding_dim) == hidden
    changed = text.clone()
    changed[:, 4] = (text[:, 4] + 1) % tokens
    torch.testing.assert_close(model(changed)[:, :4], logits[:, :4])
    assert not torch.allclose(model(changed)[:, 4:], logits[:, 4:])


def test_the_encoder_knows_places_and_each_token_attends_to_all() -> None:
    torch.manual_seed(0)
    model = build_model("encoder", channels=0, size=6, classes=9).eval()
    tokens = torch.tensor([[4, 1, 7, 1, 3, 2]])
    logits = model(tokens)
    assert logits.shape == (1, 6, 9)
    changed = tokens.clone()
    changed[0, 5] = 8
    assert ((model(changed) - logits).abs().amax(dim=2) > 1e-6).all(), "the first token has seen the last"
    assert not torch.allclose(logits[0, 1], logits[0, 3], atol=1e-3), "equal tokens at two places"
    torch.nn.init.zeros_(model.position.weight)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(model(tokens[:, order]), model(tokens)[:, order])


@pytest.mark.parametrize(("name", "size"), [("vgg16", 8), ("vgg19_bn", 31), ("resnet18", 4), ("cnn", 3)])
def test_too_small_images_are_refused(name: str, size: int) -> None:
    with pytest.raises(SetupError, match=rf"--model {name} needs images of at least .* these have {size}x{size}.*mlp"):
        build_model(name, channels=1, size=size, classes=10)


@pytest.mark.parametrize("name", [
    "mlp", "cnn", "resnet8", pytest.param("resnet20", marks=pytest.mark.thorough),
    pytest.param("resnet18", marks=pytest.mark.thorough), "vit", "cnn1d", "encoder", "lstm", "gpt",
])  # fmt: skip
def test_models_learn_one_batch(name: str) -> None:
    torch.manual_seed(0)
    if name in TEXT_MODELS or name == "encoder":
        x, classes = torch.randint(20, (4, 8)), 20
        y = torch.randint(20, (4, 8))
    else:
        x, classes = torch.randn((8, 3, 8) if name == "cnn1d" else (8, 3, 8, 8)), 10
        y = torch.randint(10, (8,))
    model = build_model(name, channels=3, size=8, classes=classes)
    rate = {"lstm": 1.0, "gpt": 0.1, "vit": 0.05, "encoder": 0.05}.get(name, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_click_model_is_that_of_its_statement_and_learns() -> None:
    data = load_data(TrainingOptions(model="dlrm", data="clicks").resolved())
    torch.manual_seed(0)
    model = build_model("dlrm", channels=data.channels, size=data.size, classes=data.classes)
    x, y = (torch.from_numpy(array[:10_000]) for array in (data.model_input(data.train_x), data.train_y))
    below = model.bottom(x[:, :13])
    vectors = [below, *(table.weight[x[:, 13 + place].long()] for place, table in enumerate(model.tables))]
    products = [(a * b).sum(1) for place, a in enumerate(vectors) for b in vectors[place + 1 :]]
    torch.testing.assert_close(model(x), model.top(torch.cat([below, torch.stack(products, 1)], 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in torch.arange(10_000).split(128):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    rest = [torch.from_numpy(array) for array in data.validation]
    always = data.validation.y.mean()
    guessing = -(always * np.log(always) + (1 - always) * np.log(1 - always))
    assert torch.nn.functional.cross_entropy(model(rest[0]), rest[1]) < guessing - 0.03


def test_clicks_look_up_few_rows_often_and_ids_are_exact() -> None:
    data = load_data(TrainingOptions(model="dlrm", data="clicks").resolved())
    ids = data.train_x[:, 13:]
    assert ids.shape[1] == DLRM_SIZE.tables
    assert (ids == ids.astype(np.int64)).all()
    assert 0 <= ids.min() <= ids.max() < DLRM_SIZE.rows
    assert 0.85 < (ids < DLRM_SIZE.rows // 100).mean() < 0.95
    assert set(np.unique(data.train_y)) == {0, 1}
    assert len(data.validation.x) == 8000


def test_tables_are_trained_again_after_an_error_while_they_were_hidden() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2))
    learner = SimpleNamespace(_model=model, _tables=["0.weight"])

    def stop() -> None:
        assert not model[0].weight.requires_grad
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"), TorchLearner._without_tables(learner):  # type: ignore[arg-type]
        stop()
    assert model[0].weight.requires_grad
