"""The Hessian's largest eigenvalue against exact Hessians, and the regimes of hand-made sequences."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from benchmarks.diagnostics import HessianEigenvalue, RegimeRecord, largest_hessian_eigenvalue  # noqa: E402
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks  # noqa: E402

PRECISE: dict[str, Any] = {"iterations": 2000, "tolerance": 1e-9}


class Quadratic(nn.Module):
    """0.5 w' A w for each input, so that the Hessian of the mean is A."""

    def __init__(self, eigenvalues: list[float], seed: int = 3) -> None:
        super().__init__()
        size = len(eigenvalues)
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        self.matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
        self.w = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.w @ self.matrix @ self.w).expand(len(x))


def mean_of_output(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()


ONE_BATCH = [(torch.zeros(4), torch.zeros(4))]


def of_quadratic(eigenvalues: list[float], **options: Any) -> HessianEigenvalue:
    return largest_hessian_eigenvalue(Quadratic(eigenvalues), mean_of_output, ONE_BATCH, **{**PRECISE, **options})


@pytest.mark.parametrize(
    ("eigenvalues", "largest", "dominant"),
    [
        ([5.0, 2.0, 0.5, 0.0, -1.0], 5.0, 5.0),
        ([1.0, 3.0, -7.0, 0.2], 3.0, -7.0),
        ([-0.5, -2.0, -3.0], -0.5, -3.0),
        ([-4.0], -4.0, -4.0),
        ([-2.0, -2.0, -2.0], -2.0, -2.0),
        ([1.0, -50.0, 0.1], 1.0, -50.0),
    ],
)
def test_eigenvalues_of_a_quadratic_are_found_whatever_their_sign(
    eigenvalues: list[float], largest: float, dominant: float
) -> None:
    found = of_quadratic(eigenvalues)
    assert found.converged
    assert found.value == pytest.approx(largest, rel=1e-6)
    assert found.dominant == pytest.approx(dominant, rel=1e-6)


@pytest.mark.parametrize("other", [-4.0, -3.9999, -4.0001])
def test_two_eigenvalues_of_opposite_sign_do_not_pass_for_one_in_between(other: float) -> None:
    found = of_quadratic([4.0, other, 1.0], tolerance=1e-6)
    assert found.converged
    assert found.value == pytest.approx(4.0, rel=1e-4)


def test_a_flat_loss_has_no_curvature() -> None:
    model = nn.Linear(3, 1)
    found = largest_hessian_eigenvalue(model, mean_of_output, [(torch.ones(2, 3), torch.zeros(2))])
    assert (found.value, found.dominant, found.converged) == (0.0, 0.0, True)


def test_running_out_of_iterations_is_told() -> None:
    close = [2.0, 1.99, 1.98, 1.0, 0.5]
    found = of_quadratic(close, iterations=3)
    assert not found.converged
    assert found.iterations == 3
    assert found.relative_change > 1e-9
    assert found.value < 2.0
    longer = of_quadratic(close)
    assert longer.converged
    assert longer.relative_change <= 1e-9
    assert 3 < longer.iterations <= 2000
    negative = of_quadratic([1.0, -7.0], iterations=2)
    assert negative.iterations == 4  # two iterations with the shift after the first two
    assert not negative.converged
    shift_not_known = of_quadratic([3.0, -7.0, -6.9], iterations=40)
    assert shift_not_known.relative_change <= 1e-9
    assert not shift_not_known.converged


def logistic_data() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(5)
    x = draws.normal(size=(60, 6)) * np.array([3.0, 1.0, 1.0, 0.5, 2.0, 0.1])
    return x, (draws.random(60) < 0.4).astype(np.float64)


def logistic_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Flatten(0)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.linspace(-0.6, 0.9, 6).view(1, 6))
    return model


