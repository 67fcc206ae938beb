"""A GPU that is emulated on this processor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from emulation import COUNTERS, emulate_kernel

from pomona.sparse.cuda import (
    bitmap_tiles,
    code_gather,
    conv2d,
    gap_gather,
    hopper_wgmma,
    lstm,
    slice_gather,
    tensor_core,
    tensor_core_common,
    warp_shuffle,
)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Emulate a small GPU; yield its properties."""
    properties = SimpleNamespace(multi_processor_count=4, major=9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the device index of a tensor on the CPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (lstm, hopper_wgmma):
        monkeypatch.setattr(module, "supports_early_launch", lambda device: True)
    for module in (warp_shuffle, slice_gather, gap_gather, bitmap_tiles, code_gather, tensor_core, hopper_wgmma, lstm):
        monkeypatch.setattr(module, "compile_kernel", emulate_kernel)
    modules = (
        warp_shuffle,
        slice_gather,
        gap_gather,
        bitmap_tiles,
        code_gather,
        tensor_core,
        hopper_wgmma,
        lstm,
        conv2d,
    )
    for module in modules:
        module.prepare_launch.cache_clear()
    for module in (tensor_core_common, gap_gather, code_gather):
        monkeypatch.setattr(module, "arrival_counters", lambda count, device: COUNTERS[:count])
    monkeypatch.setattr(hopper_wgmma, "MIN_GROUPS", 1)
    yield properties
    assert not COUNTERS.any(), "the last thread block resets its counter"
    for module in modules:
        module.prepare_launch.cache_clear()
