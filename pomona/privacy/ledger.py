"""The ledger of a data set: every private draw from it, over all runs, resumed or not, written before its release.

    ledger = pm.privacy.Ledger("ledger", data=(x, y))
    step = pm.privacy.gip(model, optimizer, …, ledger=ledger)

A ledger is a journal in a folder, one for each data set. A data set is known by the digest of its rows in any order.
A run is known by a digest of its key. A step is charged when its rows are drawn, and journalled before anything of it
is released, with digests of the weights before it and of the noisy sum. A resumed run draws the same numbers again. If
its step is the journalled one, bit for bit, nothing is spent; if not, it is refused, because two different sums with
the same noise differ by data alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from .accounting import Pair, validate_delta
from .budget import Budget
from .composition import total_epsilon
from .journal import START, Entry, Journal
from .released_steps import require_same_release
from .tensor_digest import DIGEST_LENGTH

FOLDER_VARIABLE = "POMONA_LEDGER"


@dataclass
class RunAccount:
    """What one run has drawn from the data set."""

    run: str
    name: str
    budget: dict[str, Any]
    started: str
    released: dict[int, tuple[str, str]] = field(default_factory=dict)  # digests of weights and sum, by step
    skipped: set[int] = field(default_factory=set)  # steps that were drawn and never released
    ended: bool = False  # whether it will draw no more

    @property
    def drawn(self) -> set[int]:
        """Return the steps that were drawn, numbered from 1."""
        return self.released.keys() | self.skipped

    @property
    def steps(self) -> int:
        """Return the number of steps that were drawn, each counted once."""
        return len(self.drawn)

    @property
    def pair(self) -> Pair:
        """Return the releases of a step where no ramp changes them."""
        return Budget.from_dict(self.budget).pair

    def pairs(self, planned: bool = False) -> Counter[Pair]:
        """Return how many of the steps have the same releases; with `planned`, of those it may still take too."""
        budget, steps = Budget.from_dict(self.budget), self.drawn
        if planned and not self.ended:
            steps = steps | set(range(1, budget.steps + 1))
        return budget.pairs(step - 1 for step in steps)


class Ledger:
    """The ledger of one data set in a folder."""

    def __init__(
        self,
        folder: Path | str,
        data: str | Sequence[Tensor],
        *,
        name: str = "",
        run_name: str = "",
    ) -> None:
        """Read the ledger of a data set; nothing is written before a run draws from it.

        Args:
            folder: of all ledgers; it should be one that all runs on the data share.
            data: the training data as tensors that have a row for each example, or its digest.
            name: of the data set, for people.
            run_name: of the run that is going to draw, for people.
        """
        self.digest = data if isinstance(data, str) else digest_rows(data)
        self.path = Path(folder) / f"{self.digest}.jsonl"
        self.name, self.run_name = name, run_name
        self.accounts: dict[str, RunAccount] = {}
        self.seeded: Counter[str] = Counter()  # runs with a seed, which are not private, by name
        self.limit: tuple[float, float] | None = None  # ε and δ of all runs together
        self.checksums = {START}
        self.journal = Journal(self.path, self.receive)
        self.journal.read()

    def receive(self, entry: Entry, checksum: str) -> None:
        """Add an entry of the journal to the accounts."""
        self.checksums.add(checksum)
        kind = entry["kind"]
        if kind == "data":
            self.name = self.name or entry["name"]
        elif kind == "limit":
            self.limit = entry["epsilon"], entry["delta"]
        elif kind == "seeded":
            self.seeded[entry["name"]] += 1
        elif kind == "run":
            self.accounts[entry["run"]] = RunAccount(entry["run"], entry["name"], entry["budget"], entry["time"])
        elif kind == "step":
            account = self.accounts[entry["run"]]
            if entry["sum"] is None:
                account.skipped.add(entry["step"])
            else:
                account.released[entry["step"]] = entry["weights"], entry["sum"]
        elif kind == "end":
            self.accounts[entry["run"]].ended = True

    # ---- runs

    def admit(self, run: str, budget: Budget, secure: bool) -> None:
        """Add a run before its first draw; raise PomonaError if the limit would not hold for all of its steps.

        A run that is known goes on. One with a seed is noted: it is not private, and no account can make it so.
        """
        if not secure:
            self.append(lambda: {"kind": "seeded", "name": self.run_name, "time": timestamp()})
            return

        def make_entry() -> Entry | None:
            if run in self.accounts:
                require(
                    self.accounts[run].budget == budget.to_dict(),
                    f"the run {run[:8]} began with another budget: continue with that one or begin a new run.",
                )
                self.require_going_on(run)
                return None
            entry = {"kind": "run", "run": run, "name": self.run_name, "budget": budget.to_dict(), "time": timestamp()}
            self.require_room(RunAccount(run, self.run_name, budget.to_dict(), ""))
            return entry

        self.append(make_entry)

    def require_going_on(self, run: str) -> None:
        """Raise PomonaError if a run has ended: its steps may have been given to others."""
        require(not self.accounts[run].ended, f"the run {run[:8]} has ended: begin a new one.")

    def require_room(self, added: RunAccount) -> None:
        """Raise PomonaError if the limit does not hold for all runs that may still draw, and another one."""
        if self.limit is None:
            return
        epsilon, delta = self.limit
        cost = self.total(delta, [*self.accounts.values(), added], planned=True)
        spent = self.total(delta)
        require(
            cost <= epsilon,
            f"with this run the data set '{self.name}' would cost ε={cost:.4g} at δ={delta:g}, and its limit is "
            f"{epsilon:g}, of which {spent:.4g} is spent: ask for less, or end a run that will not go on.",
        )

    def record(self, run: str, step: int, weights: str, released: str) -> None:
        """Journal a step before its release; raise PomonaError if it was released before and is another one now."""

        def make_entry() -> Entry | None:
            self.require_going_on(run)
            known = self.accounts[run].released.get(step)
            if known is None:
                return {"kind": "step", "run": run, "step": step, "weights": weights, "sum": released}
            require_same_release(step, known, (weights, released))
            return None

        self.append(make_entry)

    def record_skipped(self, run: str, step: int) -> None:
        """Journal a step whose rows were drawn and not used: it costs as much as one that was taken."""

        def make_entry() -> Entry | None:
            self.require_going_on(run)
            account = self.accounts[run]
            if step in account.released or step in account.skipped:
                return None
            return {"kind": "step", "run": run, "step": step, "weights": None, "sum": None}

        self.append(make_entry)

    def end(self, run: str) -> None:
        """Journal that a run will draw no more, so that what it has not drawn is free; it cannot be resumed."""
        matches = [account for account in self.accounts if account.startswith(run)]
        require(len(matches) == 1, f"{len(matches)} runs of '{self.name}' begin with '{run}': name one of them.")
        self.append(
            lambda: None if self.accounts[matches[0]].ended else {"kind": "end", "run": matches[0], "time": timestamp()}
        )

    def require_entry(self, checksum: str | None) -> None:
        """Raise PomonaError if an entry is missing that a checkpoint has seen: the journal is an older copy."""
        require(
            checksum is None or checksum in self.checksums,
            f"the ledger '{self.path}' lacks entries that this run has written: restore the newest copy of it.",
        )

    # ---- the data set

    def set_limit(self, epsilon: float, delta: float) -> None:
        """Limit what all runs may cost together; raise PomonaError if they have spent more or still may."""
        require(epsilon > 0, f"a limit on ε must be above 0, got {epsilon:g}.")
        validate_delta(delta)

        def make_entry() -> Entry:
            spent, planned = self.total(delta), self.total(delta, planned=True)
            require(
                spent <= epsilon,
                f"runs on '{self.name}' have already spent ε={spent:.4g} at δ={delta:g}, more than {epsilon:g}.",
            )
            require(
                planned <= epsilon,
                f"runs on '{self.name}' may still go on to ε={planned:.4g} at δ={delta:g}, more than {epsilon:g}: end "
                "those that will not go on, or set a higher limit.",
            )
            return {"kind": "limit", "epsilon": epsilon, "delta": delta, "time": timestamp()}

        self.append(make_entry)

    def total(self, delta: float, accounts: Iterable[RunAccount] | None = None, planned: bool = False) -> float:
        """Return the ε at δ of the steps that were drawn; with `planned`, of those that may still be drawn too.

        The runs are composed as if their budgets had been chosen in advance; see `composition`.
        """
        validate_delta(delta)
        counted = self.accounts.values() if accounts is None else accounts
        return total_epsilon([account.pairs(planned) for account in counted], delta)

    def append(self, make_entry: Any) -> None:
        """Append an entry to the journal, after the entry about the data set if the journal is new."""
        if not self.journal.lines:
            first = {"kind": "data", "digest": self.digest, "name": self.name, "time": timestamp()}
            self.warn_of_namesakes()
            self.journal.append(lambda: None if self.journal.lines else first)
        self.journal.append(make_entry)

    def warn_of_namesakes(self) -> None:
        """Warn if other ledgers in the folder have the name of this new one: they may be of the same people."""
        others = [path.stem for path in sorted(self.path.parent.glob("*.jsonl")) if path != self.path]
        others = [one for one in others if read_name(self.path.with_stem(one)) == self.name != ""]
        if others:
            warnings.warn(
                f"another data set is called '{self.name}' ({', '.join(one[:8] for one in others)}): if it has the "
                "same rows in another form, the limit of one does not hold for the other, so read the data as before "
                "or add the two ledgers up.",
                stacklevel=2,
            )

    @property
    def checksum(self) -> str:
        """Return the checksum of the last entry that was read or written."""
        return self.journal.checksum


def ledger_folder() -> Path:
    """Return the folder of all ledgers: that in POMONA_LEDGER, or one in the home folder."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path.home() / ".local" / "share" / "pomona" / "ledger"


