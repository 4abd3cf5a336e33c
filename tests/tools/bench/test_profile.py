"""`hvdcomp profile`: it sees the parts of a training's steps, changes nothing in it, and says what `advise` would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hvdcomp.perfmodel import Adviser, EncodeTime, Setting, load
from hvdcomp.tools.bench import marks, watched
from hvdcomp.tools.bench.profile import _dense
from hvdcomp.tools.bench.watched import BACKWARD, EXCHANGE, FORWARD, OPTIMIZER, Watch, Watched
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.commands.advise import command as advise
from hvdcomp.tools.commands.advise import to_begin_with
from hvdcomp.tools.commands.profile import command
from hvdcomp.tools.train.options import SetupError, TrainingOptions
from hvdcomp.tools.train.simulation import on_simulated_ranks
from tests.device_clock import CUDA, Device
from tests.harness import CountingCommunicator
from tests.launched import available, run_ranks

PART_S = 1.0
_time = SimpleNamespace(now=0.0, perf_counter=lambda: _time.now)
"""In place of the module `time`: it stands still but while a part of a step takes its time."""


def _spend(seconds: float) -> None:
    _time.now += seconds


class _Slow(torch.autograd.Function):
    """Passes a value on, and takes its time backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _spend(2 * PART_S)
        return gradient


class _SlowModule(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x)


class _SlowSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        _spend(3 * PART_S)
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def _train(steps: int, passes: int = 1, other: bool = False, unwrapped: bool = False) -> list[torch.Tensor]:
    """A training whose parts take known times; its weights in the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), _SlowModule(), torch.nn.Linear(8, 2))
    if unwrapped:
        _create_state(_SlowSGD(model.parameters()))
    optimizer = _SlowSGD(model.parameters())
    beside = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(4, 8)).square().mean().backward()
        _spend(PART_S)  # as clipping would, or waiting for other ranks
        optimizer.step()
        if other:
            beside.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """As `hvd.broadcast_optimizer_state` does."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _watched(on_device: bool = False, **training: Any) -> tuple[Watched, list[torch.Tensor]]:
    """A watched training.

    Args:
        on_device: whether the parts take a device's time, and not the host's.
    """
    seen: list[Watched] = []
    watch = Watch(4, 2, seen.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "time", _time)
        if on_device:
            device = Device(patch)
            patch.setattr(watched, "mark", lambda _: marks.mark(CUDA))
            patch.setitem(globals(), "_spend", device.add)
        watch.start()
        try:
            weights = _train(9, **training)
        finally:
            watch.stop()
    assert watch.done
    if on_device:
        works_of_a_step = 3
        assert device.waits == [7 * works_of_a_step], "the host waits once, at the end of the watched steps"
    assert watch.seen == 6, "the first step shows the parameters, and those after the last are not looked at"
    (only,) = seen
    return only, weights


