"""`make gpu-check`, as far as it goes without a GPU: the same lines in Triton's interpreter, on tiny tensors."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import shapes
from hvdcomp.tools.bench.encode import facts as encode_facts
from tests.interpreted import needs_triton
from tests.processes import runs

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
GPU = {"compute_capability": "9.0", "driver": "1", "cuda": "13.0", "nccl": "2.28"}
FACTS: dict[str, Any] = {"accelerator": "A GPU", "commit": "abc", "gpu": GPU, "versions": {"torch": "2.13.0"}}
TINY = {"matrix": (6, 8), "odd": (5, 7, 3), "vector": (77,)}


def quick(*chosen: tuple[str, str]) -> list[Any]:
    """Those that are named; in `make test-all` each form with every third kind of numbers too. `make gpu-check` runs
    each form with each kind, on a GPU."""
    others = [
        pytest.param(spec, kind, marks=pytest.mark.thorough)
        for place, spec in enumerate(cases.FORMS)
        for number, kind in enumerate(cases.NUMBERS)
        if (place + number) % 3 == 0 and (spec, kind) not in chosen
    ]
    return [*chosen, *others]


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
    parts.bandwidth("cpu", keep("roofline"), [TensorInfo("matrix", (40, 48))], ["efsignsgd", "eden"], 2)
    monkeypatch.setattr(parts, "KEPT", {"efsignsgd": 4.3})
    parts.memory("cpu", keep("memory"), [(40, 48)])
    assert all(aim[3] == "not measured" for aim in list(report.aims(found))[:-1])
    found["bench"]["rows"][0] |= {"device_ms": 2.6, "device_copy_ms": 1.0}
    found["bench"]["rows"][1] |= {"device_ms": 3.9, "device_copy_ms": 1.0}
    said = {what: result for what, _, _, result in report.aims(found)}
    assert said["efsignsgd on ResNet-50"] == "missed"
    assert said["topk:ratio=0.01 on ResNet-50"] == "met"
    page = report.as_markdown({"parts": {name: {"facts": FACTS, **part} for name, part in found.items()}})
    assert "| efsignsgd on ResNet-50 | at most 2.5 device copies | 2.6 | missed |" in page
    assert "| efsignsgd | 0.0 | 0.0 |" in page  # on the host nothing is counted
    assert "| efsignsgd | two_values_encode |" in page
    moving = {one["kernel"] for one in found["roofline"]["rows"] if one["bytes_a_second"] is not None}
    assert moving == {"copy", "two_values_encode", "two_values_decode", "eden_encode", "eden_decode"}


def test_the_page_in_docs_is_that_of_the_results_beside_it() -> None:
    folder = Path(__file__).parents[2] / "docs" / "encode"
    assert (folder / "gpu.md").read_text() == report.as_markdown(json.loads((folder / "gpu.json").read_text()))


def test_parts_of_several_machines_are_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict(FACTS)
    monkeypatch.setattr(encode_facts, "facts", lambda device: dict(facts))
    part: dict[str, Any] = {"failures": [], "rows": [{}], "notes": []}
    program._write(tmp_path, {"kernels": part, "steps": part, "sanitizer": part | {"rows": [], "notes": ["not here"]}})
    facts |= {"commit": "def", "accelerator": "Another"}
    trained = {"method": "int8", "ms": 33.3, "quartiles_ms": [31.0, 35.0], "ddp_ms": 30.0}
    several = [{"method": "int8"}, trained | {"peak_bytes": 2.5e9, "ddp_peak_bytes": 2e9}]
    found = {
        "kernels": part | {"rows": []},
        "steps": part | {"failures": ["one\ntrace"]},
        "nccl": part | {"rows": several, "notes": ["8 ranks over nccl"]},
        "horovod": part | {"rows": [], "notes": ["Horovod is not installed"]},
        "training": part | {"rows": [trained]},
    }
    program._write(tmp_path, found)
    nothing = {"kernels": part | {"rows": []}, "network": part | {"rows": [], "notes": ["there is one GPU"]}}
    program._write(tmp_path, nothing)  # is not written
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    made = lines[lines.index("## How this page was made") :]
    with_versions = "compute capability 9.0, driver 1, CUDA 13.0, NCCL 2.28; torch 2.13.0"
    assert made[4:6] == [
        f"- A GPU, {with_versions}: kernels",
        f"- Another, {with_versions}: steps, nccl, training",
    ]
    assert made[9:] == [
        "| kernels | passed | `abc` |",
        "| steps | failed: 1 | `def` |",
        "| ranks | not measured | - |",
        "| nccl | passed; 8 ranks over nccl | `def` |",
        "| horovod | not measured; Horovod is not installed | - |",
        "| bench | not measured | - |",
        "| memory | not measured | - |",
        "| training | passed | `def` |",
        "| roofline | not measured | - |",
        "| sanitizer | not measured; not here | - |",
        "| calibrate | not measured | - |",
        "| profile | not measured | - |",
        "| network | not measured | - |",
    ]
    assert lines[2:4] == ["- steps: one", ""]
    alone, of_several = (lines[lines.index(f"## A step of a training{more}") :] for more in ("", " on several GPUs"))
    assert alone[6] == "| int8 | 33 | 31 to 35 | 30 | - | - |"
    assert of_several[6:8] == ["| int8 | 33 | 31 to 35 | 30 | 2500 | 2000 |", ""]
    assert lines[lines.index("## The network") + 4] == "Not measured."


def test_the_page_is_what_its_file_says() -> None:
    folder = ROOT / "docs" / "encode"
    assert (folder / "gpu.md").read_text() == report.as_markdown(json.loads((folder / "gpu.json").read_text()))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("given", "names", "options", "seconds"),
    [
        ("PART=network NODES=2 RENDEZVOUS=host:29500 SECONDS=90", ["network"], (2, "host:29500"), 90),
        ("PART=ranks", ["ranks", "nccl", "horovod"], (1, ""), 570),
        ("PART=nccl", ["nccl"], (1, ""), 570),
    ],
)
def test_options_of_make_reach_the_parts(
    given: str, names: list[str], options: tuple[int, str], seconds: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Through `main` of the program, and of the process that it starts for the part."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # also under `make test`
    said = subprocess.run(
        ["make", "-n", "gpu-check", *given.split(), f"OUTPUT={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, env=alone,
    )  # fmt: skip
    command = shlex.split(said.stdout.replace("\\\n", " "))
    assert command[1:3] == ["-m", "tests.gpu"]
    monkeypatch.setattr(program, "no_gpu", lambda: "")
    monkeypatch.setattr(sys, "argv", command[2:])
    monkeypatch.setattr(encode_facts, "facts", lambda device: FACTS)
    asked: list[Any] = []

    class Here:
        """In place of a process of a part: the same in this process."""

        pid = -1

        def __init__(self, command: list[str], **_: Any) -> None:
            monkeypatch.setattr(sys, "argv", command[2:])
            self.status = program.main()

        def wait(self, timeout: float) -> int:
            asked.append(timeout)
            return self.status

    def found(place: str, keep: Any, *given: Any, **named: Any) -> None:
        asked.append((place, named))
        keep(row={"method": "a", "link": "a link"})

    monkeypatch.setattr(program.subprocess, "Popen", Here)
    monkeypatch.setattr(program, "_end", lambda process: None)
    for name in names:
        monkeypatch.setitem(parts.PARTS, name, found)
    assert program.main() == 0
    nodes, rendezvous = options
    of_network = {"output": tmp_path, "nodes": nodes, "rendezvous": rendezvous}
    assert asked[::2] == [("cuda", of_network if names == ["network"] else {})] * len(names)
    assert all(seconds - 5 < limit <= seconds for limit in asked[1::2])
    page = (tmp_path / "gpu.md").read_text()
    assert [name for name in parts.PARTS if f"| {name} | passed | `abc` |" in page] == names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "network", "--nodes", "2"], "several --nodes need the --rendezvous"),
        (["--part", "network", "--rendezvous", "host:1"], "several --nodes need the --rendezvous"),
        (["--nodes", "2", "--rendezvous", "host:1"], "several --nodes are for --part network only"),
        (["--nodes", "0"], "are numbers above 0"),
        (["--seconds", "nan"], "are numbers above 0"),
        (["--part", "rank"], "invalid choice: 'rank'"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "no_gpu", lambda: "")
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *options])
    with pytest.raises(SystemExit):
        program.main()
    assert said in capsys.readouterr().err


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
    until = time.monotonic() + 5
    while runs(process):
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu-check needs a GPU: PyTorch sees no GPU.\n"
