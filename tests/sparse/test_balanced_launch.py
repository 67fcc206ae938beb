"""What the driver is told of a launch, and when an operator is called without torch's dispatch."""

from __future__ import annotations

import ctypes
import struct
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packing import balanced_weight
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pomona.sparse import BalancedTensor, ops
from pomona.sparse import cpu as native
from pomona.sparse.cuda import compiled
from pomona.sparse.cuda.compiled import Kernel

# ---- launches


class Driver:
    """The driver's launch, which reads what a real one would read, and its answer."""

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
        told = ctypes.string_at(attributes, 72) if count else b""
        arguments = ctypes.string_at(place, length)
        self.seen.append({"shape": shape, "function": function, "stream": stream, "early": told, "given": arguments})
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


def test_a_launch_is_told_as_the_driver_reads_it(driver: Driver) -> None:
    x = torch.zeros(3)
    Kernel("few", 64, 96)((5, 6, 7), (x, None), (8, -9, True))
    Kernel("few", 32, EARLY=1).launch((1, 1, 1), [1 << 40], [])
    plain, early = driver.seen
    assert plain["shape"] == [5, 6, 7, 64, 1, 1, 96]
    assert (plain["function"], plain["stream"], plain["early"]) == (77, 1003, b"")
    assert struct.unpack("2P3i", plain["given"]) == (x.data_ptr(), 0, 8, -9, 1)
    assert struct.unpack("P", early["given"]) == (1 << 40,)
    assert struct.unpack("i4xi60x", early["early"]) == (6, 1)  # programmatic stream serialization


def test_a_refused_launch_is_an_error(driver: Driver) -> None:
    driver.answer = 701
    with pytest.raises(RuntimeError, match="not launched: error 701 of the CUDA driver"):
        Kernel("few", 32)((1, 1, 1), (), (1,))
    assert not compiled.LOCK.locked()


def test_a_thread_that_is_new_to_the_device_is_made_known_to_it(driver: Driver) -> None:
    driver.answer = compiled.STRANGE
    Kernel("few", 32)((1, 1, 1), (), (1,))
    assert len(driver.seen) == 2
    assert driver.seen[0] == driver.seen[1]


def test_threads_do_not_mix_their_arguments(driver: Driver) -> None:
    """The driver lets other threads run while it reads."""
    kernel, quick = Kernel("few", 32), driver.launch

    def slow(*given: Any) -> int:
        threading.Event().wait(1e-4)
        return quick(*given)

    kernel.go = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(slow)

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
def test_where_launches_overlap(
    major: int, version: int, able: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def tell(place: Any) -> int:
        place[0] = version
        return 0

    driver.cuDriverGetVersion = tell  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert compiled.overlaps(0) is able


# ---- dispatch


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def packed() -> BalancedTensor:
    return BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=3), 32)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether torch's dispatch was between a call and the backend, each time."""
    calls: list[bool] = []

    def backend(x: Tensor, *given: Any) -> Any:
        calls.append(any(frame.f_code.co_filename.endswith("_ops.py") for frame, _ in traceback.walk_stack(None)))
        return native.product(x, *given)

    monkeypatch.setitem(ops.BACKENDS, "cpu", backend)
    return calls


def test_nobody_watches_a_plain_call(packed: BalancedTensor, dispatched: list[bool]) -> None:
    x = torch.randn(3, 64)
    exact = torch.ops.pomona.balanced(x, packed.values, packed.indices, None, 40, 64, 32)
    y = packed.linear(x)
    with torch.inference_mode():
        assert torch.equal(packed.linear(x), exact)
    with torch.no_grad():
        assert torch.equal(packed.linear(x.requires_grad_()), exact)
    assert torch.equal(y, exact)
    assert dispatched == [True, False, False, False]


def test_whoever_watches_sees_the_operator(packed: BalancedTensor) -> None:
    x = torch.randn(3, 64)
    with Seen() as mode:
        packed.linear(x)
    assert mode.names[0] == "pomona.balanced.default"
    with profile(activities=[ProfilerActivity.CPU]) as told:
        packed.linear(x)
    assert "pomona::balanced" in {event.key for event in told.key_averages()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: packed.linear(x))(x)
    assert "pomona.balanced" in graph.code
    given = packed.values, packed.indices, None, 40, 64, 32
    assert "pomona::balanced" in str(torch.jit.trace(lambda x: ops.balanced(x, *given), x, check_trace=False).graph)
    batches = torch.randn(2, 3, 64)
    each = torch.stack([packed.linear(one) for one in batches])
    assert torch.allclose(torch.func.vmap(packed.linear)(batches), each)
    assert all(map(ops.watched, (x.clone().requires_grad_(), x.to("meta"), torch.nn.Parameter(x))))
    assert ops.watched(x, packed.values, torch.ones(40).requires_grad_(), 40)
    assert not ops.watched(x)
