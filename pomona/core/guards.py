"""What can go wrong between a user's loop and the engine, each in one short function."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..errors import PomonaError
from ..masking import apply_mask

if TYPE_CHECKING:
    from .engine import Engine, Slot


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """The torch optimizer inside accelerate's and Opacus' wrappers: its step is the one that moves weights."""
    while True:
        names = ("original_optimizer", "optimizer", "base_optimizer")
        inner = next((i for i in (getattr(optimizer, name, None) for name in names) if isinstance(i, Optimizer)), None)
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise PomonaError(f"attach needs a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    return optimizer


def refuse_optimizer(optimizer: Optimizer, weights: str) -> None:
    """Optimizers that look at the weights at other times than their step cannot be joined."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise PomonaError(
            f"{name} calls its closure several times a step, on weights that are not sparse: use SGD or Adam."
        )
    if weights != "hard" and callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise PomonaError(
            f"{name} swaps the weights itself in train() and eval(), which a '{weights}' method does too: "
            "use a hard method (incremental, oneshot), or another optimizer."
        )


def refuse_several(optimizers: Sequence[Optimizer], name: str) -> None:
    """An update that replaces a step needs all gradients at once."""
    if len(optimizers) > 1:
        raise PomonaError(
            f"{name} looks at the gradient before the step and takes one optimizer, got {len(optimizers)}."
        )


def momentum(optimizers: Iterable[Optimizer], parameter: Tensor) -> Tensor | None:
    """The running mean of the gradient that an optimizer holds; Adam's over the root of its running square."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("momentum_buffer"), Tensor):
            return state["momentum_buffer"]
        if isinstance(state.get("exp_avg"), Tensor):
            return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) if "exp_avg_sq" in state else state["exp_avg"]
    return None


def refuse_without_momentum(optimizers: Iterable[Optimizer], name: str) -> None:
    """A method that reads momentum needs an optimizer that has some."""
    for optimizer in optimizers:
        if any(group.get("momentum") == 0 for group in optimizer.param_groups):
            raise PomonaError(f"{name} reads the optimizer's momentum, and here it is 0: SGD(momentum=0.9), or Adam.")


def refuse_frozen(slots: Iterable[Slot], name: str) -> None:
    """A method that reads gradients needs them for every target."""
    for slot in slots:
        if not slot.parameter.requires_grad:
            raise PomonaError(f"{slot.name} is frozen and {name} needs its gradient: use exclude=['{slot.name}'].")


def refuse_trained(model: nn.Module, slots: Iterable[Slot], name: str) -> None:
    """A score method trains no weight: a norm may have no gain and shift that would be, a bias no score."""
    for path, module in model.named_modules():
        if "Norm" in type(module).__name__ and any(p.requires_grad for p in module.parameters(recurse=False)):
            raise PomonaError(
                f"{path or 'the model'} is a {type(module).__name__} with a gain and a shift to train, and {name} "
                "trains no weight: build the model with affine=False, or freeze them with requires_grad_(False)."
            )
    for slot in slots:
        if slot.parameter.ndim < 2:
            raise PomonaError(
                f"{slot.name} is a vector, which {name} cannot draw: leave it out of include, and it stays as it is."
            )


def refuse_edited(name: str) -> None:
    """Random weights are drawn, and what a user writes cannot be one of them."""
    raise PomonaError(
        f"{name} was changed between two steps, but a score method draws its weights and has no place for others: "
        "pruner.refresh() brings the drawn ones back, pruner.load_state_dict(…) goes on from a saved run."
    )


def refuse_values(slots: Iterable[Slot]) -> None:
    """Weights that are NaN or infinite have no magnitude to rank; complex and sparse ones have no order."""
    for slot in slots:
        parameter = slot.parameter
        if not parameter.is_floating_point() or parameter.layout != torch.strided:
            raise PomonaError(
                f"{slot.name} is {parameter.dtype}, {parameter.layout}: only dense real weights are pruned."
            )
        if type(parameter.data).__name__ == "DTensor":
            raise PomonaError(f"{slot.name} is sharded (FSDP2, tensor parallel), which is not supported yet: use DDP.")
        if not bool(torch.isfinite(parameter).all()):
            raise PomonaError(f"{slot.name} holds NaN or inf: mend or reload the weights before pruning them.")


def require_owned(slots: Iterable[Slot], optimizers: Sequence[Optimizer]) -> None:
    """Every pruned parameter that is trained must be the one the model holds and an attached optimizer moves."""
    moved = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    for slot in slots:
        if slot.target.parameter.requires_grad and id(slot.target.parameter) not in moved:
            raise PomonaError(
                f"{slot.name} is in no attached optimizer. If it was replaced after the optimizer was made "
                "(load_state_dict(assign=True), fully_shard, a rebuilt optimizer), attach again after that; "
                f"if it is not to be trained, freeze it or use exclude=['{slot.name}']."
            )


def engines(optimizer: Optimizer) -> list[Engine]:
    """The engines that are joined to an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return [hook.engine for hook in hooks if hasattr(hook, "engine")]


def refuse_overlap(slots: Iterable[Slot], optimizers: Iterable[Optimizer]) -> None:
    """Two pruners may share an optimizer, not a parameter."""
    held = {id(slot.parameter) for optimizer in optimizers for engine in engines(optimizer) for slot in engine.slots}
    for slot in slots:
        if id(slot.parameter) in held:
            raise PomonaError(f"{slot.name} is pruned by another pruner already: finish() that one first.")


def refuse_foreign(optimizer: Optimizer, slots: Iterable[Slot]) -> None:
    """Refuse a step that moves weights which a pruner holds and this optimizer knows nothing of."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for slot in slots:
        if id(slot.target.parameter) in moved:
            raise PomonaError(
                f"{slot.name} is held by a pruner that is attached to another optimizer: finish() the pruner first, "
                "or attach a new one to this optimizer."
            )


def step_frame(optimizer: Optimizer) -> FrameType | None:
    """The stack frame of the innermost running `optimizer.step`, from within one of its hooks."""
    code: CodeType | None = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def still_running(frame: FrameType) -> bool:
    """Whether that frame is among our callers; if not, its step has ended, or died."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def skipped(optimizer: Optimizer) -> bool:
    """Whether GradScaler let a fused optimizer run although the gradients overflowed: that is no step."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def capturing(mask: Tensor) -> bool:
    """Whether a CUDA graph is being captured: the step is recorded, not taken."""
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


def edited(slot: Slot) -> bool:
    """Whether the user changed a weight since the last projection (loaded a checkpoint, set a value)."""
    if slot.parameter._version == slot.version or slot.method.weights == "free":
        return False
    return not torch.equal(slot.sparse(), slot.parameter)


def warn_edited(name: str) -> None:
    warnings.warn(
        f"{name} was changed between two steps: training goes on from its new values. "
        "After loading weights on purpose, call pruner.refresh().",
        stacklevel=2,
    )


def clear_state(optimizers: Iterable[Optimizer], parameter: Tensor, mask: Tensor) -> None:
    """No trace of pruned weights in momentum or Adam moments: zero what an optimizer holds off the mask."""
    for optimizer in optimizers:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == mask.shape and value.is_floating_point():
                apply_mask(value, mask, value)
