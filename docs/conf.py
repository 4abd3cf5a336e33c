"""Settings of the site: `make site` makes it of these pages, the README and the docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hvdcomp

project = "hvdcomp"
copyright = "hvdcomp developers, Apache-2.0"
release = version = hvdcomp.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_title = "hvdcomp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
myst_heading_anchors = 4  # links name headings as GitHub does
myst_enable_extensions = ["colon_fence"]
# A page may begin with a comment; and tables to which pages link need no place in the menu.
suppress_warnings = ["myst.header", "toc.not_included"]
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True

# Docstrings are written as Google does, with single backticks around code.
default_role = "code"
napoleon_google_docstring = True
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # which the site does without
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Class attributes", "Attributes")]

_ROOT = Path(__file__).parents[1]


def _without_links_to_the_repository(app: Any, name: str, source: list[str]) -> None:
    """Files outside of docs/ are no part of the site: the words of such a link stay, without it."""
    source[0] = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", source[0])


def _of_the_readme(app: Any, relative: Path, parent: str, content: list[str]) -> None:
    """Links of the README and of CHANGELOG.md are from the root. If a link leads to no page, only its words stay."""
    text = content[0]
    text = re.sub(r"\]\(docs/", "](", text)
    content[0] = re.sub(r"\[([^\]]*)\]\((?!https?:|#)(?![\w/-]+\.(?:md|png|csv)[#)])[^)]*\)", r"\1", text)


def _as_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Code that is indented in a docstring, and bars of magnitudes, |x|, in the words of Sphinx."""
    text = "\n".join(lines)
    pieces = re.split(r"(`[^`]*`)", text)
    text = "".join(piece if piece.startswith("`") else piece.replace("|", r"\|") for piece in pieces)
    text = re.sub(r"(?<=[.!?:]\n\n)(?= {4}\S)", ".. code-block:: python\n\n", text)
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon
    app.connect("source-read", _without_links_to_the_repository)
    app.connect("include-read", _of_the_readme)
