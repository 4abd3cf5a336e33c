"""Runs the parts of `make gpu-check`, each in a process of its own, and writes what they found.

    python3 -m tests.gpu [--part NAME] [--output FOLDER] [--seconds S]

The exit status is 0 if every part passed or said why it could not run, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.parts import NETWORK, PARTS, RANKS, SHARED, sanitized_steps
from tests.gpu.report import as_markdown, is_measured

ROOT = Path(__file__).parents[2]
SECONDS = 570.0
MOST_PROCESSES = 8
SECONDS_TO_END = 10.0


def no_gpu() -> str:
    """Why nothing can be checked here; empty if it can."""
    try:
        import torch
    except ImportError:
        return "this Python has no PyTorch"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    from hvdcomp.kernels import cuda

    return cuda.why_not()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description="Check kernels on this machine's GPU.")
    parser.add_argument("--part", choices=[*PARTS, "sanitized"], help="this part alone")
    parser.add_argument("--nodes", type=int, default=1, help=f"of the part {NETWORK}, started on each of them (1)")
    parser.add_argument("--rendezvous", default="", help="HOST:PORT of one of these nodes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts together ({SECONDS:.0f})")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "encode", help="folder of gpu.json and gpu.md")
    # A part in a process of its own writes there, of so many processes this one.
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if said := no_gpu():
        print(f"gpu-check needs a GPU: {said}.", file=sys.stderr)
        return 1
    if chosen.part == "sanitized":
        sanitized_steps("cuda")
        return 0
    if chosen.json is not None:
        nodes = {"output": chosen.output, "nodes": chosen.nodes, "rendezvous": chosen.rendezvous}
        return _run_here(chosen.part, chosen.json, *chosen.share, **nodes if chosen.part == NETWORK else {})
    if chosen.nodes < 1 or not 0 < chosen.seconds < math.inf:
        parser.error("--nodes and --seconds are numbers above 0")
    if chosen.nodes > 1 and chosen.part != NETWORK:
        parser.error(f"several --nodes are for --part {NETWORK} only")
    if (chosen.nodes > 1) != bool(chosen.rendezvous):
        parser.error("several --nodes need the --rendezvous HOST:PORT of one of them, and one needs none")
    started = time.monotonic()
    names = RANKS if chosen.part == "ranks" else [chosen.part] if chosen.part else list(PARTS)
    passed = ["--output", str(chosen.output.resolve()), "--nodes", str(chosen.nodes), "--rendezvous", chosen.rendezvous]
    found = {name: _run_apart(name, chosen.seconds - (time.monotonic() - started), passed) for name in names}
    failed = [name for name, part in found.items() if part["failures"]]
    _write(chosen.output, found)
    print(f"FAILED: {', '.join(failed)}" if failed else "All parts passed.")
    return 1 if failed else 0


def _write(folder: Path, found: dict[str, Any]) -> None:
    """Writes `gpu.json` and `gpu.md`, in which each part has the facts of the machine on which it ran. Parts that have
    not run, or could measure nothing, stay as they are there."""
    if not any(map(is_measured, found.values())):  # as on the nodes without rank 0, which may share the folder
        print("nothing was measured, and nothing written")
        return
    from hvdcomp.tools.bench.encode.facts import facts

    path, now = folder / "gpu.json", facts("cuda")
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name, part in found.items():
        if is_measured(part) or not is_measured(parts.get(name)):
            parts[name] = {"facts": now, **part}
    document = {"parts": {name: parts[name] for name in PARTS if name in parts}}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    (folder / "gpu.md").write_text(as_markdown(document))
    print(f"wrote gpu.json and gpu.md to {folder}")


def _run_here(name: str, path: Path, number: int, processes: int, **options: Any) -> int:
    found: dict[str, Any] = {"failures": ["it did not end"], "rows": [], "notes": []}

    def keep(row: Any = None, failure: str = "", note: str = "") -> None:
        """Writes what is known so far, and prints a line."""
        print(f"  {name}: {failure or note or row}", flush=True)
        if row is not None:
            found["rows"].append(row)
        if failure:
            found["failures"].insert(-1, failure)
        if note:
            found["notes"].append(note)
        path.write_text(json.dumps(found))

    PARTS[name]("cuda", keep, *([slice(number, None, processes)] if name in SHARED else []), **options)
    del found["failures"][-1]
    path.write_text(json.dumps(found))
    return 0


def _run_apart(name: str, seconds: float, passed: list[str]) -> dict[str, Any]:
    """What the processes of a part found, together. passed: options for them."""
    print(f"==> {name}", flush=True)
    processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)))) if name in SHARED else 1
    end = time.monotonic() + max(1.0, seconds)
    found: dict[str, Any] = {"failures": [], "rows": [], "notes": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(processes)]
        started = [_start(name, path, number, processes, passed) for number, path in enumerate(paths)]
        try:
            for path, process in zip(paths, started, strict=True):
                ended = _ended(process, end)
                for key, values in (json.loads(path.read_text()) if path.exists() else {}).items():
                    found[key] += values
                if ended:
                    found["failures"].append(ended)
                    print(f"  {name}: {ended}", flush=True)
        finally:  # also at Ctrl-C, which does not reach the sessions of the parts
            for process in started:
                _end(process)
    return found


def _start(name: str, path: Path, number: int, processes: int, passed: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.gpu", "--part", name, "--json", str(path)]
    command += ["--share", str(number), str(processes), *passed]
    # A session of its own, as a part starts other processes, such as ranks, that must not outlive it.
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True)


def _ended(process: subprocess.Popen[bytes], end: float) -> str:
    """Waits for a process, and says how it ended; empty if as it should."""
    try:
        status = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        process.wait()
        return "the time was over"
    return f"its process ended with status {status}" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started. torchrun ends its ranks, which have sessions of their own, at SIGTERM."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
