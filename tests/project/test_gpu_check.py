"""`make gpu-check`, as far as it goes without a GPU: the same lines in Triton's interpreter, on tiny tensors."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import load, shapes
from hvdcomp.tools.bench.encode import facts as encode_facts
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from tests.gpu import __main__ as program  # noqa: E402
from tests.gpu import cases, parts, report, steps  # noqa: E402
from tests.gpu.ranks import HOST, Ranks, one_by_one  # noqa: E402

pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("in_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of numbers that overflow
]

ROOT = Path(__file__).parents[2]
TINY = {"matrix": (6, 8), "odd": (5, 7, 3), "vector": (77,)}


def quick(*chosen: tuple[str, str]) -> list[Any]:
    """Each form with each kind of numbers, of which those that are not named run in `make test-all` only."""
    return [
        pytest.param(spec, kind, marks=[pytest.mark.thorough] * ((spec, kind) not in chosen))
        for spec in cases.FORMS
        for kind in cases.NUMBERS
    ]


@pytest.mark.parametrize(
    ("spec", "kind"),
    quick(
        ("fp16", "large"), ("efsignsgd", "normal"), ("onebit", "ties"), ("qsgd:bits=4", "zeros"),
        ("powersgd:rank=4", "nan"), ("topkc:ratio=0.05", "float16"),
    ),
)  # fmt: skip
def test_a_device_gives_what_numpy_gives(spec: str, kind: str) -> None:
    """Over steps in which nobody looks at what is kept."""
    assert list(cases.check(spec, kind, "cpu", TINY)) == []


def test_what_differs_is_named() -> None:
    """Here, ranks whose gradients are others'."""
    device, given = Ranks("none", TINY, "cpu"), [[cases.gradients("normal", TINY, rank, 0) for rank in range(2)]]
    with one_by_one():
        plain = Ranks("none", TINY, HOST)
        plain.step(given[0])
    others = [[{name: 2 * x for name, x in rank.items()} for rank in step] for step in given]

    class Otherwise(Ranks):
        def step(self, given: Any, *arguments: Any, **options: Any) -> Any:
            return super().step(others[0], *arguments, **options)

    said = list(cases.compare(device, lambda: Otherwise("none", TINY, HOST), given, "none"))
    assert len(said) == 2 * len(TINY)
    assert said[0].startswith("step 0, rank 0, matrix: 48 of 48 elements are apart, one by ")


@pytest.mark.parametrize(
    ("spec", "policy"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (number > 0)) for number, case in enumerate(steps.POLICIES)],
)
def test_steps_are_checked_with_policies_and_memories(spec: str, policy: str) -> None:
    """What rank 0 sends is what the others expect, although it alone looks at gradients."""
    assert list(steps.check(spec, "cpu", policy, shapes={"matrix": (40, 48), "bias": (105,)})) == []


def test_rounded_residuals_are_compared_too() -> None:
    spec, memory = steps.MEMORIES[-1]
    assert list(steps.check(spec, "cpu", memory=memory, shapes={"matrix": (40, 48), "bias": (105,)})) == []


