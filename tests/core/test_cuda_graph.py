"""A step captured in a CUDA graph, replayed and followed by `tick`, equals the eager step.

The file runs under pytest, or as a script where pytest is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:
    pytest = None  # type: ignore[assignment]

STEPS, WARM_UP = 40, 3

METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "dpf": lambda: pm.DPF(sparsity=0.9, every=4),
    "dpf filters": lambda: pm.DPF(sparsity=0.5, every=4, pattern=pm.Filter()),
    "dpf filters bounded": lambda: pm.DPF(sparsity=0.5, every=4, pattern=pm.Filter(), feedback=1.0),
    "dpf soft": lambda: pm.DPF(sparsity=0.9, every=4, settle=0.3, schedule=pm.Cubic(until=0.5), compressor="soft"),
    "dpf soft floor": lambda: pm.DPF(
        sparsity=0.9,
        every=4,
        settle=0.3,
        schedule=pm.Cubic(until=0.5),
        allocation="global(floor=0.05)",
        compressor="soft(rescale=False)",
    ),
    "dpf floor": lambda: pm.DPF(sparsity=0.9, every=4, allocation="global(floor=0.05)"),
    "dpf balanced": lambda: pm.DPF(sparsity=0.75, every=4, pattern=pm.Balanced(block=12)),
    "dpf 2:4 quantized": lambda: pm.DPF(every=4, pattern=pm.NM(2, 4), allocation="uniform", compressor=pm.Quantize(4)),
    "incremental": lambda: pm.Incremental(sparsity=0.9, every=4),
    "oneshot": lambda: pm.OneShot(sparsity=0.9, at=0.5),
    "edge_popup": lambda: pm.EdgePopup(sparsity=0.6, every=4),
    "edge_popup balanced": lambda: pm.EdgePopup(sparsity=0.75, every=4, pattern=pm.Balanced(block=12)),
    "iterand": lambda: pm.IteRand(sparsity=0.6, every=4, rate=0.3, distribution="ku"),
    "iterand rising": lambda: pm.IteRand(sparsity=0.6, every=4, allocation="global", schedule=pm.Cubic(until=0.5)),
}


def build_training(method: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, pm.Pruner]:
    """Return a model on the GPU, its optimizer and the pruner attached to both."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 9, 10),
    ).cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused
    )
    pruner = METHODS[method]()
    model[1].requires_grad_(pruner.method.weights != "score")  # score methods refuse a norm that is trained
    return model, optimizer, pruner.attach(model, optimizer, total_steps=STEPS)


def make_data() -> tuple[Tensor, Tensor]:
    """Return the images and labels of all steps."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 16, 4, 8, 8, generator=generator).cuda(), torch.randint(
        10, (STEPS, 16), generator=generator
    ).cuda()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Take one step of training."""
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train_eagerly(method: str, fused: bool) -> dict[str, Any]:
    """Train without a CUDA graph and return the result."""
    model, optimizer, pruner = build_training(method, fused)
    images, labels = make_data()
    for x, y in zip(images, labels, strict=True):
        train_step(model, optimizer, x, y)
    return finish_and_collect(model, pruner)


def train_captured(method: str, fused: bool) -> dict[str, Any]:
    """Train by replays of a captured step, with `tick` after each, and return the result."""
    model, optimizer, pruner = build_training(method, fused)
    images, labels = make_data()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x, y in zip(images[:WARM_UP], labels[:WARM_UP], strict=True):
            train_step(model, optimizer, x, y)
    torch.cuda.current_stream().wait_stream(side)

    x, y = images[0].clone(), labels[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(model, optimizer, x, y)
    assert pruner.step == WARM_UP, "capturing a step does not take it"
    for index in range(WARM_UP, STEPS):
        x.copy_(images[index])
        y.copy_(labels[index])
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pruner.tick()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return finish_and_collect(model, pruner)


def finish_and_collect(model: nn.Module, pruner: pm.Pruner) -> dict[str, Any]:
    """Finish and return masks, weights and history."""
    pruner.finish()
    masks = {name: mask.cpu() for name, mask in pruner.masks().items()}
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    for name, mask in masks.items():
        assert not weights[name][~mask].any()
    return {"masks": masks, "weights": weights, "history": pruner.history}


def compare_captured_to_eager(method: str, fused: bool) -> None:
    """Assert that captured and eager training give the same bits."""
    cudnn, algorithms = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    settings = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        one, other = train_eagerly(method, fused), train_captured(method, fused)
    finally:  # other test modules depend on these settings
        torch.use_deterministic_algorithms(algorithms)
        cudnn.deterministic, cudnn.benchmark = settings
    assert [entry["step"] for entry in one["history"]] == [entry["step"] for entry in other["history"]]
    for kind in ("masks", "weights"):
        for name, value in one[kind].items():
            assert torch.equal(value, other[kind][name]), f"{method}: {kind} of {name} differ"


def compare_memory_formats(method: str) -> None:
    """Assert that another memory format after attach changes masks only by rounding."""
    images, labels = make_data()
    results = []
    for move in (lambda model: model, lambda model: model.to(memory_format=torch.channels_last)):
        model, optimizer, pruner = build_training(method, fused=False)
        train_step(model, optimizer, images[0], labels[0])
        move(model)
        for x, y in zip(images[1:8], labels[1:8], strict=True):
            for name, mask in pruner.masks().items():
                assert not model.get_parameter(name)[~mask].any(), f"{method}: pruned weights of {name} are not zero"
            train_step(model, optimizer, x, y)
        results.append({name: mask.cpu() for name, mask in pruner.masks().items()})
    for name, mask in results[0].items():
        assert (mask ^ results[1][name]).float().mean() < 0.02, f"{method}: the mask of {name} differs"


if pytest is not None:

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("fused", [False, True])
    def test_a_captured_step_equals_the_eager_step(method: str, fused: bool) -> None:
        compare_captured_to_eager(method, fused)

    @pytest.mark.parametrize("method", METHODS)
    def test_another_memory_format_keeps_the_masks(method: str) -> None:
        compare_memory_formats(method)


if __name__ == "__main__":
    for name in METHODS:
        for choice in (False, True):
            compare_captured_to_eager(name, choice)
            print(f"{name}, fused={choice}: the captured step equals the eager step, bit for bit")
        compare_memory_formats(name)
        print(f"{name}: another memory format keeps the masks")
