"""The common graph of two networks: what it computes, what it follows, and what is refused with one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from pomona.errors import PomonaError
from pomona.theory.certificate import Ball, certify
from pomona.theory.certificate.paired_graph import DENSE, PRUNED, PairedGraph, Weight, pair_networks


class Wrapped(nn.Module):
    """A function of the result of a linear layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def operations(graph: PairedGraph) -> list[str]:
    """Return the operations after the input."""
    return [step.op for step in graph.steps[1:]]


def other_weights(model: nn.Module) -> nn.Module:
    """Return a copy with other parameters."""
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return other


def require_same(graph: PairedGraph, side: int, model: nn.Module, shape: tuple[int, ...] = (6,)) -> None:
    """Check that one side of a graph computes what a network does, one example at a time and in batches."""
    x = torch.randn(4, *shape, dtype=torch.float64)
    expected = copy.deepcopy(model).double().eval()(x)
    assert torch.allclose(graph.run(side, x).squeeze(1), expected, atol=1e-12)
    assert torch.allclose(graph.evaluate(side, x[:1])[-1], expected[:1], atol=1e-12)


# ---- what is followed


def test_both_sides_compute_their_networks() -> None:
    dense = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(), nn.Flatten())
    dense.append(nn.Linear(48, 2))
    pruned = other_weights(dense)
    graph = pair_networks(dense, pruned, torch.zeros(1, 2, 4, 4))
    assert operations(graph) == ["conv2d", "batch_norm", "relu", "clone", "view", "linear"]
    assert [weight.name for weight in graph.steps[1].weights] == ["0.weight", "0.bias"]
    for side, model in ((DENSE, dense), (PRUNED, pruned)):
        require_same(graph, side, model, (2, 4, 4))
    assert dense.training
    assert dense[0].weight.dtype == torch.float32