def test_the_page_compares_what_was_measured_with_what_was_aimed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the parts' own rows, of a tiny model on the CPU, which has no device's time."""
    monkeypatch.setitem(shapes._MODELS, "resnet50", lambda: {"matrix": (40, 48)})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    names = "bench", "roofline", "memory"
    found: dict[str, Any] = {name: {"failures": [], "rows": [], "notes": []} for name in names}

    def keep(part: str) -> Any:
        def into(row: Any = None, failure: str = "", note: str = "") -> None:
            assert not failure, failure
            found[part]["rows"].append(row)

        return into

    parts.bench("cpu", keep("bench"), ["resnet50"], ["efsignsgd", "topk:ratio=0.01"], 0.0)
    parts.bandwidth("cpu", keep("roofline"), [TensorInfo("matrix", (40, 48))], ["efsignsgd"], 2)
    monkeypatch.setattr(parts, "KEPT", {"efsignsgd": 4.3})
    parts.memory("cpu", keep("memory"), [(40, 48)])
    assert all(aim[3] == "not measured" for aim in list(report.aims(found))[:-1])
    found["bench"]["rows"][0] |= {"device_ms": 2.6, "device_copy_ms": 1.0}
    found["bench"]["rows"][1] |= {"device_ms": 3.9, "device_copy_ms": 1.0}
    said = {what: result for what, _, _, result in report.aims(found)}
    assert said["efsignsgd on ResNet-50"] == "missed"
    assert said["topk:ratio=0.01 on ResNet-50"] == "met"
    gpu = {"compute_capability": "9.0", "driver": "1", "cuda": "13.0"}
    facts = {"accelerator": "A GPU", "commit": "abc", "gpu": gpu, "versions": {"torch": "2.13.0"}}
    trained = {"method": "int8", "ms": 33.3, "quartiles_ms": [31.0, 35.0], "ddp_ms": 30.0}
    found["training"] = {"failures": [], "rows": [trained], "notes": ["1 ranks over nccl"]}
    page = report.as_markdown({"facts": facts, "parts": found})
    assert "| training | passed; 1 ranks over nccl | `abc` |" in page
    assert "| int8 | 33 | 31 to 35 | 30 |" in page
    assert "| efsignsgd on ResNet-50 | at most 2.5 device copies | 2.6 | missed |" in page
    assert "| efsignsgd | 0.0 | 0.0 |" in page  # on the host nothing is counted
    assert "| efsignsgd | two_values_encode |" in page
    assert {one["kernel"] for one in found["roofline"]["rows"]} >= {"copy", "two_values_encode", "two_values_decode"}


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "rows"), [("ranks", 32), ("training", 8)])
def test_trainings_run_under_torchrun(part: str, rows: int) -> None:
    """Here over Gloo, in the host's memory."""
    found: list[Any] = []

    def keep(row: Any = None, failure: str = "", note: str = "") -> None:
        assert not failure, failure
        found.append(row)

    parts.PARTS[part]("cpu", keep)
    assert len([row for row in found if row]) > rows


@pytest.mark.thorough
def test_the_probe_of_the_network_is_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "NETWORK_SECONDS", 5)
    monkeypatch.delenv("TRITON_INTERPRET")
    rows: list[Any] = []

    def keep(row: Any = None, failure: str = "", note: str = "") -> None:
        assert not failure, failure
        rows.append(row)

    parts.network("cpu", keep, tmp_path, 1, "")
    assert [row["link"].split(":")[0] for row in rows if row][:2] == ["allreduce", "allgather"]
    assert load(tmp_path / "network.json").machine["ranks"] == "2"


def test_a_part_that_is_run_alone_leaves_the_others_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"compute_capability": "9.0", "driver": "1", "cuda": "13"}
    facts: dict[str, Any] = {"accelerator": "A GPU", "commit": "abc", "gpu": gpu}
    monkeypatch.setattr(encode_facts, "facts", lambda device: {**facts, "versions": {}})
    part: dict[str, Any] = {"failures": [], "rows": [], "notes": []}
    program._write(tmp_path, {"kernels": part, "steps": part}, 1.0)
    facts["commit"] = "def"
    program._write(tmp_path, {"steps": part | {"failures": ["one"]}}, 1.0)
    page = (tmp_path / "gpu.md").read_text()
    assert "| kernels | passed | `abc` |" in page
    assert "| steps | failed: 1 | `def` |" in page
    facts["accelerator"] = "Another"
    program._write(tmp_path, {"steps": part}, 1.0)
    assert "| kernels |" not in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_nothing_that_a_part_started_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Neither where its time is over nor at Ctrl-C: ranks would keep the GPU."""
    number, part = tmp_path / "number", tmp_path / "python"
    # As torchrun: a rank in a session of its own, which it ends when it is told to end.
    rank = f"setsid sleep 100 & echo $! > {number}.new && mv {number}.new {number}"
    part.write_text(f"#!/bin/sh\nsh -c 'trap \"kill \\$!; exit\" TERM; {rank}; wait' &\nwait\n")
    part.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(part))
    started = program._start

    def until_it_has_started(*arguments: Any) -> Any:
        process = started(*arguments)
        while not number.exists():
            time.sleep(0.01)
        return process

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_start", until_it_has_started)
    if interrupted:
        monkeypatch.setattr(program, "_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            program._run_apart("a", 0, [])
    else:
        assert program._run_apart("a", 0, [])["failures"] == ["the time was over"]
    _wait_until_gone(int(number.read_text()))


def _wait_until_gone(process: int) -> None:
    """A killed process may stay in the list for a moment, as its new parent has not asked for its end."""
    status = Path(f"/proc/{process}/stat")
    until = time.monotonic() + 5
    while status.exists() and " Z " not in status.read_text():
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu-check needs a GPU: PyTorch sees no GPU.\n"
