"""The source of the documentation site: links, navigation, the pages of methods and of the API, and the build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from code_blocks import read_blocks, run_blocks
from slow_cases import slow_unless

from pomona.core.method import METHODS
from pomona.registry import spec_options

ROOT = Path(__file__).parents[2]
NAMES = sorted(name for name in METHODS if METHODS[name].__module__.startswith("pomona.methods."))


@pytest.fixture(scope="module")
def method_pages(load_script: Any) -> dict[str, str]:
    """Return the pages of all methods."""
    return load_script("method_pages").render_pages()


# ---- links and navigation


PAGES = {
    "docs/index.md": "index.md",
    "docs/engine.md": "engine.md",
    "docs/results/a.svg": "results/a.svg",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("docs/index.md", "[e](engine.md#one-step)", "[e](engine.md#one-step)"),
        ("docs/index.md", "[c](../CONTRIBUTING.md)", "[c](contributing.md)"),
        ("docs/index.md", "![p](results/a.svg)", "![p](results/a.svg)"),
        ("CONTRIBUTING.md", "[e](docs/engine.md)", "[e](engine.md)"),
        ("examples/README.md", "[e](../docs/engine.md)", "[e](../engine.md)"),
        ("docs/index.md", "[source](../pomona/errors.py)", "source"),  # is not on the site
        ("docs/index.md", "[web](https://pytorch.org)", "[web](https://pytorch.org)"),
        ("docs/index.md", "[here](#start)", "[here](#start)"),
        ("docs/index.md", "```\n[c](../CONTRIBUTING.md)\n```", "```\n[c](../CONTRIBUTING.md)\n```"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(load_script: Any, source: str, before: str, after: str) -> None:
    assert load_script("site_source").move_links(before, source, PAGES) == after


def test_the_navigation_follows_the_sections(load_script: Any) -> None:
    site = load_script("site_source")
    index = (
        "# P\n\n## Start\n\n- [Q](quick.md), [e](engine.md#x)\n\n## More of it\n\n- [r](r.md) [w](https://a.b/c.md)\n"
    )
    assert site.read_sections(index) == {"Start": ["quick.md", "engine.md"], "More of it": ["r.md"]}
    text = site.add_navigation(index, ["index.md", "quick.md", "engine.md", "r.md", "new.md"])
    assert text.startswith(index)
    assert ":caption: Start\n\nquick.md\nengine.md\n```" in text
    assert ":caption: More\n\nnew.md\n```" in text  # a page that nobody has listed yet


def test_every_page_of_the_repository_is_on_the_site(load_script: Any) -> None:
    pages = load_script("site_source").find_pages()
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in pages]
    assert missing == []


# ---- methods


@pytest.mark.parametrize("name", NAMES)
def test_a_method_page_has_the_docstring_and_every_option(name: str, method_pages: dict[str, str]) -> None:
    spec, page = METHODS[name], method_pages[name]
    assert (spec.__doc__ or "").strip().split("\n")[0] in page
    assert spec.paper in page
    for option in spec_options(spec):
        assert f"| `{option}` |" in page


def test_a_method_page_has_the_figures_of_the_records(method_pages: dict[str, str], trained_cells: Any) -> None:
    for cell in trained_cells("dpf-onepass"):
        if cell["method"] == "dpf":
            assert f"{cell['mean']:.2f}" in method_pages["dpf"]
    assert "Results from the records" not in method_pages["rigl"]  # not trained on CIFAR-10 yet


@pytest.mark.parametrize("name", slow_unless(["dpf", "lottery", "sfp"], NAMES))
def test_the_example_of_a_method_runs(name: str, method_pages: dict[str, str], tmp_path: Path) -> None:
    run_blocks(read_blocks(method_pages[name]), name, tmp_path)


# ---- API


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Return `x_`, |w| and *y*.", "Return \\ ``x_``\\ , \\|w\\| and \\*y\\*."),
        ("Use ``y`` and a lone ` mark.", "Use \\ ``y``\\  and a lone \\` mark."),
        ("    w = 1", "::\n\n        w = 1"),
        (
            "bounds        the theorems\ngip           the mask",
            "::\n\n    bounds        the theorems\n    gip           the mask",
        ),
        ("for x in y:\n    print(x)", "::\n\n    for x in y:\n        print(x)"),
        ("Args:\n    steps: how many", "Args:\n    steps: how many"),
        ("- one item\n  that goes on", "- one item\n  that goes on"),
    ],
)
def test_docstrings_become_restructured_text(load_script: Any, before: str, after: str) -> None:
    assert "\n".join(load_script("api_pages").convert_docstring(before.split("\n"))).rstrip() == after


def test_the_reference_describes_every_public_class_and_function(load_script: Any) -> None:
    pages = load_script("api_pages").render_pages()
    for name in ("DPF", "Pruner", "Balanced", "compress", "shrink", "summary", "PomonaError"):
        described = [page for page, text in pages.items() if f":: pomona.{name}\n" in text]
        assert described == ["pomona.rst"]
    assert ":: pomona.theory.bounds.magnitude\n" in pages["pomona.theory.rst"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(load_script: Any, tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    load_script("site_source").write_source(tmp_path / "source")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, str(tmp_path / "source"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for page in ("index", "quick-start", "methods/dpf", "api/pomona", "examples/own_method", "contributing"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
