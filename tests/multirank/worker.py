"""Runs cases on this rank: `python -m tests.multirank.worker MODULE OUTPUT_FOLDER`.

A case is a function of the module whose name begins with `case_`. Every rank runs all cases in the same order and
writes, after each, that it passed; the first that fails ends the run, and its traceback is written. The framework is
TensorFlow for modules that have it or Keras in their names, and otherwise PyTorch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import SkipTest


def main(module_name: str, folder: str) -> None:
    in_tensorflow = any(word in module_name for word in ("tensorflow", "keras"))
    hvd = importlib.import_module("horovod.tensorflow" if in_tensorflow else "horovod.torch")
    hvd.init()
    module = importlib.import_module(module_name)
    file = Path(folder) / f"rank{hvd.rank()}.json"
    results: dict[str, str] = {}
    for name in [name for name in vars(module) if name.startswith("case_")]:
        try:
            getattr(module, name)()
            results[name] = "passed"
        except SkipTest as skipped:  # every rank must skip the same cases, before any communication
            results[name] = f"skipped: {skipped}"
        except Exception:
            # The ranks are no longer in step; the launcher ends the others when this one goes.
            results[name] = traceback.format_exc()
            file.write_text(json.dumps(results))
            os._exit(1)
        file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
