"""Certificates: sound for every operation, tight where possible, and refused for unknown operations."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pruned_copies import perturbed_copy
from torch import Tensor, nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.theory import bounds, certificate
from pomona.theory.certificate import Ball, Cube, certify
from pomona.theory.certificate.certification import certify_graph
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import pair_networks


def with_random_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return the model in evaluation mode with batch-norm parameters and statistics as after training."""
    draw = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
            for tensor, low, high in ((part.running_mean, -1, 1), (part.running_var, 0.5, 2), (part.bias.data, -1, 1)):
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=draw))
            part.weight.data.copy_(torch.randn(part.weight.shape, generator=draw))
    return model.eval()


def largest_sampled_gap(
    dense: nn.Module, pruned: nn.Module, shape: tuple[int, ...], region: Ball | Cube, count: int = 400
) -> float:
    """Return the largest difference of two networks at random points of the region."""
    x = region.sample(count, shape, torch.Generator().manual_seed(1))
    with torch.no_grad():
        gap = copy.deepcopy(pruned).eval().double()(x) - copy.deepcopy(dense).eval().double()(x)
    return float(gap.flatten(1).norm(dim=1).max())


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖W‖₂ by a singular value decomposition."""
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


# ---- tightness


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 10), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_certificate_of_one_linear_layer_is_within_a_percent(rows: int, columns: int, radius: float, seed: int) -> None:
    torch.manual_seed(seed)
    dense = nn.Linear(columns, rows, bias=False)
    pruned = perturbed_copy(dense, seed)
    true = radius * spectral_norm((pruned.weight - dense.weight).detach())
    found = certify(dense, pruned.state_dict(), (columns,), region=Ball(radius), steps=0)
    assert true * (1 - 1e-12) <= found.error <= 1.01 * true + 1e-12


def test_attack_reaches_the_certificate_of_one_layer() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(50, 30)
    found = certify(dense, perturbed_copy(dense, noise=0), (50,))
    assert 0.999 * found.error < found.found <= found.error


@pytest.mark.slow
@given(st.lists(st.integers(2, 12), min_size=4, max_size=7), st.floats(0.2, 0.9), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_certificate_is_within_the_products_of_exact_norms(widths: list[int], share: float, seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    dense = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    pruned = perturbed_copy(dense, seed, share)
    norms = [spectral_norm(layer.weight.detach()) for layer in layers]
    kept = [pruned[2 * k].weight.detach() for k in range(len(layers))]
    removed = [spectral_norm(w - layer.weight.detach()) for w, layer in zip(kept, layers, strict=True)]
    products = math.prod(a + b for a, b in zip(norms, removed, strict=True)) - math.prod(norms)
    found = certify(dense, pruned.state_dict(), (widths[0],), steps=20, starts=4)
    assert found.found <= found.error <= products * (1 + 1e-9)


def test_certificate_of_pruned_inner_layers_is_within_theorem_1() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Linear(8, 20, False), nn.ReLU(), nn.Linear(20, 20, False), nn.ReLU(), nn.Linear(20, 3, False)
    )
    pruned = copy.deepcopy(dense)
    pruned[2].weight.data[pruned[2].weight.abs() < 0.1] = 0
    norms = [spectral_norm(dense[k].weight.detach()) for k in (0, 2, 4)]
    removed = spectral_norm((pruned[2].weight - dense[2].weight).detach())
    assert certify(dense, pruned, (8,), steps=0).error <= bounds.propagated_error(norms, [removed]) * (1 + 1e-9)


def test_equal_networks_have_no_certified_error() -> None:
    model = with_random_statistics(pm.models.build("digits_cnn"))
    found = certify(model, copy.deepcopy(model), (1, 8, 8), steps=3)
    assert found.error < 1e-6
    assert found.found == 0


def test_certificate_of_a_changed_bias_is_exact() -> None:
    """Only the last bias changes, so the networks differ by the same vector everywhere."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    pruned = copy.deepcopy(dense)
    pruned[2].bias.data += torch.tensor([3.0, 0.0, 4.0])
    assert certify(dense, pruned, (5,), steps=0).error == pytest.approx(5, rel=1e-6)


# ---- soundness


def convolution(**options: Any) -> nn.Module:
    """Return a network with one 3×3 convolution."""
    return nn.Sequential(nn.Conv2d(4, 6, 3, **options), nn.ReLU(), nn.Flatten())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x))
        y += self.two(x[:, :, ::1])
        z = torch.cat((F.relu(y), F.pad(x, (0, 0, 0, 0, 1, 0))), 1)
        z = F.avg_pool2d(F.max_pool2d(z, 3, 2, padding=1), 2, 1)
        return z.view(z.size(0), -1).mean(1, keepdim=True) + torch.tanh(z.flatten(1))


