"""Steps in place of attention, so that its scores and its probabilities have bounds of their own.

Scaled dot-product attention becomes products, a scale and a softmax. Masks of attention become the argument of one
operation, a softmax among the entries to keep, instead of scores of minus infinity (or of the least float).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import require
from .rewriting import Rewriting, operation
from .steps import Step, Value, Weight

HIDDEN = -1e30  # scores below this have a probability of zero in float64, beside any ordinary score


def masked_softmax(x: Tensor, dim: int, keep: Tensor) -> Tensor:
    """Return softmax over one dimension among the entries to keep; the others are zero."""
    return torch.softmax(torch.where(keep, x, -torch.inf), dim)


MASKED_SOFTMAX = operation("masked_softmax(Tensor x, int dim, Tensor keep) -> Tensor", masked_softmax)


def expand_product_attention(new: Rewriting, step: Step) -> bool:
    """Add the parts of scaled dot-product attention."""
    q, k, v = (new.move(arg) for arg in step.args[:3])
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, step.args[3:], strict=False)) | step.kwargs
    of_values = all(isinstance(x, Value) for x in (q, k, v)) and not isinstance(given.get("attn_mask"), Value)
    if not of_values or given.get("enable_gqa") or len({new.shape(x)[:-2] for x in (q, k, v)}) > 1:
        return False
    aten, name = torch.ops.aten, step.name
    (*lead, rows, width), columns = new.shape(q), new.shape(k)[-2]
    scale = 1 / math.sqrt(width) if given.get("scale") is None else given["scale"]
    axes = list(range(len(lead)))
    turned = new.add(
        f"{name}_keys", aten.permute.default, (k, [*axes, len(lead) + 1, len(lead)]), (*lead, width, columns)
    )
    scores = new.add(f"{name}_scores", aten.matmul.default, (q, turned), (*lead, rows, columns))
    scores = new.add(f"{name}_scaled", aten.mul.Scalar, (scores, scale), (*lead, rows, columns))
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = equal_weight("causal", torch.ones(rows, columns, dtype=torch.bool, device=new.device).tril())
    if mask is not None and mask.dense.dtype == torch.bool:
        add_softmax(new, step, scores, -1, mask.dense)
    else:
        add_shifted_softmax(new, step, scores, -1, mask)
    new.add(name, aten.matmul.default, (Value(len(new.steps) - 1), v), step.shape)
    return True


def expand_softmax(new: Rewriting, step: Step) -> bool:
    """Add a softmax with a mask in place of one whose input is a value plus a mask of hugely negative numbers."""
    source, axis = step.args[0], step.args[1]
    if not isinstance(source, Value):
        return False
    before = new.old[source.index]
    operands = before.args[:2]
    if before.op == "add" and not before.kwargs and {type(x) for x in operands} == {Value, Weight}:
        value, mask = operands if isinstance(operands[0], Value) else operands[::-1]
        hides = any(bool((side <= HIDDEN).any()) for side in (mask.dense, mask.pruned))
        if not hides or new.old[value.index].shape != before.shape:
            return False
        return add_shifted_softmax(new, step, new.move(value), axis, mask)
    if before.op == "where" and isinstance(before.args[0], Weight) and len(before.args) == 3:
        condition, one, other = before.args
        swapped = isinstance(other, Value)
        value, constant = (other, one) if swapped else (one, other)
        if not isinstance(value, Value) or new.old[value.index].shape != before.shape:
            return False
        if not hides_all(constant, step):
            return False
        return add_softmax(new, step, new.move(value), axis, condition.dense ^ swapped)
    return False


def hides_all(constant: Any, step: Step) -> bool:
    """Return whether a number or a weight hides every entry that it replaces; it must be the same in both networks."""
    if isinstance(constant, Weight):
        hidden = constant.dense <= HIDDEN
        same = torch.equal(hidden, constant.pruned <= HIDDEN)
        require(same, f"the two networks have different masks at '{step.name}'.")
        return bool(hidden.all())
    return isinstance(constant, (int, float)) and constant <= HIDDEN


def add_shifted_softmax(new: Rewriting, step: Step, scores: Value, axis: int, shift: Weight | None) -> bool:
    """Add a softmax of scores plus a constant, whose hugely negative entries hide theirs."""
    if shift is None:
        return add_softmax(new, step, scores, axis, None)
    keep = shift.dense > HIDDEN
    require(torch.equal(keep, shift.pruned > HIDDEN), f"the two networks have different masks at '{step.name}'.")
    finite = Weight(shift.name, shift.dense.where(keep, 0), shift.pruned.where(keep, 0))
    if bool(finite.dense.any()) or bool(finite.pruned.any()):
        scores = new.add(f"{step.name}_shifted", torch.ops.aten.add.Tensor, (scores, finite), new.shape(scores))
    return add_softmax(new, step, scores, axis, keep)


def add_softmax(new: Rewriting, step: Step, scores: Value, axis: int, keep: Tensor | None) -> bool:
    """Add a softmax among the entries to keep, or among all."""
    shape = new.shape(scores)
    if keep is None or bool(keep.all()):
        new.add(f"{step.name}_softmax", torch.ops.aten.softmax.int, (scores, axis), shape)
        return True
    keep = keep.broadcast_to(shape)
    require(bool(keep.any(axis).all()), f"a row of attention at '{step.name}' has no key that its mask keeps.")
    mask = equal_weight(f"{step.name}_mask", keep.contiguous())
    new.add(f"{step.name}_softmax", MASKED_SOFTMAX, (scores, axis, mask), shape)
    return True


def equal_weight(name: str, tensor: Tensor) -> Weight:
    """Return a constant that both networks share."""
    return Weight(name, tensor, tensor)