@pytest.mark.parametrize("on_device", [False, True])
def test_the_parts_of_a_step_are_told_apart_and_the_training_stays_as_it_is(on_device: bool) -> None:
    backward = torch.autograd.backward
    watched, weights = _watched(on_device)
    assert torch.autograd.backward is backward
    for own, alone in zip(weights, _train(9), strict=True):
        assert torch.equal(own, alone)
    taken = np.zeros(4)
    taken[[BACKWARD, EXCHANGE, OPTIMIZER]] = 2 * PART_S, PART_S, 3 * PART_S
    np.testing.assert_array_equal(watched.parts, [taken] * 4)
    assert watched.backward_passes == 1
    assert watched.optimizer is None
    names = [tensor.name for tensor in watched.workload.tensors()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (watched.ready[:, :2] == 1).all(), "the first layer's gradients come after what is slow"
    assert (watched.ready[:, 2:] == 0).all(), "the last layer's before"
    assert all(parameter.grad is not None for parameter in watched.workload.model.parameters())


def test_of_several_backward_passes_the_last_one_counts_and_other_optimizers_are_named() -> None:
    watched, _ = _watched(passes=3, other=True)
    assert watched.backward_passes == 3
    assert watched.more_optimizers == ("Adam",)
    assert (watched.parts[:, FORWARD] == 2 * 2 * PART_S).all()
    assert (watched.parts[:, BACKWARD] == 2 * PART_S).all()


def test_a_step_that_only_creates_an_optimizers_state_is_none_of_the_training() -> None:
    watched, _ = _watched(unwrapped=True)
    names = [tensor.name for tensor in watched.workload.tensors()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (watched.parts[:, BACKWARD] == 2 * PART_S).all()
    assert watched.more_optimizers == ()


def test_gradients_are_sent_and_counted_in_their_own_types() -> None:
    linear = (torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 2))
    workload = Workload(torch.nn.Sequential(*linear), torch.Tensor)
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert workload.dense_bytes == 2 * 72 + 4 * 18

    def run(ranks: Any) -> set[tuple[str, str, int]]:
        counted = CountingCommunicator(ranks.communicator)
        _dense(workload, SimpleNamespace(ranks=ranks), counted, 0.0)  # type: ignore[arg-type]
        return {(kind, dtype, size) for kind, dtype, _, size in counted.started}

    sent = on_simulated_ranks(TrainingOptions(simulate_ranks=2), run)
    assert sent == {("allreduce mean", "bfloat16", 2 * 72), ("allreduce mean", "float32", 4 * 18)}


def test_sharded_parameters_are_refused() -> None:
    watch = Watch(1, 0, print)
    watch.start()
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.device_mesh = "as a DTensor has"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    try:
        with pytest.raises(SetupError, match="the parameters are sharded"):
            optimizer.step()
    finally:
        watch.stop()


_DDP = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
for training in range(2):  # the first is profiled
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for _ in range(int(sys.argv[1])):
        loss = torch.nn.functional.cross_entropy(ddp(torch.randn(8, 64)), torch.randint(10, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("weights:", sum(parameter.detach().double().sum().item() for parameter in model.parameters()))
    dist.barrier()
dist.destroy_process_group()
"""
# As Horovod's examples do: they broadcast before they wrap the optimizer, or after.
_HOROVOD = """
import sys
import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
named = list(model.named_parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named) if sys.argv[1] == "wrap-first" else optimizer
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = optimizer if sys.argv[1] == "wrap-first" else hvd.DistributedOptimizer(optimizer, named)
while True:  # the profile ends it
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,))).backward()
    optimizer.step()
"""
_QUICK = ["--steps", "5", "--seconds", "1", "--compressor", "topk:ratio=0.01", "--compressor", "fp16"]


def _profile(folder: Path, controller: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    words = ["-m", "hvdcomp", "profile", *_QUICK, "--output", str(folder / "profile.json")]
    return run_ranks(2, controller, [*words, *arguments[:-1], str(script), *arguments[-1:]])


@pytest.mark.alone
@pytest.mark.thorough  # PyTorch may end a finished rank by SIGABRT (docs/ddp.md), mostly under load
@pytest.mark.skipif(not available("torchrun"), reason="torchrun is not installed")
def test_a_training_in_distributed_data_parallel_goes_on_as_if_it_had_not_been_profiled(tmp_path: Path) -> None:
    done = _profile(tmp_path, "torchrun", _DDP, "--go-on", "20")
    assert done.returncode == 0, done.stdout
    profiled, plain = (line for line in done.stdout.splitlines() if line.startswith("weights:"))
    assert profiled == plain
    assert "A step takes" in done.stdout
    facts = json.loads((tmp_path / "profile.json").read_text())["models"]["training"]
    assert {tensor["name"]: tensor["shape"] for tensor in facts["tensors"]}["0.weight"] == [128, 64]
    said = CliRunner().invoke(advise, ["--calibration", str(tmp_path / "profile.json"), "--world-size", "16", "--json"])
    report = json.loads(said.output)
    assert set(report["methods"]) == {"none", "fp16", "topk:ratio=0.01"}
    assert report["world_size"] == 16

    calibration = load(str(tmp_path / "profile.json"))
    facts = calibration.models["training"]
    times = {"none": 0.2, "topk:ratio=0.01": 0.0, "int8": 0.01, "int4": 0.02}
    encode = {spec: EncodeTime(seconds) for spec, seconds in times.items()}
    compute = replace(facts.compute, encode=encode)
    slow = replace(calibration, noise=0.0, models={"training": replace(facts, compute=compute)})
    assert facts.optimizer == "Adam"
    adviser = Adviser(slow)
    with_adam = to_begin_with(adviser, adviser.advise(Setting(2)))
    # Gathered, or scattered where that was measured too.
    best = r"in hvdcomp's own training runs, (int8(?::exchange=scatter)?) is the fastest"
    (found,) = re.findall(f"lost at most 2% of quality with Adam {best}", with_adam[0])
    assert f"from_spec('{found}')" in with_adam[1]
    adviser = Adviser(replace(slow, models={"training": replace(slow.models["training"], optimizer="SGD")}))
    with_sgd = to_begin_with(adviser, adviser.advise(Setting(2)))
    assert re.search(f"with SGD {best}", with_sgd[0]), "topk costs more than that with SGD"


@pytest.mark.thorough
@pytest.mark.skipif(not available("gloo"), reason="Horovod is not installed")
@pytest.mark.parametrize("order", ["broadcast-first", "wrap-first"])
def test_a_training_in_horovod_is_ended_with_advice(tmp_path: Path, order: str) -> None:
    done = _profile(tmp_path, "gloo", _HOROVOD, order)
    assert done.returncode == 0, done.stdout
    assert "Fastest: " in done.stdout
    assert "Wrote " in done.stdout
    assert "are left out" not in done.stdout, "all parameters belong to one optimizer"
    facts = json.loads((tmp_path / "profile.json").read_text())["models"]["training"]
    assert {tensor["name"]: tensor["shape"] for tensor in facts["tensors"]}["0.weight"] == [128, 64]


# In both, weights and data are random: what counts is that they stay the same.
_KERAS = """
import sys
import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras

