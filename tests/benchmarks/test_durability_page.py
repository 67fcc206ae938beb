"""The tables of the page about what survives."""

from __future__ import annotations

from typing import Any

FAULTS = {"injected": 3, "survived": 2, "lost": 1, "seconds": 90.0, "kinds": {"cut off": 1, "disk full": 2}}
SUBJECTS = {"sweep": {"cases": 2, "faults": 3, "lost": 1}}
PARSERS = {"recipe": {"inputs": 1500, "accepted": 500, "refused": 999, "failed": 1}}
RECORD = {
    "faults": {**FAULTS, "subjects": SUBJECTS},
    "fuzz": {"inputs": 1500, "accepted": 500, "refused": 999, "failed": 1, "parsers": PARSERS},
}


def test_faults_and_inputs_are_listed_with_their_totals(load_script: Any) -> None:
    page, missing = load_script("durability_page"), load_script("page_helpers").NOT_MEASURED
    assert {page.format_faults([]), page.format_subjects([]), page.format_fuzz([])} == {missing}
    assert page.format_faults([RECORD]).splitlines()[2:] == [
        "| disk full | 2 |",
        "| cut off | 1 |",
        "| **3 injected, 2 survived, 1 lost** | in 2 minutes |",
    ]
    assert page.format_subjects([RECORD]).splitlines()[2:] == ["| sweep | 2 | 3 | 1 |"]
    figures = "1,500 | 500 | 999 | 1 |"
    assert page.format_fuzz([RECORD]).splitlines()[2:] == [f"| recipe | {figures}", f"| all | {figures}"]
    assert page.format_fuzz([{"faults": FAULTS}]) == missing


def test_long_and_large_runs_are_listed(load_script: Any) -> None:
    page = load_script("durability_page")
    steps = {"count": 1_000_000, "updates": 250_000, "history_entries": 9000, "mb": [340.04, 341.0, 342.06]}
    soak = {"steps": steps, "cycles": {"count": 1000, "mb": [330.0, 331.5]}}
    listing = {"runs": 10_000, "cells": 10_000, "seconds": {"first": 21.6, "second": 19.4}}
    assert page.format_long_runs([soak], [listing]).splitlines()[2:] == [
        "| 1,000,000 steps of a tiny model | 340.0 MB after a tenth, 342.1 MB at the end; "
        "9,000 of 250,000 mask updates in the history |",
        "| 1,000 pruners, attached and finished in turn | 330.0 MB after a tenth, 331.5 MB at the end |",
        "| `sweep --only-missing` on 10,000 finished runs in 10,000 cells | 22 s, and again 19 s |",
    ]
    plain = {"weights": 5e8, "step_s": 1.0, "peak_gb": 6.0}
    methods = {"plain": plain, "dpf": {**plain, "attach_s": 5.0, "update_s": 1.5}}
    assert page.format_large_runs([{"methods": methods}]).splitlines()[2:] == [
        "| plain, 500 M weights | — | 1.00 s | — | 6.0 GB |",
        "| dpf, 500 M weights | 5.0 s | 1.00 s | 1.50 s | 6.0 GB |",
    ]


def test_readers_are_compared_with_the_loader_of_their_record(load_script: Any) -> None:
    page = load_script("durability_page")
    speeds = {
        "loader": {"median": 500.0, "turns": [500.0]},
        "stream": {"median": 600.0, "turns": [590.0, 600.0, 611.0]},
    }
    assert page.format_readers([{"images": 3000, "images_per_second": speeds}]).splitlines()[2:] == [
        "| `torch.utils.data.DataLoader` with Pillow | 3,000 | 500 (one turn) | 1.00 |",
        "| pomona with simplejpeg | 3,000 | 600 (590 to 611, 3 turns) | 1.20 |",
    ]


def test_ranks_are_listed(load_script: Any) -> None:
    page = load_script("durability_page")
    counts = {"fsdp": 3, "ddp": 2, "2 ranks": 4, "4 ranks": 1, "killed": 2, "another number of ranks": 1, "SIGKILL": 0}
    draws = {"draws": 5, "failed": [{"number": 3}], "largest_weight_difference": 1e-12, "counts": counts}
    lines = page.format_draws([draws]).splitlines()[2:]
    assert lines[1] == "| with FSDP2, with DistributedDataParallel | 3, 2 |"
    assert lines[6] == "| with other masks or weights than one process | **1** |"
    shares = {"share_of_one_step": 0.031, "share_of_the_steps_between_updates": 0.0019}
    row = {"method": "dpf()", "pruned_step_seconds": 0.101, "update_seconds": 0.0031, **shares}
    assert page.format_selection([{"plain_step_seconds": 0.1, "methods": {"default": row}}]).splitlines()[2:] == [
        "| `dpf()` | 100.0 ms | 101.0 ms | 3.1 ms | 3.1% | 0.19% |"
    ]
