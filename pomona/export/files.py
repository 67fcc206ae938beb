"""What every format returns, and files that appear complete or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..durable import rename_files
from ..errors import PomonaError
from ..sparse import Compression
from .example import Example


@dataclass(frozen=True)
class Loaded:
    """A written file after it was loaded back."""

    run: Callable[[Example], Sequence[Tensor]]  # the outputs for an example
    runtime: str = "torch"
    packed: int | None = None  # weights stored without their zeros; None for a format that stores all of them
    reason: str = ""  # why nothing was packed, without a full stop
    details: dict[str, Any] = field(default_factory=dict)  # further facts for the report
    compression: Compression | None = None  # what became of each layer where layers were packed
    dynamic_batch: bool = False  # whether a traced network was asked to take any number of samples
    half: bool = False  # whether values are stored in half precision


@contextmanager
def partial_file(file: Path, *companions: str) -> Iterator[Path]:
    """Yield a temporary path beside `file`, with the same suffix, and rename it to `file` if the block succeeds.

    It is flushed to the disk before it has its name. `companions` are the suffixes of further files that are written
    beside it. The temporary files are removed if the block fails. Raise PomonaError where the folder refuses.
    """
    partial = file.with_name(f"{file.stem}.partial{file.suffix}")
    targets = {partial.with_suffix(suffix): file.with_suffix(suffix) for suffix in companions}
    targets[partial] = file  # last, so that it is never there without its companions
    try:
        yield partial
        rename_files(targets)
    except OSError as error:
        advice = "give a path in a folder that is there, can be written and has space"
        raise PomonaError(f"'{file}' cannot be written: {error.strerror or error}; {advice}.") from error
    finally:
        for source in targets:
            source.unlink(missing_ok=True)


def first_sentence(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
