"""Set-up of all tests: one thread, tables of the usual width, torch's settings restored, no GPU test without a GPU."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator

# This import comes first: it limits oneDNN where AMX is refused, which must happen before torch is imported.
from pomona import cpu_features

# isort: split
import pytest
import torch
from torch_settings import restored_torch_settings

from pomona.privacy import released_steps

torch.set_num_threads(1)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers, and tables would have that width


def pytest_report_header() -> str:
    """Name the state of AMX at the head of the report."""
    return f"AMX: {cpu_features.describe_amx()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def ledger_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the privacy ledgers of a test in a folder of its own, and forget the private steps of other tests."""
    monkeypatch.setenv("POMONA_LEDGER", str(tmp_path_factory.mktemp("ledger")))
    monkeypatch.setattr(released_steps, "_runs", OrderedDict())


@pytest.fixture(autouse=True)
def restore_torch_settings() -> Iterator[None]:
    """Restore torch's global settings after a test, so that no test depends on those before it."""
    with restored_torch_settings():
        yield
