"""Registration of operators with torch, and calls to them that skip torch's dispatcher where nothing observes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# Each as a name of its own: the attributes of torch's modules are looked up in large dictionaries, which takes as long
# as these functions, and with cold caches much longer.
from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import _profiler_enabled
from torch.compiler import is_compiling

LIBRARY = torch.library.Library("pomona", "DEF")


def is_traced(x: Tensor, *arguments: Any) -> bool:
    """Return whether operators are more than computed: by a compiler, tracer, mode or transform, or for autograd."""
    return (
        is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or (is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, *arguments)))
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
    )


def is_observed(x: Tensor, *arguments: Any) -> bool:
    """Return whether anything sees which operators are called: what traces them, or a profiler."""
    return is_traced(x, *arguments) or _profiler_enabled()


def register_operator(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define `torch.ops.pomona.<name>` by its schema; return a function that calls it.

    `compute` is its implementation on every device, `fake` the one that gives shapes alone; `gradients` and `save` are
    the two functions of `torch.library.register_autograd`, where the operator is differentiable. The function returned
    calls `compute` directly where nothing observes the operator: torch's dispatcher takes as long as a product.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pomona::{name}", fake, lib=LIBRARY)
    if gradients is not None:
        torch.library.register_autograd(f"pomona::{name}", gradients, setup_context=save, lib=LIBRARY)
    registered = getattr(torch.ops.pomona, name)

    @wraps(compute)
    def call(x: Tensor, *arguments: Any) -> Any:
        return registered(x, *arguments) if is_observed(x, *arguments) else compute(x, *arguments)

    return call
