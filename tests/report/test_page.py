"""The page as a file: self-contained, of a bounded size, and safe from what runs are named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import write_grid, write_run

from pomona.errors import PomonaError
from pomona.report import ReportData, collect_runs, page, render_page, write_report

SCRIPT = "Plotly = {};"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&%{x}</script><!--"


@pytest.fixture(autouse=True)
def short_script(monkeypatch):
    """Put a few characters in place of plotly.js, so that these tests need no plotly."""
    monkeypatch.setattr(page, "read_plotly_script", lambda: SCRIPT)


class Elements(HTMLParser):
    """Collects the tags of a page, with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


def test_the_page_has_its_sections_in_order_and_a_place_for_each_chart(tmp_path):
    found = Elements(render_page(collect_runs([write_grid(tmp_path / "grid")])))
    sections = [attributes["id"] for tag, attributes in found.tags if tag == "section"]
    assert sections == ["overview", "results", "summary", "training", "masks", "recipes"]
    charts = [name for name in found.ids() if name.startswith("chart-")]
    assert charts == [f"chart-{name}" for name in json.loads(found.scripts[0])]
    assert len(charts) == len(set(charts)) == 9


def test_the_page_loads_nothing(tmp_path):
    text = render_page(collect_runs([write_grid(tmp_path / "grid")]))
    for tag, attributes in Elements(text).tags:
        for key in ("src", "href", "data", "action"):
            assert attributes.get(key, "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\(", text)


def test_what_runs_are_named_is_never_html(tmp_path):
    plain = render_page(collect_runs([write_run(tmp_path / "a" / "x")]))
    folder = write_run(tmp_path / "b" / "x", layers={HOSTILE: 400})
    (folder / "certificate.json").write_text(json.dumps({"error": 1.0, "region": HOSTILE}))
    (run,) = collect_runs([folder]).runs
    settings = {**run.settings, "method.pattern.name": HOSTILE}
    hostile = render_page(ReportData(HOSTILE, (replace(run, name=HOSTILE, network=HOSTILE, settings=settings),)))
    names = [tag for tag, _ in Elements(hostile).tags]
    assert [names.count(tag) for tag in ("script", "img")] == [3, 0]
    kinds = {tag: [t for t, _ in Elements(plain).tags].count(tag) for tag in ("figure", "select", "option", "a")}
    assert {tag: names.count(tag) - (tag == "a") for tag in kinds} == kinds  # one link more, to the certificates
    assert "<script>alert" not in hostile
    figures = json.loads(Elements(hostile).scripts[0])
    text = json.dumps(figures, ensure_ascii=False)
    assert "<script" not in text
    assert "<img" not in text
    templates = re.findall(r'"hovertemplate": "(.*?)"', text)
    assert templates
    assert not any("alert" in template for template in templates)  # %{x} in a name is not a placeholder


def test_the_title_may_be_anything(tmp_path):
    report = collect_runs([write_run(tmp_path / "$title <b>&")])
    assert "<h1>$title &lt;b&gt;&amp;</h1>" in render_page(report)


def test_a_report_is_written_into_a_new_folder(tmp_path):
    report = collect_runs([write_run(tmp_path / "run")])
    file = write_report(report, tmp_path / "new" / "report.html")
    assert file.read_text(encoding="utf-8") == render_page(report)


def test_two_hundred_runs_of_three_hundred_epochs_are_small(tmp_path):
    layers = {f"layer{k}.weight": 1000 for k in range(20)}
    (run,) = collect_runs([write_run(tmp_path / "run", epochs=300, accuracy=91.2345, layers=layers, updates=450)]).runs
    runs = [replace(run, name=f"run-{k}", seed=k % 10, settings={**run.settings, "group": k // 10}) for k in range(200)]
    script_bytes = 5_000_000  # of plotly.js
    assert len(render_page(ReportData("many", tuple(runs))).encode()) + script_bytes < 15_000_000


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(PomonaError, match=r"pip install 'pomona\[report\]'"):
        render_page(collect_runs([write_run(tmp_path / "run")]))


def test_the_assets_are_in_the_package():
    folder = Path(page.__file__).parent / "assets"
    assert {"page.html", "page.css", "page.js"} == {file.name for file in folder.iterdir()}
    assert "report/assets/*" in (Path(__file__).parents[2] / "pyproject.toml").read_text()