hvd.init()
tf_keras.utils.set_random_seed(1)
layers = [tf_keras.layers.Dense(128, "relu", input_shape=(64,)), tf_keras.layers.Dense(10)]
model = tf_keras.Sequential(layers)
optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.AdamW(1e-3, jit_compile=False))
model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(hvd.rank())
count = int(sys.argv[1]) * 8
inputs, classes = rng.normal(size=(count, 64)).astype(np.float32), rng.integers(0, 10, count)
model.fit(inputs, classes, batch_size=8, shuffle=False, verbose=0)
if hvd.rank() == 0:
    print("weights:", sum(one.astype(np.float64).sum() for one in model.get_weights()))
"""
_TAPE = """
import horovod.tensorflow as hvd
import tensorflow as tf
import tf_keras

hvd.init()
variables = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 16], [1, 2])), tf.Variable(tf.zeros([64 * 16, 10]))]
optimizer = tf_keras.optimizers.SGD(0.1, jit_compile=False)

@tf.function
def step(images, classes):
    with tf.GradientTape() as tape:
        hidden = tf.reshape(tf.nn.relu(tf.nn.conv2d(images, variables[0], 1, "SAME")), [8, 64 * 16])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, hidden @ variables[1]))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))

while True:  # the profile ends it
    step(tf.random.normal([8, 8, 8, 8]), tf.random.uniform([8], 0, 10, tf.int32))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not available("gloo"), reason="Horovod is not installed")
def test_a_training_in_keras_goes_on_as_if_it_had_not_been_profiled(tmp_path: Path) -> None:
    pytest.importorskip("tf_keras")
    done = _profile(tmp_path, "gloo", _KERAS, "--go-on", "30")
    assert done.returncode == 0, done.stdout
    plain = run_ranks(2, "gloo", [str(tmp_path / "program.py"), "30"])
    (weights,) = [line for line in plain.stdout.splitlines() if "weights:" in line]
    assert weights in done.stdout.splitlines()
    assert "A step takes" in done.stdout
    facts = json.loads((tmp_path / "profile.json").read_text())["models"]["training"]
    assert {tensor["name"]: tensor["shape"] for tensor in facts["tensors"]}["dense/kernel"] == [64, 128]


