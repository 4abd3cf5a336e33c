"""Decision logs as tests look at them: whole lines, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdcomp.adaptation.decision_log import Decided, read_decisions, to_json


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of all files of a log, as the first versions wrote them."""
    found = []
    for record in read_decisions(path):
        fields = {name: value for name, value in vars(record).items() if name not in ("file", "line", "continues")}
        if isinstance(record, Decided):
            known = record.statistics.known()
            fields["statistics"] = {"survey" if name == "candidates" else name: known[name] for name in known}
        found.append({"kind": "decision" if isinstance(record, Decided) else "start", **to_json(fields)})
    return found


def write_as_before(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """A log of one file as the first versions wrote it: every line whole."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
