"""The engine's step with C kernels and pointers against plain PyTorch and copies: the same bits for every method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_helpers import Net, compute_loss, is_identical, make_adam, make_sgd, obeys_masks, train
from torch import nn

import pomona as pm
from pomona import masking
from pomona.core import guards
from pomona.native import step

pytestmark = pytest.mark.skipif(step.load_kernel("mask") is None, reason="needs the kernels")

METHODS: dict[str, Callable[[], pm.Pruner]] = {
    "dpf": lambda: pm.DPF(0.7, every=3),
    "dpf, weak bound": lambda: pm.DPF(0.9, every=3, feedback=0.3),
    "dpf printed": lambda: pm.DPF(0.7, every=3, printed=True),
    "dpf balanced": lambda: pm.DPF(0.5, every=3, pattern=pm.Balanced(4), include=["conv*.weight", "hidden.weight"]),
    "dpf filter": lambda: pm.DPF(0.5, every=3, pattern="filter"),
    "dpf power": lambda: pm.DPF(0.7, every=3, compressor=pm.PowerThreshold()),
    "dpf 4 bits": lambda: pm.DPF(0.7, every=3, compressor=pm.Quantize(4)),
    "dpf binary": lambda: pm.DPF(0.7, every=3, compressor=pm.Binary()),
    "incremental": lambda: pm.Incremental(0.7, every=3),
    "incremental filter": lambda: pm.Incremental(0.5, every=3, pattern="filter"),
    "rigl": lambda: pm.RigL(0.7, every=3),
    "set": lambda: pm.SET(0.7, every=3),
    "oneshot": lambda: pm.OneShot(0.7),
    "sparse momentum": lambda: pm.SparseMomentum(0.7, every=3),
    "sfp": lambda: pm.SFP(0.4, every=3),
    "snip": lambda: pm.SNIP(0.7),
}
OPTIMIZERS = {
    "sgd": make_sgd,
    "sgd fused": lambda model: make_sgd(model, fused=True),
    "adam foreach": lambda model: make_adam(model, foreach=True),
}


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for the small tensors of these networks, too."""
    monkeypatch.setattr(masking, "MIN_NATIVE_VALUES", 0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a function that opens a block in which there are no kernels and latents are copied."""

    def block() -> Any:
        patch = monkeypatch.context()

        class Plain:
            def __enter__(self) -> None:
                inside = patch.__enter__()
                inside.setattr(step, "load_kernel", lambda *_, **__: None)
                inside.setattr(guards, "moves_only_parameters", lambda _: False)

            def __exit__(self, *error: Any) -> None:
                patch.__exit__(*error)

        return Plain()

    return block


def start(pruner: pm.Pruner, make: Any = make_sgd, channels_last: bool = False) -> tuple[nn.Module, Any, pm.Pruner]:
    """Return a network in float32, its optimizer and the pruner attached to them."""
    model = Net().to(memory_format=torch.channels_last) if channels_last else Net()
    optimizer = make(model)
    pruner.attach(model, optimizer, total_steps=20, steps_per_epoch=3)
    return model, optimizer, pruner


def collect(model: nn.Module, optimizer: Any, pruner: pm.Pruner) -> list[Any]:
    """Return a copy of everything that a step changes."""
    gradients = [None if p.grad is None else p.grad for p in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), pruner.state_dict(), gradients])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_has_the_same_bits_without_kernels(name: str, optimizer: str, plain: Any) -> None:
    if name == "sparse momentum" and optimizer == "adam foreach":
        optimizer = "sgd"
    states = []
    for native in (True, False):
        if native:
            training = start(METHODS[name](), OPTIMIZERS[optimizer])
            train(*training[:2], range(9))
        else:
            with plain():
                training = start(METHODS[name](), OPTIMIZERS[optimizer])
                train(*training[:2], range(9))
        states.append(collect(*training))
    assert is_identical(*states)


@pytest.mark.parametrize("name", ["dpf", "dpf balanced", "incremental", "rigl"])
def test_other_memory_formats_have_the_same_bits_without_kernels(name: str, plain: Any) -> None:
    one = start(METHODS[name](), channels_last=True)
    train(*one[:2], range(7))
    with plain():
        other = start(METHODS[name](), channels_last=True)
        train(*other[:2], range(7))
    assert is_identical(collect(*one), collect(*other))


@pytest.mark.parametrize("name", ["edge popup", "iterand"])
def test_scores_have_the_same_bits_without_kernels(name: str, plain: Any) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
        optimizer = make_sgd(model)
        pruner = pm.EdgePopup(0.5) if name == "edge popup" else pm.IteRand(0.5, every=3)
        pruner.attach(model, optimizer, total_steps=20)
        for number in range(8):
            optimizer.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(number))
            model(x).square().sum().backward()
            optimizer.step()
        return collect(model, optimizer, pruner)

    native = run()
    with plain():
        assert is_identical(run(), native)


@pytest.mark.parametrize("first", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["dpf", "incremental", "rigl"])
def test_a_checkpoint_of_the_other_path_continues_with_the_same_bits(name: str, first: str, plain: Any) -> None:
    whole = start(METHODS[name]())
    train(*whole[:2], range(11))

    def save() -> list[Any]:
        begun = start(METHODS[name]())
        train(*begun[:2], range(5))
        return copy.deepcopy([part.state_dict() for part in begun])

    def continue_from(states: list[Any]) -> tuple[Any, ...]:
        model = Net(seed=3)
        optimizer = make_sgd(model)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        pruner = METHODS[name]().attach(model, optimizer, total_steps=20, steps_per_epoch=3)
        train(model, optimizer, range(5, 11))
        return model, optimizer, pruner

    if first == "torch":
        with plain():
            states = save()
        resumed = continue_from(states)
    else:
        states = save()
        with plain():
            resumed = continue_from(states)
    assert is_identical(resumed[0].state_dict(), whole[0].state_dict())
    assert is_identical(resumed[2].state_dict(), whole[2].state_dict())


@pytest.mark.parametrize("name", ["dpf", "incremental"])
def test_a_copied_training_continues_with_the_same_bits(name: str) -> None:
    training = start(METHODS[name]())
    train(*training[:2], range(4))
    copied = copy.deepcopy(training)
    train(*training[:2], range(4, 10))
    train(*copied[:2], range(4, 10))
    assert is_identical(collect(*copied), collect(*training))
    addresses = [{p.data_ptr() for p in model.parameters()} for model, _, _ in (training, copied)]
    assert not addresses[0] & addresses[1]


def test_two_models_are_trained_at_once() -> None:
    alone, one, other = (start(METHODS["dpf"]()) for _ in range(3))
    train(*alone[:2], range(7))
    for number in range(7):
        train(*one[:2], [number])
        train(*other[:2], [number])
    assert is_identical(collect(*one), collect(*alone))
    assert is_identical(collect(*other), collect(*alone))


# ---- parameters that point to their latents during a step


def test_a_parameter_keeps_its_memory_and_points_to_its_latent_during_a_step() -> None:
    model, optimizer, pruner = start(METHODS["dpf"]())
    own, seen = model.conv1.weight.data_ptr(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.conv1.weight.data_ptr()))
    alias = model.conv1.weight.data
    train(model, optimizer, range(5))
    assert set(seen) == {pruner.slots[0].latent.data_ptr()}
    assert model.conv1.weight.data_ptr() == own
    assert torch.equal(alias, model.conv1.weight)


def test_a_step_that_fails_gives_parameters_their_memory_back() -> None:
    model, optimizer, pruner = start(METHODS["dpf"](), make_adam)
    train(model, optimizer, range(4))
    own = [p.data_ptr() for p in model.parameters()]
    compute_loss(model, 4).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    # The second parameter's state is broken, so that the first has been moved when the step fails.
    optimizer.state[model.conv2.weight]["exp_avg"] = None
    with pytest.raises((TypeError, AttributeError)):
        optimizer.step()
    pruner.refresh()
    assert [p.data_ptr() for p in model.parameters()] == own
    assert obeys_masks(model, pruner)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert pruner.step == 4


def test_parameters_that_share_a_buffer_are_copied() -> None:
    model, reference = Net(), Net()
    flat = torch.cat([model.conv2.weight.data.flatten(), model.hidden.weight.data.flatten()])
    size = model.conv2.weight.numel()
    model.conv2.weight.data = flat[:size].view_as(model.conv2.weight)
    model.hidden.weight.data = flat[size:].view_as(model.hidden.weight)
    seen, trainings = [], []
    for net in (model, reference):
        optimizer = make_sgd(net)
        pruner = METHODS["dpf"]().attach(net, optimizer, total_steps=20, steps_per_epoch=3)
        trainings.append((net, optimizer, pruner))
    trainings[0][1].register_step_pre_hook(lambda *_: seen.append(model.conv2.weight.data_ptr()))
    for net, optimizer, _ in trainings:
        train(net, optimizer, range(7))
    assert set(seen) == {flat.data_ptr()}
    assert is_identical(*(collect(*training) for training in trainings))


def test_an_optimizer_of_another_library_is_given_copies() -> None:
    class Momentum(torch.optim.SGD):
        """SGD that may keep what it likes."""

    model = Net()
    assert guards.moves_only_parameters(torch.optim.SGD(model.parameters()))
    assert not guards.moves_only_parameters(Momentum(model.parameters()))
    shared = nn.Parameter(model.conv1.weight.data)
    assert not guards.moves_only_parameters(torch.optim.SGD([model.conv1.weight, shared]))


# ---- hard methods mask a gradient once


def test_a_gradient_is_masked_again_after_it_changed() -> None:
    model, optimizer, pruner = start(pm.OneShot(0.7))
    mask, weight = pruner.masks()["hidden.weight"], model.hidden.weight
    for change in ("in place", "replaced", "none"):
        optimizer.zero_grad()
        compute_loss(model, 0).backward()
        if change == "in place":
            weight.grad.add_(1)
        elif change == "replaced":
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert not optimizer.state[weight]["momentum_buffer"][~mask].any(), change
        assert not weight.grad[~mask].any(), change