def test_only_operations_that_need_it_are_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decomposition takes most of the time of an export, and gives the same graph."""
    dense = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten())
    graphs = []
    for inplace in (False, True):
        dense[2] = nn.ReLU(inplace)
        graphs.append(pair_networks(dense, dense, torch.zeros(1, 2, 4, 4)))
    pair_networks(nn.Sequential(*dense[:2], nn.ReLU(), *dense[3:]), dense, torch.zeros(1, 2, 4, 4))
    assert operations(graphs[0]) == operations(graphs[1])
    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    with pytest.raises(PomonaError, match="run_decompositions"):
        pair_networks(dense, dense, torch.zeros(1, 2, 4, 4))
    dense[2] = nn.ReLU()
    pair_networks(dense, dense, torch.zeros(1, 2, 4, 4))


def test_pruned_weights_are_exchanged_without_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = parametrizations.weight_norm(nn.Linear(6, 3))
    graph = pair_networks(dense, dense.state_dict(), torch.zeros(1, 6))
    pruned = other_weights(dense)
    monkeypatch.setattr(torch.export, "export", None)
    graph = graph.with_pruned(pruned.state_dict())
    require_same(graph, PRUNED, pruned)
    require_same(graph, DENSE, dense)
    part = graph.with_pruned({"bias": torch.zeros(3)})  # the rest is the dense network's
    assert torch.equal(part.steps[1].weights[0].dense, part.steps[1].weights[0].pruned)
    with pytest.raises(PomonaError, match="has no weight 'biases'"):
        graph.with_pruned({"biases": torch.zeros(3)})
    with pytest.raises(PomonaError, match=r"'bias' has the shape \(4,\), and \(3,\) in the dense network"):
        graph.with_pruned({"bias": torch.zeros(4)})


def test_masked_and_parametrized_layers_are_plain_layers() -> None:
    """The pruned network of torch.nn.utils.prune multiplies by a mask; the dense one has a plain weight."""
    dense = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    masked = copy.deepcopy(dense)
    prune.l1_unstructured(masked[0], "weight", 0.5)
    masked(torch.randn(1, 6))  # the masked weight has a gradient function now
    normed = nn.Sequential(parametrizations.spectral_norm(copy.deepcopy(dense[0])), nn.ReLU())
    for pruned in (masked, normed):
        graph = pair_networks(dense, pruned, torch.zeros(1, 6))
        assert operations(graph) == ["linear", "relu"]
        expected = pruned.eval()[0].weight.double()
        assert torch.allclose(graph.steps[1].weights[0].pruned, expected, atol=1e-6)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu())

    dense = Tied()
    pruned = other_weights(dense)
    for given in (pruned, pruned.state_dict()):
        require_same(pair_networks(dense, given, torch.zeros(1, 6)), PRUNED, pruned)
    state = dense.state_dict() | {"one.weight": torch.zeros(6, 6)}
    with pytest.raises(PomonaError, match="one weight in the dense network and differ"):
        pair_networks(dense, dense.state_dict(), torch.zeros(1, 6)).with_pruned(state)
    untied = copy.deepcopy(dense)
    untied.two.weight = nn.Parameter(torch.randn(6, 6))
    require_same(pair_networks(dense, untied, torch.zeros(1, 6)), PRUNED, untied)


def test_hooks_are_part_of_the_network() -> None:
    dense = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    dense[0].register_forward_hook(lambda module, inputs, output: output * 2)
    dense[1].register_full_backward_hook(lambda *_: None)
    require_same(pair_networks(dense, copy.deepcopy(dense), torch.zeros(1, 6)), DENSE, dense)


def test_half_precision_and_casts_are_computed_in_float64() -> None:
    dense = Wrapped(lambda h: torch.softmax(h.float(), -1, dtype=torch.float32).to(h.dtype) + torch.arange(6.0))
    graph = pair_networks(dense.half(), copy.deepcopy(dense).bfloat16(), torch.zeros(1, 6))
    values = graph.evaluate(DENSE, torch.randn(1, 6, dtype=torch.float64))
    assert {value.dtype for value in values} == {torch.float64}
    exact = torch.softmax(values[1], -1) + torch.arange(6.0)
    assert torch.allclose(values[-1], exact, atol=1e-15)


def test_constants_may_differ_like_weights() -> None:
    class WithConstant(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scale = torch.full((6,), value)  # not a buffer

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    found = certify(WithConstant(2.0), WithConstant(5.0), (6,), region=Ball(2.0))
    assert found.error == pytest.approx(6, rel=1e-9)


def test_steps_that_the_output_does_not_need_are_dropped() -> None:
    def branches(h: Tensor) -> Tensor:
        F.dropout(h)  # random, and unused
        h.sort(1)
        return h + 1

    assert operations(pair_networks(Wrapped(branches), Wrapped(branches), torch.zeros(1, 6))) == ["linear", "add"]


def test_a_network_for_one_example_at_a_time_is_taken() -> None:
    model = Wrapped(lambda h: h.view(1, 6).relu())
    assert operations(pair_networks(model, model, torch.zeros(1, 6)))[:1] == ["linear"]


@pytest.mark.gpu
def test_a_network_on_a_gpu_stays_there() -> None:
    dense = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).cuda()
    graph = pair_networks(dense, dense.state_dict(), torch.zeros(1, 6))
    assert graph.device.type == "cuda"
    assert certify(dense, other_weights(dense), (6,)).error > 0


# ---- what is refused


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


BATCH_STATISTICS = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2, track_running_stats=False))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wrapped(lambda h: F.dropout(h, 0.5)), "'native_dropout' is random"),
        (Wrapped(lambda h: h + torch.rand(6)), r"'rand' is random \(rand\)"),
        (Wrapped(lambda h: h + torch.randn_like(h)), "random"),
        (Wrapped(lambda h: torch.bernoulli(h.sigmoid())), "random"),
        (Wrapped(lambda h: h + torch.empty(6)), "uninitialized memory"),
        (CountsCalls(), "writes to 'calls' in its forward pass"),
        (Wrapped(lambda h: h.argmax(1)), "the output has the type torch.int64"),
        (Wrapped(lambda h: (h, h)), "one output, a tensor"),
        (Wrapped(lambda h: torch.ones(1, 3)), "does not depend on the input"),
        (Wrapped(lambda h: h * h.sum().item()), "cannot follow _local_scalar_dense"),
        (Wrapped(lambda h: h if h.sum() > 0 else -h), "cannot be exported"),
        (Wrapped(lambda h: h if len(h) == 1 else 2 * h), "another result for an example alone"),
        (Wrapped(lambda h: h - h.mean(0)), "another result for an example alone"),
        (BATCH_STATISTICS, "batch norm without running statistics"),
        (nn.LazyLinear(3), "lazy parameters without a shape, such as 'weight'"),
        (nn.Bilinear(6, 6, 3), "missing a required argument: 'input2'"),
        (nn.Linear(7, 3), "cannot be exported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_networks_without_a_graph_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PomonaError, match=message) as raised:
        pair_networks(model, model, torch.zeros(1, 6))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("dense", "pruned", "message"),
    [
        (nn.ReLU(), nn.Tanh(), r"'relu' is relu\(\) of shape \(1, 6\) in one, and tanh\(\)"),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), "0.1.* in one, and .*0.2"),
        (nn.Linear(6, 3), nn.Linear(6, 4), r"shape \(1, 3\) in one, and .*\(1, 4\)"),
        (nn.Linear(6, 3), nn.Linear(6, 3, bias=False), "differ in more than their weights"),
        (nn.ReLU(), nn.Sequential(nn.ReLU(), nn.ReLU()), "they have 2 and 3 operations"),
        (nn.Linear(6, 3), {"weight": torch.zeros(3, 6)}, 'Missing key.* "bias"'),
        (nn.Linear(6, 3), {"weight": torch.full((3, 6), torch.nan), "bias": torch.zeros(3)}, "not a number"),
        (Wrapped(lambda h: h[:, [0, 1]]), Wrapped(lambda h: h[:, [0, 2]]), "the whole numbers .* are not equal"),
    ],
    ids=["activation", "slope", "shape", "bias", "length", "state", "not a number", "positions"],
)
def test_networks_that_differ_in_more_than_weights_are_refused(dense: nn.Module, pruned: Any, message: str) -> None:
    with pytest.raises(PomonaError, match=message):
        pair_networks(dense, pruned, torch.zeros(1, 6))


def test_weights_have_a_short_text() -> None:
    assert repr(Weight("0.weight", torch.zeros(100, 100), torch.zeros(100, 100))) == "Weight(name='0.weight')"
