"""The report in a browser, opened from the disk with the network off; the pictures in docs/ come from here.

POMONA_SCREENSHOTS=docs POMONA_SCREENSHOT_RUNS=runs/demo python -m pytest tests/report/test_browser.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import LAYERS, write_grid

from pomona.report import collect_runs, write_report

pytest.importorskip("plotly")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

EPOCHS, SEEDS = 4, 2
DRAWN = "() => [...document.querySelectorAll('.chart')].every(chart => chart.querySelector('.plot').data)"
TRACES = "name => document.querySelector(`#chart-${name} .plot`).data"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def report_file(tmp_path_factory) -> Path:
    """Return a report of ten runs."""
    folder = tmp_path_factory.mktemp("report")
    return write_report(collect_runs([write_grid(folder / "grid", SEEDS, epochs=EPOCHS)]), folder / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Return a headless browser."""
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a file with the network off; errors and requests to elsewhere fail the test."""
    problems, contexts = [], []

    def open_file(file: Path, **options):
        context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
        page.goto(file.as_uri())
        for chart in page.locator(".chart").all():
            chart.scroll_into_view_if_needed()
        page.wait_for_function(DRAWN)
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert problems == []


def test_every_point_and_cell_is_drawn(open_page, report_file):
    page = open_page(report_file)
    means, runs = [], []
    for trace in page.evaluate(TRACES, "sparsity"):
        (runs if "single runs" in trace["name"] else means).append(len(trace["x"]))
    assert (means, runs) == ([1, 2, 2], [SEEDS * count for count in (1, 2, 2)])
    assert [len(trace["y"]) for trace in page.evaluate(TRACES, "learning")] == [EPOCHS] * 5 * SEEDS
    assert page.locator("#chart-learning .scatterlayer .js-line").count() == 5 * SEEDS
    (heat,) = page.evaluate(TRACES, "layers")
    assert (len(heat["y"]), len(heat["x"])) == (len(LAYERS), EPOCHS)
    assert [len(row) for row in heat["z"]] == [EPOCHS] * len(LAYERS)
    assert page.locator("#chart-layers .hm image").count() == 1
    choice = page.locator("#chart-layers select")
    assert choice.locator("option").count() == 4 * SEEDS
    before = heat["z"][0][-1]
    choice.select_option(index=2)  # of another sparsity
    page.wait_for_function(f"() => ({TRACES})('layers')[0].z[0].at(-1) !== {before}")


def test_points_have_labels_and_the_legend_hides_curves(open_page, report_file):
    page = open_page(report_file)
    chart = page.locator("#chart-sparsity")
    chart.scroll_into_view_if_needed()
    points = chart.locator(".scatterlayer .trace").nth(2).locator(".point")
    points.first.hover(force=True)
    label = chart.locator(".hoverlayer .hovertext")
    label.first.wait_for()
    assert "dpf 90 %" in label.first.text_content()
    assert "seeds 0, 1" in label.first.text_content()
    chart.locator(".legend .legendtoggle").nth(1).click(force=True)
    hidden = "() => document.querySelector('#chart-sparsity .plot').data.filter(t => t.visible === 'legendonly')"
    page.wait_for_function(f"{hidden}.length === 2")
    assert [trace["legendgroup"] for trace in page.evaluate(hidden)] == ["dpf", "dpf"]


def test_the_page_is_light_or_dark(open_page, report_file):
    background = "() => getComputedStyle(document.body).backgroundColor"
    grid = "() => document.querySelector('#chart-sparsity .plot').layout.xaxis.gridcolor"
    page = open_page(report_file, color_scheme="dark")
    assert (page.evaluate(background), page.evaluate(grid)) == ("rgb(16, 20, 18)", "#2a332e")
    page.locator("#theme").click()
    page.wait_for_function(f"() => ({grid})() === '#e5e3dc'")
    assert page.evaluate(background) == "rgb(250, 249, 246)"


def test_a_phone_shows_the_page_without_scrolling_sideways(open_page, report_file):
    page = open_page(report_file, **PHONE)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
    widths = page.evaluate("() => [...document.querySelectorAll('.plot .main-svg')].map(plot => plot.clientWidth)")
    assert max(widths) <= PHONE["viewport"]["width"]


@pytest.mark.slow
def test_the_page_can_be_printed(open_page, report_file, tmp_path):
    page = open_page(report_file, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 10_000


@pytest.mark.skipif("POMONA_SCREENSHOTS" not in os.environ, reason="writes the pictures of docs/")
def test_write_the_pictures_of_the_documentation(open_page, tmp_path):
    runs = os.environ["POMONA_SCREENSHOT_RUNS"].split(",")
    file, out = write_report(collect_runs(runs), tmp_path / "report.html"), Path(os.environ["POMONA_SCREENSHOTS"])
    for scheme, name, section in (("light", "report.png", None), ("dark", "report-dark.png", "#training")):
        page = open_page(file, color_scheme=scheme, viewport={"width": 1240, "height": 1240})
        if section is None:
            page.evaluate("scrollTo(0, 0)")
        else:
            page.locator(section).evaluate("section => section.scrollIntoView()")
        page.mouse.move(0, 0)
        page.wait_for_timeout(500)
        page.screenshot(path=out / name)
