"""The model is always plain: its invariants, for every registered method and several patterns."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from engine_helpers import (
    TARGETS,
    Net,
    compute_loss,
    count_global_hooks,
    count_hooks,
    is_identical,
    make_adam,
    make_sgd,
    obeys_masks,
    save_and_load,
    train,
)
from slow_cases import slow_unless
from torch import Tensor, nn

import pomona as pm
from pomona.masking import matrix_shape
from pomona.methods import METHODS, make_pruner
from pomona.patterns import Pattern

TOTAL = 40
PATTERNS = {
    "unstructured": pm.Unstructured(),
    "balanced": pm.Balanced(block=4),
    "nm": pm.NM(2, 4),
    "block": pm.Block((2, 2)),
    "kernel": pm.Kernel(),
    "filter": pm.Filter(norm=1),
}
# Lottery runs several trainings, each with a separate pruner.
ATTACHED = [name for name in METHODS if name != "lottery"]
every_method = pytest.mark.parametrize("name", ATTACHED)
# One of each kind of weights and of each time of update; `make test-all` runs the others.
FAST = ("dpf", "incremental", "iterand", "rigl", "sfp", "snip", "st3")
every_method_slowly = pytest.mark.parametrize("name", slow_unless(FAST, ATTACHED))
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
every_optimizer = pytest.mark.parametrize("make", [make_sgd, make_adam])


def frequent_pruner(name: str, pattern: Pattern = PATTERNS["unstructured"], **more: Any) -> pm.Pruner:
    """Return a pruner that updates its masks often; options that the method lacks are left out."""
    options = {
        "sparsity": 0.75 if pattern.sparsity is None else None,
        "pattern": pattern,
        "allocation": "uniform" if name == "dsr" else "global",  # dsr starts with some weights in every layer
        "every": 4,
        **more,
    }
    known = {f.name for f in fields(METHODS[name]) if f.init}
    return make_pruner({"name": name, **{k: v for k, v in options.items() if k in known}})


def make_model(name: str, seed: int = 0) -> Net:
    """Return a network in float64, with zeros for finetune and with a frozen norm for score methods."""
    model = Net(seed).double()
    model.norm.requires_grad_(METHODS[name].weights != "score")
    if name == "finetune":
        for target in TARGETS:
            model.get_parameter(target).data[::2] = 0
    return model


def attach_frequent(
    name: str, pattern: Pattern = PATTERNS["unstructured"], make: Any = make_sgd, **more: Any
) -> tuple[Net, Any, pm.Pruner]:
    """Return a network, its optimizer and an attached pruner that updates its masks often."""
    model = make_model(name)
    optimizer = make(model)
    return model, optimizer, frequent_pruner(name, pattern, **more).attach(model, optimizer, total_steps=TOTAL)


REGROWING = {"acdc", "dsr", "rigl", "set", "sparse_momentum", "srigl"}  # a weight that has just grown is zero
THRESHOLDING = {"feather", "st3"}  # a kept weight below its threshold is zero
WITHOUT_PATTERN = {"finetune", "srigl"}  # finetune keeps the zeros it finds; the structure of srigl has its own tests


# Pairs that are refused, with a part of the message.
REFUSED = {
    ("dsr", "nm"): "moves weights between layers",
    ("sparse_momentum", "nm"): "moves weights between layers",
    **{(name, "filter"): "a filter of zeros behind a ReLU never learns" for name in REGROWING - {"srigl"}},
    **{(name, p): "prunes groups of weights" for name in ("feather", "st3") for p in PATTERNS if p != "unstructured"},
}


def is_free(name: str) -> bool:
    """Return whether pruned weights may change between mask updates."""
    return METHODS[name].weights == "free"


def has_structure(pattern: Pattern, mask: Tensor) -> bool:
    """Return whether a mask has the structure of a pattern."""
    rows = mask.reshape(matrix_shape(mask.shape))
    if isinstance(pattern, (pm.NM, pm.Balanced)):
        return rows.reshape(-1, 4).sum(1).unique().numel() == 1
    if isinstance(pattern, pm.Block):
        tiles = rows.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).movedim(2, 1).flatten(2)
        return torch.equal(tiles.any(2), tiles.all(2))
    units = {pm.Kernel: 2, pm.Filter: 1}.get(type(pattern), mask.ndim)
    units = mask.reshape(*mask.shape[:units], -1)
    return torch.equal(units.any(-1), units.all(-1))


def count_tolerance(pattern: Pattern, masks: dict[str, Tensor]) -> float:
    """Return how far the number of pruned weights may be from the one asked for: half the largest unit."""
    if isinstance(pattern, pm.Unstructured):
        return 0.5
    if isinstance(pattern, (pm.NM, pm.Balanced)):
        return sum(m.numel() for m in masks.values()) / 8  # half a weight in each block of four
    return 0.5 + max({pm.Block: 4, pm.Kernel: 9}.get(type(pattern), m[0].numel()) for m in masks.values()) / 2


# ---- 1: at every forward the weights obey the mask, with the zeros asked for


@every_method
@every_pattern
def test_weights_obey_the_mask_at_every_forward(name: str, pattern: Pattern) -> None:
    if (name, pattern.name) in REFUSED:
        with pytest.raises(pm.PomonaError, match=REFUSED[name, pattern.name]):
            frequent_pruner(name, pattern)
        return
    model, optimizer, pruner = attach_frequent(name, pattern)
    masks = pruner.masks()
    size = sum(mask.numel() for mask in masks.values())

    def check_masks(*_: Any) -> None:
        if not is_free(name):
            assert obeys_masks(model, pruner, grown=name in REGROWING | THRESHOLDING)
        assert name in WITHOUT_PATTERN or all(has_structure(pattern, mask) for mask in masks.values())
        asked = pruner.history[-1]["sparsity"] if pruner.history else 0.0
        pruned = sum(int((~mask).sum()) for mask in masks.values())
        limit = count_tolerance(pattern, masks) if name != "srigl" else sum(len(mask) for mask in masks.values())
        assert name == "finetune" or abs(pruned - asked * size) <= limit  # srigl: one weight for each neuron
        assert pruner.sparsity() == pytest.approx(pruned / size)

    handle = model.register_forward_pre_hook(check_masks)
    train(model, optimizer, range(TOTAL))
    handle.remove()
    pruner.finish()
    check_masks()
    assert obeys_masks(model, pruner, grown=name in REGROWING | THRESHOLDING)
    assert pruner.history[-1]["sparsity"] == pruner.method.final_sparsity


@pytest.mark.parametrize("name", ["dpf", "incremental", "oneshot", "random"])
@pytest.mark.parametrize("allocation", ["uniform", "erk"])
def test_each_layer_has_the_sparsity_of_its_allocation(name: str, allocation: str) -> None:
    model, optimizer, pruner = attach_frequent(name, allocation=allocation)
    train(model, optimizer, range(TOTAL))
    pruner.finish()
    shares = dict.fromkeys(TARGETS, 0.75)
    if allocation == "erk":  # density = ε · Σ dims / Π dims, nothing capped here
        sizes = {k: m.numel() for k, m in pruner.masks().items()}
        raw = {k: sum(m.shape) / m.numel() for k, m in pruner.masks().items()}
        epsilon = 0.25 * sum(sizes.values()) / sum(raw[k] * sizes[k] for k in sizes)
        shares = {k: 1 - epsilon * raw[k] for k in sizes}
        assert min(shares.values()) > 0
    assert pruner.method.allocation == allocation
    for key, mask in pruner.masks().items():
        assert int((~mask).sum()) == round(shares[key] * mask.numel())


# ---- 2: the state loads into a plain model


@every_method
def test_state_dict_loads_strictly_into_a_plain_model_at_every_step(name: str) -> None:
    keys = list(Net().state_dict())
    model, optimizer, pruner = attach_frequent(name)

    def check_state(*_: Any) -> None:
        assert list(model.state_dict()) == keys
        assert set(map(type, model.modules())) == set(map(type, Net().modules()))
        Net().double().load_state_dict(model.state_dict(), strict=True)

    check_state()
    model.register_forward_pre_hook(check_state)
    train(model, optimizer, range(TOTAL))
    pruner.finish()
    check_state()


# ---- 3: a run that is stopped and resumed is bit-identical to one that is not


def collect_state(model: Net, optimizer: Any, pruner: pm.Pruner) -> dict[str, Any]:
    """Return the states of the model and the optimizer, and the masks."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "masks": pruner.masks()}


