"""The handwritten digits that are part of scikit-learn and need no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import keyed_random
from .dataset import Dataset
from .sources import SOURCES, Source
from .split import Split


@SOURCES.register("digits")
@dataclass(frozen=True)
class Digits(Source):
    """1797 gray digits of 8×8 pixels: 1347 for training and 450 for testing, in a fixed split."""

    classes: ClassVar[int] = 10
    training_rows: ClassVar[int | None] = 1347
    contents: ClassVar[str] = "1347 + 450 gray images of 8×8"
    licence: ClassVar[str] = "CC BY 4.0"
    citation: ClassVar[str] = "Alpaydin and Kaynak, UCI Optical Recognition of Handwritten Digits, 1998"
    instructions: ClassVar[str] = "nothing to do, it is part of scikit-learn"

    def read(self, folder: Path) -> Dataset:
        from sklearn.datasets import load_digits  # imported here because it is slow and only this source needs it

        bunch = load_digits()
        x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]  # 17 gray levels, spread over 256
        train, test = keyed_random.stratified_split(bunch.target, 450, 0)
        return Dataset(
            self.name,
            Split.from_arrays(x[train], bunch.target[train]),
            Split.from_arrays(x[test], bunch.target[test]),
            classes=10,
            input_shape=(1, 8, 8),
            mean=(0.30531200416320947,),  # of the training images, as for the other image data sets
            std=(0.3756949614456744,),
            labels=tuple("0123456789"),
        )