def test_logistic_regression_has_the_eigenvalue_of_its_exact_hessian() -> None:
    x, y = logistic_data()
    probability = 1 / (1 + np.exp(-x @ np.linspace(-0.6, 0.9, 6)))
    exact = np.linalg.eigvalsh(x.T @ (x * (probability * (1 - probability))[:, None]) / len(x))[-1]
    whole = [(torch.from_numpy(x), torch.from_numpy(y))]
    loss = nn.BCEWithLogitsLoss()
    found = largest_hessian_eigenvalue(logistic_model(), loss, whole, **PRECISE)
    assert found.value == pytest.approx(exact, rel=1e-6)
    for sizes in ([20, 20, 20], [1, 7, 52], [60, 0]):  # unequal batches count by their samples
        parts = list(zip(*(tensor.split(sizes) for tensor in whole[0]), strict=True))
        split = largest_hessian_eigenvalue(logistic_model(), loss, parts, **PRECISE)
        assert split.value == pytest.approx(exact, rel=1e-6)


def mlp_and_batches() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    return model, [(x[:25], y[:25]), (x[25:], y[25:])]


def exact_eigenvalues(model: nn.Module, batches: list[tuple[Tensor, Tensor]], names: list[str]) -> Tensor:
    """All eigenvalues of the Hessian of the mean cross-entropy with respect to the parameters named, ascending."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    shapes = {name: dict(model.named_parameters())[name] for name in names}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view_as(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    point = torch.cat([shape.detach().flatten() for shape in shapes.values()])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, point))


@pytest.mark.parametrize("names", [["0.weight", "0.bias", "2.weight", "2.bias"], ["2.weight"]])
def test_an_mlp_has_the_eigenvalue_of_its_exact_hessian(names: list[str]) -> None:
    model, batches = mlp_and_batches()
    exact = exact_eigenvalues(model, batches, names)
    parameters = [dict(model.named_parameters())[name] for name in names]
    found = largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), batches, parameters, **PRECISE)
    assert found.value == pytest.approx(exact[-1].item(), rel=1e-5)
    twice = largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), batches, [*parameters, *parameters], **PRECISE)
    assert twice == found
    negated = largest_hessian_eigenvalue(
        model, lambda output, y: -nn.functional.cross_entropy(output, y), batches, parameters, **PRECISE
    )
    assert negated.dominant == pytest.approx(-exact[-1].item(), rel=1e-5)
    assert negated.value == pytest.approx(-exact[0].item(), rel=1e-4, abs=1e-7)


def test_frozen_parameters_are_left_out() -> None:
    model, batches = mlp_and_batches()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "2.weight")
    exact = exact_eigenvalues(model, batches, ["2.weight"])[-1].item()
    found = largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), batches, **PRECISE)
    assert found.value == pytest.approx(exact, rel=1e-5)


def test_single_precision_gives_the_same_to_its_own_precision() -> None:
    model, batches = mlp_and_batches()
    exact = exact_eigenvalues(model, batches, [name for name, _ in model.named_parameters()])[-1].item()
    single = [(x.float(), y) for x, y in batches]
    found = largest_hessian_eigenvalue(model.float(), nn.CrossEntropyLoss(), single, iterations=500, tolerance=1e-6)
    assert found.converged
    assert found.value == pytest.approx(exact, rel=1e-3)


def noisy_model() -> nn.Module:
    """Batch normalization with buffers to update, and dropout that draws."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = noisy_model().train(training)
    batches = [(x.float(), y) for x, y in mlp_and_batches()[1]]
    stepped = []
    for parameter in model.parameters():
        # What Horovod hangs its exchange on must not run.
        parameter.register_post_accumulate_grad_hook(stepped.append)
        parameter.grad = torch.full_like(parameter, 2.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), batches)

    def failing(output: Tensor, targets: Tensor) -> Tensor:
        raise OSError("broken loss")

    with pytest.raises(OSError, match="broken loss"):
        largest_hessian_eigenvalue(model, failing, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all((parameter.grad == 2.0).all() for parameter in model.parameters())
    assert not stepped
    assert model.training is training
    model.train()(batches[0][0])  # in training it does update them
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])


