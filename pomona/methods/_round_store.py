"""Storage of finished lottery rounds, in a folder or in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes
from torch import Tensor

from ..durable import replace_file
from ..errors import PomonaError, require
from ..untrusted import read_object, read_tensors, reading


class RoundStore:
    """Finished rounds of one lottery; every file is whole on the disk before it replaces the last one."""

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        self.memory: dict[str, dict[str, Tensor]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Store tensors under a name."""
        tensors = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        self.memory[name] = tensors
        if self.folder is not None:
            replace_file(self.folder / f"{name}.safetensors", to_bytes(tensors))

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors stored under a name."""
        if name not in self.memory:
            path = self.folder / f"{name}.safetensors"  # type: ignore[operator]
            with reading(f"'{path}'"):
                self.memory[name] = read_tensors(path)[1]
        return self.memory[name]

    def write_results(self, results: list[dict[str, Any]]) -> None:
        """Store the results of all finished rounds."""
        if self.folder is not None:
            text = json.dumps({**self.settings, "rounds": results}, indent=1, default=to_json)
            replace_file(self.folder / "rounds.json", text.encode())

    def read_results(self) -> list[dict[str, Any]]:
        """Return the results of rounds that were finished before; raise PomonaError for another lottery's folder."""
        path = None if self.folder is None else self.folder / "rounds.json"
        if path is None or not path.exists():
            return []
        with reading(f"'{path}'"):
            stored = read_object(path)
            for key, own in self.settings.items():
                require(stored.get(key) == own, f"{path} is of a lottery with other {key}: choose another folder.")
            rounds = stored["rounds"]
            valid = isinstance(rounds, list) and all(isinstance(one, dict) for one in rounds)
            require(valid, f"'{path}' is damaged: its rounds are no list of results.")
            return rounds


def to_json(value: Any) -> Any:
    """Return a tensor or a NumPy number as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise PomonaError(
        f"train returned {value!r}, which a folder cannot store: return numbers, texts, lists or dictionaries."
    )
