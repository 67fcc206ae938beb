"""Prune the filters of a CNN, remove them, and write a file that runs without Pomona.

python examples/shrink_and_export.py --sparsity 0.5 --out small.pt2
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pomona as pm


def main() -> None:
    """Train, prune, shrink, export, and compare the exported network with the pruned one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="small.pt2")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = pm.data.load("digits")
    loader = DataLoader(TensorDataset(data.train.x.float() / 255, data.train.y), batch_size=64, shuffle=True)
    images, labels = data.test.x.float() / 255, data.test.y

    model = pm.models.build("digits_cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = pm.DPF(sparsity=options.sparsity, pattern=pm.Filter())
    pruner.attach(model, optimizer, total_steps=options.epochs * len(loader))
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    pruner.finish(data=loader)
    model.eval()

    shrunk = pm.shrink(model, images[:1])
    print(shrunk)
    small = shrunk.model.eval()
    program = torch.export.export(small, (images[:2],), dynamic_shapes=[{0: torch.export.Dim("batch", min=1)}])
    torch.export.save(program, options.out)

    deployed = torch.export.load(options.out).module()
    with torch.no_grad():
        difference = (deployed(images) - model(images)).abs().max().item()
        correct = (deployed(images).argmax(1) == labels).float().mean().item()
        before, after = milliseconds(model, images), milliseconds(small, images)
    print(f"accuracy {correct:.1%}, largest difference of an output {difference:.1e}")
    print(f"{len(images)} images: {before:.1f} ms before, {after:.1f} ms after; written to {options.out}")


def milliseconds(model, images, repeats=20):
    """Return the shortest time of a forward pass."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(images)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    main()
