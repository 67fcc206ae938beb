"""Networks that run in one native call: against the float64 network, and as its modules wherever that is needed."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import prune_unstructured
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona import models
from pomona.sparse import compress, decompress, load, save
from pomona.sparse.cpu import backend
from pomona.sparse.network import is_planned, plan_network
from pomona.sparse.network.convert import convert_network
from pomona.sparse.network.plan import NetworkPlan
from pomona.sparse.network.steps import Convolution, Mean

INSTRUCTION_SETS = backend.supported_instruction_sets() if backend.load_library() is not None else []
pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="needs the native library")
SIZES = st.integers(1, 4)
PAIRS = st.tuples(SIZES, SIZES)
SHAPE = (3, 12, 12)


class Residual(nn.Module):
    """A small network with everything that is a step: residuals of each kind, pools, and a head."""

    def __init__(self, inputs: int = 3, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv = nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=False)
        self.norm = nn.BatchNorm2d(width, affine=False)
        self.point = nn.Conv2d(width, 2 * width, 1, 2)
        self.average = nn.AvgPool2d(2, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(2 * width, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        y = self.norm(self.conv(x)).relu()
        x = torch.relu(y + x) + y  # a sum of two that other nodes read
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 3, 5))
        return self.head(self.average(F.relu(self.point(x) + short)))


class Gate(nn.Module):
    """A network that ends its steps early: a sigmoid has no native form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return x[:, :, 1:-1, 1:-1] * self.second(x).sigmoid()


