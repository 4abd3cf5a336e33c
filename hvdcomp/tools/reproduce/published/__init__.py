"""What the papers published, and which counterpart finds ours.

An entry of a JSON file here, by the name of a table or figure:

- `place`, `shows`: where it is in the paper, and what it says.
- `published`: its numbers, as far as the paper states them; `as` names the entry whose numbers it draws.
- `counterpart`: the function that finds ours, with `settings`; null where there is none, and `why` says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

PAPERS = {
    "accordion": "Agarwal et al. 2021, Accordion (arXiv:2010.16248)",
    "utility": "Agarwal et al. 2022, On the Utility of Gradient Compression (arXiv:2103.00543)",
    "gravac": "Tyagi and Swany 2023, GraVAC (arXiv:2305.12201)",
}


@dataclass(frozen=True)
class Artefact:
    """A table or a figure of a paper.

    Attributes:
        name: by which it is asked for, such as "accordion-table1".
        place, shows: where it is in the paper, and what it says.
        published: its numbers.
        counterpart: name of the function that finds ours; None if there is none.
        settings: of that function.
        why: there is no counterpart.
    """

    name: str
    place: str
    shows: str
    published: Mapping[str, Any] = field(default_factory=dict)
    counterpart: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str | None = None

    @property
    def paper(self) -> str:
        """A key of `PAPERS`."""
        return self.name.partition("-")[0]

    @property
    def is_figure(self) -> bool:
        return "-fig" in self.name


@cache
def artefacts() -> dict[str, Artefact]:
    """All tables and figures, by name, in the order of the papers."""
    found: dict[str, Artefact] = {}
    for paper in PAPERS:
        entries = json.loads((files(__package__) / f"{paper}.json").read_text())
        for name, entry in entries.items():
            numbers = entries[entry.get("as", name)].get("published", {})
            others = {key: value for key, value in entry.items() if key not in ("as", "published")}
            found[name] = Artefact(name, published=numbers, **others)
    return found
