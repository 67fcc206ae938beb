"""`pomona bound certify --predictions`: the predictions of a run's network that pruning provably leaves unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pomona.errors import require

from ..output import print_json, print_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pomona.theory.certificate import CertifiedPredictions, Region


def certify_run_predictions(
    run: Path,
    dense: nn.Module,
    pruned: nn.Module,
    *,
    radius: float,
    norm: str,
    region: Region | None,
    examples: int,
    steps: int,
    sparsity: float | None,
    as_json: bool,
) -> None:
    """Certify the predictions on the first test examples of a run's data, and print them class by class."""
    from pomona.theory import certificate

    x = read_test_examples(run, examples)
    found = certificate.certify_predictions(dense, pruned, x, radius=radius, norm=norm, region=region, steps=steps)
    if as_json:
        print_json(describe_predictions(found, sparsity))
    else:
        print_table(found)


def read_test_examples(run: Path, count: int) -> Tensor:
    """Return the first test examples of a run's data, as its network sees them."""
    import torch

    from pomona.lab.recipes.recipe import Recipe
    from pomona.lab.runs.folder import RECIPE_FILE
    from pomona.lab.runs.run_inputs import load_data

    data = load_data(Recipe.load_stored(run / RECIPE_FILE), None, torch.device("cpu"))
    require(data.kind in ("image", "table"), f"--predictions takes images or tables, and '{data.name}' is {data.kind}.")
    x, _ = next(data.batches(count, part="test").evaluate())
    return x


def describe_predictions(found: CertifiedPredictions, sparsity: float | None) -> dict[str, Any]:
    """Return certified predictions as plain data."""
    columns = ("classes", "unchanged", "robust", "margin", "changed", "left_class")
    return {
        "sparsity": sparsity,
        "region": found.region,
        "examples": len(found),
        "share": found.share,
        "largest_share": found.largest_share,
        **{name: getattr(found, name).tolist() for name in columns},
    }
