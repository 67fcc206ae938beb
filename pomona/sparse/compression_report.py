"""The report of `compress`: which layers were packed and why, their sizes and their times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from rich.table import Table

from ..table_view import TableView

# A compressed model counts as no slower up to this multiple of the dense model's time: measurements scatter as much.
TIMING_TOLERANCE = 1.02
SLOWER_TOGETHER = " alone, but the whole model is faster dense"
WITH_RELU = ", with its ReLU in one kernel"
# The key of a whole model in which nothing is packed, and convolutions compute their ReLU where that is faster.
DENSE_FUSED = "dense, fused"
# The key of a whole model with all sparse layers packed, whose convolutions run in one native call.
PLANNED = "one call"


@dataclass(frozen=True)
class LayerReport:
    """The outcome for one layer, and the reason. Seconds are for one call on the example's input."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sparsity: float
    packed: bool
    reason: str
    format: str | None = None  # the packed form that is fastest, whether it is used or not
    block: int | None = None  # of a balanced form
    kept: int | None = None
    bits: int | None = None  # of the values, where they are codes
    bytes: tuple[int, int] | None = None  # dense, packed
    seconds: tuple[float, float] | None = None  # dense, packed; with the ReLU that follows
    saved: float = 0.0  # seconds that cuDNN saves by the ReLU in the same kernel; if any, `seconds` has that as dense

    def revert_to_dense(self, fused: bool) -> LayerReport:
        """Return the report of the layer as dense after all, with its ReLU in the same kernel or not."""
        saved = self.saved if fused else 0.0
        reason = self.reason.removesuffix(WITH_RELU) + SLOWER_TOGETHER * self.packed + WITH_RELU * (saved > 0)
        return replace(self, packed=False, reason=reason, saved=saved)

    def plan(self) -> LayerReport:
        """Return the report of the layer in a network that runs in one call."""
        return self if self.format is None else replace(self, packed=True, reason="in one call with the others")


@dataclass(frozen=True)
class Compression(TableView):
    """The difference between a compressed model and the dense one: layer by layer, and in time where it was timed."""

    text_width: ClassVar[int] = 150

    layers: tuple[LayerReport, ...]
    batch: int
    # Of the whole model: dense, all packed, compressed, DENSE_FUSED where convolutions gain by it, and PLANNED.
    seconds: dict[str, float] = field(default_factory=dict)
    called: dict[str, float] = field(default_factory=dict)  # plain calls, with the host's time, on a GPU
    caches: str = "warm"  # when a layer was timed alone; cold where the model is larger than the last-level cache

    @property
    def dense(self) -> dict[str, str]:
        """The names of the layers that stayed dense, with the reasons."""
        return {layer.name: layer.reason for layer in self.layers if not layer.packed}

    def facts(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        layers = [asdict(layer) for layer in self.layers]
        times = {"seconds": dict(self.seconds), "called": dict(self.called)}
        return {"batch": self.batch, **times, "caches": self.caches, "layers": layers}

    def __rich__(self) -> Table:
        table = Table("layer", "shape", "zeros", "format", "bytes", "dense, µs", "packed, µs", "", show_footer=True)
        if any(layer.seconds for layer in self.layers):
            table.caption = f"layers timed alone, with {self.caches} caches{self.describe_plain_calls()}"
        for layer in self.layers:
            sizes = "" if layer.bytes is None else f"{layer.bytes[0]:,} → {layer.bytes[1]:,}"
            times = ("", "") if layer.seconds is None else [f"{1e6 * s:,.1f}" for s in layer.seconds]
            form = layer.format or ""
            form = form if layer.block is None else f"{form}, {layer.kept} of {layer.block}"
            form = form if layer.bits is None else f"{form}, int{layer.bits}"
            shape = "×".join(map(str, layer.shape))
            table.add_row(layer.name, shape, f"{layer.sparsity:.1%}", form, sizes, *times, layer.reason)
        if self.seconds:
            table.columns[0].footer = f"whole model, batch {self.batch}"
            table.columns[5].footer = f"{1e6 * self.seconds['dense']:,.1f}"
            table.columns[6].footer = f"{1e6 * self.seconds['compressed']:,.1f}"
            others = [way for way in ("all packed", DENSE_FUSED, PLANNED) if way in self.seconds]
            table.columns[7].footer = "; ".join(f"{way} {1e6 * self.seconds[way]:,.1f} µs" for way in others)
        return table

    def describe_plain_calls(self) -> str:
        """Return the times of plain calls as text, with advice where the compressed model is slower that way."""
        if not self.called:
            return ""
        dense, compressed = self.called["dense"], self.called["compressed"]
        advice = (
            ", slower than dense: capture the model in a CUDA graph" if compressed > TIMING_TOLERANCE * dense else ""
        )
        return f"; plain calls, host time included, {1e6 * dense:,.1f} → {1e6 * compressed:,.1f} µs{advice}"

    def __repr__(self) -> str:
        packed = f"{len(self.layers) - len(self.dense)} of {len(self.layers)} layers packed"
        ways = [f"{1e6 * self.seconds[way]:,.1f}" for way in ("dense", "compressed") if way in self.seconds]
        times = f", {' → '.join(ways)} µs for a batch of {self.batch}" if ways else ""
        return f"<Compression: {packed}{times}>"