@pytest.mark.thorough
@pytest.mark.skipif(not available("gloo"), reason="Horovod is not installed")
def test_a_training_with_a_tape_is_ended_with_advice(tmp_path: Path) -> None:
    pytest.importorskip("tf_keras")
    done = _profile(tmp_path, "gloo", _TAPE, "")
    assert done.returncode == 0, done.stdout
    assert "Fastest: " in done.stdout
    assert "Traceback" not in done.stdout
    facts = json.loads((tmp_path / "profile.json").read_text())["models"]["training"]
    assert [tensor["shape"] for tensor in facts["tensors"]] == [[72, 16], [1024, 10]], "as compressors see kernels"


@pytest.mark.thorough
@pytest.mark.skipif(not available("gloo"), reason="Horovod is not installed")
def test_keras_3_is_refused_on_every_rank(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    script = tmp_path / "program.py"
    script.write_text(_KERAS.replace("tf_keras", "keras").replace("jit_compile=False", ""))
    words = ["-m", "hvdcomp", "profile", *_QUICK, "--output", str(tmp_path / "profile.json"), str(script), "30"]
    done = run_ranks(2, "gloo", words, {"TF_USE_LEGACY_KERAS": "0"})
    assert done.returncode != 0
    assert "Error: AdamW is an optimizer of Keras 3" in done.stdout


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    for words, said in (
        ([str(tmp_path / "none.py")], "there is no file"),
        (["--", "python", str(tmp_path / "none.py")], f"there is no file {tmp_path}"),
        (["--compressor", "topk:ratio=2", str(script)], "ratio=2.0 is not allowed"),
        (["--output", str(tmp_path / "no" / "profile.json"), str(script)], "there is no folder"),
    ):
        done = CliRunner().invoke(command, words)
        assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.fixture
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets others, and its folder comes first."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


_ALONE = """
import sys
import torch

weight = torch.nn.Parameter(torch.ones(2))
if sys.argv[1] == "sharded":
    weight.device_mesh = "as a DTensor has"
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(16):
    if sys.argv[1] == "functional":
        (weight.grad,) = torch.autograd.grad(weight.sum(), [weight])
    else:
        weight.sum().backward()
    optimizer.step()
    if sys.argv[1] == "short" and step == 11:
        break
"""


@pytest.mark.usefixtures("own_arguments")
def test_a_training_that_cannot_be_profiled_ends_with_the_reason_and_is_watched_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ALONE)
    (tmp_path / "train_module.py").write_text(_ALONE)
    backward = torch.autograd.backward
    monkeypatch.syspath_prepend(tmp_path)
    for words, said in (
        ([str(script), "short"], "ended after 11 optimizer steps, and hvdcomp profile needs 10 + 5 steps: train"),
        ([str(script), "functional"], "made 16 optimizer steps without calling loss.backward()"),
        (["--", "python", str(script), "sharded"], "the parameters are sharded"),
        (["--", "python3", "-m", "train_module", "sharded"], "the parameters are sharded"),
    ):
        words = [*_QUICK, "--output", str(tmp_path / "p.json"), *words]
        done = CliRunner().invoke(command, words)
        assert (done.exit_code, said in done.output) == (1, True), done.output
        assert torch.autograd.backward is backward


@pytest.mark.thorough
def test_one_rank_has_no_network(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    alone = [line for line in _HOROVOD.splitlines() if "hvd" not in line]
    script.write_text("\n".join(alone))
    words = [sys.executable, "-m", "hvdcomp", "profile", *_QUICK, "--output", str(tmp_path / "p.json"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "there is only one rank, so there is no network to measure. Start several" in done.stderr
    assert "Or use the network of a preset, such as --network h100x8" in done.stderr


@pytest.mark.thorough
def test_one_rank_is_profiled_for_the_network_of_a_preset(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "p.json"
    script.write_text(_DDP)
    options = ["--network", "h100x8", *_QUICK, "--output", str(file)]
    done = run_ranks(1, "torchrun", ["-m", "hvdcomp", "profile", *options, str(script), "40"], timeout=300)
    assert done.returncode == 0, done.stdout
    assert "A step takes" in done.stdout
    assert "Measured exchanges" not in done.stdout, "one rank exchanges nothing"
    assert load(file).network == load("h100x8").network
    answer = CliRunner().invoke(advise, ["--calibration", str(file), "--json"])
    assert answer.exit_code == 0, answer.output
