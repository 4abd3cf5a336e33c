"""What bindings of all frameworks share, with the binding that docs/your-own-framework.md writes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcomp
from hvdcomp import ConfigurationError, RankMismatchError, kernels
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from tests.docs.test_docs_examples import DOCS, program


@cache
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program((DOCS / "your-own-framework.md").read_text(encoding="utf-8")), "page", "exec"), names)
    return names


def bound(communicator: InProcessCommunicator, value: float = 1.0, rate: float = 0.1, **options: Any) -> Any:
    compression = hvdcomp.Compression.from_spec(**{"spec": "topk:ratio=0.1", **options})
    setup = Setup(
        compression=compression,
        parameters={"w": np.full((64, 64), value, np.float32)},
        process_set=None,
        grad_scaler=None,
        optimizer=None,
    )
    return page()["NumpyBinding"](setup, page()["Ranks"](communicator.group, communicator.rank), rate)


def gradients(communicator: InProcessCommunicator) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(communicator.rank).normal(size=(64, 64)).astype(np.float32)}


def messages(*ranks: dict[str, Any]) -> list[str]:
    """What each rank is told in its first step, made with these arguments of `bound`."""

    def work(communicator: InProcessCommunicator) -> str:
        binding = bound(communicator, **ranks[communicator.rank])
        with pytest.raises((RankMismatchError, ConfigurationError)) as caught:
            binding.average(gradients(communicator))
        assert not binding.engine.step_number
        return str(caught.value)

    return list(run_ranks(len(ranks), work))


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ({"seed": 1}, "seed: 0 on rank 0, 1 on rank 1"),
        ({"rate": 0.2}, "learning rate: 0.1 on rank 0, 0.2 on rank 1"),
        ({"spec": "topk:ratio=0.2"}, "compressor: topk:ratio=0.1 on rank 0, topk:ratio=0.2 on rank 1"),
        ({"value": 2.0}, "Before the first step, give all ranks the same weights: copy the arrays of rank 0."),
    ],
)
def test_what_differs_is_told_to_all_ranks_before_the_first_exchange(differs: dict[str, Any], named: str) -> None:
    first, second = messages({}, differs)
    assert first == second
    assert named in first


def test_kernels_that_only_one_rank_has_are_told_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(kernels, "available", lambda: next(answers))
    first, second = messages({}, {})
    assert first == second
    assert "kernels: " in first
    assert "HVDCOMP_KERNELS=off" in first


LOGGED = {"policy": "accordion:low=0.5,high=0.1,steps=2"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_log_that_rank_0_cannot_write_is_told_to_all(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # so that nothing is said before the first step
    options = {**LOGGED, "decision_log": tmp_path / "missing" / "file"}
    (tmp_path / "missing").write_text("a file where a folder should be")
    said = messages(*[options] * ranks)
    assert len(set(said)) == 1
    assert f"{options['decision_log']} cannot be written: Not a directory; choose a different file" in said[0]
    assert "the same model and arguments on every rank" not in said[0]
    assert ("some ranks cannot take part in the training. rank 0: the decision log" in said[0]) == (ranks == 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**LOGGED, "decision_log": "/proc/nowhere/log"}, "the decision log /proc/nowhere/log cannot be written"),
        ({"policy": "auto:calibration=nope.json"}, "calibration='nope.json' cannot be used: nope.json cannot be read"),
        ({"policy": "auto:calibration=nope"}, "'nope' is neither a file nor a preset; the presets are: a100x8"),
    ],
)
def test_a_file_that_rank_0_cannot_use_is_named_when_the_object_is_made(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        hvdcomp.Compression.from_spec("topk:ratio=0.1", **options)
    for variable in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK"):
        with monkeypatch.context() as launched:
            launched.setenv(variable, "1")
            hvdcomp.Compression.from_spec("topk:ratio=0.1", **options)  # rank 0 alone uses the file


@pytest.mark.parametrize(
    "options",
    [
        {"spec": '{"v*": "topk:ratio=0.1", "*": "none"}'},
        {"policy": 'auto:calibration=v100x8,compressors=({"v*": "topk:ratio=0.1", "*": "none"}|natural)'},
    ],
)
def test_a_pattern_that_matches_no_tensor_is_refused(options: dict[str, Any]) -> None:
    said = r"none of the 1 tensors has a name that matches 'v\*' \(the nearest names are 'w'\)"
    with pytest.raises(hvdcomp.SpecError, match=said):
        run_ranks(2, lambda communicator: bound(communicator, **options))


def test_a_training_that_does_not_follow_the_batch_is_refused_on_every_rank() -> None:
    def work(communicator: InProcessCommunicator) -> int:
        binding = bound(communicator, spec="none", policy="accordion_batch_size:low=16,high=32,steps=2,eta=0.9")

        def train() -> None:
            for _ in range(10):
                binding.average(gradients(communicator))

        with pytest.raises(ConfigurationError, match=r"read compression\.accumulation"):
            train()
        return binding.engine.step_number

    steps = run_ranks(2, work)
    assert steps[0] == steps[1] > 0


def test_a_step_without_all_ranks_is_refused() -> None:
    binding = bound(run_ranks(1, lambda communicator: communicator)[0])
    binding.communicator.world_size = 2
    with pytest.raises(ConfigurationError, match="only 1 of 2 ranks took part"):
        binding.check_presence(binding.presence)


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    def work(communicator: InProcessCommunicator) -> None:
        whole = bound(communicator)
        for _ in range(3):
            whole.average(gradients(communicator))
        resumed = bound(communicator)
        resumed.load_state_dict(whole.state_dict())
        for _ in range(3):
            one, other = (binding.average(gradients(communicator))["w"] for binding in (whole, resumed))
            assert (one == other).all()

    run_ranks(2, work)