RESUME_CASES = [
    (make_sgd, order, way, 17)
    for order in ("model first", "model last", "model before attach")
    for way in ("pruner", "optimizer")
]
MORE_RESUME_CASES = [
    *((make, "all before attach", "optimizer", stop) for make in (make_sgd, make_adam) for stop in (1, 17, 37)),
    (make_adam, "model first", "optimizer", 18),
    (make_sgd, "model last", "optimizer", 0),
    (make_adam, "model first", "optimizer", 37),
]


@every_method_slowly
@pytest.mark.parametrize(("make", "order", "way", "stop"), RESUME_CASES + MORE_RESUME_CASES)
def test_a_resumed_run_is_bit_identical_for_every_method(name: str, make: Any, order: str, way: str, stop: int) -> None:
    model, optimizer, pruner = attach_frequent(name, make=make)
    train(model, optimizer, range(stop))
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if way == "pruner":
        del file["optimizer"]["pomona"]
        file["pruner"] = pruner.state_dict()
    file = save_and_load(file)
    train(model, optimizer, range(stop, TOTAL))
    pruner.finish()

    other, resumed = make_model(name, seed=7), frequent_pruner(name)
    if "before attach" in order:
        other.load_state_dict(file["model"])
    other_optimizer = make(other)
    if order == "all before attach":
        other_optimizer.load_state_dict(file["optimizer"])
    resumed.attach(other, other_optimizer, total_steps=TOTAL)
    if order == "model first":
        other.load_state_dict(file["model"])
    if order != "all before attach":
        other_optimizer.load_state_dict(file["optimizer"])
    if way == "pruner":
        resumed.load_state_dict(file["pruner"])
    if order == "model last":
        other.load_state_dict(file["model"])
    assert resumed.step == stop
    train(other, other_optimizer, range(stop, TOTAL))
    resumed.finish()

    assert is_identical(collect_state(other, other_optimizer, resumed), collect_state(model, optimizer, pruner))
    assert resumed.history == pruner.history


