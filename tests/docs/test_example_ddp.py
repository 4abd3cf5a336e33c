"""The programs of `examples/` that need nothing beside PyTorch and Horovod, as a user starts them; those that save
checkpoints again where a rank has saved more."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launched import run_ranks

torch = pytest.importorskip("torch")
dcp_to_torch_save = pytest.importorskip("torch.distributed.checkpoint.format_utils").dcp_to_torch_save

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(
    folder: Path, controller: str = "torchrun", example: str = "ddp.py", ranks: int = 2
) -> list[tuple[int, float, float]]:
    """The lines of a run: step, loss and compression factor. Its exit status is not looked at: with Gloo, PyTorch 2.13
    now and then ends a rank that has done everything by SIGABRT while its interpreter goes away, with plain
    DistributedDataParallel too."""
    said = run_ranks(ranks, controller, [str(EXAMPLES / example), str(folder)], timeout=120).stdout
    lines = re.findall(r"step (\d+): loss ([\d.]+), ([\d.]+) times fewer bytes", said)
    assert lines, said
    return [(int(step), float(loss), float(factor)) for step, loss, factor in lines]


def weights(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"rank{rank}-100.pt", weights_only=True)["model"]


def assert_same_weights(*folders: Path) -> None:
    """Asserts that all ranks of all runs have ended with the same weights, bit for bit."""
    first = weights(folders[0], 0)
    for folder in folders:
        for rank in (0, 1):
            other = weights(folder, rank)
            assert first.keys() == other.keys()
            assert all(torch.equal(weight, other[name]) for name, weight in first.items()), (folder, rank)


def stop_after_40(whole: Path, stopped: Path) -> None:
    """What a run would have left that was stopped when rank 1 had saved step 50, and rank 0 had not."""
    stopped.mkdir()
    for name in ("rank0-40", "rank1-40", "rank1-50"):
        shutil.copy(whole / f"{name}.pt", stopped)


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda program: program.name)
def test_it_reads_its_checkpoints_as_data(program: Path) -> None:
    """As SECURITY.md tells users: without `weights_only`, a file that somebody gave them can run a program."""
    loads = re.findall(r"torch\.load\(.*", program.read_text(encoding="utf-8"))
    assert [line for line in loads if "weights_only=True" not in line] == []


def test_the_gallery_has_every_program_and_a_test_starts_it() -> None:
    page = (EXAMPLES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_example*.py"))
    for program in EXAMPLES.glob("*.py"):
        assert f"examples/{program.name}" in page
        assert f'"{program.name}"' in tests


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_trainer_needs_three_lines_of_hvdcomp(library: str) -> None:
    program = (EXAMPLES / f"{library}_ddp.py").read_text(encoding="utf-8")
    _, code = program.removeprefix('"""').split('"""')
    assert len([line for line in code.splitlines() if "hvdcomp" in line]) <= 3


@pytest.mark.thorough
def test_it_trains_once(tmp_path: Path) -> None:
    steps, losses, factors = zip(*train(tmp_path), strict=True)
    assert steps == tuple(range(10, 101, 10))
    assert losses[-1] < 1
    assert factors[-1] > 6
    again = run_ranks(2, "torchrun", [str(EXAMPLES / "ddp.py"), str(tmp_path)], timeout=120).stdout
    assert f"the training in {tmp_path} is complete. To train again, pass another folder or delete this one." in again


@pytest.mark.thorough
def test_it_goes_on_where_all_ranks_were(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole)
    stop_after_40(whole, stopped)
    assert train(stopped)[0][0] == 50
    assert_same_weights(whole, stopped)


@pytest.mark.thorough
def test_the_page_to_read_first_trains() -> None:
    said = run_ranks(2, "torchrun", [str(EXAMPLES / "simple.py")], timeout=120).stdout
    losses = re.findall(r"rank [01]: loss ([\d.]+)", said)
    assert len(losses) == 2, said
    assert all(float(loss) < 1 for loss in losses), said


@pytest.mark.thorough
def test_the_click_model_learns() -> None:
    said = run_ranks(2, "torchrun", [str(EXAMPLES / "embeddings.py")], timeout=120).stdout
    losses, factors = zip(*re.findall(r"step \d+: loss ([\d.]+); tables in (\d+), layers in", said), strict=True)
    assert len(losses) == 4, said
    assert float(losses[-1]) < 0.55
    assert int(factors[-1]) > 500


@pytest.mark.thorough
@pytest.mark.parametrize(("example", "factor"), [("own_compressor.py", 13.1), ("own_policy.py", 33.8)])
def test_what_is_of_ones_own_trains(example: str, factor: float) -> None:
    said = run_ranks(2, "torchrun", [str(EXAMPLES / example)], timeout=120).stdout
    losses, factors = zip(*re.findall(r"step \d+: loss ([\d.]+), \D*([\d.]+) times fewer bytes", said), strict=True)
    assert float(losses[-1]) < 0.6, said
    assert float(factors[-1]) == factor


@pytest.mark.thorough
def test_fsdp_trains_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_RANKS_PER_NODE", "1")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    steps, losses, factors = zip(*train(whole, example="fsdp.py"), strict=True)
    assert steps == tuple(range(10, 101, 10))
    assert losses[-1] < 1
    assert factors[-1] > 6
    larger = tmp_path / "larger"
    for step in range(10, 41, 10):
        for folder in (stopped, larger):
            shutil.copytree(whole / str(step), folder / str(step))
    assert train(stopped, example="fsdp.py")[0][0] == 50
    again = run_ranks(2, "torchrun", [str(EXAMPLES / "fsdp.py"), str(whole)], timeout=120).stdout
    assert f"the training in {whole} is complete. To train again, pass another folder or delete this one." in again
    steps, losses, _ = zip(*train(larger, example="fsdp.py", ranks=4), strict=True)
    assert steps[0] == 50
    assert losses[-1] < 1
    for folder in (whole, stopped):
        dcp_to_torch_save(folder / "100", folder / "weights.pt")
    ours, theirs = (torch.load(folder / "weights.pt", weights_only=True)["model"] for folder in (whole, stopped))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.thorough
def test_horovod_gives_the_weights_of_ddp_and_goes_on_from_its_files(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    ddp, horovod, stopped = tmp_path / "ddp", tmp_path / "horovod", tmp_path / "stopped"
    train(ddp)
    assert train(horovod, "gloo", "horovod_torch.py")[-1][2] > 10
    stop_after_40(ddp, stopped)
    assert train(stopped, "gloo", "horovod_torch.py")[0][0] == 50
    assert_same_weights(ddp, horovod, stopped)
