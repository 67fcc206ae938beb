"""The public API is typed: mypy accepts right options of `pm.DPF(...)` and its kin, and reports wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pomona as pm

SCRIPT = """
import torch
from torch import nn

import pomona as pm

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pruner = pm.DPF(sparsity=0.9, every=16, settle=0.1, pattern=pm.Balanced(block=4), include=["weight"])
pruner.attach(model, optimizer, total_steps=100)
reveal_type(pruner)
masks: dict[str, torch.Tensor] = pruner.masks()
share: float = pruner.sparsity()
pm.SNIP(0.9)
pm.RigL(share=0.2, every=None, allocation="erk")
pm.Feather(compressor=pm.PowerThreshold(power=3.0), schedule=pm.Cubic(until=0.5), theta=0.5)
pm.IteRand(distribution="ku", rate=0.1)
results = pm.Lottery(retrainings=3).rounds(model, lambda model, pruner, index: index)
small: nn.Module = pm.compress(model, (4,))
"""

WRONG = {
    "pm.DPF(sparsty=0.9)": 'Unexpected keyword argument "sparsty"',
    "pm.DPF(0.9, 16)": 'Argument 2 has incompatible type "int"',
    'pm.DPF(sparsity="high")': 'has incompatible type "str"',
    "pm.DPF(every=0.5)": 'has incompatible type "float"; expected "int | None"',
    "pm.RigL(settle=0.1)": 'Unexpected keyword argument "settle"',
    "pm.SNIP(schedule=pm.Cubic())": 'Unexpected keyword argument "schedule"',
    "pm.DPF(pattern=pm.Cubic())": 'has incompatible type "Cubic"; expected "Pattern"',
    "pm.DPF().atach()": '"Pruner" has no attribute "atach"',
    "pm.DPF().rounds()": '"Pruner" has no attribute "rounds"',
}


def run_mypy(script: str, folder: Path) -> str:
    """Return what mypy prints for a user's script, with the installed package seen through its py.typed."""
    file = folder / "user_script.py"
    file.write_text(script)
    root = Path(pm.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file=", f"--cache-dir={folder / 'cache'}"]
    done = subprocess.run(
        [*command, "--ignore-missing-imports", "--follow-imports=silent", str(file)],
        env={**os.environ, "MYPYPATH": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_users_script_is_checked(tmp_path: Path) -> None:
    """One mypy run for all: right lines give no error, and each wrong line gives the error it should."""
    assert (Path(pm.__file__).parent / "py.typed").exists()
    lines = SCRIPT.strip().splitlines()
    printed = run_mypy("\n".join([*lines, *WRONG]) + "\n", tmp_path)
    assert (
        f'user_script.py:{lines.index("reveal_type(pruner)") + 1}: note: Revealed type is "pomona.core.pruner.Pruner"'
        in printed
    )
    errors = {int(line.split(":")[1]): line for line in printed.splitlines() if ": error:" in line}
    expected = {len(lines) + 1 + i: message for i, message in enumerate(WRONG.values())}
    assert errors.keys() == expected.keys(), printed
    for number, message in expected.items():
        assert message in errors[number]