# ---- 4: copies


@every_method
def test_a_copied_model_is_plain(name: str) -> None:
    model, optimizer, pruner = attach_frequent(name)
    train(model, optimizer, range(28))  # acdc is compressed there
    compute_loss(model, 0).backward()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_identical(copied.state_dict(), model.state_dict())
        assert count_hooks(copied, make_sgd(copied)) == count_hooks(Net().double(), make_sgd(Net().double()))
        train(copied, make_sgd(copied, lr=0.5), range(3))  # nothing holds its zeros
        assert copied.conv2.weight[~pruner.masks()["conv2.weight"]].any()


@every_method_slowly
@every_optimizer
@pytest.mark.parametrize("stop", [0, 18])
def test_model_optimizer_and_pruner_copied_together_train_alike(name: str, make: Any, stop: int) -> None:
    one = attach_frequent(name, make=make)
    train(*one[:2], range(stop))
    model, optimizer, pruner = copy.deepcopy(one)
    assert is_identical(collect_state(model, optimizer, pruner), collect_state(*one))
    before = copy.deepcopy(one[0].state_dict())

    train(model, optimizer, range(stop, TOTAL))
    assert is_identical(one[0].state_dict(), before), "the copy trained the original"
    train(*one[:2], range(stop, TOTAL))
    one[2].finish()
    pruner.finish()
    assert is_identical(collect_state(model, optimizer, pruner), collect_state(*one))
    assert pruner.history == one[2].history


# ---- finish


@every_method_slowly
def test_finish_leaves_exact_zeros_and_no_hooks(name: str) -> None:
    model = make_model(name)
    optimizer = make_sgd(model)
    before, on_all = count_hooks(model, optimizer), count_global_hooks()
    pruner = frequent_pruner(name).attach(model, optimizer, total_steps=TOTAL)
    assert count_hooks(model, optimizer) != before
    train(model, optimizer, range(TOTAL))
    pruner.finish()
    assert obeys_masks(model, pruner, grown=name in REGROWING | THRESHOLDING)
    assert (count_hooks(model, optimizer), count_global_hooks()) == (before, on_all)
    assert "pomona" not in optimizer.state_dict()
    size = sum(mask.numel() for mask in pruner.masks().values())
    asked = 1344 // 2 if name == "finetune" else round(0.75 * size)  # finetune: half of the targets
    rounding = (
        sum(len(mask) for mask in pruner.masks().values()) / 2 if name == "srigl" else 0
    )  # half a weight for each neuron
    assert abs(sum(int((~mask).sum()) for mask in pruner.masks().values()) - asked) <= rounding


# ---- memory


def count_live_bytes() -> int:
    """Return the bytes in the storages of all live tensors."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@every_method_slowly
def test_memory_is_one_byte_a_weight_and_one_dense_copy_for_soft_methods(name: str) -> None:
    """Score methods hold scores, weights, the mask of the last history entry and, for IteRand, draw numbers."""
    more = {"hard": 0, "free": 0, "soft": 8, "score": 17}[METHODS[name].weights]
    draw_numbers = 4 if name == "iterand" else 0
    model = make_model(name)
    optimizer = make_sgd(model)
    train(model, optimizer, range(1))
    before = count_live_bytes()
    pruner = frequent_pruner(name).attach(model, optimizer, total_steps=TOTAL)
    train(model, optimizer, range(TOTAL))
    size = sum(mask.numel() for mask in pruner.masks().values())
    assert pruner.history  # reading it fetches what is still on the device
    assert all(mask.dtype == torch.bool for mask in pruner.masks().values())
    thresholds = sum(slot.calibration.nbytes for slot in pruner.slots if slot.calibration is not None)
    assert 0 <= count_live_bytes() - before - size * (1 + more + draw_numbers) - thresholds < 100  # a few scalars
    bits = {k: (v.dtype, v.numel()) for k, v in pruner.state_dict()["masks"].items()}
    assert bits == {k: (torch.uint8, -(-m.numel() // 8)) for k, m in pruner.masks().items()}
    pruner.finish()
    assert count_live_bytes() - before < size * (1 + draw_numbers) + thresholds + 100, (
        "finish did not free the dense copy"
    )
