"""The Python of README.md, or of another page, block by block, for tests that run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
_TRAINING = re.compile(r"^\.\.\.  # train as before.*$", re.MULTILINE)


def blocks(page: Path = README) -> list[str]:
    """All blocks marked as Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def block_with(text: str, page: Path = README) -> str:
    """The only block that contains the text."""
    (block,) = [block for block in blocks(page) if text in block]
    return block


def run(block: str, train: Callable[[dict[str, Any]], None] | None = None, **variables_before: Any) -> dict[str, Any]:
    """Runs a block as a part of a program.

    Args:
        train: called at "train as before" in the block, with the program's variables.
        variables_before: variables that the program has before the block.

    Returns:
        The variables after it.
    """
    assert (train is not None) == bool(_TRAINING.search(block)), block
    variables = {**variables_before, "train_as_before": train}
    exec(_TRAINING.sub("train_as_before(globals())", block), variables)
    return variables
