"""Checkpoints that survive a kill at any moment, a damaged file and a full disk.

A checkpoint is a folder with `tensors.safetensors` and `state.json`. It is written completely under the name
`checkpoint.part`, flushed to the disk and only then renamed; the previous one stays as `checkpoint.previous`.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from pomona.errors import PomonaError
from pomona.untrusted import parse_json

from . import durable_files

VERSION = 1
MAX_STATE_BYTES = 1 << 30  # of the JSON file
CURRENT_FOLDER, PREVIOUS_FOLDER, PART_FOLDER = "checkpoint", "checkpoint.previous", "checkpoint.part"
TENSORS_FILE, STATE_FILE = "tensors.safetensors", "state.json"


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or does not match its checksums."""


def save(folder: Path | str, state: Mapping[Any, Any], *, secret: bool = False) -> None:
    """Write a state, nested tensors and plain values, as the current checkpoint of the folder.

    Only its owner can read a secret checkpoint.
    Raises PomonaError if the disk refuses, and TypeError for a value that is neither.
    """
    folder = Path(folder)
    part = folder / PART_FOLDER
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_encode(state, "", tensors, {}))
    data = safetensors.torch.save(tensors)
    head = {"version": VERSION, TENSORS_FILE: _digest(data), STATE_FILE: _digest(tree.encode())}
    try:
        if part.exists():  # left by a kill: the newest checkpoint if it is complete, else useless
            if _is_complete(part):
                _make_current(folder)
            else:
                _remove(part)
        part.mkdir(parents=True, mode=0o700 if secret else 0o777)
        durable_files.write_file(part / TENSORS_FILE, data, secret=secret)
        text = f'{json.dumps(head)[:-1]}, "state": {tree}}}\n'
        durable_files.write_file(part / STATE_FILE, text.encode(), secret=secret)
        durable_files.sync_folder(part)
        _make_current(folder)
    except OSError as error:
        if not _is_complete(part):
            shutil.rmtree(part, ignore_errors=True)
        raise durable_files.describe_write_error(error, folder / CURRENT_FOLDER) from error


def load(folder: Path | str, note: Callable[[str], None] | None = None) -> dict[Any, Any]:
    """Return the state of the newest complete checkpoint of the folder.

    `note` is called with a sentence if an older checkpoint had to be used. Raises PomonaError if there is none.
    """
    folder = Path(folder)
    if not exists(folder):
        raise PomonaError(f"there is no checkpoint in '{folder}': start the run without resuming.")
    damage = []
    for name in (PART_FOLDER, CURRENT_FOLDER, PREVIOUS_FOLDER):
        try:
            state = _read_state(folder / name)
        except DamagedCheckpoint as error:
            if name != PART_FOLDER and (folder / name).exists():  # an unfinished part is not damage
                damage.append(f"'{name}' is damaged ({error})")
            continue
        if damage and note is not None:
            note(f"{damage[0]}: continuing from '{name}'.")
        return state
    raise PomonaError(
        f"no checkpoint of '{folder}' can be used: {' and '.join(damage)}. Start the run again in another folder."
    )


def remove_previous(folder: Path | str) -> None:
    """Remove the checkpoint before the current one."""
    _remove(Path(folder) / PREVIOUS_FOLDER)


def exists(folder: Path | str) -> bool:
    """Return whether the folder has a checkpoint, damaged or not; one whose writing was cut short does not count."""
    folder = Path(folder)
    return (
        (folder / CURRENT_FOLDER).exists() or (folder / PREVIOUS_FOLDER).exists() or _is_complete(folder / PART_FOLDER)
    )


def _make_current(folder: Path) -> None:
    """Make the complete part the current checkpoint. After a kill between any two lines, one can still be loaded."""
    current, previous = folder / CURRENT_FOLDER, folder / PREVIOUS_FOLDER
    if current.exists():
        _remove(previous)
        current.rename(previous)
    (folder / PART_FOLDER).rename(current)
    durable_files.sync_folder(folder)


def _remove(path: Path) -> None:
    """Remove a checkpoint folder, or the file or link that has taken its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _read_state(folder: Path) -> dict[Any, Any]:
    """Return the state in one checkpoint folder; raise DamagedCheckpoint unless it matches its checksums."""
    try:
        head = parse_json((folder / STATE_FILE).read_bytes(), MAX_STATE_BYTES)
        data = (folder / TENSORS_FILE).read_bytes()
        version = head["version"]
        if version > VERSION:
            raise PomonaError(
                f"'{folder}' has checkpoint version {version}, and this is version {VERSION}: update pomona."
            )
        if _digest(data) != head[TENSORS_FILE]:
            raise DamagedCheckpoint(f"{TENSORS_FILE} does not match its checksum")
        if _digest(json.dumps(head["state"]).encode()) != head[STATE_FILE]:
            raise DamagedCheckpoint(f"{STATE_FILE} does not match its checksum")
        return _decode(head["state"], safetensors.torch.load(data))
    except OSError as error:
        raise DamagedCheckpoint(
            f"{Path(error.filename).name if error.filename else 'a file'} cannot be read"
        ) from error
    except (PomonaError, DamagedCheckpoint):
        raise
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise DamagedCheckpoint(f"{STATE_FILE} cannot be understood") from error


def _is_complete(folder: Path) -> bool:
    """Return whether a checkpoint folder can be read and matches its checksums."""
    try:
        _read_state(folder)
    except (DamagedCheckpoint, PomonaError):
        return False
    return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]) -> Any:
    """Return a JSON value for a state, and collect its tensors by path.

    JSON has no tensors, no tuples and no keys but strings; each of these becomes an object with one key that starts
    with "$". A tensor that occurs twice (a tied weight) is stored once.
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
    """Return the state that `_encode` turned into a JSON value."""
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
