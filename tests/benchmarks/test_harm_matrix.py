"""The harm matrix: its cells, its verdicts, and a few cells trained."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.methods import METHODS
from pomona.patterns import PATTERNS


@pytest.fixture
def matrix(load_script: Any) -> Any:
    """Return the script that trains the matrix."""
    return load_script("harm_matrix")


def built_in(registry: Any) -> set[str]:
    """Return the registered names that the package defines itself."""
    return {name for name in registry if registry[name].__module__.startswith("pomona.")}


def test_every_method_and_pattern_is_in_the_matrix(matrix: Any) -> None:
    cells = matrix.list_cells()
    assert {cell.method for cell in cells} - {"dense"} >= built_in(METHODS)
    assert {cell.pattern for cell in cells} == built_in(PATTERNS)
    counts = Counter((cell.method, cell.pattern) for cell in cells)
    networks, sparsities = len(matrix.NETWORKS), len(matrix.SPARSITIES)
    assert counts["dense", "unstructured"] == networks == 6
    assert counts["dpf", "filter"] == networks * sparsities == 18
    assert counts["dpf", "kernel"] == 9  # of three convolutional networks
    assert counts["dpf", "nm"] == networks
    assert [pattern for method, pattern in counts if method == "srigl"] == ["balanced"]
    assert len({cell.name for cell in cells}) == len(cells)


def test_every_network_has_ten_classes_and_can_be_built_without_gains(load_script: Any) -> None:
    for network in load_script("harm_networks").NETWORKS.values():
        for affine in (True, False):
            model = network.make_model(affine)
            assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
            norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]
            assert bool(norms) == network.has_norms
            assert all((norm.weight is not None) == affine for norm in norms)
        kernels = any(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules())
        assert kernels == network.has_kernels


def test_layers_that_a_pattern_does_not_fit_are_left_out(load_script: Any) -> None:
    training = load_script("harm_training")
    model = training.NETWORKS["CNN"].make_model()
    spec, left_out = training.Cell("dpf", "nm", "CNN", 0.5).make_method(model, "dpf")
    assert left_out == ["features.0.weight"]  # nine weights in a row
    assert [target.name for target in spec.targets(model)] == [f"features.{i}.weight" for i in (3, 6, 9)]
    spec, left_out = training.Cell("dpf", "balanced", "CNN", 0.98).make_method(model, "dpf")
    assert left_out == []


def test_kernels_of_scores_have_a_floor_of_half_the_density(load_script: Any) -> None:
    training = load_script("harm_training")
    model = training.NETWORKS["CNN"].make_model(affine=False)
    for sparsity, floor in ((0.5, 0.25), (0.98, 0.01)):
        spec, _ = training.Cell("iterand", "kernel", "CNN", sparsity).make_method(model, "iterand")
        assert spec.allocation == f"global(floor={floor})"
    spec, _ = training.Cell("iterand", "unstructured", "CNN", 0.5).make_method(model, "iterand")
    assert spec.allocation == "uniform"


def test_statistics_are_estimated_again_where_masks_change_at_the_last_step(load_script: Any) -> None:
    training = load_script("harm_training")
    for name in training.CHANGED_LAST:
        row = training.train_cell(training.Cell(name, "unstructured", "CNN", 0.5, epochs=1))
        assert row["status"] == "trained"
        assert not any("statistics are stale" in warning for warning in row["warnings"]), name


def make_row(method: str, accuracy: float | None = None, **fields: Any) -> dict[str, Any]:
    """Return a row of the matrix."""
    cell = {"method": method, "pattern": "filter", "network": "MLP", "sparsity": 0.9, "seed": 0}
    return {**cell, "status": "trained", **({} if accuracy is None else {"accuracy": accuracy}), **fields}


def test_verdicts_by_hand(matrix: Any) -> None:
    rows = [
        make_row("snip", 19.9),
        make_row("finetune", 90.0),
        make_row("dpf", 75.0),
        make_row("random", 74.9),
        make_row("rigl", status="refused"),
        make_row("set", status="crashed"),
        make_row("dpf", 20.0, seed=1),  # no reference with this seed
    ]
    judged = {(row["method"], row["seed"]): (row["verdict"], row["reference"]) for row in matrix.judge(rows)}
    assert judged == {
        ("dpf", 0): ("fine", 90.0),
        ("finetune", 0): ("fine", 90.0),
        ("random", 0): ("harmed", 90.0),
        ("rigl", 0): ("refused", 90.0),
        ("set", 0): ("crashed", 90.0),
        ("snip", 0): ("chance", 90.0),
        ("dpf", 1): ("fine", None),
    }
    assert list(judged) == sorted(judged, key=lambda key: (key[1], key[0]))


def test_masks_of_an_emptied_layer_are_described(load_script: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 10))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 4.0, 5.0, 6.0], [0.0, 0.0, 0.0, 0.0]]))
        model[1].weight.fill_(0.0)
    pruner = pm.Finetune(include=["0", "1"])
    pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    assert load_script("harm_training").describe_masks(pruner) == {
        "reached": 0.66667,
        "zeros": 0.66667,
        "least_density": 0.0,
        "thinnest_layer": "1.weight",
        "empty_layers": 1,
        "outputs": 4,
        "empty_outputs": 3,
    }


def test_a_crash_is_a_row_and_a_refusal_has_its_sentence(load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = load_script("harm_training")
    refused = training.train_cell(training.Cell("rigl", "filter", "MLP", 0.9))
    assert refused["status"] == "refused"
    assert "a filter of zeros behind a ReLU never learns" in refused["message"]
    monkeypatch.setattr(training.Training, "run", lambda self: 1 / 0)
    crashed = training.train_cell(training.Cell("dpf", "filter", "MLP", 0.9))
    assert crashed["status"] == "crashed"
    assert crashed["message"].startswith("ZeroDivisionError: division by zero")


def test_a_few_cells_are_trained_and_resumed(matrix: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, lines = tmp_path / "record.json", tmp_path / "cells.jsonl"
    command = ["--quick", "--processes", "1", "--json", str(record), "--resume", str(lines)]
    first = ["--only", "dpf/*", "finetune/*/0.9/*"]
    matrix.main([*command, *first])
    assert len(lines.read_text().splitlines()) == 1 + 4
    capsys.readouterr()
    matrix.main([*command, "--only", "dense/*", "*/0.5/*", *first[1:]])
    assert capsys.readouterr().out.startswith("6 cells to train, 4 finished before")
    cells = json.loads(record.read_text())["cells"]
    verdicts = {(cell["method"], cell["sparsity"]): cell["verdict"] for cell in cells}
    assert verdicts.pop(("sfp", 0.5)) == "refused"  # it prunes convolutions
    assert set(verdicts.values()) == {"fine"}
    assert {method for method, _ in verdicts} == {"dense", "dpf", "edge_popup", "finetune", "lottery", "snip"}
    for cell in cells:
        if "reached" in cell:
            assert cell["reached"] == pytest.approx(cell["sparsity"], abs=1e-4)
    lines.write_text(lines.read_text().replace('"epochs": [2]', '"epochs": [3]', 1))
    with pytest.raises(SystemExit, match="give --resume another file"):
        matrix.main(command)


def test_the_script_fails_where_a_cell_ends_at_chance(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "train_cell", lambda cell: {**make_row("dpf", 9.8), "sparsity": cell.sparsity})
    with pytest.raises(SystemExit, match="3 cells ended at chance and 0 crashed"):
        matrix.main(["--quick", "--processes", "1", "--only", "dpf/*"])
