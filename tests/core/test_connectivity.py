"""Layers that keep too little, and layers that nothing of the input passes: warnings, and the exchange of weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_cases import slow_after
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.connectivity import find_blocked_layers, follow_layer
from pomona.methods import make_pruner


class Chain(nn.Module):
    """Two convolutions, one of them in a residual branch, and two linear layers behind a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.hidden = nn.Linear(4 * 4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.max_pool2d(x + self.branch(x), 2)
        return self.head(torch.sigmoid(self.hidden(x.view(x.size(0), -1))))


def blocked(model: nn.Module, **removed: Tensor) -> list[str]:
    """Return the layers that nothing passes when the marked weights of some layers are removed."""
    parameters = dict(model.named_parameters())
    return find_blocked_layers(model, {parameters[f"{name}.weight"]: ~mask for name, mask in removed.items()})


def mark(shape: tuple[int, ...], *places: tuple[object, ...]) -> Tensor:
    """Return a mask that is true at the given places."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return mask


def test_blocked_layers_by_hand() -> None:
    model, everything = Chain(), slice(None)
    assert blocked(model) == []
    # The stem keeps filter 2 only, and the branch reads filters 0, 1 and 3: the shortcut still passes filter 2 on.
    stem = mark((4, 1, 3, 3), (0,), (1,), (3,))
    branch = mark((4, 4, 3, 3), (everything, 2))
    assert blocked(model, stem=stem) == []
    assert blocked(model, stem=stem, branch=branch) == ["branch.weight"]
    # Channel 2 of the stream is pixels 8 to 11 of the flattened image.
    columns = mark((6, 16), (everything, slice(8, 12)))
    assert blocked(model, stem=stem, branch=branch, hidden=columns) == ["branch.weight", "hidden.weight"]
    assert blocked(model, hidden=columns) == []
    assert blocked(model, stem=mark((4, 1, 3, 3), (everything,))) == ["stem.weight"], "only the cause is named"
    assert blocked(model, hidden=mark((6, 16), (slice(0, 5),)), head=mark((3, 6), (everything, 5))) == ["head.weight"]


def test_groups_and_transposed_convolutions_by_hand() -> None:
    depthwise = nn.Conv2d(3, 3, 1, groups=3)
    kept = mark((3, 1, 1, 1), (0,), (2,))
    assert follow_layer(depthwise, torch.tensor([True, True, False]), kept).tolist() == [True, False, False]
    transposed = nn.ConvTranspose2d(2, 3, 1)  # (in, out, …)
    kept = mark((3, 2, 1, 1), (1, 0), (2, 1))  # with outputs in front
    assert follow_layer(transposed, torch.tensor([True, False]), kept).tolist() == [False, True, False]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.5, 0.99))
def test_a_network_without_blocked_layers_depends_on_its_input(seed: int, sparsity: float) -> None:
    """Positive weights cancel nothing, so that the gradient of the input tells whether the network is connected."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 2)
    )
    masks = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
            if parameter.ndim > 1:
                masks[parameter] = torch.rand_like(parameter) > sparsity
                parameter.mul_(masks[parameter])
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    model(x).sum().backward()
    assert bool(x.grad.any()) == (not find_blocked_layers(model, masks))


@pytest.mark.parametrize("forward", ["traced", "not traced"])
def test_a_layer_without_weights_is_named(forward: str) -> None:
    model = Chain()
    if forward == "not traced":
        plain = model.forward
        model.forward = lambda x: plain(x) if bool(x.sum() < 1e9) else x  # type: ignore[method-assign]
    with torch.no_grad():
        model.branch.weight.mul_(1e-6)
    pruner = pm.OneShot(sparsity=0.6, allocation="global(floor=0)", exclude=["head"])
    with pytest.warns(UserWarning, match=r"passes branch\.weight, which has no weight left\. Lower .*'branch\.weight'"):
        pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.finish()  # a layer is named once


