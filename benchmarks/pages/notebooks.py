"""Write the notebooks of examples/ from the how-to pages of docs/, so that both have the same text and code.

python benchmarks/pages/notebooks.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from page_helpers import DOCS, ROOT

EXAMPLES = ROOT / "examples"
# The page that each notebook is written from.
PAGES = {
    "quick_start": "quick-start",
    "prune_transformer": "how-to-transformer",
    "deploy_cnn": "how-to-deploy",
    "compare_methods": "how-to-compare",
}
# A Python block, without the output shown right behind it.
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n.*?^```$)?", re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->\n", re.S)


def render_notebook(page: str) -> str:
    """Return the notebook of a page as JSON: a cell for each Python block and for the text between two of them."""
    cells = [make_cell(number, *cell) for number, cell in enumerate(split_page(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def split_page(page: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each cell of a page."""
    text = COMMENT.sub("", (DOCS / f"{page}.md").read_text(encoding="utf-8"))
    end = 0
    for block in PYTHON.finditer(text):
        yield "markdown", text[end : block.start()].strip()
        yield "code", block[1].strip()
        end = block.end()
    yield "markdown", text[end:].strip()


def make_cell(number: int, kind: str, text: str) -> dict[str, Any]:
    """Return a cell of a notebook; links of its text lead to the pages."""
    if kind == "markdown":
        text = re.sub(r"(?<=\]\()(?=[\w-]+\.(?:md|svg)\b)", "../docs/", text)
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    for name, page in PAGES.items():
        (EXAMPLES / f"{name}.ipynb").write_text(render_notebook(page), encoding="utf-8")
