"""The page and the picture of the harm matrix."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest


def make_cell(method: str, network: str, sparsity: float, verdict: str, **fields: Any) -> dict[str, Any]:
    """Return a judged cell."""
    cell = {"method": method, "pattern": "unstructured", "network": network, "sparsity": sparsity, "seed": 0}
    return {**cell, "verdict": verdict, **fields}


MASKS = {"least_density": 0.0012, "thinnest_layer": "0.weight", "largest_latent": 1142.0, "warnings": ["thin"]}
CELLS = [
    make_cell("dense", "MLP", 0.0, "fine", accuracy=98.0),
    make_cell("dpf", "MLP", 0.5, "fine", accuracy=97.0),
    make_cell("dpf", "MLP", 0.5, "fine", accuracy=40.0, seed=1),
    make_cell("dpf", "LSTM", 0.9, "chance", accuracy=9.8, reference=95.0, **MASKS),
    make_cell("sfp", "MLP", 0.5, "refused", message="MLP has nothing to prune."),
    make_cell("sfp", "MLP", 0.9, "refused", message="MLP has nothing to prune."),
]


def texts_of(picture: str) -> list[str]:
    """Return the texts of an SVG picture in their order."""
    return [element.text or "" for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")]


def test_the_picture_shows_the_lowest_accuracy_of_all_seeds(load_script: Any) -> None:
    picture = load_script("harm_page").draw_matrix(CELLS)
    texts = texts_of(picture)
    columns = texts.index("MLP"), texts.index("LSTM")
    assert columns == tuple(sorted(columns))
    legend = texts.index("accuracy, %")
    assert [text for text in texts[:legend] if text.endswith(" %")] == ["50 %", "90 %"] * 2
    values = [text for text in texts[:legend] if re.fullmatch(r"\d+", text)]
    assert values == ["98", "98", "40", "10"]  # dense training at both sparsities, DPF's worst seed, the LSTM
    assert picture.count("url(#hatch)") == 3  # two refused cells and the legend


def test_tables_of_harmed_and_refused_cells(load_script: Any, empty_results: Path) -> None:
    page, missing = load_script("harm_page"), load_script("page_helpers").NOT_MEASURED
    formats = page.format_verdicts, page.format_harmed, page.format_refusals, page.format_picture
    assert {format_part([]) for format_part in formats} == {missing}
    assert page.read_cells() == []
    harmed = page.format_harmed(CELLS).splitlines()
    row = "| dpf | unstructured | LSTM | 90 % | 0 | 9.8 | 95.0 | 0.12 % of 0.weight | 1.14e+03 | chance, warned |"
    assert harmed[2:] == [row]
    refused = page.format_refusals(CELLS).splitlines()
    assert refused[2:] == ["| sfp | unstructured | MLP 50 %, MLP 90 % | MLP has nothing to prune. |"]
    assert page.format_harmed(CELLS[:1]) == page.format_refusals(CELLS[:1]) == "None."
    assert "| 3 | fine |" in page.format_verdicts(CELLS)
    settings = {"networks": {"MLP": "two layers", "LSTM": "rows"}}
    (empty_results / "harm-matrix.json").write_text(json.dumps({"settings": settings, "cells": CELLS}))
    rows = page.format_networks(load_script("page_helpers").read_records(page.RECORD)).splitlines()
    assert rows[2:] == ["| MLP | two layers | 98.0 |", "| LSTM | rows |  |"]
    assert page.read_cells() == CELLS


def test_colors_run_from_light_to_dark(load_script: Any) -> None:
    heat_map = load_script("heat_map")
    assert heat_map.color_of(100) == "#e8f3ee"
    assert heat_map.color_of(19.9) == "#2d0028"
    assert heat_map.color_of(65) == "#f2af5c"  # the mean of its neighbours (255, 224, 150) and (230, 126, 34)
    light = [sum(bytes.fromhex(heat_map.color_of(value)[1:])) for value in range(0, 101, 5)]
    assert light == sorted(light)


def test_groups_are_apart(load_script: Any) -> None:
    heat_map = load_script("heat_map")
    labels = [("a", "1"), ("a", "2"), ("b", "1")]
    assert heat_map.find_groups(labels) == [("a", 0, 1), ("b", 2, 2)]
    assert heat_map.place_labels(labels, 10) == [0, 10, 20 + heat_map.GROUP_GAP]


def test_the_picture_is_what_the_record_gives(load_script: Any) -> None:
    page = load_script("harm_page")
    if not (cells := page.read_cells()):
        pytest.skip("the matrix was not recorded yet")
    assert page.PICTURE.read_text(encoding="utf-8") == page.draw_matrix(cells)
    assert not [cell for cell in cells if cell["verdict"] in ("chance", "crashed")]
