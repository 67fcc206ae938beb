"""Data sources: where data sets are on disk, which are present, and how to get the others."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from pomona import untrusted
from pomona.errors import PomonaError
from pomona.registry import Registry, describe_options, parse_spec, spec_to_dict

from .dataset import Dataset

EXAMPLE = """\
import pomona as pm

data = pm.data.load("{name}")
for inputs, targets in data.batches(128, seed=0).epoch(0):
    ...
"""

DataRoot = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Download:
    """A published file. A tar archive must contain the folder of the data set at its top level."""

    url: str
    checksum: str  # "md5:…" or "sha256:…", as published
    file: str = ""  # its name on disk, if the URL does not end in it
    max_bytes: int = 512 << 20  # a server that sends more is not believed; the largest published file has 170 MB

    @property
    def name(self) -> str:
        """The name of the file on disk."""
        return self.file or self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """A data set that can be read from its standard files. The dataclass fields are the options of `load`."""

    name: ClassVar[str]
    classes: ClassVar[int | None] = None  # None: the number depends on the files
    training_rows: ClassVar[int | None] = None  # of the published files; None: it depends on the files or the options
    contents: ClassVar[str] = ""  # a description for `pomona data`
    licence: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    folders: ClassVar[tuple[str, ...]] = ()  # possible names in a data folder; none: built in
    marker: ClassVar[str] = "."  # a path that a folder must contain to be recognized as this data set
    downloads: ClassVar[Mapping[str, tuple[Download, ...]]] = {}  # folder → the files it is made from
    instructions: ClassVar[str] = ""  # how to get the data set if it cannot be downloaded

    def read(self, folder: Path) -> Dataset:
        """Read the data set from a folder; raise PomonaError that names a missing or damaged file."""
        raise NotImplementedError

    @classmethod
    def how_to_get(cls) -> str:
        """Return how to get the files, as an instruction for a message."""
        return f"run `pomona data --download {cls.name}`" if cls.downloads else cls.instructions

    @classmethod
    def candidate_folders(cls, root: DataRoot = None) -> list[Path]:
        """Return every folder that may hold the data set, in the order of the search."""
        found = []
        for base in data_folders(root):
            found += [base / folder for folder in cls.folders]
            found += [base] if base.name in cls.folders else []  # the data folder is the data set itself
        return found

    @classmethod
    def find_folder(cls, root: DataRoot = None) -> Path | None:
        """Return the first folder that holds the data set, or None."""
        return next((f for f in cls.candidate_folders(root) if f.is_dir() and (f / cls.marker).exists()), None)

    def read_bytes(self, path: Path) -> bytes:
        """Return the bytes of a file; raise PomonaError if it cannot be read."""
        try:
            return untrusted.read_bytes(path)
        except OSError as error:
            raise PomonaError(
                f"{path} cannot be read ({error.strerror}): '{self.name}' needs it; {self.repair_advice(path)}."
            ) from error

    @contextmanager
    def parsing(self, path: Path, expected: str) -> Iterator[None]:
        """Turn every failure within the block into the error for a damaged file."""
        try:
            yield
        except PomonaError:
            raise
        except Exception as error:  # a hostile file can make anything fail, and must do no more than that
            raise self.damaged_error(path, untrusted.describe(error), expected) from error

    def damaged_error(self, path: Path, found: str, expected: str) -> PomonaError:
        """Return the error for a file with unexpected content."""
        return PomonaError(f"{path} is damaged: {found}, expected {expected}; {self.repair_advice(path)}.")

    def repair_advice(self, path: Path) -> str:
        """Return what to do about a missing or damaged file, for a message."""
        if not self.downloads:
            return "replace it with an intact copy"
        names = {Path(folder).name for folder in self.folders}
        whole = next((p for p in path.parents if p.name in names), path.parent)
        return f"remove {whole} and {self.how_to_get()}"


SOURCES: Registry[Source] = Registry("data set")


@dataclass(frozen=True)
class CatalogEntry:
    """What `pomona data` shows about one data set; the fields are the keys of its JSON output."""

    name: str
    present: bool
    path: str | None
    looked: list[str]
    get: str
    licence: str
    citation: str
    classes: int | None
    size: str


def data_folders(root: DataRoot = None) -> list[Path]:
    """Return the data folders in the order of the search: the given one, POMONA_DATA, the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pomona"
    given = [Path(p).expanduser() for p in (root, os.environ.get("POMONA_DATA")) if p]
    return list(dict.fromkeys([*given, cache]))


def locate(name: str, root: DataRoot = None) -> Path:
    """Return the folder that holds a data set; raise PomonaError if it is not found."""
    source = SOURCES[name]
    if not source.folders:
        raise PomonaError(f"data set '{name}' is built in and has no folder: load it by its name.")
    folder = source.find_folder(root)
    if folder is None:
        looked = ", ".join(str(f) for f in source.candidate_folders(root))
        raise PomonaError(
            f"data set '{name}' was not found in {looked}: {source.how_to_get()}, "
            "or point --data-dir or POMONA_DATA at the folder that holds it."
        )
    return folder


def catalog(root: DataRoot = None) -> list[CatalogEntry]:
    """Return an entry for every data set: whether it is present, where it is searched, how to get it, its citation."""
    return [catalog_entry(name, root) for name in SOURCES]


def catalog_entry(name: str, root: DataRoot = None) -> CatalogEntry:
    """Return the entry of one data set; raise PomonaError where there is none of this name."""
    source = SOURCES[name]
    path = source.find_folder(root)
    return CatalogEntry(
        name=name,
        present=path is not None or not source.folders,
        path=None if path is None else str(path),
        looked=[str(f) for f in source.candidate_folders(root)],
        get=source.how_to_get(),
        licence=source.licence,
        citation=source.citation,
        classes=source.classes,
        size=source.contents,
    )


def describe_source(name: str, root: DataRoot = None) -> dict[str, Any]:
    """Return the entry of one data set with its description, its published files, its options and examples."""
    source, options = SOURCES[name], spec_to_dict(SOURCES.resolve(name))
    del options["name"]
    return {
        **dataclasses.asdict(catalog_entry(name, root)),
        "about": inspect.cleandoc(source.__doc__ or ""),
        "downloads": {
            folder: [{"url": file.url, "checksum": file.checksum} for file in files]
            for folder, files in source.downloads.items()
        },
        "options": options,
        "meanings": describe_options(source),
        "python": EXAMPLE.format(name=name),
        "command": f"pomona train RECIPE --set data={name}",
    }


def load(
    name: str,
    *,
    root: DataRoot = None,
    device: torch.device | str = "cpu",
    validation: int | float = 0,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """Read a data set and move it to the compute device.

    `validation`, a number of rows or a fraction, is held out of train, chosen by `seed` with the classes in
    proportion. The name may include options, as in "imdb(maxlen=200)"; keyword `options` take precedence.
    """
    base, inline = parse_spec(name)
    source = SOURCES.resolve({**inline, **options, "name": base})
    folder = locate(base, root) if source.folders else Path()
    with untrusted.reading(f"the data set '{base}' in '{folder}'"):
        found = source.read(folder)
    return found.hold_out(validation, seed).to(device)
