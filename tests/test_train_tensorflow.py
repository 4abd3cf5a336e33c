"""`hvdcomp train --framework tensorflow`: the same models, files and behaviour as in PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_ranks

pytest.importorskip("sklearn")
torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
tf_keras = pytest.importorskip("tf_keras")
pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here: run `hvdcomp build-horovod`")

from hvdcomp.bindings.base import PRESENCE_BYTES  # noqa: E402
from hvdcomp.train import environment  # noqa: E402
from hvdcomp.train.frameworks import build_model  # noqa: E402
from hvdcomp.train.options import MODELS, SetupError  # noqa: E402

_COMMAND = str(Path(sys.executable).parent / "hvdcomp")

# -- models

# Of the two VGG networks at 32x32 the quick tests have the one with batch normalization.
_SHAPES: list[Any] = [
    pytest.param(name, 3, 32, 10, marks=[pytest.mark.thorough] * (name == "vgg16")) for name in MODELS if name != "lstm"
]
_WITHOUT_IMAGES = [("lstm", 0, 0, 60), ("lstm", 0, 0, 1200)]

_LSTM_NAMES = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh", "bias": "bias_ih", "recurrent_bias": "bias_hh"}


def _torch_name(name: str) -> str:
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
    order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.ndim)
    transposed = order is not None and not name.endswith("embeddings:0")
    return torch.from_numpy(np.ascontiguousarray(value.transpose(order)) if transposed else value)


def _as_tensorflow(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter's value in TensorFlow's order of dimensions; undoes `_as_torch`."""
    order = {4: (2, 3, 1, 0), 2: (1, 0)}.get(value.ndim)
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
def test_models_are_the_same_function_of_the_same_parameters(
    name: str, channels: int, size: int, classes: int
) -> None:
    ours, theirs = _twins(name, channels, size, classes)
    parameters = dict(ours.named_parameters())
    named = {_torch_name(variable.name): variable for variable in theirs.trainable_variables}
    assert named.keys() == parameters.keys()
    state = {_torch_name(v.name): _as_torch(v.name, v.numpy()) for v in theirs.variables}
    counters = {key: value for key, value in ours.state_dict().items() if key.endswith("num_batches_tracked")}
    ours.load_state_dict(state | counters)  # it is strict: the same names, the same shapes
    draws = np.random.default_rng(1)
    if name == "lstm":
        inputs, targets = draws.integers(classes, size=(2, 2, 9))
    else:
        inputs = draws.standard_normal((4, channels, size, size)).astype(np.float32)
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
        expected = parameters[_torch_name(variable.name)].grad
        assert expected is not None
        got = _as_torch(variable.name, tf.convert_to_tensor(gradient).numpy())
        # Batch normalization of four samples, layer upon layer, magnifies what rounding differs by.
        assert torch.linalg.vector_norm(got - expected) <= 0.03 * torch.linalg.vector_norm(expected) + 1e-4
    buffers = dict(ours.named_buffers())
    for variable in theirs.non_trainable_variables:
        expected = buffers[_torch_name(variable.name)].numpy()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "channels", "size", "classes"), [*_SHAPES, *_WITHOUT_IMAGES])
def test_initial_weights_have_the_same_distributions(name: str, channels: int, size: int, classes: int) -> None:
    ours, theirs = _twins(name, channels, size, classes)
    parameters = dict(ours.named_parameters())
    for variable in theirs.trainable_variables:
        expected, found = parameters[_torch_name(variable.name)].detach().numpy(), variable.numpy()
        if found.size < 50:
            continue  # so few numbers tell nothing
        spread = 0.1 if found.size > 2000 else 0.4
        assert found.std() == pytest.approx(expected.std(), rel=spread), variable.name
        assert np.abs(found).max() == pytest.approx(np.abs(expected).max(), rel=0.5), variable.name
        assert abs(found.mean() - expected.mean()) <= 8 * expected.std() / found.size**0.5, variable.name


@pytest.mark.parametrize("name", ["mlp", "resnet20", "lstm"])
def test_names_of_variables_do_not_depend_on_models_built_before(name: str) -> None:
    first, second = (_twins(name, 1, 8, 5)[1] for _ in range(2))
    assert [v.name for v in first.variables] == [v.name for v in second.variables]


def test_too_small_images_are_refused() -> None:
    with pytest.raises(SetupError, match="--model vgg16 needs images of at least 32x32"):
        build_model("vgg16", channels=1, size=8, classes=10, framework="tensorflow")


# -- runs


