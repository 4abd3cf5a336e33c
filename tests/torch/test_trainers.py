"""The parts for trainers, in one process: the files of ranks in checkpoints, and what is refused at once."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import hvdcomp
from hvdcomp import ConfigurationError
from tests.bindings.test_world import saved

torch = pytest.importorskip("torch")
trainers = pytest.importorskip("hvdcomp.torch.trainers")


class Loading:
    """Keeps the state that it is to load."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        assert self.state is not None
        return self.state


def restored(states: dict[int, dict[str, Any]], rank: int, ranks: int) -> dict[str, Any] | None:
    compression = Loading()
    trainers.restore(compression, states.get, rank, ranks, "FOLDER")
    return compression.state


def residuals(state: dict[str, Any] | None) -> list[list[Any]]:
    assert state is not None
    return [kept["arrays"][0].tolist() for _, kept in sorted(state["own"]["residuals"].items())]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_each_number_of_ranks_shares_out_what_three_ranks_have_saved(ranks: int) -> None:
    states = saved(3, "topk:ratio=0.1", "torch")
    files = dict(enumerate(states))
    for rank in range(ranks):
        expected = hvdcomp.state_for(states, rank, ranks)
        assert residuals(restored(files, rank, ranks)) == residuals(expected)


def test_a_rank_reads_only_the_files_that_it_needs() -> None:
    """With those of the hosts' own disks, all ranks have their own file alone."""
    for rank, state in enumerate(saved(3, "topk:ratio=0.1", "torch")):
        assert residuals(restored({rank: state}, rank, 3)) == residuals(state)


def test_a_missing_file_is_named_with_the_way_out() -> None:
    first, second, _ = saved(3, "topk:ratio=0.1", "torch")
    for states, rank, ranks, lost in (({0: first}, 1, 3, 1), ({0: first, 1: second}, 0, 2, 2)):
        with pytest.raises(ConfigurationError) as error:
            restored(states, rank, ranks)
        assert f"saved by 3 ranks. Rank {rank} of {ranks} needs the file of rank {lost}, which is missing" in str(
            error.value
        )
        assert "copy the checkpoint files of all hosts to this folder" in str(error.value)


def test_a_checkpoint_without_compression_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="'FOLDER' has no state of hvdcomp"):
        assert restored({}, 0, 2) is None
    with warnings.catch_warnings(action="error") if sys.version_info >= (3, 11) else warnings.catch_warnings():
        assert restored({}, 1, 2) is None
        assert restored({0: {}, 1: {}}, 1, 2) is None  # saved before the first step


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compression, file = Loading(), tmp_path / "checkpoint" / "compression0.pt"
    assert trainers.read(file) is None
    (compression.state,) = saved(1, "topk:ratio=0.1", "torch")
    trainers.save(compression, file)
    assert residuals(trainers.read(file)) == residuals(compression.state)

    def killed(state: dict[str, Any], unfinished: Path) -> None:
        unfinished.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trainers.save(compression, file)
    assert residuals(trainers.read(file)) == residuals(compression.state)


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_a_missing_library_is_named_with_the_extra_that_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"hvdcomp.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"hvdcomp.{name}")
    assert str(error.value) == (f"hvdcomp.{name} needs {name}, which is not installed: pip install 'hvdcomp[{name}]'")
    monkeypatch.delitem(vars(hvdcomp), name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="which is not installed"):
        getattr(hvdcomp, name)


def topk(**options: Any) -> hvdcomp.Compression:
    return hvdcomp.Compression(hvdcomp.TopK(ratio=0.01), **options)


def module_for(name: str) -> Any:
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'hvdcomp[{name}]'")
    return getattr(hvdcomp, name)


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("lightning", "CompressedStrategy"),
        ("lightning", "CompressedFabricStrategy"),
        ("transformers", "CompressionCallback"),
    ],
)
def test_what_is_no_compression_is_refused_when_it_is_given(library: str, name: str) -> None:
    kind = getattr(module_for(library), name)
    with pytest.raises(ConfigurationError, match=f"hvdcomp.{library}.{name} was given 'topk' as compression"):
        kind("topk")


@pytest.mark.parametrize(
    ("library", "name"), [("lightning", "CompressedStrategy"), ("transformers", "CompressionCallback")]
)
def test_a_policy_that_changes_the_batch_size_is_refused_at_once(library: str, name: str) -> None:
    kind = getattr(module_for(library), name)
    compression = topk(policy=hvdcomp.IncreaseBatchSize(low=128, high=2048), steps_per_epoch=100)
    with pytest.raises(
        ConfigurationError,
        match=r"changes the batch size, but the Trainer of .* decides by itself how it accumulates gradients",
    ):
        kind(compression)


def test_accelerate_names_what_register_needs() -> None:
    register = module_for("accelerate").register
    accelerate = importlib.import_module("accelerate")
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigurationError, match="a Linear as the argument accelerator"):
        register(model, topk(), None)
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=r"a Linear that .* num_processes=1, .*, and start two or more"):
        register(accelerator, accelerator.prepare(model), topk())


def trainer_of(folder: Path) -> Any:
    transformers = importlib.import_module("transformers")
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True)
    return transformers.Trainer(
        torch.nn.Linear(4, 4),
        arguments,
        train_dataset=[{}],
        callbacks=[hvdcomp.transformers.CompressionCallback(topk())],
    )


def test_transformers_on_one_rank_is_refused_with_the_command_to_start_two(tmp_path: Path) -> None:
    module_for("transformers")
    with pytest.raises(
        ConfigurationError, match=r"trains a Linear in 1 process, .* torchrun --nproc-per-node 2 PROGRAM"
    ):
        trainer_of(tmp_path).train()


def test_a_search_of_hyperparameters_is_refused_before_its_first_training(tmp_path: Path) -> None:
    module_for("transformers")
    trainer = trainer_of(tmp_path)
    trainer.state.is_hyper_param_search = True
    with pytest.raises(ConfigurationError, match=r"Search without hvdcomp\.transformers.CompressionCallback"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