class InPlaceAndBroadcast(nn.Module):
    """Sums that broadcast, values that are used twice, and values that are overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(4, 3, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.relu(y)
        z = 3 * y
        z.add_(1)
        z = z + z.mean((2, 3), keepdim=True) + y
        return torch.cat((z, z), 1) / 2 - 1


class Tokens(nn.Module):
    """A linear layer on the last of three axes, and a batch norm on the second, which has the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(49, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.flatten(2)))


torch.manual_seed(0)
NETWORKS: dict[str, nn.Module] = {
    "in-place and broadcast": InPlaceAndBroadcast(),
    "tokens": Tokens(),
    "zero padding": convolution(padding=1),
    "more padding than kernel": convolution(padding=4),
    "stride": convolution(padding=1, stride=2),
    "stride beyond the kernel": convolution(stride=4),
    "dilation": convolution(dilation=2, padding=2),
    "groups": convolution(groups=2, padding=(0, 2)),
    "same": convolution(padding="same", dilation=(1, 2)),
    "circular": convolution(padding=1, padding_mode="circular"),
    "circular, twice around": convolution(padding=7, padding_mode="circular"),
    "circular, strided": convolution(padding=2, padding_mode="circular", stride=3),
    "reflect": convolution(padding=3, padding_mode="reflect"),
    "replicate": convolution(padding=3, padding_mode="replicate", stride=2),
    "overlapping max pool": nn.Sequential(nn.Conv2d(4, 3, 1), nn.MaxPool2d(3, 1, dilation=2)),
    "average pool at the edge": nn.Sequential(nn.Conv2d(4, 3, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "adaptive pools": nn.Sequential(nn.Conv2d(4, 3, 1), nn.AdaptiveMaxPool2d(5), nn.AdaptiveAvgPool2d(3)),
    "norm alone": nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(-1.5), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)),
    "activations": nn.Sequential(nn.Conv2d(4, 3, 1), nn.GELU(), nn.Conv2d(3, 3, 1), nn.SiLU(), nn.ELU(2.0)),
    "residual": Residual(),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_sampled_point_exceeds_the_certificate(name: str) -> None:
    dense = with_random_statistics(NETWORKS[name])
    pruned = perturbed_copy(dense)
    graph = pair_networks(dense, pruned, torch.zeros(1, 4, 7, 7))
    for region in (Ball(3.0), Cube(-0.5, 1.0)):
        found = certify_graph(graph, region, steps=30, starts=4)
        assert 0 < found.found <= found.error < 1e3 * found.found
        assert largest_sampled_gap(dense, pruned, (4, 7, 7), region) <= found.error


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0.1, 0.9))
@settings(max_examples=15, deadline=None)
def test_certificate_holds_for_random_small_networks(seed: int, share: float) -> None:
    torch.manual_seed(seed)
    dense = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 2),
        nn.ReLU(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    dense = with_random_statistics(dense, seed)
    pruned = perturbed_copy(dense, seed, share)
    found = certify(dense, pruned.state_dict(), (2, 6, 6), region=Cube(), steps=20, starts=4)
    assert max(found.found, largest_sampled_gap(dense, pruned, (2, 6, 6), Cube(), 100)) <= found.error


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lenet300", (1, 28, 28)), ("digits_cnn", (1, 8, 8)), ("conv2", (3, 8, 8)), ("resnet20", (3, 8, 8))],
)
def test_certificate_of_the_models_of_the_library(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    options = {"image_size": 8, "rho": 0.25} if name == "conv2" else {}
    dense = with_random_statistics(pm.models.build(name, **options))
    pruned = certificate.prune_by_magnitude(dense, 0.3)
    found = certify(dense, pruned, shape, steps=5, starts=2)
    assert 0 < found.found <= found.error < math.inf
    assert [layer.name for layer in found.layers][-1] in ("layers.5", "head.2", "classifier.4")
    assert all(layer.removed > 0 for layer in found.layers[1:-1])


def test_cube_is_certified_by_the_ball_around_it() -> None:
    """A linear layer has the bound ‖Δ(W c + b)‖ at the middle plus half the diagonal times ‖ΔW‖."""
    torch.manual_seed(0)
    dense = nn.Linear(6, 4)
    pruned = perturbed_copy(dense)
    removed, shift = (
        (a.double() - b.double()).detach() for a, b in ((pruned.weight, dense.weight), (pruned.bias, dense.bias))
    )
    middle = float((removed.sum(1) / 2 + shift).norm())
    expected = middle + spectral_norm(removed) * math.sqrt(6) / 2
    graph = pair_networks(dense, pruned, torch.zeros(1, 6))
    assert norm_bounds(graph, Cube()).output.gap == pytest.approx(expected, rel=1e-9)
    assert certify_graph(graph, Cube()).error <= expected * (1 + 1e-9)


def test_folded_batch_norm_is_tighter_than_two_layers() -> None:
    """A batch norm that undoes its convolution's scale leaves a norm of 1."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)
    scales = torch.tensor([1e-3, 1.0, 1e3])
    conv.weight.data[:, :, 0, 0] = torch.linalg.qr(torch.randn(3, 3))[0] * scales[:, None]
    norm.running_var.copy_(scales**2 - norm.eps)
    dense = nn.Sequential(conv, norm)
    found = certify(dense, dense, (3, 4, 4), steps=0)
    assert [layer.dense for layer in found.layers] == [pytest.approx(1, rel=1e-2)]


def test_batch_norm_on_another_axis_is_not_folded() -> None:
    """Only output 0 has weights and only token 1 has a scale; folding would multiply the wrong pairs."""
    dense = with_random_statistics(Tokens())
    dense.norm.weight.data.copy_(torch.tensor([0.0, 10.0, 0.0, 0.0]))
    dense.linear.weight.data[1:] = 0
    pruned = copy.deepcopy(dense)
    pruned.linear.weight.data.zero_()
    scale = 10 / math.sqrt(float(dense.norm.running_var[1]) + dense.norm.eps)
    found = certify(dense, pruned, (4, 7, 7))
    assert found.error == pytest.approx(scale * float(dense.linear.weight[0].detach().norm()), rel=1e-6)
    assert found.found == pytest.approx(found.error, rel=1e-2)


def test_state_dict_gives_the_same_certificate_as_a_network() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    pruned = perturbed_copy(dense)
    assert certify(dense, pruned.state_dict(), (5,)) == certify(dense, pruned, (5,))
    assert dense.training


def test_certificate_of_a_broadcast_sum_is_tight() -> None:
    """One number is added to nine, so its difference appears nine times."""

    class BroadcastSum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.cat((x[:, :3], x), 1)

    dense = BroadcastSum()
    pruned = copy.deepcopy(dense)
    pruned.layer.weight.data.zero_()
    found = certify(dense, pruned, (6,))
    assert found.error == pytest.approx(3 * float(dense.layer.weight.detach().norm()), rel=1e-6)
    assert found.found == pytest.approx(found.error, rel=1e-2)


def test_in_place_operation_updates_the_value() -> None:
    class InPlaceProduct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.mul_(10)
            return y

    torch.manual_seed(0)
    dense = InPlaceProduct()
    found = certify(dense, perturbed_copy(dense), (6,))
    assert 0.99 * found.error < found.found <= found.error


def test_certificate_of_a_changed_batch_norm_shift_is_exact() -> None:
    """A batch norm behind a convolution, and one alone."""
    for first in (nn.Conv2d(2, 3, 1), nn.Identity()):
        dense = with_random_statistics(nn.Sequential(first, nn.BatchNorm2d(3 if isinstance(first, nn.Conv2d) else 2)))
        pruned = copy.deepcopy(dense)
        pruned[1].bias.data[:2] += torch.tensor([3.0, 4.0])
        assert certify(dense, pruned, (2, 1, 1), steps=0).error == pytest.approx(5, rel=1e-6)
        assert certify(dense, dense, (2, 1, 1), steps=0).error < 1e-6


def test_certificate_of_a_mean_is_tight() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(1, keepdim=True)

    torch.manual_seed(0)
    dense = Mean()
    pruned, row = copy.deepcopy(dense), torch.randn(6)
    pruned.layer.weight.data += row
    found = certify(dense, pruned, (6,))
    assert found.error == pytest.approx(float(row.norm()), rel=1e-6)
    assert found.found == pytest.approx(found.error, rel=1e-2)


# ---- pruning and the largest certified sparsity


def test_largest_certified_sparsity_is_the_largest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))
    share = certificate.largest_certified_sparsity(model, (20,), 0.2, halvings=6)
    assert share is not None
    assert certify(model, certificate.prune_by_magnitude(model, share), (20,), steps=0).error <= 0.2
    assert certify(model, certificate.prune_by_magnitude(model, share + 1 / 64), (20,), steps=0).error > 0.2
    assert certificate.largest_certified_sparsity(model, (20,), 1e-9, halvings=4) is None


def test_pruning_by_magnitude_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))
    before = copy.deepcopy(model.state_dict())
    pruned = certificate.prune_by_magnitude(model, 0.5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert (pruned[2].weight == 0).sum() == 800


# ---- invalid arguments


def test_invalid_regions_are_refused() -> None:
    with pytest.raises(PomonaError, match="radius must be positive and finite, got -1"):
        Ball(-1.0)
    with pytest.raises(PomonaError, match="low < high, got 1 and 0"):
        Cube(1.0, 0.0)
    with pytest.raises(PomonaError, match="epsilon must be positive"):
        certificate.largest_certified_sparsity(nn.Linear(3, 3), (3,), 0.0)
