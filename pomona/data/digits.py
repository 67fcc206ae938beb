"""The digits that come with scikit-learn: no file, no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import draws
from .dataset import Dataset
from .sources import SOURCES, Source
from .split import Split


@SOURCES.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """1797 grey digits of 8×8 pixels: 1347 to train and 450 to test, the same ones for everybody."""

    classes: ClassVar[int] = 10
    holds: ClassVar[str] = "1347 + 450 grey images of 8×8"
    licence: ClassVar[str] = "CC BY 4.0"
    citation: ClassVar[str] = "Alpaydin and Kaynak, UCI Optical Recognition of Handwritten Digits, 1998"
    advice: ClassVar[str] = "nothing to do, it comes with scikit-learn"

    def read(self, folder: Path) -> Dataset:
        from sklearn.datasets import load_digits  # slow to import, and nothing else needs it

        bunch = load_digits()
        x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]  # 17 grey levels, spread over 256
        train, test = draws.stratified(bunch.target, 450, 0)
        return Dataset(
            self.name,
            Split.of(x[train], bunch.target[train]),
            Split.of(x[test], bunch.target[test]),
            classes=10,
            input_shape=(1, 8, 8),
            mean=(float(x[train].mean() / 255),),
            std=(float(x[train].std() / 255),),
            labels=tuple("0123456789"),
        )
