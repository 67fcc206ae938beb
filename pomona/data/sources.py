"""Where data sets lie on disk, what is there, and how to get the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from pomona.errors import PomonaError
from pomona.registry import Registry, parse_spec

from .dataset import Dataset

Root = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Download:
    """A published file. A tar archive must hold the data set's folder at its top."""

    url: str
    checksum: str  # "md5:…" or "sha256:…", as published
    file: str = ""  # its name on disk, where the address does not end in it

    @property
    def name(self) -> str:
        return self.file or self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """A data set that can be read from its standard files. Its fields are the options of `load`."""

    name: ClassVar[str]
    classes: ClassVar[int | None] = None  # None: the files tell
    holds: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    folders: ClassVar[tuple[str, ...]] = ()  # names it goes by under a data folder; none: built in
    marker: ClassVar[str] = "."  # what a folder must hold to be taken for this data set
    downloads: ClassVar[Mapping[str, tuple[Download, ...]]] = {}  # folder → the files that make it
    advice: ClassVar[str] = ""  # how to get it, where it cannot be downloaded

    def read(self, folder: Path) -> Dataset:
        """Read the files, or say which one is missing or damaged."""
        raise NotImplementedError

    @classmethod
    def get(cls) -> str:
        """How to get the files, as an order to the reader."""
        return f"run `pomona data --download {cls.name}`" if cls.downloads else cls.advice

    @classmethod
    def candidates(cls, root: Root = None) -> list[Path]:
        """Every folder that is looked at, in order."""
        found = []
        for base in roots(root):
            found += [base / folder for folder in cls.folders]
            found += [base] if base.name in cls.folders else []  # pointed right at it
        return found

    @classmethod
    def find(cls, root: Root = None) -> Path | None:
        """The first folder that holds the data set."""
        return next((f for f in cls.candidates(root) if f.is_dir() and (f / cls.marker).exists()), None)

    def content(self, path: Path) -> bytes:
        """A file's bytes; a missing one is the user's to mend."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise PomonaError(
                f"{path} cannot be read ({error.strerror}): '{self.name}' needs it; {self.mend(path)}."
            ) from error

    def damaged(self, path: Path, found: str, expected: str) -> PomonaError:
        """The error for a file that is not what it should be."""
        return PomonaError(f"{path} is damaged: {found}, expected {expected}; {self.mend(path)}.")

    def mend(self, path: Path) -> str:
        """What to do about a bad file."""
        if not self.downloads:
            return "put a sound copy in its place"
        names = {Path(folder).name for folder in self.folders}
        whole = next((p for p in path.parents if p.name in names), path.parent)
        return f"remove {whole} and {self.get()}"


SOURCES: Registry[Source] = Registry("data set")


@dataclass(frozen=True)
class Entry:
    """One line of `pomona data`."""

    name: str
    present: bool
    path: str | None
    looked: list[str]
    get: str
    licence: str
    citation: str
    classes: int | None
    size: str


def roots(root: Root = None) -> list[Path]:
    """Folders of data, in the order they are looked in: the given one, POMONA_DATA, the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pomona"
    given = [Path(p).expanduser() for p in (root, os.environ.get("POMONA_DATA")) if p]
    return list(dict.fromkeys([*given, cache]))


def locate(name: str, root: Root = None) -> Path:
    """The folder that holds a data set."""
    source = SOURCES[name]
    if not source.folders:
        raise PomonaError(f"data set '{name}' is built in and has no folder: load it as it is.")
    folder = source.find(root)
    if folder is None:
        looked = ", ".join(str(f) for f in source.candidates(root))
        raise PomonaError(
            f"data set '{name}' was looked for in {looked}, and is in none of them: {source.get()}, "
            "or point --data-dir or POMONA_DATA at the folder that holds it."
        )
    return folder


def catalog(root: Root = None) -> list[Entry]:
    """Every data set: whether it is here, where it was looked for, how to get it, whom to cite."""
    entries = []
    for name in SOURCES:
        source = SOURCES[name]
        path = source.find(root)
        entries.append(
            Entry(
                name=name,
                present=path is not None or not source.folders,
                path=None if path is None else str(path),
                looked=[str(f) for f in source.candidates(root)],
                get=source.get(),
                licence=source.licence,
                citation=source.citation,
                classes=source.classes,
                size=source.holds,
            )
        )
    return entries


def load(
    name: str,
    *,
    root: Root = None,
    device: torch.device | str = "cpu",
    validation: int | float = 0,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """Read a data set and put it on the compute device once.

    `validation`, a count or a fraction, is held out of train, drawn by `seed` with the classes in
    proportion. The name may carry options, "imdb(maxlen=200)"; those given here win.
    """
    base, inline = parse_spec(name)
    source = SOURCES.resolve({**inline, **options, "name": base})
    folder = locate(base, root) if source.folders else Path()
    return source.read(folder).hold_out(validation, seed).to(device)
