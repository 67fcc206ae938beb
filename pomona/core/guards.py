"""Guards: what can go wrong between a user's training loop and the engine, each in one short function."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import PomonaError, require
from ..masking import apply_mask
from ..sharding import local_part, whole_reads

if TYPE_CHECKING:
    from .engine import Engine
    from .slot import Slot

NONFINITE = "NaN or inf"  # the warning about them, among the layers that others have named


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside the wrappers of accelerate and Opacus, whose step moves the weights."""
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
    """Refuse optimizers that read or write the weights at other times than their step."""
    name = type(optimizer).__name__
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise PomonaError(
            f"{name} keeps the momentum of each parameter on one rank, where the others' masks cannot reach it: use "
            "torch.distributed.fsdp.fully_shard, which shards weights, masks and momentum alike, or a plain optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise PomonaError(
            f"{name} calls its closure several times a step, on weights that are not sparse: use SGD or Adam."
        )
    if weights != "hard" and callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise PomonaError(
            f"{name} swaps the weights itself in train() and eval(), which a '{weights}' method does too: "
            "use a hard method (incremental, oneshot), or another optimizer."
        )


def refuse_flat_shards(model: nn.Module) -> None:
    """Refuse FSDP1, which trains flat buffers in which no layer has a weight of its own."""
    for path, module in model.named_modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            raise PomonaError(
                f"{path or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which flattens the weights of "
                "layers into one: use torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel."
            )


def refuse_several(optimizers: Sequence[Optimizer], name: str) -> None:
    """Refuse several optimizers for a method whose update replaces a step and needs all gradients at once."""
    if len(optimizers) > 1:
        raise PomonaError(
            f"{name} reads the gradient before the step and takes one optimizer, got {len(optimizers)}: use one."
        )


def read_momentum(optimizers: Iterable[Optimizer], parameter: Tensor) -> Tensor | None:
    """Return the optimizer's running mean of a gradient (Adam: over the root of its second moment), or None."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("momentum_buffer"), Tensor):
            return state["momentum_buffer"]
        if isinstance(state.get("exp_avg"), Tensor):
            return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) if "exp_avg_sq" in state else state["exp_avg"]
    return None


def refuse_without_momentum(optimizers: Iterable[Optimizer], name: str) -> None:
    """Refuse optimizers without momentum for a method that reads it."""
    for optimizer in optimizers:
        if any(group.get("momentum") == 0 for group in optimizer.param_groups):
            raise PomonaError(f"{name} reads the optimizer's momentum, which is 0 here: use SGD(momentum=0.9) or Adam.")


def refuse_frozen(slots: Iterable[Slot], name: str) -> None:
    """Refuse frozen targets for a method that reads gradients."""
    for slot in slots:
        if not slot.parameter.requires_grad:
            raise PomonaError(
                f"{slot.name} is frozen and {name} needs its gradient: call requires_grad_(True) on it, or use "
                f"exclude=['{slot.name}']."
            )


def warn_frozen(slots: Iterable[Slot]) -> None:
    """Warn of frozen targets, which are pruned only where the user includes them."""
    frozen = [slot.name for slot in slots if not slot.parameter.requires_grad]
    if frozen:
        warnings.warn(
            f"{', '.join(frozen)}: pruned as included, but frozen, so that training cannot make up for what is pruned.",
            stacklevel=5,
        )


def refuse_trained_norms(model: nn.Module, slots: Iterable[Slot], name: str) -> None:
    """Refuse norms with a trained gain and shift, and vectors, for a score method, which trains no weight."""
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
    """Refuse a step after the user wrote to random weights, which are always drawn."""
    raise PomonaError(
        f"{name} was changed between two steps, but a score method draws its weights and cannot use others: "
        "pruner.refresh() restores the drawn ones, pruner.load_state_dict(…) continues a saved run."
    )


def refuse_values(slots: Iterable[Slot]) -> None:
    """Refuse weights that cannot be ranked."""
    for slot in slots:
        with whole_reads(slot.is_sharded):
            refuse_unranked(slot.name, slot.parameter)


def refuse_unranked(name: str, parameter: Tensor) -> None:
    """Refuse a weight that cannot be ranked: complex or sparse, without values, or with NaN or infinite ones."""
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        raise PomonaError(f"{name} is {parameter.dtype}, {parameter.layout}: only dense real weights are pruned.")
    reload = "reload the weights before pruning them."
    require(not parameter.is_meta, f"{name} is on the meta device, where it has no values: {reload}")
    require(bool(torch.isfinite(parameter.detach()).all()), f"{name} holds NaN or inf: {reload}")


def require_owned(slots: Iterable[Slot], optimizers: Sequence[Optimizer]) -> None:
    """Require that every trained target is the parameter that the model holds and an attached optimizer moves."""
    moved = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    for slot in slots:
        if slot.target.parameter.requires_grad and id(slot.target.parameter) not in moved:
            raise PomonaError(
                f"{slot.name} is in no attached optimizer. If it was replaced after the optimizer was made "
                "(load_state_dict(assign=True), fully_shard, a rebuilt optimizer), attach again after that; "
                f"if it is not meant to be trained, freeze it or use exclude=['{slot.name}']."
            )


def attached_engines(optimizer: Optimizer) -> list[Engine]:
    """Return the engines that are attached to an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return [hook.engine for hook in hooks if hasattr(hook, "engine")]


