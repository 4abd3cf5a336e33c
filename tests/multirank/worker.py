"""Runs cases on this rank: `python -m tests.multirank.worker OUTPUT_FOLDER MODULE.CASE...`.

A case is a function whose name begins with `case_`, of a module beside this one. Every rank runs them in the order
given and writes, after each, that it passed, and the seconds that it took; the first that fails ends the run, and its
traceback is written. The framework is TensorFlow for modules that have it or Keras in their names, and otherwise
PyTorch; a start has one. Under torchrun it is torch.distributed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import SkipTest


def thorough(case: Callable[[], None]) -> Callable[[], None]:
    """Marks a case that is rarely needed or slow: it runs in `make test-all` only."""
    return case


def is_in_tensorflow(case: str) -> bool:
    """Whether the framework of a case, or of its module, is TensorFlow."""
    return any(word in case for word in ("tensorflow", "keras"))


def _start(case: str) -> int:
    """Starts what the cases exchange with; this rank's number."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun
        distributed = importlib.import_module("torch.distributed")
        distributed.init_process_group("gloo")
        return distributed.get_rank()
    hvd = importlib.import_module("horovod.tensorflow" if is_in_tensorflow(case) else "horovod.torch")
    hvd.init()
    return hvd.rank()


def requests_of(folder: Path, rank: int) -> Path:
    """The file with the requests of a rank in its last case."""
    return folder / f"rank{rank}.requests"


def main(folder: str, cases: Sequence[str]) -> None:
    rank = _start(cases[0])
    file = Path(folder) / f"rank{rank}.json"
    requests = importlib.import_module("tests.multirank.requests").Requests(requests_of(Path(folder), rank))
    results: dict[str, tuple[str, float]] = {}
    for name in cases:
        module, _, case = name.partition(".")
        started = time.perf_counter()
        requests.clear()
        try:
            getattr(importlib.import_module(f"tests.multirank.{module}"), case)()
            said = "passed"
        except SkipTest as skipped:  # every rank must skip the same cases, before any communication
            said = f"skipped: {skipped}"
        except Exception:
            # The ranks are no longer in step; the launcher ends the others when this one goes.
            results[name] = traceback.format_exc(), time.perf_counter() - started
            file.write_text(json.dumps(results))
            os._exit(1)
        results[name] = said, time.perf_counter() - started
        file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