def prepare(model: nn.Module, sparsity: float = 0.8, seed: int = 0) -> nn.Module:
    """Prune a model and give its batch norms values other than the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    prune_unstructured(model, sparsity)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor, low in ((norm.running_mean, -1), (norm.running_var, 0.5), (norm.weight, -1), (norm.bias, -1)):
            if tensor is not None:
                tensor.data.uniform_(low, 2, generator=generator)
    return model.eval()


def images(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def agree(found: Tensor, expected: Tensor) -> bool:
    close = torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-6)
    return found.shape == expected.shape and close


def planned_copy(model: nn.Module, shape: tuple[int, int, int] = SHAPE) -> nn.Module:
    planned = copy.deepcopy(model)
    assert plan_network(planned, shape)
    return planned


def the_plan(model: nn.Module, shape: tuple[int, int, int] = SHAPE) -> Any:
    return vars(model)["forward"].current.plans[shape]


def calls_of(plan: NetworkPlan) -> list[Tensor | None]:
    """Return a list to which every run of a plan adds its result."""
    results: list[Tensor | None] = []
    run = plan.run

    def recorded(x: Tensor) -> Tensor | None:
        results.append(run(x))
        return results[-1]

    plan.run = recorded  # type: ignore[method-assign]
    return results


def test_one_convolution_by_hand() -> None:
    conv = nn.Conv2d(1, 1, (1, 3), padding=(0, 1))
    conv.weight.data = torch.tensor([[[[2.0, 0.0, -1.0]]]])
    conv.bias.data = torch.tensor([0.5])
    model = planned_copy(nn.Sequential(conv, nn.ReLU()).eval(), (1, 1, 4))
    with torch.inference_mode():
        y = model(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]))
    assert y.flatten().tolist() == [0.0, 0.0, 0.5, 6.5]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)),
    st.integers(1, 40),
    PAIRS,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_any_convolution(
    instruction_set: str,
    shape: tuple[int, int, int, int],
    rows: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    sparsity: float,
    has_norm: bool,
    relu: bool,
    threads: int,
) -> None:
    conv = nn.Conv2d(shape[1], rows, kernel, stride, padding, dilation)
    layers = [conv, *([nn.BatchNorm2d(rows)] * has_norm), *([nn.ReLU()] * relu)]
    model, x = prepare(nn.Sequential(*layers), sparsity), images(*shape)
    spans = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    network = convert_network(model, shape[1:])
    if shape[2] < spans[0] or shape[3] < spans[1]:
        assert network is None
        return
    assert network is not None
    assert len(network.steps) == 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = NetworkPlan(network, instruction_set).run(x)
    finally:
        torch.set_num_threads(before)
    assert y is not None
    assert agree(y, exact(model, x))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3),
    st.tuples(st.integers(1, 5), st.integers(7, 30), st.integers(7, 30)),
    st.integers(4, 24),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_every_kind_of_step(
    instruction_set: str, n: int, shape: tuple[int, int, int], width: int, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = prepare(Residual(shape[0], 8), 0.7, seed), images(n, *shape)
    network = convert_network(model, shape)
    assert network is not None
    assert network.rest is None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = NetworkPlan(network, instruction_set).run(x)
    finally:
        torch.set_num_threads(before)
    assert y is not None
    assert agree(y, exact(model, x))


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    PAIRS,
    PAIRS,
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.booleans(),
)
def test_any_pool(
    shape: tuple[int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    largest: bool,
) -> None:
    padding = min(padding[0], kernel[0] // 2), min(padding[1], kernel[1] // 2)
    pool = nn.MaxPool2d(kernel, stride, padding) if largest else nn.AvgPool2d(kernel, stride, padding)
    model, x = prepare(nn.Sequential(nn.Conv2d(shape[0], 5, 1), pool)), images(2, *shape)
    network = convert_network(model, shape)
    if network is None or len(network.steps) < 2:
        assert any(s + 2 * p < k for s, p, k in zip(shape[1:], padding, kernel, strict=True))
        return
    y = NetworkPlan(network).run(x)
    assert y is not None
    assert agree(y, exact(model, x))


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("resnet20", {}, (3, 32, 32)),
        ("resnet20", {"shortcut": "B"}, (3, 32, 32)),
        ("resnet18", {"rho": 0.25}, (3, 32, 32)),
        ("resnet50", {"rho": 0.125, "num_classes": 10}, (3, 64, 64)),
    ],
)
def test_residual_networks_are_steps_alone(name: str, options: dict[str, Any], shape: tuple[int, int, int]) -> None:
    model, x = prepare(models.build(name, **options), 0.9), images(2, *shape)
    planned = planned_copy(model, shape)
    plan = the_plan(planned, shape)
    results = calls_of(plan.steps)
    with torch.inference_mode():
        y = planned(x)
    assert plan.rest is None
    assert y is results[0]
    assert agree(y, exact(model, x))


def test_norms_sums_and_relus_are_part_of_convolutions() -> None:
    network = convert_network(prepare(models.build("resnet20")), (3, 32, 32))
    assert network is not None
    kinds = [type(step) for step in network.steps]
    assert kinds.count(Convolution) == 19 + 2 + 1  # two shortcuts that subsample, and the linear layer
    assert kinds.count(Mean) == 1
    assert sum(step.residual is not None for step in network.steps if isinstance(step, Convolution)) == 9


def test_the_rest_runs_as_modules() -> None:
    model, x = prepare(Gate()), images(2, *SHAPE)
    planned = planned_copy(model)
    plan = the_plan(planned)
    results = calls_of(plan.steps)
    with torch.inference_mode():
        assert agree(planned(x), exact(model, x))
    assert len(results) == 1
    assert plan.rest.second is planned.second


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, 3, groups=3),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 6, (2, 2), padding="same"),  # one more line below than above
        nn.Sigmoid(),
        nn.InstanceNorm2d(3),
    ],
    ids=["groups", "circular", "same", "sigmoid", "instance norm"],
)
def test_what_has_no_native_form_is_left_alone(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.ReLU()).eval()
    assert convert_network(model, SHAPE) is None
    assert not plan_network(model, SHAPE)
    assert not is_planned(model)


def test_a_forward_that_creates_tensors_runs_as_modules() -> None:
    class Created(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.ones(10, 2)

    assert not plan_network(prepare(Created(nn.Conv2d(3, 4, 3), nn.ReLU())), SHAPE)


def test_an_inplace_relu_that_others_see_is_no_step() -> None:
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.last = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.last(self.relu(x)) + x

    model, x = prepare(Inplace()), images(1, *SHAPE)
    planned = planned_copy(model)
    with torch.inference_mode():
        assert agree(planned(x), exact(model, x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_reach_all_outputs_that_they_reach_in_a_dense_model(value: float) -> None:
    model, x = prepare(Residual()), images(2, *SHAPE)
    x[1, 2, 5, 5] = value
    planned = planned_copy(model)
    with torch.inference_mode():
        found, expected = planned(x), model(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found[0], expected[0], atol=1e-5)


def test_an_overflow_inside_the_network_is_computed_by_the_modules() -> None:
    model, x = prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))), images(1, *SHAPE)
    for layer in model:
        layer.weight.data *= 1e30
    planned = planned_copy(model)
    results = calls_of(the_plan(planned).steps)
    with torch.inference_mode():
        found, expected = planned(x), model(x)
    assert results == [None]
    assert not expected.isfinite().all()
    assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_modules_are_called_where_hooks_see_them() -> None:
    model, x = prepare(Residual()), images(1, *SHAPE)
    planned, seen = planned_copy(model), []
    planned.conv.register_forward_hook(lambda *_: seen.append("conv"))
    planned.register_forward_hook(lambda *_: seen.append("model"))
    with torch.inference_mode():
        assert torch.equal(planned(x), model(x))
    assert seen == ["conv", "model"]


@pytest.mark.parametrize("change", ["in place", "state dict", "training", "dtype"])
def test_a_changed_model_is_planned_again(change: str) -> None:
    model, x = prepare(Residual()), images(1, *SHAPE)
    planned, other = planned_copy(model), prepare(Residual(), seed=5).state_dict()
    with torch.no_grad():
        planned(x)
        for one in (model, planned):
            if change == "in place":
                one.conv.weight.mul_(2)
            elif change == "state dict":
                one.load_state_dict(other)
            elif change == "training":
                one.norm.train()
            else:
                one.double()
        y, expected = planned(x.to(planned.conv.weight.dtype)), model(x.to(planned.conv.weight.dtype))
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert y.dtype == expected.dtype


def test_gradients_reach_the_parameters() -> None:
    model, x = prepare(Residual()), images(1, *SHAPE)
    planned = planned_copy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned(x).sum().backward()
    model(x).sum().backward()
    assert torch.equal(planned.conv.weight.grad, model.conv.weight.grad)


def test_images_of_other_shapes_and_layouts() -> None:
    model = prepare(Residual())
    planned = planned_copy(model)
    with torch.inference_mode():
        for size in (12, 15, 31, 7, 9, 20):
            x = images(2, 3, size, size + 1).to(memory_format=torch.channels_last)
            assert agree(planned(x), exact(model, x))
        assert planned(images(0, *SHAPE)).shape == (0, 5)
        with pytest.raises(RuntimeError):
            planned(images(1, 4, 12, 12))


def test_copies_and_pickles_run_as_planned() -> None:
    model, x = prepare(Residual()), images(1, *SHAPE)
    planned = planned_copy(model)
    for other in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert is_planned(other)
        assert vars(other)["forward"].model is other
        with torch.inference_mode():
            assert agree(other(x), exact(model, x))
            assert the_plan(other).steps is not the_plan(planned).steps


def test_threads_at_the_same_time() -> None:
    model = prepare(Residual())
    planned = planned_copy(model)
    batches = [images(2, *SHAPE, seed=seed) for seed in range(8)]

    def run(x: Tensor) -> bool:
        with torch.inference_mode():
            return all(agree(planned(x), exact(model, x)) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, batches))


def run_in_child(model: nn.Module, x: Tensor, expected: Tensor, results: Any) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        results.put(agree(model(x), expected))


def test_a_forked_process() -> None:
    model, x = prepare(Residual()), images(1, *SHAPE)
    planned, expected = planned_copy(model), exact(model, x)
    with torch.inference_mode():
        planned(x)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=run_in_child, args=(planned, x, expected, results))
    child.start()
    assert results.get(timeout=60)
    child.join()


def test_export_and_compile_see_the_modules() -> None:
    model, x = prepare(Residual()), images(2, *SHAPE)
    planned = planned_copy(model)
    with torch.no_grad():
        program = torch.export.export(planned, (x,))
        assert agree(program.module()(x), exact(model, x))
        compiled = torch.compile(planned, backend="eager", fullgraph=True)
        assert agree(compiled(x), exact(model, x))


def small_network() -> nn.Module:
    return prepare(models.build("resnet20"), 0.9)


def force_plan(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a compressed model that runs as planned, whatever was measured."""
    compressed = compress(model, x, policy="all", patience=0.0)
    if not is_planned(compressed):
        assert plan_network(compressed, tuple(x.shape[1:]))  # type: ignore[arg-type]
    return compressed


