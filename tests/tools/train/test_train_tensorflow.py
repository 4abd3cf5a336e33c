"""`hvdcomp train --framework tensorflow`: the same files and behavior as in PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launched import run_ranks

pytest.importorskip("sklearn")
pytest.importorskip("torch")
pytest.importorskip("tensorflow")
pytest.importorskip("tf_keras")
pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here: run `hvdcomp build-horovod`")

from hvdcomp.bindings.base import PRESENCE_BYTES
from hvdcomp.tools.train import environment

_COMMAND = str(Path(sys.executable).parent / "hvdcomp")

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
        cwd=Path(__file__).parents[3],
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
@pytest.mark.thorough
def test_two_ranks_compress_and_agree(tmp_path: Path) -> None:
    from tests.tools.train.test_train_run import run_on_two_ranks

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
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.tensorflow_learner import TensorFlowLearner
from hvdcomp.tools.train.trainer import train

class Learner(TensorFlowLearner):
    counts = []

    def step(self, *arguments):
        loss = super().step(*arguments)
        self.counts.append(self._training.experimental_get_tracing_count())
        return loss

sys.modules["hvdcomp.tools.train.tensorflow_learner"].TensorFlowLearner = Learner
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
from hvdcomp.tools.train import environment
environment.prepare_mpi()
from hvdcomp.tools.train.data import load_data
from hvdcomp.tools.train.frameworks import learner_class
from hvdcomp.tools.train.ranks_horovod import HorovodRanks
from hvdcomp.tools.train.options import TrainingOptions

framework, weights, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
settings = TrainingOptions(framework=framework, **options).resolved()
data = load_data(settings)
make_learner = learner_class(framework)
ranks = HorovodRanks(framework)
learner = make_learner(settings, data, ranks)
if framework == "torch":
    np.savez(weights, **learner.parameters())
else:
    from tests.tools.train.test_train_tensorflow_models import as_tensorflow, torch_name

    given = np.load(weights)
    for variable in learner._model.trainable_variables:
        variable.assign(as_tensorflow(variable.name, given[torch_name(variable.name)]))
learner.broadcast()
learner.distribute(learner.compression("none"))
learner.set_learning_rate(settings.lr)
size = settings.batch_size * settings.backward_passes_per_step
losses = []
for step in range(int(sys.argv[4])):
    batch = data.training_batch(np.arange(step * size, (step + 1) * size), np.random.default_rng(0))
    losses.append(learner.step(*batch, 1))
tested = data.model_input(data.test.x[:100]), data.test.y[:100]
print("losses", json.dumps([*losses, *learner.evaluate(*tested)]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "steps"), [("cnn", 12), ("resnet20", 5)])
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
    assert "Error: the optimizer has momentum=0.9, but momentum_correction already applies momentum" in done.stdout
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
from hvdcomp.tools.cli import main
main(prog_name="hvdcomp")
"""


def _without(hidden: str, *options: str) -> subprocess.CompletedProcess[str]:
    short = ("--model", "mlp", "--samples", "64", "--epochs", "1")
    return _alone("-c", _WITHOUT, hidden, "train", *short, *options)


@pytest.mark.parametrize(
    ("framework", "other"),
    [
        ("torch", "tensorflow,tf_keras,keras,horovod.tensorflow"),
        pytest.param("tensorflow", "torch", marks=pytest.mark.thorough),
    ],
)
def test_each_framework_does_without_the_other(tmp_path: Path, framework: str, other: str) -> None:
    done = _without(other, "--framework", framework, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert _summary(tmp_path)["framework"] == framework


@pytest.mark.parametrize(
    "missing",
    ["tensorflow", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("tf_keras", "horovod.tensorflow"))],
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
