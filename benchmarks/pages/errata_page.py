"""Write docs/errata.md from benchmarks/errata.toml (what the papers print) and results/errata.json (the figures).

python benchmarks/pages/errata_page.py
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator
from typing import Any

from page_helpers import DOCS, RESULTS, ROOT, format_command, format_table, read_record, write_page

PAGE = DOCS / "errata.md"
STATEMENTS, RECORD = ROOT / "benchmarks" / "errata.toml", RESULTS / "errata.json"

INTRODUCTION = """# Errors in the papers

Pomona computes formulas from five papers. This page lists the errors that we found in them, and the simulations that
show which form is correct. The functions of `pomona.theory` return the corrected form by default, and the printed
form with `printed=True` (or in a function whose name ends in `_printed`):

```python
from pomona.theory import gip

corrected, printed = (gip.pruning_mse(1.0, 10_000, 1000, printed=printed) for printed in (False, True))
print(f"corrected {corrected:.1f}, printed {printed:.1f}")
```

```
corrected 8016.3, printed 7853.5
```

`python benchmarks/measure/errata.py` simulates every case (seed SEED). It checks that the corrected form agrees with
the simulation and that the printed form does not, and writes the figures to `results/errata.json`. We have the papers
as text that was converted from their pages. Where a formula did not survive that, the page says *cannot be verified*.
`python benchmarks/pages/errata_page.py` writes this page from that record.

In the tables, ± is one standard error. A value without it is an exact sum, or the largest value of all draws. Where the
column *bound* stands in place of *corrected*, the corrected form is an upper bound of the simulated value.
"""


def wrap(text: str, indent: str = "") -> str:
    """Return `text` in lines of at most 120 characters, with `indent` before all lines but the first."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def format_row(row: dict[str, Any]) -> list[str]:
    """Return the cells of one comparison."""
    error = f" ± {row['error']:.1g}" if row["error"] else ""
    printed = "cannot be verified" if row["printed"] is None else f"{row['printed']:.5g}"
    return [row["case"], f"{row['drawn']:.5g}{error}", f"{row['right']:.5g}", printed]


def format_erratum(erratum: dict[str, Any], recorded: dict[str, Any], figures: dict[str, Any]) -> Iterator[str]:
    """Yield the paragraphs of one erratum: the statement, the note and the table."""
    form = "bound" if recorded["bound"] else "corrected"
    is_known = all(row["printed"] is not None for row in recorded["rows"])
    yield f"### {erratum['place']}\n"
    yield wrap(f"- Printed: {erratum['printed']}.", indent="  ")
    yield wrap(f"- {'Corrected' if is_known else 'Exact'}: {erratum['right']}.", indent="  ") + "\n"
    yield wrap(erratum["note"].format_map(figures)) + "\n"
    yield (
        format_table(["", "simulated", form if is_known else "exact", "printed"], map(format_row, recorded["rows"]))
        + "\n"
    )


def render() -> str:
    """Return the text of the page."""
    record = read_record(RECORD)
    papers = tomllib.loads(STATEMENTS.read_text(encoding="utf-8"))["paper"]
    recorded, figures = iter(record["errata"]), record["figures"]
    parts = [INTRODUCTION.replace("SEED", str(record["seed"]))]  # the example has braces, so no str.format
    for paper in papers:
        parts.append(f"## {paper['title']} ({paper['citation']}), `{paper['module']}`\n")
        for erratum in paper["erratum"]:
            parts += format_erratum(erratum, next(recorded), figures)
        parts.append("### Other errors and remarks\n")
        parts += [wrap(f"- {remark.format_map(figures)}", indent="  ") for remark in paper["remarks"]]
        parts.append("")
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("numpy", "scipy"))
    parts.append(f"## Source\n\n{format_command(record)}, {versions}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    write_page(PAGE, render())
