"""What a method is, for a person who chooses one: paper, options with their meaning, and an example."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.method import METHODS, WEIGHT_KINDS, Method
from ..registry import describe_options, spec_options, spec_to_dict, to_plain_data
from .lottery import Lottery

TRAINING_LOOP = """\
import pomona as pm

pruner = {pruner}
pruner.attach(model, optimizer, loader=loader, epochs=epochs)
for _ in range(epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
pruner.finish()
"""
TRAINING_ROUNDS = """\
import torch

import pomona as pm

def train(model, pruner, index):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(model, optimizer, loader=loader, epochs=epochs)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    pruner.finish()

results = {pruner}.rounds(model, train)
"""
COMMAND = "pomona train digits-dpf --set method={name} --name digits-{name}"


def summarize_method(name: str) -> dict[str, Any]:
    """Return name, paper, weight kind, one sentence, and the options with their defaults; the method may be unknown."""
    spec = METHODS[name]
    options = spec_to_dict(spec())
    return {
        "name": options.pop("name"),
        "paper": spec.paper,
        "weights": spec.weights,
        "about": (spec.__doc__ or "").split("\n")[0],
        "options": options,
    }


def describe_method(name: str) -> dict[str, Any]:
    """Return what `summarize_method` does, with all options, their meanings, the description and examples."""
    spec, summary = METHODS[name], summarize_method(name)
    signature = {key: to_plain_data(option.default) for key, option in spec_options(spec).items()}
    options = signature | summary["options"]  # the signature also has the options of type InitVar, which set others
    return {
        **summary,
        "weights_mean": WEIGHT_KINDS[spec.weights],
        "description": inspect.cleandoc(spec.__doc__ or "").partition("\n")[2].strip(),
        "options": options,
        "meanings": describe_options(spec),
        "python": example_code(spec),
        "command": example_command(spec),
    }


def example_code(spec: type[Method]) -> str:
    """Return a training loop with a method's pruner; model, optimizer, criterion, loader and epochs are the user's."""
    options = f"sparsity={spec().sparsity}" if "sparsity" in spec_options(spec) else ""
    is_ours = spec.__module__.startswith(f"{__package__}.")
    pruner = f"pm.{spec.__name__}({options})" if is_ours else f'pm.methods.make_pruner("{spec.name}({options})")'
    return (TRAINING_ROUNDS if issubclass(spec, Lottery) else TRAINING_LOOP).format(pruner=pruner)


def example_command(spec: type[Method]) -> str:
    """Return a command that trains a small network with a method; one that only fine-tunes continues another run."""
    origin = "" if "sparsity" in spec_options(spec) else " --set origin.run=runs/digits-dpf"
    return COMMAND.format(name=spec.name) + origin
