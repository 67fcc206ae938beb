"""The summary of a run: its last scores, its cost, what was tracked, and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pomona import models

from .environment import describe_environment
from .stage_figures import TRACKED_FIGURES

if TYPE_CHECKING:
    from .run import Run


def summarize_run(run: Run) -> dict[str, Any]:
    """Return the summary of a run that has completed its stages."""
    stages = [{key: value for key, value in row.items() if key not in ("kind", "lr")} for row in run.stage_results]
    tracked = {key: stages[0].pop(key) for key in TRACKED_FIGURES if key in stages[0]}
    cost = models.summary(run.model, run.data.input_shape)
    return {
        "name": run.recipe.name,
        "fingerprint": run.recipe.fingerprint(),
        "seed": run.recipe.seed,
        "data": run.recipe.data.name,
        "model": run.recipe.model["name"],
        "method": run.recipe.method["name"],
        **{key: value for key, value in stages[-1].items() if key not in ("stage", "layers")},
        "model_sparsity": cost.sparsity,
        "params": cost.params,
        "nonzeros": cost.nonzeros,
        "macs": cost.macs,
        "macs_left": cost.macs_left,
        **tracked,
        "stages": stages,
        "device": str(run.device),
        "world": run.processes.world_size,
        **describe_environment(),
    }
