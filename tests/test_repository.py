"""The files around the package agree with each other: versions, commands, markers and links."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pomona import __version__

ROOT = Path(__file__).parents[1]
HAND_WRITTEN = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))


def slug_of(heading: str) -> str:
    """Return the anchor that a Markdown heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_pre_commit_has_the_version_of_ruff_that_lint_uses():
    (hooks,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    pinned = re.search(r"^ruff==(.+)$", read("constraints.txt"), re.MULTILINE)
    assert pinned is not None
    assert hooks["rev"] == f"v{pinned[1]}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_citation_has_the_version():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__


def test_the_changelog_has_the_version_and_an_unreleased_section():
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert __version__ in headings


def test_ci_runs_lint_and_all_tests():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert re.findall(r"^make (\S+)$", read(".ci/run"), re.MULTILINE) == ["lint", "test-all"]
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in commands
    assert any("python -m build" in command for command in commands)
    pythons = {
        s["with"]["python-version"]
        for job in workflow["jobs"].values()
        for s in job["steps"]
        if "setup-python" in s.get("uses", "")
    }
    assert pythons == {"3.11"}


@pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
def test_issue_templates_are_complete(name):
    form = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{name}"))
    assert {"name", "description", "body"} <= form.keys()
    assert all(field["attributes"]["label"] for field in form["body"])


def test_make_test_leaves_out_the_slow_tests_and_no_others():
    makefile = read("Makefile")
    assert re.search(r'^test: setup\n\t\$\(BIN\)/pytest -n 2 -m "not slow"$', makefile, re.MULTILINE)
    assert re.search(r"^test-all: setup\n\t\$\(BIN\)/pytest -n 2$", makefile, re.MULTILINE)
    markers = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]["markers"]
    assert {marker.split(":")[0] for marker in markers} == {"gpu", "slow"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_the_make_targets_that_are_named_exist(name):
    named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", read(name), re.MULTILINE)
    assert set(named) <= make_targets()


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug_of, headings), f"{name} links to {link}"
