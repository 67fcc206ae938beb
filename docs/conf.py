"""Settings of the documentation site. `make docs-site` writes the source with benchmarks/pages/site_source.py first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "pages")]

from api_pages import convert_docstring  # noqa: E402

from pomona.version import __version__  # noqa: E402

project, author, release = "Pomona", "The Pomona maintainers", __version__
copyright = "the Pomona maintainers, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links to headings work as on the forge
autosummary_generate = False  # the tables of the reference link to entries on the same page
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of other packages are not written like ours
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "Pomona"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a3420b", "color-brand-content": "#0a6a8f"},
    "dark_css_variables": {"color-brand-primary": "#f0a36b", "color-brand-content": "#6cc3e8"},
}


def setup(app: Any) -> None:
    """Read docstrings as they are written: plain text with `code`."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)  # before napoleon reads its sections


def process_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring by reStructuredText, and those that a named tuple writes itself by nothing."""
    lines[:] = [] if lines and lines[0].startswith("Alias for field number") else convert_docstring(lines)
