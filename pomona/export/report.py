"""The report of an export: size, difference and latency of the file beside the network's."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from ..sparse.balanced_blocks import MIN_SPARSITY
from ..sparse.compress import Compression
from ..sparse.compression_report import TIMING_TOLERANCE


@dataclass(frozen=True)
class ExportReport:
    """What was written, how far it is from the network, and what was gained."""

    format: str
    file: str
    bytes: int  # of the file, or of all files where there are several
    state_bytes: int  # of the network's state with dense weights
    zeros: float  # the share of zeros among the network's weights
    packed: int | None  # weights that are stored without their zeros; None for a format that stores all of them
    difference: float | None  # the largest difference of outputs relative to the largest output; None without example
    tolerance: float
    runtime: str  # what has run the loaded file
    batch: int | None = None
    latency: dict[str, float] = field(default_factory=dict)  # seconds of one call "before" and "after", one thread
    details: dict[str, Any] = field(default_factory=dict)  # further facts of the format
    compression: Compression | None = None  # what became of each layer where layers were packed
    reason: str = ""  # why nothing was packed

    @property
    def ratio(self) -> float:
        """How many times smaller the file is than the dense state."""
        return self.state_bytes / self.bytes

    @property
    def speed_up(self) -> float | None:
        """How many times faster the loaded file is than the network."""
        return self.latency["before"] / self.latency["after"] if self.latency else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences about what was not gained; none for a format that gains nothing by zeros, without zeros."""
        found = []
        if self.packed == 0:
            found.append(f"nothing was packed: {self.reason}.")
        if self.packed is not None or self.zeros >= MIN_SPARSITY:
            if self.bytes >= self.state_bytes:
                sizes = f"'{self.file}' has {self.bytes:,} bytes where the dense state has {self.state_bytes:,}"
                found.append(f"nothing became smaller: {sizes}.")
            if self.speed_up is not None and self.speed_up < TIMING_TOLERANCE:
                before, after = (f"{1000 * self.latency[key]:.3g} ms" for key in ("before", "after"))
                found.append(f"nothing became faster: {after} by {self.runtime} where the network takes {before}.")
        return tuple(found)

    def facts(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        return {
            "format": self.format,
            "file": self.file,
            "bytes": self.bytes,
            "state_bytes": self.state_bytes,
            "ratio": self.ratio,
            "zeros": self.zeros,
            "packed": self.packed,
            "difference": self.difference,
            "tolerance": self.tolerance,
            "runtime": self.runtime,
            "latency": {"batch": self.batch, **self.latency} if self.latency else None,
            "warnings": list(self.warnings),
            **self.details,
            **({} if self.compression is None else self.compression.facts()),
        }

    def __rich__(self) -> Group:
        table = Table("", "network", self.format, "", title=self.file, title_justify="left")
        size = f"{self.ratio:.2f}× smaller" if self.ratio >= 1 else f"{1 / self.ratio:.2f}× larger"
        table.add_row("bytes", f"{self.state_bytes:,}", f"{self.bytes:,}", size)
        if self.latency:
            before, after = (f"{1000 * self.latency[key]:,.3g}" for key in ("before", "after"))
            speed_up = f"{self.speed_up:.2f}× as fast, {self.runtime}"
            table.add_row(f"ms, batch {self.batch}, one thread", before, after, speed_up)
        if self.difference is not None:
            limit = f"of the largest output; at most {self.tolerance:g} is accepted"
            table.add_row("largest difference", "", f"{self.difference:.1e}", limit)
        packed = "" if self.packed is None else f"{self.packed:,} weights without their zeros"
        table.add_row("zeros", f"{self.zeros:.2%}", "", packed)
        for name, value in self.details.items():
            if isinstance(value, (str, int, float)):
                table.add_row(name, "", f"{value:.4g}" if isinstance(value, float) else str(value), "")
        return Group(*([] if self.compression is None else [self.compression]), table)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]
