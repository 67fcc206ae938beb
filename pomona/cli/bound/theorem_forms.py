"""One theorem of Qian & Klabjan (2021) in its printed, corrected and sharp form: solved, printed and drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pomona.errors import PomonaError, require

from ..output import facts_table, print_status, print_table
from .output import Series, print_result, write_chart

CURVE_POINTS = 40


def show_theorem(
    theorem: Callable[..., Any],
    widths: tuple[int, ...],
    alpha: float | None,
    sparsity: float | None,
    epsilon: float | None,
    delta: float,
    options: Mapping[str, Any],
    plot: Path | None,
    as_json: bool,
    assumption: str = "",
) -> None:
    """Evaluate a theorem in its three forms, or solve it for the sparsity or the width, and print the results."""
    from pomona.theory import bounds

    require(
        epsilon is not None or alpha is not None or sparsity is not None,
        "say how much is pruned, --alpha or --sparsity, or how much error is allowed, --epsilon.",
    )
    results = [evaluate_form(theorem, form, widths, alpha, sparsity, epsilon, delta, options) for form in bounds.FORMS]
    if all(result.get("not_covered") for result in results):
        raise PomonaError(results[0]["note"])
    if not as_json:
        print_status("the bound holds for weights drawn at random; docs/errata.md explains the three forms.")
    print_result([{**result, "assumption": assumption} for result in results], forms_table(results), as_json)
    if assumption and not as_json:
        print_table(facts_table({" assumes": assumption}))
    if plot is not None:
        write_chart(
            plot,
            errors_over_sparsity(theorem, widths, delta, options),
            title="Guaranteed error over sparsity",
            subtitle=f"widths {', '.join(map(str, widths))}, δ = {delta:g}; no line where the bound is vacuous",
            x_label="sparsity",
            y_label="sup ‖f − F‖ at most",
        )


def evaluate_form(
    theorem: Callable[..., Any],
    form: str,
    widths: tuple[int, ...],
    alpha: float | None,
    sparsity: float | None,
    epsilon: float | None,
    delta: float,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the result of one form of a theorem, as the command's JSON output has it.

    With only ε the theorem is solved for the sparsity. With ε and α (or a sparsity) it is also solved for the width.
    Where the bound is vacuous or missing, the smallest width that would give one is added.
    """
    from pomona.theory import bounds

    flags = bounds.FORMS[form]
    pruning: dict[str, Any] = {"alpha": alpha, "sparsity": sparsity}
    solves_sparsity = epsilon is not None and alpha is None and sparsity is None
    result: dict[str, Any] = {"form": form, "note": ""}
    try:
        if solves_sparsity:
            found = bounds.largest(theorem, widths, epsilon or 0.0, delta, **flags, **options)
        else:
            found = theorem(widths, delta=delta, **flags, **pruning, **options)
    except bounds.NotCovered as error:
        return result | {"note": str(error), "not_covered": True}
    except bounds.TooNarrow as error:
        # A condition on the widths belongs to the result: other forms may not have it.
        found, result["note"] = None, str(error)
    if found is not None:
        result |= {**dataclasses.asdict(found), "sparsity": found.sparsity, "vacuous": found.vacuous}
        result |= {"loss_gap": found.loss_gap(), "proven": found.proven}
    elif solves_sparsity and not result["note"]:
        result["note"] = f"none: no sparsity has an error of {epsilon:g} with probability 1 − {delta:g}"
    if epsilon is not None and not solves_sparsity:
        result["width"] = bounds.narrowest(theorem, widths, epsilon, delta, **flags, **pruning, **options)
    elif found is None or found.vacuous:
        goal = {"epsilon": epsilon, "delta": delta} if solves_sparsity else pruning
        result["width"] = bounds.narrowest(theorem, widths, **flags, **goal, **options)
    return result


def forms_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one line for each form of a theorem."""
    table = Table("form", "sparsity", "error", "probability", "loss gap", "smallest width", "", box=None)
    for result in results:
        values = ["–"] * 4
        if "error" in result:
            values = [f"{result[key]:.4g}" for key in ("sparsity", "error", "probability", "loss_gap")]
        width = ("none" if result["width"] is None else f"{result['width']:,}") if "width" in result else ""
        basis = "proven" if result.get("proven") else "by a measured C" if "proven" in result else result["note"]
        note = "vacuous" if result.get("vacuous") else basis
        table.add_row(result["form"], *values, width, escape(note))
    return table


def errors_over_sparsity(
    theorem: Callable[..., Any], widths: tuple[int, ...], delta: float, options: Mapping[str, Any]
) -> Series:
    """Return (sparsity, error) for each form of a theorem, where the bound is not vacuous."""
    from pomona.theory import bounds

    series: Series = {form: [] for form in bounds.FORMS}
    for form, points in series.items():
        most = bounds.least_pruning(theorem, widths, bounds.FORMS[form])
        for k in range(1, CURVE_POINTS + 1 if most > 0 else 1):
            try:
                found = theorem(widths, alpha=most * k / CURVE_POINTS, delta=delta, **bounds.FORMS[form], **options)
            except (bounds.TooNarrow, bounds.NotCovered):
                continue
            if not found.vacuous and found.error > 0:
                points.append((found.sparsity, found.error))
    return series
