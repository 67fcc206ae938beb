"""No test depends on torch's global settings that an earlier test has left."""

from __future__ import annotations

import torch
from torch_settings import read_torch_settings, restored_torch_settings


def test_every_setting_is_restored():
    before = read_torch_settings()
    with restored_torch_settings():
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.enabled = not torch.backends.cudnn.enabled
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        changed = read_torch_settings()
    assert all(changed[name] != before[name] for name in before)
    assert all(changed["cudnn"][name] != before["cudnn"][name] for name in before["cudnn"])
    assert read_torch_settings() == before


def test_settings_are_restored_after_a_failure():
    before = read_torch_settings()
    try:
        with restored_torch_settings():
            torch.set_default_dtype(torch.float64)
            raise ValueError
    except ValueError:
        pass
    assert read_torch_settings() == before
