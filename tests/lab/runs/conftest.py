"""Fixtures for tests of runs."""

from __future__ import annotations

import pytest
import torch
from run_helpers import digits_recipe

from pomona.lab import train


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory):
    """Return the folder of an uninterrupted run, its recipe and its summary."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "complete"
    return folder, digits_recipe(), train(digits_recipe(), folder)
