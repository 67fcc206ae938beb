"""The reader of Covertype on small files in the exact format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from pomona.data import load
from pomona.errors import PomonaError


def write_covertype(folder: Path, scale: float = 1, header: bool = True) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    table = np.hstack([rng.random((70, 54)).round(3) * scale, (np.arange(70) % 7 + 1)[:, None]])
    lines = [",".join(f"{v:g}" for v in row) for row in table]
    if header:
        lines.insert(0, ",".join([f"Feature{i}" for i in range(54)] + ["Cover_Type"]))
    (folder / "covertype.csv").write_text("\n".join(lines) + "\n")
    return table


@pytest.mark.parametrize("header", [True, False])
def test_covertype(tmp_path: Path, header: bool):
    table = write_covertype(tmp_path / "covertype", header=header)
    data = load("covertype", root=tmp_path)
    assert (len(data.train), len(data.test), data.kind) == (56, 14, "table")
    assert data.test.y.bincount().tolist() == [2] * 7
    got = {tuple(row) for row in torch.cat([data.train.x, data.test.x]).numpy()}
    assert got == {tuple(row) for row in table[:, :54].astype(np.float32)}
    again = load("covertype", root=tmp_path, seed=9)
    assert torch.equal(data.test.x, again.test.x)
    assert next(data.batches(8, seed=1).epoch(0))[0].shape == (8, 54)


def test_covertype_as_published_is_scaled(tmp_path: Path):
    write_covertype(tmp_path / "covertype", scale=300, header=False)
    path = tmp_path / "covertype" / "covertype.csv"
    (tmp_path / "covertype" / "covtype.data.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    data = load("covertype", root=tmp_path)
    x = torch.cat([data.train.x, data.test.x])
    assert x.amin(0).tolist() == [0] * 54
    assert x.amax(0).tolist() == [1] * 54


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",".join(["0"] * 54), "54 columns in line 3, expected 55"),
        (",".join(["0"] * 54 + ["8"]), "class 8 in data row 2, expected 1 to 7"),
        (",".join(["0"] * 53 + ["fir", "1"]), "could not convert string 'fir'"),
        (",".join(["nan"] * 54 + ["1"]), "not a finite number"),
    ],
)
def test_damaged_covertype(tmp_path: Path, line: str, message: str):
    write_covertype(tmp_path / "covertype")
    path = tmp_path / "covertype" / "covertype.csv"
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines))
    with pytest.raises(PomonaError, match=rf"covertype.csv is damaged: .*{message}.*--download covertype"):
        load("covertype", root=tmp_path)