def _ranks(controller: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(2, controller, [_COMMAND, "train", *options], {"COLUMNS": "160"}, timeout=200)


def _alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python arguments...` in one process, started by no launcher, and without the variable that Keras 2 may need."""
    mine = ("OPAL_", "OMPI_", "PMIX_", "HOROVOD_", "SLURM_", "TF_USE_LEGACY_KERAS")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=variables | {"COLUMNS": "160"},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def _both(tmp_path: Path, *options: str, in_torch: Path | None = None) -> tuple[Path, Path]:
    """The folders of a run in PyTorch, which may be there already, and of the same in TensorFlow; their files have the
    same fields."""
    folders = in_torch or tmp_path / "torch", tmp_path / "tensorflow"
    for framework, folder in zip(("torch", "tensorflow"), folders, strict=True):
        if folder != in_torch:
            done = _ranks("gloo", "--framework", framework, *options, "--output", str(folder))
            assert done.returncode == 0, done.stdout[-3000:]
    ours, theirs = map(_summary, folders)
    assert theirs.keys() == ours.keys()
    assert theirs["options"].keys() == ours["options"].keys()
    assert theirs["versions"].keys() - {"tensorflow", "tf_keras"} == ours["versions"].keys() - {"torch"}
    for summary in (ours, theirs):
        assert summary["status"] == "finished"
        assert summary["identical"] is True
        assert len(summary["weights_sha256"]) == 2
        assert len(set(summary["weights_sha256"])) == 1
    for key in ("model", "data", "spec", "steps", "epochs", "world_size", "parameters", "dense_bytes", "controller"):
        assert theirs[key] == ours[key], key
    for name in ("steps.jsonl", "epochs.jsonl"):
        lines = [_lines(folder / name) for folder in folders]
        assert [line.keys() for line in lines[0]] == [line.keys() for line in lines[1]]
    assert [path.name for path in sorted(folders[0].iterdir())] == [path.name for path in sorted(folders[1].iterdir())]
    return folders


def _repeated(tensors: int) -> int:
    """The bytes of a step by which ranks say more often in PyTorch that they take part: once for each tensor."""
    return PRESENCE_BYTES * (tensors - 1)


@pytest.mark.alone
def test_two_ranks_compress_and_agree(tmp_path: Path) -> None:
    from tests.test_train_run import run_on_two_ranks

    in_torch, _ = run_on_two_ranks("gloo")
    options = "--compression", "topk:ratio=0.01", "--epochs", "3"
    torch_folder, folder = _both(tmp_path, *options, in_torch=in_torch)
    ours, theirs = _summary(torch_folder), _summary(folder)
    assert (theirs["framework"], theirs["options"]["framework"]) == ("tensorflow", "tensorflow")
    assert theirs["bytes_sent"] + ours["steps"] * _repeated(8) == ours["bytes_sent"]
    assert theirs["floats_sent"] == ours["floats_sent"]
    assert theirs["accuracy"] > 0.85
    columns = [[(line["bytes_sent"] + more, line["learning_rate"]) for line in _lines(f / "steps.jsonl")] for f, more in
               ((torch_folder, 0), (folder, _repeated(8)))]  # fmt: skip
    assert columns[0] == columns[1]


@pytest.mark.alone
@pytest.mark.thorough
def test_a_policy_of_levels(tmp_path: Path) -> None:
    policy = "accordion:low=4,high=1,interval=1"
    options = ["--model", "mlp", "--compression", "powersgd:rank=4", "--policy", policy, "--epochs", "4"]
    torch_folder, folder = _both(tmp_path, *options, "--milestones", "3")
    assert _summary(folder)["accuracy"] > 0.9
    levels = {line["bytes_sent"] for line in _lines(folder / "steps.jsonl")[1:]}
    # Both begin at the low level. Afterwards the two trainings differ, and so may the tensors that are critical.
    assert max(levels) + _repeated(6) == max(line["bytes_sent"] for line in _lines(torch_folder / "steps.jsonl")[1:])
    kinds = [line["kind"] for line in _lines(folder / "decisions.jsonl")]
    assert kinds[0] == "start"
    assert kinds.count("decision") == 3
    assert len(levels) > 1, "the level changed while the graph stayed"


# Trains, and notes how often the step was traced: after the first step, and in the end.
_COUNTED = """
import sys
from pathlib import Path
from hvdcomp.train.options import TrainingOptions
from hvdcomp.train.tensorflow_learner import TensorFlowLearner
from hvdcomp.train.trainer import train

class Learner(TensorFlowLearner):
    counts = []

    def step(self, *arguments):
        loss = super().step(*arguments)
        self.counts.append(self._training.experimental_get_tracing_count())
        return loss

sys.modules["hvdcomp.train.tensorflow_learner"].TensorFlowLearner = Learner
policy = "accordion_batch_size:low=32,high=64,interval=1,lag=0"
options = {"compression": "topk:ratio=0.01", "policy": policy, "epochs": 5, "output": Path(sys.argv[1])}
train(TrainingOptions(framework="tensorflow", **options))
print("traced again", Learner.counts[-1] - Learner.counts[0], flush=True)
"""


@pytest.mark.alone
@pytest.mark.thorough
def test_a_policy_makes_the_batch_larger_without_another_trace(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_COUNTED)
    done = run_ranks(2, "gloo", [str(program), str(tmp_path / "run")], timeout=200)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("traced again 0\n") == 2
    lines = _lines(tmp_path / "run" / "steps.jsonl")
    per_epoch = [[line["accumulation"] for line in lines if line["epoch"] == epoch] for epoch in range(1, 6)]
    assert per_epoch[0] == [1] * 44
    assert [2] * 22 in per_epoch, "a larger batch makes fewer steps"
    assert all(epoch in ([1] * 44, [2] * 22) for epoch in per_epoch)
    summary = _summary(tmp_path / "run")
    assert summary["identical"] is True
    assert summary["accuracy"] > 0.85


# Makes some steps from given weights on given batches, and prints the losses, and one loss of evaluation.
_STEPS = """
import json, sys
import numpy as np
from hvdcomp.train import environment
environment.prepare_mpi()
from hvdcomp.train.data import load_data
from hvdcomp.train.frameworks import learner_class
from hvdcomp.train.ranks import Ranks
from hvdcomp.train.options import TrainingOptions

framework, weights, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
settings = TrainingOptions(framework=framework, **options).resolved()
data = load_data(settings)
make_learner = learner_class(framework)
ranks = Ranks(framework)
learner = make_learner(settings, data, ranks.rank)
if framework == "torch":
    np.savez(weights, **learner.parameters())
else:
    from tests.test_train_tensorflow import _as_tensorflow, _torch_name

    given = np.load(weights)
    for variable in learner._model.trainable_variables:
        variable.assign(_as_tensorflow(variable.name, given[_torch_name(variable.name)]))
learner.broadcast()
learner.distribute(learner.compression("none"))
learner.set_learning_rate(settings.lr)
size = settings.batch_size * settings.backward_passes_per_step
losses = []
for step in range(int(sys.argv[4])):
    batch = data.training_batch(np.arange(step * size, (step + 1) * size), np.random.default_rng(0))
    losses.append(learner.step(*batch, 1))
print("losses", json.dumps([*losses, *learner.evaluate(*data.test_batch(np.arange(100)))]))
"""


@pytest.mark.parametrize(("model", "steps"), [("cnn", 12), pytest.param("resnet20", 5, marks=pytest.mark.thorough)])
def test_a_step_does_what_it_does_in_torch(tmp_path: Path, model: str, steps: int) -> None:
    """Momentum of Nesterov's form, weight decay, clipping, two backward passes, running statistics."""
    step = {"weight_decay": 0.1, "nesterov": True, "clip_norm": 0.5, "backward_passes_per_step": 2}
    options = {"model": model, "data": "digits", "lr": 0.2, "batch_size": 16, **step}
    found = {}
    for framework in ("torch", "tensorflow"):
        done = _alone("-c", _STEPS, framework, str(tmp_path / "weights.npz"), json.dumps(options), str(steps))
        assert done.returncode == 0, done.stdout[-3000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("losses "))
        found[framework] = json.loads(line.removeprefix("losses "))
    *losses, test_loss, right = found["torch"]
    assert found["tensorflow"][:-2] == pytest.approx(losses, rel=0.01)
    assert found["tensorflow"][-2] == pytest.approx(test_loss, rel=0.05)
    assert found["tensorflow"][-1] == pytest.approx(right, abs=5)


@pytest.mark.alone
@pytest.mark.thorough
def test_ranks_and_backward_passes_make_one_batch(tmp_path: Path) -> None:
    """Two ranks of two passes of 8 see what one process with a batch of 32 sees, and learn the same."""
    common = ["--framework", "tensorflow", "--model", "mlp", "--samples", "320", "--epochs", "3", "--clip-norm", "0.5"]
    common += ["--warm-up", "1", "--milestones", "2", "--weight-decay", "0.01"]
    done = _alone(_COMMAND, "train", *common, "--batch-size", "32", "--output", str(tmp_path / "one"))
    assert done.returncode == 0, done.stdout
    split = ["--batch-size", "8", "--backward-passes-per-step", "2"]
    done = _ranks("mpi", *common, *split, "--output", str(tmp_path / "two"))
    assert done.returncode == 0, done.stdout[-3000:]
    one, two = (_summary(tmp_path / name) for name in ("one", "two"))
    assert (one["steps"], two["steps"]) == (30, 30)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)


@pytest.mark.alone
@pytest.mark.thorough
def test_batch_norm_on_two_ranks(tmp_path: Path) -> None:
    model = ["--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "256", "--epochs", "2"]
    _both(tmp_path, *model, "--batch-size", "16", "--backward-passes-per-step", "2")


@pytest.mark.alone
@pytest.mark.thorough
def test_language_model_with_mpi(tmp_path: Path) -> None:
    options = ["--model", "lstm", "--data", "stdlib-text", "--text-size", "40000", "--epochs", "3"]
    done = _ranks("mpi", "--framework", "tensorflow", *options, "--compression", "powersgd:rank=2",
                  "--output", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("tracing the graph") == 1, "rank 0 says why nothing comes for a while"
    summary = _summary(tmp_path)
    assert summary["ranks_per_host"] == 2
    assert (summary["identical"], summary["controller"]) == (True, "mpi")
    perplexities = [line["perplexity"] for line in _lines(tmp_path / "epochs.jsonl")]
    assert perplexities[-1] < 0.8 * perplexities[0]


@pytest.mark.alone
@pytest.mark.thorough
def test_what_a_step_refuses_is_said_in_one_line(tmp_path: Path) -> None:
    options = ["--compression", "topk:ratio=0.01", "--memory", "momentum_correction", "--output", str(tmp_path)]
    done = _ranks("mpi", "--framework", "tensorflow", *options)
    assert done.returncode != 0
    assert "Error: the optimizer has momentum=0.9, but momentum_correction applies momentum itself" in done.stdout
    assert "Traceback" not in done.stdout
    assert _summary(tmp_path)["status"] == "failed"


@pytest.mark.alone
@pytest.mark.thorough
def test_divergence_ends_the_run(tmp_path: Path) -> None:
    done = _ranks("mpi", "--framework", "tensorflow", "--model", "mlp", "--lr", "1e20", "--output", str(tmp_path))
    assert done.returncode != 0
    assert "the loss is no longer a finite number" in done.stdout
    assert "Traceback" not in done.stdout
    assert (_summary(tmp_path)["status"], _summary(tmp_path)["steps"]) == ("diverged", 20)


# -- one framework at a time

# Runs the command where the modules named first cannot be imported.
_WITHOUT = """
import sys
from importlib.machinery import ModuleSpec

hidden = sys.argv.pop(1).split(",")

class Hidden:
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Hidden) if name in hidden else None

    def create_module(spec):
        raise ImportError(f"No module named {spec.name!r}")

    exec_module = None

sys.meta_path.insert(0, Hidden)
from hvdcomp.cli import main
main(prog_name="hvdcomp")
"""


def _without(hidden: str, *options: str) -> subprocess.CompletedProcess[str]:
    short = ("--model", "mlp", "--samples", "64", "--epochs", "1")
    return _alone("-c", _WITHOUT, hidden, "train", *short, *options)


@pytest.mark.parametrize(
    ("framework", "other"), [("torch", "tensorflow,tf_keras,keras,horovod.tensorflow"), ("tensorflow", "torch")]
)
def test_each_framework_does_without_the_other(tmp_path: Path, framework: str, other: str) -> None:
    done = _without(other, "--framework", framework, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert _summary(tmp_path)["framework"] == framework


@pytest.mark.parametrize(
    "missing",
    ["tensorflow", pytest.param("tf_keras", marks=pytest.mark.thorough), "horovod.tensorflow"],
)
def test_what_is_missing_is_named_with_its_remedy(missing: str) -> None:
    done = _without(missing, "--framework", "tensorflow")
    assert done.returncode == 1
    assert f"Error: No module named '{missing}'; hvdcomp train --framework tensorflow needs TensorFlow" in done.stdout
    assert "pip install 'hvdcomp[tensorflow,train,build]', then hvdcomp build-horovod" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.thorough
def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    digests = []
    for run, seed in enumerate(("3", "3", "4")):
        folder = tmp_path / str(run)
        options = ("--model", "mlp", "--samples", "64", "--epochs", "1", "--seed", seed, "--output", str(folder))
        done = _alone(_COMMAND, "train", "--framework", "tensorflow", *options)
        assert done.returncode == 0, done.stdout[-3000:]
        digests += _summary(folder)["weights_sha256"]
    assert digests[0] == digests[1] != digests[2]


def test_versions_name_the_framework() -> None:
    assert environment.versions("tensorflow").keys() == {"python", "hvdcomp", "tensorflow", "tf_keras", "horovod"}
    assert environment.versions().keys() == {"python", "hvdcomp", "torch", "horovod"}
