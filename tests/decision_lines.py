"""Decision logs for tests: complete lines, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdcomp.adaptation.decision_log import Decided, read_decisions, to_json


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of all files of a log, in the format of the first versions."""
    lines = []
    for record in read_decisions(path):
        fields = {name: value for name, value in vars(record).items() if name not in ("file", "line", "continues")}
        if isinstance(record, Decided):
            statistics = record.statistics.known()
            fields["statistics"] = {"survey" if name == "candidates" else name: statistics[name] for name in statistics}
        lines.append({"kind": "decision" if isinstance(record, Decided) else "start", **to_json(fields)})
    return lines


def write_as_before(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a log of one file in the format of the first versions, with complete lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
