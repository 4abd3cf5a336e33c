"""Runs an example as it is and keeps what it ends with: `python -m tests.multirank.example EXAMPLE FOLDER ARGUMENT...`.

The example has a `model` and a `compression`. Each rank under torchrun writes to a file of its own in the folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch


def main(example: str, folder: str, *arguments: str) -> None:
    sys.argv = [example, *arguments]
    names = runpy.run_path(example, run_name="__main__")
    totals, steps = names["compression"].ledger.totals, names["compression"].ledger.steps
    kept = {"weights": names["model"].state_dict(), "factor": totals.compression_factor, "steps": steps}
    torch.save(kept, Path(folder) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
