"""The Python of README.md, block by block, for tests that run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
_TRAINING = re.compile(r"^\.\.\.  # train as before.*$", re.MULTILINE)


def blocks() -> list[str]:
    """All blocks that are marked as Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    """The one block in which this stands."""
    (found,) = [block for block in blocks() if text in block]
    return found


def run(block: str, train: Callable[[dict[str, Any]], None] | None = None, **given: Any) -> dict[str, Any]:
    """Runs a block as the part of a program that it is.

    Args:
        train: what happens where the block says "train as before"; takes the program's variables.
        given: variables that the program has before the block.

    Returns:
        The variables after it.
    """
    assert (train is not None) == bool(_TRAINING.search(block)), block
    variables = {**given, "train_as_before": train}
    exec(_TRAINING.sub("train_as_before(globals())", block), variables)
    return variables
