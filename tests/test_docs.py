"""The hand-written pages: what their examples compute, and that they name what exists.

tests/test_code_blocks.py runs all code blocks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.cli import main
from pomona.compressors import COMPRESSORS
from pomona.core.method import METHODS
from pomona.patterns import PATTERNS

ROOT = Path(__file__).parents[1]
PAGES = [
    *("architecture", "engine", "laboratory", "methods"),
    *("quick-start", "add-a-method", "how-to-extend", "how-to-transformer", "how-to-deploy", "how-to-compare"),
]
GUIDES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page}.md" for page in PAGES)]

COMMAND = re.compile(r"^\$ pomona (.+)$", re.MULTILINE)


def read_blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def make_network() -> nn.Module:
    """Return a small network with a convolution, a linear layer and a classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))


def train_network(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on random batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_purpose_and_an_example(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    head = re.split(r"\n## (?!A module)", text)[0]
    assert head.startswith("# ")
    assert "This page" in head
    assert "```python" in head or "```console" in head


def test_the_commands_of_the_laboratory_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [line for block in read_blocks("docs/laboratory.md", "console") for line in COMMAND.findall(block)]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr().err
    assert (tmp_path / "runs/first/summary.json").is_file()
    assert (tmp_path / "runs/two/sweep.json").is_file()


# ---- docs/add-a-method.md


@pytest.fixture
def page():
    """Run the definition on the page, and return its names and the block that uses it."""
    names: dict = {}
    definition, use = read_blocks("docs/add-a-method.md")
    try:
        exec(definition, names)
        yield names, use
    finally:
        METHODS._specs.pop("lamp", None)


def test_the_method_on_the_page_prunes(page):
    names, use = page
    model = make_network()
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "steps": 64}
    exec(use, names)
    train_network(model, names["optimizer"], 64)
    names["pruner"].finish()
    for weight in (model[0].weight, model[3].weight):
        # 9 columns are one block, padded to 32; 288 are nine: each keeps the same count, and never none.
        kept = (weight.flatten(1) != 0).sum(1)
        assert kept.min() >= 1
        assert len(kept.unique()) == 1


@pytest.mark.parametrize("pattern", [pm.Unstructured(), pm.Filter()], ids=str)
def test_the_method_on_the_page_never_brings_a_weight_back(page, pattern):
    names, _ = page
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pruner = names["LAMP"](sparsity=0.9, every=4, pattern=pattern)
    pruner.attach(model, optimizer, total_steps=32)
    pruned = {name: ~mask for name, mask in pruner.masks().items()}
    for _ in range(8):
        train_network(model, optimizer, 4)
        masks = pruner.masks()
        assert not any((masks[name] & pruned[name]).any() for name in masks)
        pruned = {name: ~mask.clone() for name, mask in masks.items()}


def test_the_method_on_the_page_prunes_whole_filters(page):
    names, _ = page
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pruner = names["LAMP"](sparsity=0.5, every=4, pattern=pm.Filter())
    pruner.attach(model, optimizer, total_steps=32)
    train_network(model, optimizer, 32)
    pruner.finish()
    kept = [weight.flatten(1) != 0 for weight in (model[0].weight, model[3].weight)]
    assert all((mask.all(1) | ~mask.any(1)).all() for mask in kept)
    weights = sum(mask.numel() for mask in kept)
    unit = max(mask[0].numel() for mask in kept)  # the sparsity is exact up to half a filter
    assert abs(sum(int((~mask).sum()) for mask in kept) - 0.5 * weights) <= unit / 2


def test_the_score_on_the_page_by_hand(page):
    # Squares 1, 9, 4: 9/9, 4/(9+4), 1/(9+4+1).
    score = page[0]["lamp_score"](torch.tensor([[1.0, -3.0, 2.0]]))
    assert torch.allclose(score, torch.tensor([[1 / 14, 1.0, 4 / 13]]))


def test_the_method_on_the_page_is_registered(page):
    assert pm.methods.make_pruner("lamp(sparsity=0.5)").method.sparsity == 0.5


# ---- docs/how-to-extend.md


def test_the_pattern_and_the_method_of_the_how_to_prune_whole_columns():
    names: dict = {}
    try:
        exec(read_blocks("docs/how-to-extend.md")[0], names)
        model = make_network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        pruner = names["AnnealedPruner"](sparsity=0.5, pattern="column", include=["3.weight"], every=4)
        pruner.attach(model, optimizer, total_steps=16)
        train_network(model, optimizer, 16)
        pruner.finish()
    finally:
        METHODS._specs.pop("annealed", None)
        PATTERNS._specs.pop("column", None)
    kept = model[3].weight != 0
    assert int(kept.all(0).sum()) == int((~kept).all(0).sum()) == 144


@pytest.mark.slow
def test_the_scratch_folder_of_the_how_to_runs_a_sweep(tmp_path):
    (definition, script), (recipe,) = read_blocks("docs/how-to-extend.md"), read_blocks("docs/how-to-extend.md", "toml")
    (tmp_path / "my_pruning.py").write_text(definition)
    (tmp_path / "columns.toml").write_text(recipe)
    (tmp_path / "compare.py").write_text(script)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # as all tests: one thread
    done = subprocess.run([sys.executable, "compare.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["incremental"] * 2 + ["annealed"] * 4
    assert len(list(tmp_path.glob("runs/columns/*/summary.json"))) == 6


# ---- README.md and all pages


def test_every_method_and_compressor_is_on_the_pages_that_list_them():
    readme, methods = (ROOT / "README.md").read_text(), (ROOT / "docs/methods.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (?:hard|soft|free|score) \|", methods, re.MULTILINE))
    built_in = {name for name in METHODS if METHODS[name].__module__.startswith("pomona.methods.")}
    assert rows == built_in
    assert [name for name in built_in if f"`pm.{METHODS[name].__name__}`" not in readme] == []
    assert [name for name in COMPRESSORS if f"`{COMPRESSORS[name].__name__}(" not in readme] == []


@pytest.mark.parametrize("page", GUIDES)
def test_the_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:pomona|benchmarks|recipes|tests|results|docs)/[\w./-]*)`", (ROOT / page).read_text())
    assert [name for name in dict.fromkeys(named) if not (ROOT / name).exists()] == []


LINKED = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")


def read_anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as a forge makes them: lower case, without punctuation, with hyphens."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_the_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    for target, anchor in LINK.findall(text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in read_anchors(path), f"{target}#{anchor}"
