"""The entries that a private step makes in a ledger, from the first of its processes, and in this process's memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .budget import Budget
from .ledger import Ledger, digest_key
from .processes import Processes
from .random_source import Source
from .released_steps import KnownRun, known_run, remember_release, require_same_release
from .tensor_digest import digest_tensors


class StepJournal:
    """Enters the draws and releases of a run in the memory of this process and in a ledger, if there is one.

    Those of the processes of a run are compared with each other.
    """

    def __init__(self, ledger: Ledger | None, source: Source, processes: Processes, budget: Budget) -> None:
        self.ledger, self.source, self.processes, self.budget = ledger, source, processes, budget
        self.is_admitted = False

    def enter_draw(self, drawn: int, taken: int) -> None:
        """Enter the run before its first draw, and the last draw if its step was not taken."""
        if self.source.secure:
            self.known.drawn = max(self.known.drawn, self.source.step + 1)
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
        is_needed = self.ledger is not None or self.processes.count > 1
        digest = digest_tensors(weights, self.source.digest_key()) if is_needed else ""
        self.processes.require_agreement("weights", digest)
        return digest

    def enter_release(self, step: int, weights: str, total: Tensor) -> None:
        """Enter a step before its release; raise PomonaError if it differs from the same step of an earlier time."""
        is_secure = self.source.secure
        is_needed = is_secure or self.processes.count > 1
        released = digest_tensors([total], self.source.digest_key()) if is_needed else ""
        self.processes.require_agreement("sums", released)
        if not is_secure:  # a run with a seed is not private, and is repeated on purpose
            return
        address, run = self.source.step, digest_key(self.source.key)
        require_same_release(step, self.known.released.get(address), (weights, released))
        if self.ledger is not None:
            ledger = self.ledger
            self.processes.run_on_first(lambda: ledger.record(run, step, weights, released))
        remember_release(run, address, (weights, released))

    @property
    def known(self) -> KnownRun:
        """Return what this process has drawn and released with the run's key."""
        return known_run(digest_key(self.source.key))

    def furthest_draw(self, drawn: int) -> int:
        """Return how many steps were charged, of which a run that was set back to an earlier state counts `drawn`."""
        if not self.source.secure:
            return drawn
        ahead = self.known.drawn - self.source.step
        return min(drawn + max(ahead, 0), self.budget.steps)

    @property
    def checksum(self) -> str | None:
        """Return the checksum of the last entry of the ledger."""
        return None if self.ledger is None else self.ledger.checksum

    def resume(self, checksum: str | None) -> None:
        """Go on after a checkpoint; raise PomonaError if the ledger lacks what the checkpoint has seen."""
        self.is_admitted = False
        if self.ledger is not None:
            self.ledger.require_entry(checksum)
