"""The arguments that the CUDA driver receives for a launch, and the errors it returns."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pomona.sparse.cuda import launcher
from pomona.sparse.cuda.launcher import CompiledKernel


class Driver:
    """A substitute for the CUDA driver, which reads what a real one reads and returns `answer`."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.answer = 0
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = kind(self.launch)

    def cuCtxGetCurrent(self, place: Any) -> int:
        place._obj.value = 55
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        assert context.value == 55
        self.answer = 0
        return 0

    def launch(self, config: int, function: int, parameters: int | None, extra: int) -> int:
        *shape, stream, attributes, count = struct.unpack("7I2PI", ctypes.string_at(config, 52))
        buffer, place, size, bytes_, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (parameters, buffer, size, end) == (None, 1, 2, None)
        length = ctypes.c_size_t.from_address(bytes_).value
        attribute = ctypes.string_at(attributes, 72) if count else b""
        arguments = ctypes.string_at(place, length)
        self.seen.append(
            {"shape": shape, "function": function, "stream": stream, "early": attribute, "given": arguments}
        )
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    handle = SimpleNamespace(func=ctypes.c_void_p(77), set_shared_memory_config=lambda size: None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda text, name, only: handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda._utils, "_get_gpu_runtime_library", lambda: made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    return made


def test_the_driver_reads_the_launch_as_it_was_given(driver: Driver) -> None:
    x = torch.zeros(3)
    CompiledKernel("warp_shuffle", 64, 96)((5, 6, 7), (x, None), (8, -9, True))
    CompiledKernel("warp_shuffle", 32, EARLY_LAUNCH=1).launch((1, 1, 1), [1 << 40], [])
    plain, early = driver.seen
    assert plain["shape"] == [5, 6, 7, 64, 1, 1, 96]
    assert (plain["function"], plain["stream"], plain["early"]) == (77, 1003, b"")
    assert struct.unpack("2P3i", plain["given"]) == (x.data_ptr(), 0, 8, -9, 1)
    assert struct.unpack("P", early["given"]) == (1 << 40,)
    assert struct.unpack("i4xi60x", early["early"]) == (6, 1)  # programmatic stream serialization


def test_a_refused_launch_is_an_error(driver: Driver) -> None:
    driver.answer = 701
    with pytest.raises(RuntimeError, match="not launched: error 701 of the CUDA driver"):
        CompiledKernel("warp_shuffle", 32)((1, 1, 1), (), (1,))
    assert not launcher.LAUNCH_LOCK.locked()


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    driver.answer = launcher.INVALID_CONTEXT
    CompiledKernel("warp_shuffle", 32)((1, 1, 1), (), (1,))
    assert len(driver.seen) == 2
    assert driver.seen[0] == driver.seen[1]


def test_threads_do_not_mix_their_arguments(driver: Driver) -> None:
    """The substitute driver lets other threads run while it reads the arguments."""
    kernel, quick = CompiledKernel("warp_shuffle", 32), driver.launch

    def slow(*given: Any) -> int:
        threading.Event().wait(1e-4)
        return quick(*given)

    kernel.launch_function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(slow)

    def run(number: int) -> None:
        for _ in range(20):
            kernel.launch((number, 1, 1), [number], [number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.seen) == 80
    assert all(struct.unpack("Pi", seen["given"]) == (seen["shape"][0],) * 2 for seen in driver.seen)


@pytest.mark.parametrize(("major", "version", "able"), [(9, 13000, True), (8, 13000, False), (9, 12020, False)])
def test_early_launch_needs_hopper_and_a_recent_driver(
    major: int, version: int, able: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def write_version(place: Any) -> int:
        place[0] = version
        return 0

    driver.cuDriverGetVersion = write_version  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert launcher.supports_early_launch(0) is able
