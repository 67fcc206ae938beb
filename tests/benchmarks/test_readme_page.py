"""README.md: its picture and its table are those of the records."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest


def test_the_picture_is_what_the_records_give(load_script: Any) -> None:
    page = load_script("readme_page")
    written = page.PICTURE.read_text(encoding="utf-8")
    assert page.draw_picture() == written, "write it again with python benchmarks/pages/readme_page.py"


def test_the_picture_shows_every_accuracy_of_the_tables(load_script: Any, trained_cells: Any) -> None:
    root = ElementTree.fromstring(load_script("readme_page").draw_picture())
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    cells = [cell for cell in trained_cells("dpf-onepass") if cell["model"] == "resnet20"]
    shown = [cell for cell in cells if cell["column"] == "DPF default, cosine"]
    assert len(shown) == 6
    for cell in shown:
        assert f"{cell['mean']:.2f}" in texts
        assert f"{cell['paper']:.2f}" in texts
    for cell in trained_cells("dpf-distilled"):
        assert any(text.endswith(f"{cell['mean']:.2f}") for text in texts if text)


def test_the_table_has_the_figures_of_the_records_by_hand(load_script: Any) -> None:
    rows = list(load_script("readme_page").measured_rows())
    product = next(row for row in rows if "4096×4096" in row[0] and row[1] == "AMD EPYC")
    # 3,674.71 µs dense and 536.36 µs balanced with cold caches; 67,108,864 and 7,340,032 bytes.
    assert product[2:] == ["3.67 ms", "0.536 ms", "6.9×", "67.1 → 7.3 MB"]
    shrunk = next(row for row in rows if "pm.shrink" in row[0])
    assert shrunk[2:] == ["2.55 ms", "1.73 ms", "1.5×", "269,722 → 95,922 parameters"]


def test_a_network_is_quoted_with_cold_caches_or_as_warm(load_script: Any) -> None:
    layer = {"packed": False, "bytes": [8, 4], "sparsity": 0.5}
    found = {"seconds": {"dense": 2e-3, "plain": 3e-3, "compressed": 1e-3}, "layers": [layer]}
    record = {"workloads": {"LSTM": found}, "machine": {"cpu": "C", "gpus": []}}
    row = load_script("readme_page").format_network("LSTM", record)
    assert row == ["LSTM after `pm.compress`, batch 1, warm caches", "C", "2.00 ms", "1.00 ms", "2.0×", ""]
    found["cold"] = {"dense": 6e-3, "plain": 5e-3, "compressed": 2e-3}
    row = load_script("readme_page").format_network("LSTM", record)
    assert row == ["LSTM after `pm.compress`, batch 1", "C", "5.00 ms", "2.00 ms", "2.5×", ""]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.386, "3.39 s"), (0.345, "0.345 s"), (0.0127, "12.7 ms"), (1.6e-5, "16.0 µs")]
)
def test_times_have_three_digits(load_script: Any, seconds: float, shown: str) -> None:
    assert load_script("readme_page").format_seconds(seconds) == shown


def test_every_make_target_in_the_pages_exists() -> None:
    root = Path(__file__).parents[2]
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))):
        named = re.findall(r"(?:^|`)make ([a-z-]+)(?:$|`|  )", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, page


def test_the_notebooks_are_those_of_their_pages(load_script: Any) -> None:
    notebooks = load_script("notebooks")
    for name, page in notebooks.PAGES.items():
        written = (notebooks.EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
        assert notebooks.render_notebook(page) == written, "write them again with python benchmarks/pages/notebooks.py"


def test_a_notebook_has_the_code_and_the_text_of_a_page(load_script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    notebooks = load_script("notebooks")
    monkeypatch.setattr(notebooks, "DOCS", tmp_path)
    text = "# Page\n\n<!-- setup\nhidden\n-->\n```python\nprint(1)\n```\n\n```\n1\n```\n\nSee [more](more.md#part).\n"
    (tmp_path / "page.md").write_text(text)
    cells = json.loads(notebooks.render_notebook("page"))["cells"]
    assert [("".join(cell["source"]), cell["cell_type"]) for cell in cells] == [
        ("# Page", "markdown"),
        ("print(1)", "code"),
        ("See [more](../docs/more.md#part).", "markdown"),
    ]