def wide_network() -> nn.Sequential:
    """Return a network whose last hidden layer has much smaller weights than the first."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 4)
    )


def test_a_layer_far_below_the_others_is_named_with_its_numbers() -> None:
    model = wide_network()
    with torch.no_grad():
        model[4].weight.mul_(0.1)
    pruner = pm.OneShot(sparsity=0.95)
    message = r"4\.weight keeps 256 of 131,072 weights \(0\.20%\), where all layers together keep 5\.00%"
    with pytest.warns(UserWarning, match=message):
        pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("allocation", ["global", "uniform", "erk"])
def test_no_layer_is_named_where_an_allocation_explains_its_density(allocation: str) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
    with torch.no_grad():
        for layer in model:
            layer.weight.normal_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.OneShot(sparsity=0.99, allocation=allocation).attach(
            model, torch.optim.SGD(model.parameters(), 0.1)
        ).finish()


@pytest.mark.parametrize("make", [pm.OneShot, pm.DPF, pm.RigL, pm.EdgePopup])
def test_a_sparsity_without_room_is_refused_and_changes_nothing(make: Callable[..., pm.Pruner]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    message = (
        r"a sparsity of 0\.995 keeps 1 weights, and one unit of Unstructured\(\) .* is [34]: ask .* at most 0\.9[78]"
    )
    with pytest.raises(pm.PomonaError, match=message):
        make(sparsity=0.995).attach(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=10)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


# ---- weights that read nothing are exchanged


def test_a_blocked_layer_exchanges_its_weights_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[9.0, 8.0], [0.1, 0.2], [0.1, 0.2]]))
        model[2].weight.copy_(torch.tensor([[0.3, 0.1, 9.0], [0.4, 8.0, 0.2]]))
    pruner = pm.OneShot(sparsity=2 / 3, allocation="uniform").attach(model, torch.optim.SGD(model.parameters(), 0.1))
    assert pruner.masks()["0.weight"].tolist() == [[True, True], [False, False], [False, False]]
    # By magnitude the second layer would keep 9 and 8, which read the outputs that the first one lost.
    assert pruner.masks()["2.weight"].tolist() == [[True, False, False], [True, False, False]]


@pytest.mark.parametrize("pattern", ["unstructured", "kernel", "block(shape=(2, 2))"])
@pytest.mark.parametrize("method", slow_after(2, ["oneshot", "acdc", "random", "sparse_momentum", "sfp", "set"]))
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999))
def test_hard_methods_leave_a_path(method: str, pattern: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 2, padding=1), nn.ReLU())))
    model.append(nn.Flatten()).append(nn.LazyLinear(4))
    x = torch.randn(4, 8, 4, 4)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    pruner = make_pruner({"name": method, "sparsity": 0.95, "pattern": pattern, "allocation": "uniform"})
    pruner.attach(model, optimizer, total_steps=8, steps_per_epoch=2)
    before = pruner.sparsity()
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    masks = {slot.parameter: slot.mask for slot in pruner.slots}
    assert find_blocked_layers(model, masks) == []
    assert method not in ("oneshot", "random") or pruner.sparsity() == before


# ---- when the warnings come


def narrow_network() -> nn.Sequential:
    """Return a network whose first convolution has much smaller filters than the second, but for one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten())
    model.append(nn.LazyLinear(4))
    model(torch.randn(1, 1, 6, 6))
    with torch.no_grad():
        model[0].weight[1:].mul_(1e-3)
    return model


@pytest.mark.parametrize("method", ["dpf", "incremental", "sfp"])
def test_a_layer_that_keeps_one_filter_is_named_at_the_last_update(method: str) -> None:
    model = narrow_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"pattern": "filter(of='filters')", "allocation": "global"}
    pruner = make_pruner({"name": method, "sparsity": 0.5, **options, **({} if method == "sfp" else {"every": 2})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner.attach(model, optimizer, total_steps=20, steps_per_epoch=4)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 6, 6)).square().mean().backward()
            optimizer.step()
    assert pruner.masks()["0.weight"].flatten(1).any(1).sum() == 1
    (message,) = {str(warning.message) for warning in caught}
    assert message.startswith("0.weight keeps 9 of 288 weights (3.12%), where all layers together keep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.finish()  # a layer is named once


def test_filters_of_a_high_sparsity_are_not_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(1, 1, 6, 6))
    pruner = pm.OneShot(sparsity=0.95, pattern=pm.Filter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.attach(model, torch.optim.SGD(model.parameters(), 0.1)).finish()
