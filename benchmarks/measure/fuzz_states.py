"""The parsers of states: of a pruner, of an optimizer that carries one, and of the checkpoint of a run."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fuzz_case import Parser
from fuzz_mutations import hostile_value, mutate_bytes, mutate_tree

import pomona as pm
from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.runs import checkpoint, resume
from pomona.lab.runs.run import prepared_run
from pomona.lab.runs.strategy import as_strategy

STEPS = 6
METHODS: dict[str, Callable[[], Any]] = {
    "dpf": lambda: pm.DPF(sparsity=0.8, every=2),
    "rigl": lambda: pm.RigL(sparsity=0.8, every=2),
    "iterand": lambda: pm.IteRand(sparsity=0.5, every=2, rate=0.5),
    "dsr": lambda: pm.DSR(sparsity=0.8, every=2),
    "feather": lambda: pm.Feather(sparsity=0.8),
}


def make_state_parsers(folder: Path) -> Iterator[Parser]:
    """Yield the parsers; `folder` is for a run that was stopped."""
    cases = [prepare(make) for make in METHODS.values()]

    def draw_state(draw: random.Random) -> tuple[int, Any]:
        number = draw.randrange(len(cases))
        return number, mutate_tree(draw, cases[number][2])

    def load_state(value: tuple[int, Any], _: Path) -> None:
        number, state = value
        model, optimizer, _, pruner, _ = cases[number]
        before = snapshot(model, pruner)
        try:
            pruner.load_state_dict(state)
        except PomonaError:
            require_unchanged(before, snapshot(model, pruner))
            raise
        step(model, optimizer)
        restore(model, pruner, before)

    def attach_state(value: tuple[int, Any], _: Path) -> None:
        number, state = value
        torch.manual_seed(0)
        model = make_model()
        model.load_state_dict(cases[number][4])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["pomona"] = state
        list(METHODS.values())[number]().attach(model, optimizer, total_steps=STEPS)

    valid = [(number, case[2]) for number, case in enumerate(cases)]
    yield Parser("pruner state", 10, valid, draw_state, load_state)
    yield Parser("waiting state", 4, valid, draw_state, attach_state)
    yield make_checkpoint_parser(folder)


def make_model() -> torch.nn.Module:
    """Return a small network."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3)
    )


def prepare(make: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any], Any, dict[str, Any]]:
    """Return a model, its optimizer, a state of its pruner, the pruner, and a state of the model, after some steps."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = make().attach(model, optimizer, total_steps=STEPS)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer, copy.deepcopy(pruner.state_dict()), pruner, copy.deepcopy(model.state_dict())


def step(model: Any, optimizer: Any) -> None:
    """Take one step of training."""
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def snapshot(model: Any, pruner: Any) -> dict[str, Any]:
    """Return copies of everything that loading a state may change."""
    return copy.deepcopy({"model": model.state_dict(), "pruner": pruner.state_dict()})


def require_unchanged(before: Any, after: Any, place: str = "") -> None:
    """Raise AssertionError, with the place, where two nested states differ."""
    same = type(before) is type(after)
    if same and isinstance(before, dict):
        same = before.keys() == after.keys()
        for key in before if same else ():
            require_unchanged(before[key], after[key], f"{place}.{key}")
    elif same and isinstance(before, list | tuple):
        same = len(before) == len(after)
        for number, pair in enumerate(zip(before, after, strict=False)):
            require_unchanged(*pair, f"{place}[{number}]")
    elif same:
        same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    if not same:
        raise AssertionError(f"a refused state has changed {place}")


def restore(model: Any, pruner: Any, saved: dict[str, Any]) -> None:
    """Go back to a snapshot after a state was accepted."""
    model.load_state_dict(saved["model"])
    pruner.load_state_dict(saved["pruner"])


def make_checkpoint_parser(folder: Path) -> Parser:
    """Return the parser of the checkpoint of a run, which restores the run too."""
    settings = {"data": "digits", "model": "mlp(hidden=[8])", "method": "dpf(sparsity=0.8, every=2)"}
    recipe = Recipe.load({**settings, "train": {"epochs": 2, "batch_size": 512, "device": "cpu"}})
    taken = iter(range(4))
    with contextlib.suppress(Interrupted):
        train(recipe, folder, stop=lambda: next(taken) == 3)
    valid = checkpoint.load(folder)
    files = {path.name: path.read_bytes() for path in sorted((folder / checkpoint.CURRENT_FOLDER).iterdir())}
    context = prepared_run(as_strategy(recipe), None)
    run = context.__enter__()

    def draw_checkpoint(draw: random.Random) -> Any:
        kind = draw.randrange(3)
        if kind == 0:
            name = draw.choice(list(files))
            return files | {name: mutate_bytes(draw, files[name], list(files.values()))}
        if kind == 1:
            tree = mutate_tree(draw, valid)
            return tree if isinstance(tree, dict) else {"model": hostile_value(draw)}
        return {**valid, draw.choice(list(valid)): hostile_value(draw)}

    def parse_checkpoint(value: Any, place: Path) -> None:
        checkpoint._remove(place / checkpoint.CURRENT_FOLDER)
        if all(isinstance(one, bytes) for one in value.values()):
            (place / checkpoint.CURRENT_FOLDER).mkdir()
            for name, data in value.items():
                (place / checkpoint.CURRENT_FOLDER / name).write_bytes(data)
        else:
            try:
                checkpoint.save(place, value)
            except (TypeError, ValueError, UnicodeEncodeError) as error:
                raise PomonaError("no such checkpoint can be written") from error
        checkpoint._remove(place / checkpoint.PREVIOUS_FOLDER)
        resume.restore_state(run, checkpoint.load(place))

    return Parser("checkpoint", 8, [valid, files], draw_checkpoint, parse_checkpoint)
