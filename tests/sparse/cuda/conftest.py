"""A GPU that is emulated on this processor, and GPUs for which kernels are only chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulation import COUNTERS, emulate_kernel
from recorded_kernels import RecordedKernel, properties_of

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
from pomona.sparse.cuda.launcher import EARLY_LAUNCH_MAJOR

GATHERS = warp_shuffle, slice_gather, gap_gather, bitmap_tiles, code_gather
COMPILING = *GATHERS, tensor_core, hopper_wgmma, lstm
MODULES = *COMPILING, conv2d


def substitute_gpu(
    monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace, compile_kernel: Callable[..., Any]
) -> None:
    """Let the backend work for a GPU with these properties on tensors of the CPU, with kernels of this function."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the device index of a tensor on the CPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (lstm, hopper_wgmma):
        monkeypatch.setattr(module, "supports_early_launch", lambda device: properties.major >= EARLY_LAUNCH_MAJOR)
    for module in COMPILING:
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    for module in (tensor_core_common, gap_gather, code_gather):
        monkeypatch.setattr(module, "arrival_counters", lambda count, device: COUNTERS[:count])
    clear_launches()


def clear_launches() -> None:
    """Forget all launches that were prepared."""
    for module in MODULES:
        module.prepare_launch.cache_clear()


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Emulate a small GPU; yield its properties."""
    properties = SimpleNamespace(multi_processor_count=4, major=9)
    substitute_gpu(monkeypatch, properties, emulate_kernel)
    for module in (lstm, hopper_wgmma):  # tests change the capability, but not what the emulator can do
        monkeypatch.setattr(module, "supports_early_launch", lambda device: True)
    monkeypatch.setattr(hopper_wgmma, "MIN_GROUPS", 1)
    yield properties
    assert not COUNTERS.any(), "the last thread block resets its counter"
    clear_launches()


@pytest.fixture
def recording_gpu(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, list[RecordedKernel]]]:
    """Stand for a GPU of a compute capability; yield the kernels that were asked for, by the name of their source."""
    recorded: dict[str, list[RecordedKernel]] = {}

    def record_kernel(name: str, device: int, threads: int, shared_bytes: int = 0, **macros: int | str) -> Any:
        recorded.setdefault(name, []).append(RecordedKernel(name, threads, shared_bytes, macros))
        return recorded[name][-1]

    substitute_gpu(monkeypatch, properties_of(capability), record_kernel)
    yield recorded
    clear_launches()
