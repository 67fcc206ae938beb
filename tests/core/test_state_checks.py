"""States that cannot be right: each is refused, and a refused load changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import TOTAL, make_hard, make_soft
from engine_helpers import Net, is_identical, make_sgd, train

import pomona as pm

Edit = Callable[[dict[str, Any]], None]
ENTRY = {"step": 1, "sparsity": 0.5, "delta": 0.1, "flips": 3, "iou": 0.9, "layers": [0.5]}  # of a history


def set_key(key: str, value: Any) -> Edit:
    return lambda state: state.__setitem__(key, value)


def edit_tensors(key: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Return an edit that changes the last tensor under a key, so that those before it could have been copied."""

    def edit(state: dict[str, Any]) -> None:
        name = list(state[key])[-1]
        state[key] = {**state[key], name: change(state[key][name].clone())}

    return edit


def put_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


def empty_masks(state: dict[str, Any]) -> None:
    state["masks"] = {name: torch.zeros_like(bits) for name, bits in state["masks"].items()}


DAMAGED: dict[str, tuple[Edit, str]] = {
    "NaN in a latent": (edit_tensors("latents", put_nan), "its latents of hidden.weight are not finite"),
    "infinite latent": (edit_tensors("latents", lambda t: t / 0), "not finite"),
    "integers as latent": (edit_tensors("latents", lambda t: t.long()), "not finite"),
    "no tensor": (edit_tensors("latents", lambda t: t.tolist()), "damaged"),
    "step below 0": (set_key("step", -7), "its step is -7"),
    "step far beyond the end": (set_key("step", 10**9), f"its step is 1000000000 of {TOTAL}"),
    "step as a fraction": (set_key("step", 8.5), r"its step is 8\.5"),
    "step as text": (set_key("step", "8"), "its step is 8"),
    "change after the step": (set_key("last_change", 9), "masks changed after step 8"),
    "sparsity above 1": (set_key("reached", 1.5), r"reached 1\.5"),
    "NaN sparsity": (set_key("reached", float("nan")), "reached nan"),
    "at rest": (set_key("at_rest", "no"), "at rest no"),
    "another length": (set_key("total", TOTAL + 1), f"total_steps={TOTAL + 1}, and the pruner was attached with"),
    "batch norms": (set_key("norms", {"norm": "many"}), "its batch norms have seen"),
    "no length": (set_key("total", 0), "total_steps=0"),
    "masks without a weight": (empty_masks, "its masks keep no weight"),
    "mask too short": (edit_tensors("masks", lambda t: t[:-1]), "the mask of hidden.weight is torch.uint8 of shape"),
    "mask as numbers": (edit_tensors("masks", lambda t: t.float()), "the mask of hidden.weight is torch.float32"),
    "no masks": (set_key("masks", []), "masks has no tensor for conv1.weight"),
    "history": (set_key("history", [ENTRY | {"step": 10**9}]), "its history has the entry"),
    "history without figures": (set_key("history", [{"step": 1}]), "its history is not that of this model"),
    "history as text": (set_key("history", "none"), "its history is not that of this model"),
    "memory": (set_key("memory", 3), "its memory is 3"),
    "method": (set_key("method", "dpf"), "its method is dpf"),
    "version": (set_key("version", []), "version"),
    "nested": (set_key("shapes", {"conv1.weight": None}), "damaged|missing"),
}


def trained_pruner(kind: Callable[..., pm.Pruner]) -> tuple[Net, torch.optim.Optimizer, pm.Pruner, dict[str, Any]]:
    """Return a pruner after sixteen steps, and its state after eight."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    train(model, optimizer, range(8))
    state = copy.deepcopy(pruner.state_dict())
    train(model, optimizer, range(8, 16))
    return model, optimizer, pruner, state


OF_LATENTS = {"NaN in a latent", "infinite latent", "integers as latent", "no tensor"}  # which hard methods lack
CASES = [
    (kind, case) for kind in (make_soft, make_hard) for case in DAMAGED if kind is make_soft or case not in OF_LATENTS
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_state_that_cannot_be_right_is_refused_and_changes_nothing(kind: Any, case: str) -> None:
    edit, message = DAMAGED[case]
    model, optimizer, pruner, state = trained_pruner(kind)
    edit(state)
    before = copy.deepcopy((model.state_dict(), pruner.state_dict()))
    with pytest.raises(pm.PomonaError, match=message):
        pruner.load_state_dict(state)
    assert is_identical((model.state_dict(), pruner.state_dict()), before)
    train(model, optimizer, range(16, 18))


def test_a_valid_state_is_still_loaded() -> None:
    _, _, pruner, state = trained_pruner(make_soft)
    pruner.load_state_dict(state)
    assert pruner.step == 8


def test_a_state_that_the_optimizer_refuses_leaves_the_masks() -> None:
    model, optimizer, pruner, _ = trained_pruner(make_soft)
    other = Net().double()
    both = torch.optim.SGD([{"params": list(other.parameters())}, {"params": [torch.zeros(1)]}], lr=0.1)
    stranger = make_soft().attach(other, both, total_steps=TOTAL)
    saved = both.state_dict()
    assert "pomona" in saved
    assert stranger.step != pruner.step
    before = copy.deepcopy((model.state_dict(), pruner.state_dict()))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(saved)
    assert is_identical((model.state_dict(), pruner.state_dict()), before)


def test_a_memory_without_its_numbers_is_refused() -> None:
    torch.manual_seed(0)
    model = Net().double()
    pruner = pm.DSR(sparsity=0.5, every=2).attach(model, make_sgd(model), total_steps=TOTAL)
    state = copy.deepcopy(pruner.state_dict())
    for memory in ({}, {"kept": 3}, {"kept": "many", "threshold": 0.1}, {"kept": 3, "threshold": float("nan")}):
        with pytest.raises(pm.PomonaError, match="its memory is"):
            pruner.load_state_dict({**state, "memory": memory})