def test_random_generators_are_left_alone_and_do_not_matter() -> None:
    """With dropout in training mode, and a DataLoader that shuffles by the global generator."""
    x, y = (torch.cat(parts) for parts in zip(*mlp_and_batches()[1], strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.float(), y), batch_size=16, shuffle=True)
    model, found = noisy_model(), []
    for state in (11, 12):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        found.append(largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), loader, iterations=200))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    assert found[0].converged  # each pass drew the same masks
    assert largest_hessian_eigenvalue(model, nn.CrossEntropyLoss(), loader, seed=1) != found[0]


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert of_quadratic([3.0, 1.0]).value == pytest.approx(3.0, rel=1e-6)


def averaging(communicator: InProcessCommunicator) -> Callable[[Tensor], Tensor]:
    return lambda vector: communicator.wait(communicator.start_allreduce(vector, "mean", "hessian"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_a_part_of_the_data_each_find_what_one_finds(ranks: int) -> None:
    x, y = (torch.from_numpy(array) for array in logistic_data())
    loss = nn.BCEWithLogitsLoss()
    alone = largest_hessian_eigenvalue(logistic_model(), loss, [(x, y)], **PRECISE)

    def on(communicator: InProcessCommunicator) -> HessianEigenvalue:
        shard = [(x[communicator.rank :: ranks], y[communicator.rank :: ranks])]
        return largest_hessian_eigenvalue(
            logistic_model(), loss, shard, reduce=averaging(communicator), iterations=200, tolerance=1e-9
        )

    with torch.random.fork_rng():  # these ranks are threads, and share the generator that is put back
        results = run_ranks(ranks, on)
    assert all(result == results[0] for result in results)
    assert results[0].value == pytest.approx(alone.value, rel=1e-6)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    x, y = (torch.from_numpy(array) for array in logistic_data())
    messages: dict[int, str] = {}

    def on(communicator: InProcessCommunicator) -> None:
        shard = [] if communicator.rank == 1 else [(x, y)]
        try:
            largest_hessian_eigenvalue(
                logistic_model(), nn.BCEWithLogitsLoss(), shard, reduce=averaging(communicator), iterations=5
            )
        except ValueError as error:
            messages[communicator.rank] = str(error)

    with torch.random.fork_rng():
        run_ranks(2, on)
    assert "not finite, here or on another rank" in messages[0]
    assert "batches is empty" in messages[1]


def a_call(**changes: Any) -> dict[str, Any]:
    """Arguments that work, with changes."""
    model = logistic_model()
    x, y = (torch.from_numpy(array) for array in logistic_data())
    return {"model": model, "loss_function": nn.BCEWithLogitsLoss(), "batches": [(x, y)], **changes}


X, Y = (torch.from_numpy(array) for array in logistic_data())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": 0}, "iterations=0 is not allowed"),
        ({"tolerance": 0.0}, r"tolerance=0\.0 is not allowed"),
        ({"tolerance": math.nan}, "tolerance=nan is not allowed"),
        ({"seed": -1}, "seed=-1 is not allowed"),
        ({"batches": []}, "batches is empty"),
        ({"batches": [(X[:0], Y[:0])]}, "batches is empty"),
        ({"batches": iter([(X, Y)])}, "can be iterated only once.*a list"),
        ({"batches": [X]}, r"batch 0 is a Tensor; give pairs"),
        ({"parameters": []}, "none of the 0 parameters requires a gradient"),
        ({"parameters": [torch.zeros(2)]}, "none of the 1 parameters requires a gradient"),
        ({"parameters": [nn.Parameter(torch.zeros(2))]}, "does not depend on any of the parameters"),
        ({"loss_function": nn.BCEWithLogitsLoss(reduction="none")}, r"a tensor of shape \(60,\).*scalar"),
        ({"loss_function": lambda output, y: 1.0}, "returned a float"),
        ({"loss_function": lambda output, y: output.detach().sum()}, r"batch 0 does not depend .*detach"),
        ({"batches": [(X, Y), (X * math.inf, Y)]}, "the loss of batch 1 is nan"),
        ({"loss_function": lambda output, y: output.abs().sqrt().sum() * 0, "batches": [(X * 0, Y)]}, "not finite"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = a_call(**changes)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        largest_hessian_eigenvalue(**arguments)
    assert torch.equal(torch.get_rng_state(), before)
    assert largest_hessian_eigenvalue(**a_call()).converged


class OnceOnly(torch.autograd.Function):
    """A square whose derivative cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def attention_loss(output: Tensor, y: Tensor) -> Tensor:
    tokens = output[:56].view(1, 1, 7, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).mean()


@pytest.mark.parametrize("loss", [lambda output, y: OnceOnly.apply(output).mean(), attention_loss])
def test_operations_without_a_second_derivative_are_named(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(.+\); use another implementation"):
        largest_hessian_eigenvalue(**a_call(loss_function=loss))


def test_other_errors_of_the_model_come_through_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        largest_hessian_eigenvalue(**a_call(batches=[(X[:, :4], Y)]))


def a_record(eigenvalues: list[Any], norms: list[float], **settings: Any) -> RegimeRecord:
    record = RegimeRecord(**settings)
    for eigenvalue, norm in zip(eigenvalues, norms, strict=True):
        record.note(eigenvalue=eigenvalue, gradient_norm=norm)
    return record


def test_epochs_are_critical_where_a_measure_changed_by_eta() -> None:
    #        exactly half, in either direction, is critical; 49 % less is not
    eigenvalues = [8.0, 4.0, 6.0, 6.1, 9.15, 4.7]
    norms = [1.0, 0.9, 0.45, 0.46, 0.1, 0.1]
    record = a_record(eigenvalues, norms, interval=1)
    assert record.critical("eigenvalue") == [True, True, True, False, True, False]
    assert record.critical("gradient_norm") == [True, False, True, False, True, False]
    assert record.agreement() == 4 / 5


def test_spans_of_several_epochs_compare_their_ends() -> None:
    eigenvalues = [None, None, 10.0, None, 50.0, 4.0, 1.0, None, 4.1, None]
    norms = [9.0, 9.0, 2.0, 0.0, 100.0, 1.9, 1.0, 1.0, 0.5, 7.0]
    record = a_record(eigenvalues, norms, interval=3)
    assert record.critical("eigenvalue") == [True] * 3 + [True] * 3 + [False] * 3 + [None]
    assert record.critical("gradient_norm") == [True] * 3 + [False] * 3 + [True] * 3 + [None]
    assert record.agreement() == 0.0
    assert [record.epochs, record.compares_next] == [10, False]


def test_eta_is_the_threshold() -> None:
    values = [10.0, 8.0, 7.5]
    assert a_record(values, values, interval=1, eta=0.2).critical("eigenvalue") == [True, True, False]
    assert a_record(values, values, interval=1, eta=0.21).critical("eigenvalue") == [True, False, False]
    assert a_record(values, values, interval=1, eta=0.05).critical("gradient_norm") == [True, True, True]


def test_what_cannot_be_compared_is_critical() -> None:
    record = a_record([-1.0, -1.0, 2.0, math.nan, 2.0, 2.0], [0.0, 0.0, 1.0, math.inf, 1.0, 1.0], interval=1)
    assert record.critical("eigenvalue") == [True, True, True, True, True, False]
    assert record.critical("gradient_norm") == [True, True, True, True, True, False]
    document = json.loads(json.dumps(record.as_json(), allow_nan=False))
    assert document["eigenvalue"]["values"] == [-1.0, -1.0, 2.0, None, 2.0, 2.0]
    assert document["gradient_norm"]["critical"] == record.critical("gradient_norm")
    assert (document["interval"], document["eta"], document["epochs"]) == (1, 0.5, 6)


def test_before_the_first_comparison_nothing_is_said_of_agreement() -> None:
    record = RegimeRecord(interval=2)
    assert (record.critical("eigenvalue"), record.agreement(), record.compares_next) == ([], None, False)
    record.note(eigenvalue=None, gradient_norm=1)
    assert (record.critical("eigenvalue"), record.compares_next) == ([None], True)
    record.note(eigenvalue=2, gradient_norm=1)
    assert (record.critical("eigenvalue"), record.agreement()) == ([True, True], None)


@pytest.mark.parametrize(
    ("noted", "message"),
    [
        ({"eigenvalue": None, "gradient_norm": 1.0}, "eigenvalue is None at the end of epoch 1"),
        ({"eigenvalue": "7", "gradient_norm": 1.0}, "eigenvalue='7' is not allowed"),
        ({"eigenvalue": 7.0, "gradient_norm": -1.0}, r"gradient_norm=-1\.0 is not allowed"),
        ({"eigenvalue": 7.0, "gradient_norm": None}, "gradient_norm=None is not allowed"),
    ],
)
def test_what_is_no_measure_is_not_noted(noted: dict[str, Any], message: str) -> None:
    record = RegimeRecord(interval=1)
    with pytest.raises(ValueError, match=message):
        record.note(**noted)
    assert record.epochs == len(record.eigenvalues) == 0


@pytest.mark.parametrize("settings", [{"interval": 0}, {"interval": 2.5}, {"eta": 0}, {"eta": math.nan}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.* is not allowed"):
        RegimeRecord(**settings)


def test_an_unknown_criterion_is_refused() -> None:
    with pytest.raises(ValueError, match="'loss' is unknown; choose one of eigenvalue, gradient_norm"):
        RegimeRecord().critical("loss")


def test_the_picture_shades_what_is_critical() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.diagnostics.plot import draw

    eigenvalues, norms = [8.0, 7.0, 3.0, -4.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.1, 1.2, 0.5]
    record = a_record(eigenvalues, norms, interval=2)
    figure = draw(record, losses=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0], decays=[4])
    shaded = [
        [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches] for axes in figure.get_axes()
    ]
    assert record.critical("eigenvalue") == [True] * 6
    assert shaded == [[], [(0.5, 6.5)], [(0.5, 2.5), (4.5, 6.5)]]
    assert [axes.get_yscale() for axes in figure.get_axes()] == ["log", "linear", "log"]
    assert [list(axes.lines[0].get_ydata()) for axes in figure.get_axes()][1:] == [eigenvalues, norms]
    assert [axes.lines[1].get_xdata()[0] for axes in figure.get_axes()] == [4.5] * 3
    assert len(draw(record).get_axes()) == 2
    with pytest.raises(ValueError, match="5 losses for 6 epochs"):
        draw(record, losses=[1.0] * 5)
    with pytest.raises(ValueError, match="the record is empty"):
        draw(RegimeRecord())


@pytest.mark.thorough
def test_the_benchmark_writes_what_it_measured(tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    options = ["--epochs", "2", "--milestone", "1", "--interval", "1", "--samples", "32"]
    command = [sys.executable, "-m", "benchmarks.diagnostics.critical_regimes", *options, "--output", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    document = json.loads((tmp_path / "critical_regimes.json").read_text())
    first, second = document["epochs"]
    assert second["train_loss"] < first["train_loss"]
    assert second["learning_rate"] == pytest.approx(first["learning_rate"] / 10)
    assert all(row["converged"] and row["eigenvalue"] > 0 and row["gradient_norm"] > 0 for row in (first, second))
    assert document["regimes"]["eigenvalue"]["values"] == [first["eigenvalue"], second["eigenvalue"]]
    assert (tmp_path / "critical_regimes.png").read_bytes().startswith(b"\x89PNG")
    assert "of the spans" in " ".join(shown.stdout.split())
