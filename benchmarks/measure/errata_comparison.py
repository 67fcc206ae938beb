"""The comparison that decides an erratum, and the registry of the functions that make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SEED = 0


@dataclass(frozen=True)
class Comparison:
    """A simulated value (with its standard error; 0 means an exact value) beside the corrected and the printed form.

    `printed` is None where the paper's formula cannot be verified from the text at hand.
    """

    case: str
    drawn: float
    error: float
    right: float
    printed: float | None


Measurement = Callable[[np.random.Generator], Iterator[Comparison]]
MEASUREMENTS: dict[str, Measurement] = {}  # by the name that errata.toml uses


def measurement(function: Measurement) -> Measurement:
    """Register a function measure_NAME under NAME."""
    MEASUREMENTS[function.__name__.removeprefix("measure_")] = function
    return function


def mean_and_error(samples: Array) -> tuple[float, float]:
    """Return the mean of samples and its standard error."""
    return float(np.mean(samples)), float(np.std(samples) / math.sqrt(len(samples)))
