"""Which calls of an operator go through torch's dispatcher, and which skip it."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from packing import balanced_weight
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pomona.sparse import BalancedTensor
from pomona.sparse.cpu.backend import multiply_packed
from pomona.sparse.ops import balanced, product
from pomona.sparse.ops.registration import is_observed


class OperatorLog(TorchDispatchMode):
    """A dispatch mode that collects the names of the operators called."""

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
    """Collect for each call of the backend whether it came through torch's dispatcher."""
    calls: list[bool] = []

    def backend(x: Tensor, *given: Any) -> Any:
        calls.append(any(frame.f_code.co_filename.endswith("_ops.py") for frame, _ in traceback.walk_stack(None)))
        return multiply_packed(x, *given)

    monkeypatch.setitem(product.BACKENDS, "cpu", backend)
    return calls


def test_a_plain_call_skips_the_dispatcher(packed: BalancedTensor, dispatched: list[bool]) -> None:
    x = torch.randn(3, 64)
    exact = torch.ops.pomona.balanced(x, packed.values, packed.indices, None, 40, 64, 32)
    y = packed.linear(x)
    with torch.inference_mode():
        assert torch.equal(packed.linear(x), exact)
    with torch.no_grad():
        assert torch.equal(packed.linear(x.requires_grad_()), exact)
    assert torch.equal(y, exact)
    assert dispatched == [True, False, False, False]


def test_modes_profilers_and_tracers_see_the_operator(packed: BalancedTensor) -> None:
    x = torch.randn(3, 64)
    with OperatorLog() as mode:
        packed.linear(x)
    assert mode.names[0] == "pomona.balanced.default"
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        packed.linear(x)
    assert "pomona::balanced" in {event.key for event in profiled.key_averages()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: packed.linear(x))(x)
    assert "pomona.balanced" in graph.code
    given = packed.values, packed.indices, None, 40, 64, 32
    assert "pomona::balanced" in str(torch.jit.trace(lambda x: balanced(x, *given), x, check_trace=False).graph)
    batches = torch.randn(2, 3, 64)
    each = torch.stack([packed.linear(one) for one in batches])
    assert torch.allclose(torch.func.vmap(packed.linear)(batches), each)
    assert all(map(is_observed, (x.clone().requires_grad_(), x.to("meta"), torch.nn.Parameter(x))))
    assert is_observed(x, packed.values, torch.ones(40).requires_grad_(), 40)
    assert not is_observed(x)
