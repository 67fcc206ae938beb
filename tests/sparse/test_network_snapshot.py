"""Comparisons of a model with its earlier state: the native call says the same as the comparison by value."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy
import pytest
import torch
from packing import prune_unstructured
from torch import Tensor, nn

from pomona import models
from pomona.sparse import compress
from pomona.sparse.cpu import backend
from pomona.sparse.network import native_snapshot
from pomona.sparse.network.snapshot import ModelSnapshot

pytestmark = pytest.mark.skipif(backend.load_library() is None, reason="needs the native library")


class Equal:
    """An object that is equal to others of the same number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


class Holder(nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.randn(4)


class Block(nn.Module):
    """Layers with attributes of many types."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        channels = random.choice((1, 4, 9))
        self.conv, self.norm = nn.Conv2d(3, channels, 3, bias=random.random() < 0.5), nn.BatchNorm2d(channels)
        self.parts = nn.ModuleList([nn.ReLU() for _ in range(random.randrange(3))])
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3)} if random.random() < 0.5 else {})
        self.table = nn.Parameter(torch.randn(5, 2), requires_grad=random.random() < 0.5)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("missing", None)
        self.scale, self.name, self.pair, self.object = random.random(), "block", (1, [2.0, 3]), Equal(1)
        self.numbers, self.nested = [1000, 2000.5], {"x": [1, {"y": 2}], "z": None}
        self.tensors, self.holder = [torch.ones(2), torch.zeros(2, 2)], Holder()
        self.last_attribute = 7


def build(random: Random) -> nn.Module:
    """Return a random model in evaluation mode."""
    blocks = [Block(random) for _ in range(random.randrange(1, 4))]
    rest = [nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2, bias=False)]
    model = nn.Sequential(*blocks, *rest)
    if random.random() < 0.3:
        model[0].shared = model[-1]
    if random.random() < 0.3:
        with torch.inference_mode():
            model[0].norm.running_var = torch.rand(model[0].norm.num_features) + 1
    return model.eval()


def pick_block(model: nn.Module, random: Random) -> Any:
    return random.choice([module for module in model if isinstance(module, Block)])


def pick_tensor(model: nn.Module, random: Random) -> Tensor:
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
    return random.choice(tensors)


def pick_vector(model: nn.Module, random: Random) -> Tensor:
    return random.choice([t for t in (*model.parameters(), *model.buffers()) if t.ndim == 1 and t.is_floating_point()])


def add_in_place(model: nn.Module, random: Random) -> None:
    with torch.no_grad():
        pick_tensor(model, random).add_(1)


def swap_values(model: nn.Module, random: Random) -> None:
    tensor = pick_block(model, random).norm.weight
    torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach().clone()))


def write_in_inference_mode(model: nn.Module, random: Random) -> None:
    with torch.inference_mode():
        pick_vector(model, random).add_(1)


def resize_storage(model: nn.Module, random: Random) -> None:
    storage = pick_block(model, random).norm.running_mean.untyped_storage()
    size = storage.size()
    storage.resize_(1 << 20)
    storage.resize_(size)


def change_data(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Random], None]:
    """Return a function that assigns the `data` of a tensor anew."""

    def apply(model: nn.Module, random: Random) -> None:
        tensor = pick_tensor(model, random)
        tensor.data = change(tensor.data)

    return apply


def on_block(change: Callable[[Any], Any]) -> Callable[[nn.Module, Random], None]:
    """Return a function that changes a block."""
    return lambda model, random: change(pick_block(model, random))


# Changes that are seen, whatever the model is.
SEEN: dict[str, Callable[[nn.Module, Random], Any]] = {
    "submodule replaced": on_block(lambda b: setattr(b, "norm", copy.deepcopy(b.norm))),
    "submodule replaced in a container": lambda m, _: m.__setitem__(0, copy.deepcopy(m[0])),
    "submodule appended": lambda m, _: m.append(nn.ReLU()),
    "submodule added": on_block(lambda b: b.add_module("extra_layer", nn.ReLU())),
    "module of a list": on_block(lambda b: b.parts.append(nn.ReLU())),
    "module of a dictionary": on_block(lambda b: b.named.update({"b": nn.ReLU()})),
    "submodule removed": lambda m, _: m.__delitem__(len(m) - 1),
    "parameter replaced": on_block(lambda b: setattr(b, "table", nn.Parameter(b.table.detach().clone()))),
    "parameter removed": on_block(lambda b: setattr(b, "table", None)),
    "buffer replaced": on_block(lambda b: setattr(b, "steps", b.steps.clone())),
    "buffer filled": on_block(lambda b: setattr(b, "missing", torch.ones(2))),
    "buffer registered": on_block(lambda b: b.register_buffer("extra_buffer", torch.ones(2))),
    "in place": add_in_place,
    "swapped": swap_values,
    "written in inference mode": write_in_inference_mode,
    "data assigned": change_data(lambda data: data + 1),
    "equal data assigned": change_data(torch.clone),
    "data transposed": on_block(lambda b: setattr(b.conv.weight, "data", b.conv.weight.data.transpose(2, 3))),
    "data shortened": on_block(lambda b: setattr(b.steps, "data", b.steps.data[:2])),
    "data of other dimensions": on_block(lambda b: setattr(b.steps, "data", b.steps.data[None])),
    "data of no dimensions": on_block(lambda b: setattr(b.steps, "data", b.steps.data[0])),
    "vector written through data": lambda m, random: pick_vector(m, random).data.add_(1),
    "vector written through numpy": lambda m, random: pick_vector(m, random).detach().numpy().__setitem__(0, 1e9),
    "a NaN in a vector": lambda m, random: pick_vector(m, random).data.fill_(float("nan")),
    "a zero of another sign": on_block(lambda b: b.norm.running_mean.data.neg_()),
    "number": on_block(lambda b: setattr(b, "scale", -1.0)),
    "a NaN": on_block(lambda b: setattr(b, "scale", float("nan"))),
    "number of a layer": on_block(lambda b: setattr(b.norm, "eps", b.norm.eps * 2)),
    "tuple": on_block(lambda b: setattr(b.conv, "stride", (2, 2))),
    "text": on_block(lambda b: setattr(b, "name", "other")),
    "attribute added": on_block(lambda b: setattr(b, "extra", 1)),
    "attribute removed": on_block(lambda b: delattr(b, "name")),
    "object": on_block(lambda b: setattr(b, "object", Equal(2))),
    "array": on_block(lambda b: setattr(b, "object", numpy.ones(3))),
    "tensor attribute": on_block(lambda b: setattr(b.holder, "tensor", b.holder.tensor.clone())),
    "tensor attribute in place": on_block(lambda b: b.holder.tensor.add_(1)),
    "list extended": on_block(lambda b: b.numbers.append(1)),
    "item of a list": on_block(lambda b: b.numbers.__setitem__(0, 7)),
    "items exchanged": on_block(lambda b: b.numbers.reverse()),
    "item of a nested list": on_block(lambda b: b.nested["x"].__setitem__(0, 7)),
    "item of a list in a tuple": on_block(lambda b: b.pair[1].append(1)),
    "tensor of a list": on_block(lambda b: b.tensors.__setitem__(1, b.tensors[1].clone())),
    "tensor of a list in place": on_block(lambda b: b.tensors[1].add_(1)),
    "nested dictionary": on_block(lambda b: b.nested["x"][1].update(y=3)),
    "key of a dictionary": on_block(lambda b: b.nested.update(w=b.nested.pop("z"))),
    "name of an attribute": on_block(lambda b: setattr(b, "last_attribute_renamed", vars(b).popitem()[1])),
    "dictionary cleared": on_block(lambda b: b.nested.clear()),
    "mode": on_block(lambda b: b.train()),
    "hook": on_block(lambda b: b.conv.register_forward_hook(lambda *_: None)),
    "hook before": on_block(lambda b: b.conv.register_forward_pre_hook(lambda *_: None)),
    "double": lambda m, _: m.double(),
    "storage": resize_storage,
}
# Changes of no effect on outputs, or of one that is not seen.
UNSEEN: dict[str, Callable[[nn.Module, Random], Any]] = {
    "equal number": on_block(lambda b: setattr(b, "scale", b.scale * 2 / 2)),
    "equal list": on_block(lambda b: setattr(b, "numbers", list(b.numbers))),
    "equal object": on_block(lambda b: setattr(b, "object", Equal(1))),
    "equal large number": on_block(lambda b: b.numbers.__setitem__(0, int("1000"))),
    "modes": lambda m, _: m.train().eval(),
    "gradients": lambda m, _: m.requires_grad_(False),
    "grad": on_block(lambda b: setattr(b.conv.weight, "grad", torch.ones_like(b.conv.weight))),
    "hook of the model": lambda m, _: m.register_forward_hook(lambda *_: None),
    "removed hook": on_block(lambda b: b.conv.register_forward_hook(lambda *_: None).remove()),
    "matrix written through data": on_block(lambda b: b.conv.weight.data.add_(1)),
}
CHANGES = SEEN | UNSEEN


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_change_is_seen(name: str, seed: int) -> None:
    random = Random(seed)
    model = build(random)
    snapshot = ModelSnapshot(model)
    assert snapshot.native is not None
    assert snapshot.native.matches()
    CHANGES[name](model, random)
    assert snapshot.is_current() == snapshot.is_equal() == (name in UNSEEN)
    assert not (snapshot.native.matches() and name in SEEN)


@pytest.mark.parametrize("seed", range(20))
def test_both_comparisons_agree_after_random_changes(seed: int) -> None:
    random = Random(100 + seed)
    model, changes = build(random), [*CHANGES.values(), *UNSEEN.values()]
    snapshot = ModelSnapshot(model)
    for _ in range(30):
        try:
            random.choice(changes)(model, random)
        except (AttributeError, IndexError, KeyError):  # what it changes is no longer there
            continue
        assert snapshot.is_current() == snapshot.is_equal()
        if not snapshot.is_equal():
            model.train().eval()
            for block in model.modules():
                block._forward_hooks.clear()
                block._forward_pre_hooks.clear()
            snapshot = ModelSnapshot(model)
            assert snapshot.is_current()


def test_an_equal_list_is_compared_by_value_from_then_on() -> None:
    model = build(Random(0))
    snapshot = ModelSnapshot(model)
    model[0].numbers = list(model[0].numbers)
    assert snapshot.is_current()
    model[0].numbers.append(1)
    assert not snapshot.is_current()


@pytest.mark.parametrize("name", ["resnet20", "vgg16_d", "densenet40"])
def test_networks_are_compared_natively(name: str) -> None:
    model = models.build(name).eval()
    snapshot = ModelSnapshot(model)
    assert snapshot.native is not None
    assert snapshot.native.matches()
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    assert not snapshot.native.matches()


def test_packed_layers_are_compared_natively() -> None:
    model = prune_unstructured(models.build("resnet20"), 0.9).eval()
    compressed = compress(model, torch.randn(1, 3, 32, 32), patience=0.1)
    snapshot = ModelSnapshot(compressed)
    assert snapshot.native is not None
    assert snapshot.native.matches()
    next(compressed.buffers()).add_(1)
    assert not snapshot.is_current()


@pytest.mark.parametrize("container", [{1, 2}, OrderedDict(a=1, b=2), UserDict(a=1)], ids=lambda c: type(c).__name__)
def test_containers_of_other_types(container: Any) -> None:
    model = build(Random(0))
    del model[-1]  # an OrderedDict from then on
    model[0].extra = [container]
    snapshot = ModelSnapshot(model)
    assert snapshot.native is not None
    assert snapshot.native.matches()
    if isinstance(container, set):
        container.add(3)
    elif isinstance(container, OrderedDict):
        container.move_to_end("a")
    else:
        model[0].extra[0] = UserDict(a=2)
    assert not snapshot.native.matches()
    assert not snapshot.is_current()


def test_modules_in_another_order() -> None:
    model = build(Random(0))
    del model[-1]
    snapshot = ModelSnapshot(model)
    assert snapshot.is_current()
    model._modules.move_to_end("0")
    assert not snapshot.is_current()


@pytest.mark.parametrize("other", [torch.ones(4)[::2], torch.ones(2).as_subclass(type("Other", (Tensor,), {}))])
def test_models_with_other_tensors_are_compared_by_value(other: Tensor) -> None:
    model = build(Random(0))
    model[0].missing = other
    snapshot = ModelSnapshot(model)
    assert snapshot.native is None
    assert snapshot.is_current()
    model[0].missing.data.add_(1)
    assert not snapshot.is_current()


@pytest.mark.parametrize("missing", ["load_functions", "find_functions", "find_handle_offset"])
def test_without_what_it_needs_the_comparison_is_by_value(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_snapshot, missing, lambda: None)
    model = build(Random(0))
    snapshot = ModelSnapshot(model)
    assert snapshot.native is None
    assert snapshot.is_current()
    model[0].scale = 5.0
    assert not snapshot.is_current()


def test_functions_that_are_missing_are_found_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_snapshot, "TORCH_FUNCTIONS", ("pomona_no_such_function",))
    assert native_snapshot.find_functions.__wrapped__() is None


def test_an_attribute_removed_from_the_end_of_what_is_compared() -> None:
    model = nn.Sequential(nn.ReLU())
    snapshot = ModelSnapshot(model)
    assert snapshot.native is not None
    assert snapshot.native.matches()
    del model[0].inplace
    assert not snapshot.native.matches()


def test_a_tensor_swapped_for_one_in_the_same_memory() -> None:
    """Its version may be read only of the tensor that had one: the address may be that of an inference tensor now."""
    model = build(Random(0))
    weight = model[0].norm.weight
    snapshot = ModelSnapshot(model)
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach()))
    assert snapshot.native is not None
    assert not snapshot.native.matches()
    assert not snapshot.native.has_same_tensors()


def test_tensors_can_be_swapped_while_there_is_a_snapshot() -> None:
    model = build(Random(0))
    snapshot = ModelSnapshot(model)
    first, second = model[0].norm.weight, nn.Parameter(torch.zeros(model[0].norm.num_features))
    torch.utils.swap_tensors(first, second)
    assert not snapshot.is_current()
    torch.utils.swap_tensors(first, second)
    assert snapshot.is_current()
