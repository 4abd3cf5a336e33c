"""The published numbers of the papers, and the counterpart of each table and figure.

Each JSON file has entries for tables, figures or the abstract, by name. An entry has these fields:

- `place`, `shows`: its place in the paper, and its subject.
- `published`: its numbers, as far as the paper states them. Its field `as` names a different entry with the same
  numbers.
- `counterpart`: the function that computes hvdcomp's numbers, with its `settings`. It is null if there is no such
  function; `why` then has the reason.
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
    "bagpipe": "Agarwal et al. 2023, Bagpipe (arXiv:2202.12429)",
    "gravac": "Tyagi and Swany 2023, GraVAC (arXiv:2305.12201)",
}


@dataclass(frozen=True)
class Artifact:
    """A table or a figure of a paper.

    Attributes:
        name: name of the table or figure, such as "accordion-table1".
        place, shows: its place in the paper, and its subject.
        published: the published numbers.
        counterpart: name of the function that computes hvdcomp's numbers; None if there is none.
        settings: settings that are passed to the counterpart.
        why: the reason why there is no counterpart.
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
        """The paper's key in `PAPERS`."""
        return self.name.partition("-")[0]

    @property
    def is_figure(self) -> bool:
        return "-fig" in self.name


@cache
def artifacts() -> dict[str, Artifact]:
    """All tables and figures, by name, in the order of the papers."""
    by_name: dict[str, Artifact] = {}
    for paper in PAPERS:
        entries = json.loads((files(__package__) / f"{paper}.json").read_text())
        for name, entry in entries.items():
            numbers = entries[entry.get("as", name)].get("published", {})
            fields = {key: value for key, value in entry.items() if key not in ("as", "published")}
            by_name[name] = Artifact(name, published=numbers, **fields)
    return by_name
