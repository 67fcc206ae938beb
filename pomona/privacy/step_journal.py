"""The entries that a private step makes in a ledger, from the first of its processes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .budget import Budget
from .ledger import Ledger, digest_key, digest_tensors
from .processes import Processes
from .random_source import Source


class StepJournal:
    """Enters the draws and releases of a run in a ledger, if there is one, and compares those of its processes."""

    def __init__(self, ledger: Ledger | None, source: Source, processes: Processes, budget: Budget) -> None:
        self.ledger, self.source, self.processes, self.budget = ledger, source, processes, budget
        self.is_admitted = False

    def enter_draw(self, drawn: int, taken: int) -> None:
        """Enter the run before its first draw, and the last draw if its step was not taken."""
        if self.ledger is None:
            return
        ledger, run = self.ledger, digest_key(self.source.key)
        if not self.is_admitted:
            self.processes.run_on_first(lambda: ledger.admit(run, self.budget, self.source.secure))
            self.is_admitted = True
        if drawn > taken and self.source.secure:
            self.processes.run_on_first(lambda: ledger.record_skipped(run, drawn))

    def digest_weights(self, weights: Iterable[Tensor]) -> str:
        """Return a digest of the weights where one is needed; raise PomonaError if processes have different ones."""
        digest = digest_tensors(weights) if self.ledger is not None or self.processes.count > 1 else ""
        self.processes.require_agreement("weights", digest)
        return digest

    def enter_release(self, step: int, weights: str, total: Tensor) -> None:
        """Enter a step before its release; raise PomonaError if it differs from the same step of an earlier time."""
        is_entered = self.ledger is not None and self.source.secure
        released = digest_tensors([total]) if is_entered or self.processes.count > 1 else ""
        self.processes.require_agreement("sums", released)
        if is_entered:
            ledger, run = self.ledger, digest_key(self.source.key)
            assert ledger is not None
            self.processes.run_on_first(lambda: ledger.record(run, step, weights, released))

    @property
    def checksum(self) -> str | None:
        """Return the checksum of the last entry of the ledger."""
        return None if self.ledger is None else self.ledger.checksum

    def resume(self, checksum: str | None) -> None:
        """Go on after a checkpoint; raise PomonaError if the ledger lacks what the checkpoint has seen."""
        self.is_admitted = False
        if self.ledger is not None:
            self.ledger.require_entry(checksum)
