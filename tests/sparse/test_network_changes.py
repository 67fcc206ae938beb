"""Planned networks that are changed, differentiated, called by several threads, and called with many image shapes."""

from __future__ import annotations

import copy
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packing import prune_unstructured
from torch import Tensor, nn
from torch.autograd import forward_ad

from pomona import models
from pomona.sparse import compress
from pomona.sparse.cpu import backend
from pomona.sparse.network import copy_without_plan, is_planned, model_plans, plan_network
from pomona.sparse.network.forward import warn_about_new_plans
from pomona.sparse.network.plan import NetworkPlan
from pomona.sparse.network.snapshot import ModelSnapshot

pytestmark = pytest.mark.skipif(backend.load_library() is None, reason="needs the native library")
SHAPE = (3, 10, 10)


class Scaled(nn.Module):
    """A network whose forward reads attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 5)
        self.scale, self.options, self.returns_both = 1.0, {"shift": [0.0]}, False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.body(self.norm(self.conv(x))).flatten(1)
        y = self.head(features) * self.scale + self.options["shift"][0]
        return (y, features) if self.returns_both else y


def build(seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    return prune_unstructured(Scaled(), 0.7).eval()


def planned_copy(model: nn.Module) -> nn.Module:
    planned = copy.deepcopy(model)
    assert plan_network(planned, SHAPE)
    return planned


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, *SHAPE)), generator=torch.Generator().manual_seed(1))


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[NetworkPlan]:
    """Return a list to which every run of a plan is added."""
    runs: list[NetworkPlan] = []
    run = NetworkPlan.run

    def recorded(plan: NetworkPlan, x: Tensor) -> Tensor | None:
        runs.append(plan)
        return run(plan, x)

    monkeypatch.setattr(NetworkPlan, "run", recorded)
    return runs


def swap_tensor(model: Scaled) -> None:
    model.norm.weight.data = torch.full((8,), 3.0)


def load_by_assignment(model: Scaled) -> None:
    model.norm.load_state_dict({name: t + 1 for name, t in model.norm.state_dict().items()}, assign=True)


def write_in_inference_mode(model: Scaled) -> None:
    with torch.inference_mode():
        model.norm.running_mean = model.norm.running_mean + 1
        model.norm.running_mean.mul_(2)


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "head replaced": lambda model: setattr(model, "head", nn.Linear(8, 3).requires_grad_(False)),
    "head removed": lambda model: setattr(model, "head", nn.Identity()),
    "layer appended": lambda model: model.body.append(nn.ReLU()),
    "parameter replaced": lambda model: setattr(model.norm, "weight", nn.Parameter(torch.full((8,), 2.0))),
    "bias removed": lambda model: setattr(model.conv, "bias", None),
    "data in place": lambda model: model.norm.weight.data.mul_(3),
    "bias data in place": lambda model: model.conv.bias.data.add_(1),
    "data assigned": swap_tensor,
    "data transposed": lambda model: setattr(model.conv.weight, "data", model.conv.weight.data.transpose(2, 3)),
    "loaded by assignment": load_by_assignment,
    "vector": lambda model: nn.utils.vector_to_parameters(
        torch.full((sum(p.numel() for p in model.parameters()),), 0.1), model.parameters()
    ),
    "eps": lambda model: setattr(model.norm, "eps", 10.0),
    "stride": lambda model: setattr(model.conv, "stride", (2, 2)),
    "number": lambda model: setattr(model, "scale", 3.0),
    "item of a list in a dictionary": lambda model: model.options["shift"].__setitem__(0, 1.0),
    "flag": lambda model: setattr(model, "returns_both", True),
    "inference mode": write_in_inference_mode,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_model_gives_new_outputs(change: Callable[[Scaled], Any]) -> None:
    model, x = build(), images()
    planned = planned_copy(model)
    with torch.no_grad():
        assert torch.allclose(planned(x), model(x), atol=1e-5)
    for one in (model, planned):
        torch.manual_seed(5)
        change(one)
    with torch.no_grad():
        found, expected = planned(x), model(x)
    for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_no_trace_of_a_hook_is_left() -> None:
    model, x = build(), images()
    hooked, planned = copy.deepcopy(model), planned_copy(model)
    handles = [one.body.register_forward_hook(lambda *args: 2 * args[-1]) for one in (hooked, planned)]
    assert not plan_network(hooked, SHAPE)
    with torch.no_grad():
        planned.scale = model.scale = 2.0
        planned(x)
        handles[1].remove()
        assert torch.allclose(planned(x), model(x), atol=1e-5)


def test_dropout_in_training_mode_is_random() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(8, 4, 1)).eval(), images()
    planned = planned_copy(model)
    planned[2].train()
    with torch.no_grad():
        assert not torch.equal(planned(x), planned(x))
        planned[2].eval()
        assert torch.allclose(planned(x), model(x), atol=1e-5)


def test_a_functional_call_uses_its_parameters() -> None:
    model, x = build(), images()
    planned, values = planned_copy(model), {"norm.weight": torch.full((8,), 5.0)}
    with torch.no_grad():
        for tensors in ({}, values, {}):
            found, expected = (torch.func.functional_call(one, tensors, (x,)) for one in (planned, model))
            assert torch.allclose(found, expected, atol=1e-5)


def test_nothing_is_planned_again_where_nothing_has_changed() -> None:
    model, x = build(), images()
    planned = planned_copy(model)
    current = vars(planned)["forward"].current
    planned.train().eval()
    planned.scale = 1 / 1  # another object, but equal
    with torch.no_grad():
        planned(x)
    assert vars(planned)["forward"].current is current
    assert len(current.plans) == 1


@pytest.mark.parametrize(("name", "limit"), [("resnet20", 300), ("resnet50", 1200)])
def test_a_comparison_takes_microseconds(name: str, limit: int) -> None:
    snapshot = ModelSnapshot(models.build(name).eval())
    with torch.no_grad():
        assert snapshot.is_current()
        seconds = min(timeit.repeat(snapshot.is_current, timer=time.process_time, number=20, repeat=10)) / 20
    assert seconds < limit * 1e-6  # 50 and 200 where nothing else runs


class Remembering(nn.Sequential):
    """A network that keeps its last output, and counts its calls in several ways."""

    kind = "attribute"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.kind == "attribute":
            self.last = y
        elif self.kind == "number":
            self.calls += 1
        else:
            self.outputs.append(y)
        return y


@pytest.mark.parametrize("kind", ["attribute", "number", "list"])
def test_a_forward_that_stores_something_is_not_planned(kind: str) -> None:
    model = Remembering(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model.last, model.calls, model.outputs, model.kind = None, 0, [], kind
    assert not plan_network(model, SHAPE)
    assert not is_planned(model)
    assert (model.last, model.calls, model.outputs) == (None, 0, [])


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_gradients(grad: bool) -> None:
    model, x = build().requires_grad_(False), images()
    planned, tangent = planned_copy(model), torch.randn_like(x)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found, expected = (forward_ad.unpack_dual(one(dual)).tangent for one in (planned, model))
        assert torch.allclose(found, expected, atol=1e-6)
        values = {"norm.weight": forward_ad.make_dual(model.norm.weight.detach(), torch.ones(8))}
        found, expected = (
            forward_ad.unpack_dual(torch.func.functional_call(one, values, (x,))).tangent for one in (planned, model)
        )
        assert torch.allclose(found, expected, atol=1e-6)


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_a_plain_call_runs_as_planned_and_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(), images()
    planned, runs = planned_copy(model), count_runs(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = planned(x)
    assert len(runs) == 1
    assert torch.allclose(y, model(x), atol=1e-5)
    for found, expected in zip(gradients_of(planned, x), gradients_of(model, x), strict=True):
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert not planned.requires_grad_(False)(x).requires_grad


def test_second_gradients_of_a_plain_call() -> None:
    results, model = [], build()
    for one in (model, planned_copy(model)):
        weights = list(one.parameters())
        first = torch.autograd.grad(one(images()).square().sum(), weights, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_gradients_are_those_at_the_call() -> None:
    model, x = build(), images()
    planned = planned_copy(model)
    y, expected = planned(x), gradients_of(model, x)
    planned.train()
    old, planned.norm.weight = planned.norm.weight, nn.Parameter(torch.zeros(8))
    y.square().sum().backward()
    assert planned.norm.training
    assert planned.norm.num_batches_tracked == 0
    assert torch.allclose(old.grad, expected[2], rtol=1e-3, atol=1e-5)
    planned.eval()
    y = planned(x)
    with torch.no_grad():
        planned.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_threads_with_new_shapes_and_threads_with_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_plans, "MAX_PLANS", 100)
    other, call = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Module.__call__
    planned, errors, done = planned_copy(build()), [], threading.Event()

    def run_planned(start: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(20):
                    planned.scale = float(turn)  # traced anew
                    planned(images(1, 3, 8 + (turn + start) % 9, 12))
        except Exception as error:
            errors.append(error)

    def run_other() -> None:
        try:
            while not done.is_set():
                other(torch.ones(1, 8))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run_planned, args=(start,)) for start in range(3)]
    unrelated = threading.Thread(target=run_other)
    for thread in (unrelated, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    unrelated.join()
    assert not errors
    assert nn.Module.__call__ is call


def test_a_model_is_traced_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, runs = planned_copy(build()), count_runs(monkeypatch)
    monkeypatch.setattr(model_plans, "trace_network", lambda _: pytest.fail("traced again"))
    with torch.no_grad():
        for _ in range(2):
            for size in range(8, 16):
                planned(images(1, 3, size, size))
    assert len(runs) == 16
    assert len(set(runs)) == 8


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_the_plans_used_last_are_kept(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, runs = planned_copy(build()), count_runs(monkeypatch)
    plans = vars(planned)["forward"].current
    if bound == "number":
        monkeypatch.setattr(model_plans, "MAX_PLANS", 2)
    else:
        monkeypatch.setattr(model_plans, "MAX_BYTES", int(2.5 * plans.plans[SHAPE].steps.nbytes))
    with torch.no_grad():
        for width in (10, 11, 10, 12, 10):
            planned(images(1, 3, 10, width))
    assert set(plans.plans) == {(3, 10, 10), (3, 10, 12)}
    assert len(runs) == 5


def test_plans_that_are_not_worth_it_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_plans, "MAX_PLANS", 4)
    warn_about_new_plans.cache_clear()
    model = build()
    planned, runs = planned_copy(model), count_runs(monkeypatch)
    batches = [images(1, 3, 10, width) for width in range(10, 50)]
    with torch.no_grad():
        with pytest.warns(UserWarning, match="ever new shapes"):
            outputs = [planned(x) for x in batches]
        assert all(torch.allclose(y, model(x), atol=1e-5) for x, y in zip(batches, outputs, strict=True))
        assert 4 <= len(runs) <= 7
        for _ in range(40):  # one shape again and again is planned after a while
            planned(batches[-1])
    assert len(runs) > 12


@pytest.mark.parametrize("training", [True, False])
def test_a_compressed_model_is_in_the_mode_of_the_given_one(training: bool) -> None:
    model = prune_unstructured(models.build("resnet20"), 0.9).train(training)
    model.stem[1].eval()
    compressed = compress(model, images(1, 3, 32, 32), patience=0.1)
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name: module.training for name, module in compressed.named_modules()} == modes


def test_the_modules_of_a_planned_model_are_the_fastest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prune_unstructured(models.build("resnet20"), 0.9).eval(), images(1, 3, 32, 32)
    seconds = {"dense": 2.0, "all packed": 3.0, "compressed": 4.0, "one call": 1.0}
    monkeypatch.setattr(sys.modules["pomona.sparse.compress"], "time_models", lambda *_: (dict(seconds), {}))
    compressed = compress(model, x, patience=0.0)
    assert is_planned(compressed)
    assert compressed.compression.seconds["compressed"] == 1.0
    assert type(copy_without_plan(compressed).stem[0]) is nn.Conv2d
    with torch.no_grad():
        assert torch.allclose(compressed(x), model(x), atol=1e-4)
