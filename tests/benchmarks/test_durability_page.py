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
