"""Writes a report to a folder. A report consists of report.html, report.json, report.csv, series.csv, and each figure
as PNG and SVG. The page report.html can be read without other files and without a network."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from hvdcomp.files import VERSION, csv_of, replace_files
from hvdcomp.tools.report.curves import HALF_WIDTH, draw_section
from hvdcomp.tools.report.decision_curves import draw_decisions
from hvdcomp.tools.report.headline import headline
from hvdcomp.tools.report.runs import SERIES_FILE, Run
from hvdcomp.tools.report.series import series_cells
from hvdcomp.tools.report.table import Section, cells, policy_line


def write_report(folder: Path, sections: list[Section]) -> Path:
    """Writes the report into `folder`, and returns the path of report.html. The folder is created if it does not exist.

    Raises:
        OSError: if a file cannot be written. In this case, an earlier report is unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for section in sections for row in section.rows]
    series = [row for section in sections for row in section.series]
    document = {"hvdcomp": VERSION, "rows": rows, "series": series}
    files: dict[str, bytes] = {}
    shown = [_render(files, section, number) for number, section in enumerate(sections, start=1)]
    loader = jinja2.PackageLoader("hvdcomp.tools.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html").render(sections=shown)
    files["report.json"] = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    files["report.csv"] = csv_of(rows)
    files[SERIES_FILE] = csv_of(series)
    files["report.html"] = page.encode("utf-8", errors="replace")
    replace_files({folder / name: content for name, content in files.items()})
    return folder / "report.html"


def _render(files: dict[str, bytes], section: Section, number: int) -> dict[str, Any]:
    """The content of the page for a section. The figures of the section are added to `files`.

    For each group, the main figures show the policy's decisions in one run. The figures for the other runs of the group
    are in the details.
    """
    figures = _add_figures(files, f"{number}", draw_section(section))
    places = {run: place for place, run in enumerate(section.runs, start=1)}
    details = []
    for group in section.groups:
        first = next((run for run in group.runs if run.decisions is not None), None)
        runs = []
        for run in group.runs:
            decisions = _add_figures(files, f"{number}-run{places[run]}", draw_decisions(run))
            if run is first:
                figures += decisions
            runs.append({**_details(run), "figures": [] if run is first else decisions})
        details.append({"label": group.label, "runs": runs})
    shown = [(cells(row, section.in_turns, section.on_links), policy_line(row), row) for row in section.rows]
    series = [series_cells(row, section.series_headings) for row in section.series] if section.has_series else []
    return {
        "title": section.title,
        "headline": headline(section),
        "series_headings": section.series_headings,
        "series": series,
        "headings": section.headings,
        "rows": [row for row in shown if row[2]["kind"] != "seed"],
        "seeds": [row for row in shown if row[2]["kind"] == "seed"],
        "notes": section.notes(),
        "figures": figures,
        "details": details,
    }


def _add_figures(files: dict[str, bytes], stem: str, drawn: Iterable[tuple[str, str, Figure]]) -> list[dict[str, Any]]:
    figures = []
    for name, caption, figure in drawn:
        svg = _image(figure, "svg", transparent=True)
        files[f"{stem}-{name}.png"] = _image(figure, "png", facecolor="white")
        files[f"{stem}-{name}.svg"] = svg
        # Unlike inline SVG, an image cannot run scripts, and its ids do not clash with those of other figures.
        source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
        half = figure.get_figwidth() <= HALF_WIDTH
        figures.append({"caption": caption, "source": source, "half": half})
    return figures


def _image(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, **options)
    return buffer.getvalue()


def _details(run: Run) -> dict[str, Any]:
    """All values of the summary. Each nested value (such as options or versions) has its own table."""
    nested = {key: value for key, value in run.summary.items() if isinstance(value, dict)}
    plain = {key: value for key, value in run.summary.items() if key not in nested}
    plain = {"folder": run.folder, "status": run.status, "steps recorded": run.steps["step"].size, **plain}
    tables = {"run": plain, **nested}
    return {
        "name": run.name,
        "tables": {name: {key: as_text(value) for key, value in table.items()} for name, table in tables.items()},
    }


def as_text(value: Any) -> str:
    """A value as text for the page. Numbers have six digits, and a missing value is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(item)}" for key, item in value.items()) or "-"
    return str(value)