def test_compress_plans_a_network_and_decompress_undoes_it() -> None:
    model, x = small_network(), images(1, 3, 32, 32)
    compressed = compress(model, x, patience=0.3)
    seconds = compressed.compression.seconds
    assert seconds["compressed"] == min(seconds.values())
    assert is_planned(compressed) == (seconds["one call"] == seconds["compressed"])
    with torch.inference_mode():
        assert agree(compressed(x), exact(model, x))
        plain = decompress(force_plan(model, x))
        assert not is_planned(plain)
        assert torch.equal(plain(x), model(x))


def test_a_compressed_model_can_be_compressed_again() -> None:
    model, x = small_network(), images(1, 3, 32, 32)
    again = compress(force_plan(model, x), x, patience=0.0)
    assert "one call" in again.compression.seconds
    with torch.inference_mode():
        assert agree(again(x), exact(model, x))


def test_a_file_keeps_that_a_network_is_planned(tmp_path: Path) -> None:
    model, x = small_network(), images(1, 3, 32, 32)
    file = save(force_plan(model, x), tmp_path / "planned.safetensors", "resnet20")
    loaded = load(file)
    assert is_planned(loaded)
    with torch.inference_mode():
        assert agree(loaded(x), exact(model, x))
    plain = save(model, tmp_path / "plain.safetensors", "resnet20")
    assert not is_planned(load(plain))


def test_values_keep_the_precision_in_which_they_are_packed() -> None:
    model, x = small_network(), images(1, 3, 32, 32)
    compressed = compress(model, x, dtype=torch.float16, policy="all", patience=0.0)
    plain = pm.decompress(compressed)
    assert plan_network(compressed, (3, 32, 32)) or is_planned(compressed)
    with torch.inference_mode():
        assert agree(compressed(x), exact(plain.float(), x))