def find_ledgers(folder: Path, dataset: str | None = None) -> list[Ledger]:
    """Return the ledgers in a folder, or those of a data set by its name or the beginning of its digest."""
    digests = {path.stem for ending in ("*.jsonl", "*.head") for path in folder.glob(ending)}
    ledgers = [Ledger(folder, digest) for digest in sorted(digests)]
    return [one for one in ledgers if dataset in (None, one.name) or one.digest.startswith(str(dataset))]


def read_name(path: Path) -> str:
    """Return the name of the data set in the first line of a journal, or "" where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return str(json.loads(file.readline())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def summarize(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Return what was spent on a data set, by which runs and together, as plain values."""
    return {
        "name": ledger.name,
        "digest": ledger.digest,
        "delta": delta,
        "limit": None if ledger.limit is None else list(ledger.limit),
        "epsilon": ledger.total(delta),
        "not_private": ledger.seeded.total(),
        "runs": [
            {
                "run": account.run,
                "name": account.name,
                "started": account.started,
                "steps": account.steps,
                "planned": account.budget["steps"],
                "ended": account.ended,
                "rate": account.pair.rate,
                "sigma": account.pair.sigma,
                "index": account.budget["index"],
                "epsilon": ledger.total(delta, [account]),
            }
            for account in ledger.accounts.values()
        ],
    }


def digest_key(key: bytes) -> str:
    """Return the public name of the run of a key; it does not reveal a key of the operating system."""
    return hashlib.sha256(b"pomona run " + key).hexdigest()[:DIGEST_LENGTH]


def digest_rows(parts: Sequence[Tensor]) -> str:
    """Return a digest of a data set, from tensors that have a row for each example; it ignores the order of rows."""
    counts = {len(part) for part in parts}
    require(len(counts) == 1, f"the tensors of a data set have a row for each example, got {sorted(counts)} rows.")
    rows = [tensor_bytes(part).reshape(len(part), -1) if len(part) else [] for part in parts]
    digests = sorted(
        hashlib.sha256(b"".join(bytes(row) for row in values)).digest() for values in zip(*rows, strict=True)
    )
    kinds = ";".join(f"{part.dtype} {tuple(part.shape[1:])}" for part in parts)
    return hashlib.sha256(kinds.encode() + b"".join(digests)).hexdigest()[:DIGEST_LENGTH]


def tensor_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a NumPy array."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy()


def timestamp() -> str:
    """Return the time as text."""
    return datetime.now(UTC).isoformat(timespec="seconds")