def refuse_overlap(slots: Iterable[Slot], optimizers: Iterable[Optimizer]) -> None:
    """Refuse a parameter that another pruner prunes; two pruners may share an optimizer."""
    held = {
        id(slot.parameter)
        for optimizer in optimizers
        for engine in attached_engines(optimizer)
        for slot in engine.slots
    }
    for slot in slots:
        if id(slot.parameter) in held:
            raise PomonaError(f"{slot.name} is pruned by another pruner already: finish() that pruner first.")


def refuse_foreign(optimizer: Optimizer, slots: Iterable[Slot]) -> None:
    """Refuse a step that moves weights which a pruner holds and this optimizer knows nothing of."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for slot in slots:
        if id(slot.target.parameter) in moved:
            raise PomonaError(
                f"{slot.name} is held by a pruner that is attached to another optimizer: finish() the pruner first, "
                "or attach a new one to this optimizer."
            )


def refuse_foreign_steps(engine: Engine) -> Any:
    """Register a hook on all optimizers that refuses the step of one that is not attached and moves pruned weights."""
    engine_ref = weakref.ref(engine)

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        attached = engine_ref()
        if attached is None or unwrap_optimizer(optimizer) in attached.optimizers:
            return
        # An attached optimizer may step another one inside its own step.
        if attached.step_frame is None or not is_running(attached.step_frame):
            refuse_foreign(optimizer, attached.slots)

    handle = register_optimizer_step_pre_hook(torch.compiler.disable(refuse))
    weakref.finalize(engine, handle.remove)  # where a pruner is dropped without finish()
    return handle


def find_step_frame(optimizer: Optimizer) -> FrameType | None:
    """Return the stack frame of the innermost running `optimizer.step`, from within one of its hooks."""
    code: CodeType | None = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def initializes_state(optimizer: Optimizer) -> bool:
    """Return whether torch.distributed.checkpoint makes a step of length zero, so that the optimizer has a state."""
    possible = not optimizer.state and "torch.distributed.checkpoint.state_dict" in sys.modules
    frame = sys._getframe(1) if possible else None
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def is_running(frame: FrameType) -> bool:
    """Return whether a frame is among the callers; if not, its step has ended or raised."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def moves_only_parameters(optimizer: Optimizer) -> bool:
    """Return whether a step works on the tensors that its parameters hold then, and on no alias of their memory.

    Torch's own optimizers do, if no two parameters share memory. Others may keep views of flat buffers.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    addresses = [local_part(p).data_ptr() for group in optimizer.param_groups for p in group["params"]]
    found = set(addresses)
    found.discard(0)
    return len(found) == len(addresses) - addresses.count(0)


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Return whether GradScaler ran a fused optimizer although the gradients overflowed, which is no step."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def is_capturing(mask: Tensor) -> bool:
    """Return whether a CUDA graph is being captured: the step is captured, not taken."""
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_edited(name: str) -> None:
    """Warn that the user changed a weight between two steps."""
    warnings.warn(
        f"{name} was changed between two steps: training continues from its new values. "
        "After loading weights on purpose, call pruner.refresh().",
        stacklevel=2,
    )


def warn_nonfinite(slots: Iterable[Slot], step: int, reported: set[str]) -> None:
    """Warn once of weights that are NaN or infinite at a mask update, where any are: a norm may overflow without."""
    bad = next((slot.name for slot in slots if not bool(torch.isfinite(slot.moved).all())), None)
    if bad is not None and NONFINITE not in reported:
        reported.add(NONFINITE)
        warnings.warn(
            f"{bad} holds NaN or inf at step {step}, which rank above all other weights and are kept: go back to a "
            "checkpoint, and lower the learning rate, clip gradients, or leave out steps whose gradient is not finite.",
            stacklevel=2,
        )


def warn_pruned_before(share: float, name: str) -> None:
    """Warn that a new run begins with the weights of a pruned model."""
    warnings.warn(
        f"{share:.0%} of the weights were zero at attach, as in a pruned model, and no pruner's state was loaded with "
        f"them, so {name} begins at step 0 and chooses its masks anew: load the optimizer's state to continue a run, "
        "use attach(…, resume=False) to begin one on purpose, or pm.Finetune() to keep these zeros.",
        stacklevel=2,
    )


def clear_optimizer_state(optimizers: Iterable[Optimizer], parameter: Tensor, mask: Tensor) -> None:
    """Zero the momentum and Adam moments of a parameter off its mask."""
    for optimizer in optimizers:
        for value in optimizer.state.get(parameter, {}).values():
            part = local_part(value)
            if isinstance(part, Tensor) and part.shape == mask.shape and part.is_floating_point():
                apply_mask(part, mask, part)
