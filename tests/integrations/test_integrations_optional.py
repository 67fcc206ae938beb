"""A callback whose library is missing names the extra to install, and `import pomona` loads no library."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from pomona.errors import PomonaError


@pytest.mark.parametrize(
    ("module", "packages", "extra"),
    [
        ("huggingface", ["transformers"], "huggingface"),
        ("lightning", ["lightning.pytorch", "pytorch_lightning"], "lightning"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    module: str, packages: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pomona.integrations.{module}", raising=False)
    with pytest.raises(PomonaError, match=rf"pip install 'pomona\[{extra}\]'"):
        importlib.import_module(f"pomona.integrations.{module}")


def test_importing_pomona_loads_no_trainer() -> None:
    script = "import sys, pomona; print([n for n in ('transformers', 'lightning', 'accelerate') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
