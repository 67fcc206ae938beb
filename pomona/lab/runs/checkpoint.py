"""Checkpoints that outlive a kill at any moment, a damaged file and a full disk.

A checkpoint is a folder with `tensors.safetensors` and `state.json`. It is written whole under the
name `checkpoint.part`, flushed to the disk, and only then renamed; the one before it stays as
`checkpoint.previous`. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from pomona.errors import PomonaError

VERSION = 1
CURRENT, PREVIOUS, PART = "checkpoint", "checkpoint.previous", "checkpoint.part"
TENSORS, STATE = "tensors.safetensors", "state.json"


class DamagedCheckpoint(Exception):
    """A checkpoint that is not whole."""


def save(folder: Path | str, state: Mapping[Any, Any]) -> None:
    """Write `state`, a nest of tensors and plain values, as the folder's current checkpoint."""
    folder = Path(folder)
    part = folder / PART
    if part.exists():  # left by a kill: whole, it is the newest; else it is worth nothing
        if _is_complete(part):
            _make_current(folder)
        else:
            shutil.rmtree(part)
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_encode(state, "", tensors, {}))
    data = safetensors.torch.save(tensors)
    head = {"version": VERSION, TENSORS: _digest(data), STATE: _digest(tree.encode())}
    try:
        part.mkdir(parents=True)
        write_file(part / TENSORS, data)
        write_file(part / STATE, f'{json.dumps(head)[:-1]}, "state": {tree}}}\n'.encode())
        sync_folder(part)
        _make_current(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise describe_write_error(error, folder / CURRENT) from error


def load(folder: Path | str, note: Callable[[str], None] | None = None) -> dict[Any, Any]:
    """The newest whole checkpoint of the folder; `note` is told when an older one had to be taken."""
    folder = Path(folder)
    if not exists(folder):
        raise PomonaError(f"there is no checkpoint in '{folder}': start the run without resuming.")
    damage = []
    for name in (PART, CURRENT, PREVIOUS):
        try:
            state = _read_state(folder / name)
        except DamagedCheckpoint as error:
            if name != PART and (folder / name).exists():  # an unfinished part is no damage
                damage.append(f"'{name}' is damaged ({error})")
            continue
        if damage and note is not None:
            note(f"{damage[0]}: going on from '{name}'.")
        return state
    raise PomonaError(
        f"no checkpoint of '{folder}' can be used: {' and '.join(damage)}. Start the run anew in another folder."
    )


def exists(folder: Path | str) -> bool:
    """Whether the folder has a checkpoint, whole or not; one whose writing was cut short is none."""
    folder = Path(folder)
    return (folder / CURRENT).exists() or (folder / PREVIOUS).exists() or _is_complete(folder / PART)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, under a full disk too."""
    part = path.with_name(path.name + ".part")
    try:
        write_file(part, data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise describe_write_error(error, path) from error


def _make_current(folder: Path) -> None:
    """Make the whole part the current checkpoint. Killed between any two lines, one can be loaded."""
    current, previous = folder / CURRENT, folder / PREVIOUS
    if current.exists():
        shutil.rmtree(previous, ignore_errors=True)
        current.rename(previous)
    (folder / PART).rename(current)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_state(folder: Path) -> dict[Any, Any]:
    """The state in one checkpoint folder, checked against its own digests."""
    try:
        head = json.loads((folder / STATE).read_bytes())
        data = (folder / TENSORS).read_bytes()
        version = head["version"]
        if version > VERSION:
            raise PomonaError(
                f"'{folder}' is of checkpoint version {version}, this is version {VERSION}: update pomona."
            )
        if _digest(data) != head[TENSORS]:
            raise DamagedCheckpoint(f"{TENSORS} does not match its checksum")
        if _digest(json.dumps(head["state"]).encode()) != head[STATE]:
            raise DamagedCheckpoint(f"{STATE} does not match its checksum")
        return _decode(head["state"], safetensors.torch.load(data))
    except OSError as error:
        raise DamagedCheckpoint(
            f"{Path(error.filename).name if error.filename else 'a file'} cannot be read"
        ) from error
    except PomonaError:
        raise
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{STATE} cannot be understood") from error


def _is_complete(folder: Path) -> bool:
    try:
        _read_state(folder)
    except (DamagedCheckpoint, PomonaError):
        return False
    return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Errors of the disk as what they mean to the user."""
    try:
        yield
    except OSError as error:
        raise describe_write_error(error, path) from error


def describe_write_error(error: OSError, path: Path) -> PomonaError:
    """What went wrong when writing, in one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PomonaError(
            f"the disk is full: '{path}' could not be written. The last good checkpoint is untouched: "
            "free some space and go on with --resume."
        )
    return PomonaError(f"'{path}' cannot be written: {error.strerror or error}.")


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]) -> Any:
    """A plain JSON value for `value`, its tensors put aside by path.

    JSON knows neither tensors, tuples nor keys that are no strings; each of them becomes an object
    with one key that begins with "$". A tensor met twice (a tied weight) is stored once.
    """
    if isinstance(value, torch.Tensor):
        same = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if same not in seen:
            seen[same] = f"{len(tensors)}{path}"  # the number keeps the keys 1 and "1" apart
            tensors[seen[same]] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": seen[same]}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _encode(v, f"{path}/{k}", tensors, seen) for k, v in value.items()}
        return {
            "$items": [
                [_encode(k, path, tensors, seen), _encode(v, f"{path}/{k}", tensors, seen)] for k, v in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [_encode(v, f"{path}/{i}", tensors, seen) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {path or 'the state'}, a {type(value).__name__}")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$items": items}:
            return {_decode(k, tensors): _decode(v, tensors) for k, v in items}
        case {"$tuple": items}:
            return tuple(_decode(v, tensors) for v in items)
    return {k: _decode(v, tensors) for k, v in value.items()}
