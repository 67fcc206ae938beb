"""Define a pruning method in twenty lines, and compare it with one of the package.

    python examples/own_method.py

The method ranks weights by their magnitude relative to the norm of their row, so that rows of small weights are not
pruned first. It shares everything else with gradual magnitude pruning: when masks are updated, and by how much.
`pomona --plugin own_method methods` shows it on the command line, from within this folder.
"""

from dataclasses import dataclass

import torch
from torch import nn

import pomona as pm
from pomona.methods import make_constructor, method
from pomona.methods.incremental import Incremental


@method("row_relative", paper="an example", weights="hard")
@dataclass(frozen=True, kw_only=True)
class RowRelative(Incremental):
    """Gradual pruning by magnitude relative to the norm of a row."""

    power: float = 1.0  # of the norm: 0 is plain magnitude

    def update(self, targets, sparsity):
        """Return the masks of the highest relative magnitudes."""
        scores = {name: self.score(weight) for name, weight in targets.latent.items()}
        return self.select(targets, scores, sparsity)

    def score(self, weight):
        """Return |w| over the norm of its row; outputs are in the first dimension."""
        norm = weight.flatten(1).norm(dim=1).clamp(min=1e-12).pow(self.power)
        return weight.abs() / norm.view(-1, *[1] * (weight.dim() - 1))


RowRelativePruner = make_constructor(RowRelative)


def train(pruner, epochs=3):
    """Train a small network with a pruner, and return its accuracy on test images."""
    torch.manual_seed(0)
    data = pm.data.load("digits")
    batches = list(zip((data.train.x.float() / 255).split(64), data.train.y.split(64), strict=True))
    model = pm.models.build("digits_cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner.attach(model, optimizer, total_steps=epochs * len(batches))
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    pruner.finish(data=[x for x, _ in batches])
    with torch.no_grad():
        return (model.eval()(data.test.x.float() / 255).argmax(1) == data.test.y).float().mean().item()


if __name__ == "__main__":
    for pruner in (pm.Incremental(sparsity=0.9, every=8), RowRelativePruner(sparsity=0.9, every=8)):
        accuracy = train(pruner)
        print(f"{pruner.method.name:<13} {pruner.sparsity():.0%} sparse: {accuracy:.1%}")
