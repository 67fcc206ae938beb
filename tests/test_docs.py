"""The documentation's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.core.method import METHODS

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.fixture
def page():
    names: dict = {}
    definition, use = blocks("docs/add-a-method.md")
    try:
        exec(definition, names)
        yield names, use
    finally:
        METHODS._specs.pop("lamp", None)


def test_the_method_on_the_page_prunes(page):
    names, use = page
    model = network()
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "steps": 64}
    exec(use, names)
    train(model, names["optimizer"], 64)
    names["pruner"].finish()
    for weight in (model[0].weight, model[3].weight):
        # 9 columns are one block, padded to 32; 288 are nine: each keeps the same count, and never none.
        kept = (weight.flatten(1) != 0).sum(1)
        assert kept.min() >= 1
        assert len(kept.unique()) == 1


def test_the_score_on_the_page_by_hand(page):
    # Squares 1, 9, 4: 9/9, 4/(9+4), 1/(9+4+1).
    score = page[0]["lamp"](torch.tensor([[1.0, -3.0, 2.0]]))
    assert torch.allclose(score, torch.tensor([[1 / 14, 1.0, 4 / 13]]))


def test_the_method_on_the_page_is_registered(page):
    assert pm.methods.pruner("lamp(sparsity=0.5)").method.sparsity == 0.5


def test_the_readme_loop_runs():
    code = next(block for block in blocks("README.md") if "attach" in block)
    model = network()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "criterion": nn.functional.cross_entropy,
        "loader": [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(64)],
        "steps": 64,
    }
    exec(code, names)
    weights = torch.cat([model[0].weight.flatten(), model[3].weight.flatten()])
    assert int((weights == 0).sum()) == round(0.9 * weights.numel())
