"""Optimizer variants: subclasses, wrappers, learning-rate schedulers, accelerate, Opacus, schedule-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    TOTAL,
    DecaysAfterStep,
    copy_latents,
    copy_state,
    ignore_warnings,
    make_closure,
    make_factory,
    make_hard,
    make_soft,
    soft_and_hard,
)
from engine_helpers import Net, attach_to_network, compute_loss, is_identical, make_sgd, obeys_masks, train
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import pomona as pm


@soft_and_hard
@pytest.mark.parametrize("with_closure", [False, True])
def test_only_the_outermost_step_counts(kind: Callable[..., pm.Pruner], with_closure: bool) -> None:
    make_factory(SGD)(Net())  # so that torch has hooked the inner step, too
    model, optimizer, pruner = attach_to_network(kind(), make=make_factory(DecaysAfterStep))
    dense = copy_latents(pruner).get("conv1.weight")
    for step in range(6):
        if with_closure:
            optimizer.step(make_closure(model, optimizer, step))
        else:
            train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
    assert pruner.step == 6
    if dense is not None:  # the decay after super().step() reached the dense weights off the mask
        off = ~pruner.masks()["conv1.weight"]
        assert (copy_latents(pruner)["conv1.weight"][off] != dense[off]).all()


class Lookahead(Optimizer):
    """An optimizer that steps another one and averages the weights with earlier ones every other step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.count % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))
        return loss


def make_lookahead(model: nn.Module) -> Optimizer:
    """Return a Lookahead optimizer around SGD."""
    return Lookahead(make_factory(SGD)(model))


@pytest.mark.parametrize("make", [make_factory(DecaysAfterStep), make_lookahead])
@pytest.mark.parametrize("with_closure", [False, True])
def test_zero_sparsity_is_dense_training_for_every_optimizer(make: Any, with_closure: bool) -> None:
    """A soft method at sparsity 0 gives the same bits as dense training."""
    make_factory(SGD)(Net())
    model, optimizer, pruner = attach_to_network(make_soft(sparsity=0.0), make=make)
    for step in range(6):
        if with_closure:
            optimizer.step(make_closure(model, optimizer, step))
        else:
            train(model, optimizer, [step])
    plain = Net().double()
    train(plain, make(plain), range(6))
    assert pruner.step == 6
    assert is_identical(model.state_dict(), plain.state_dict())


@soft_and_hard
def test_an_optimizer_that_wraps_another_one(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=make_lookahead)
    for step in range(6):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
    assert pruner.step == 6


@soft_and_hard
@pytest.mark.parametrize("cls", [SGD, DecaysAfterStep])
@pytest.mark.parametrize("first", [False, True])
def test_learning_rate_schedulers_may_wrap_the_step_before_or_after_attach(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], first: bool
) -> None:
    make_factory(SGD)(Net())
    model = Net().double()
    optimizer = make_factory(cls)(model)
    pruner = kind()
    if not first:
        pruner.attach(model, optimizer, total_steps=TOTAL)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if first:
        pruner.attach(model, optimizer, total_steps=TOTAL)
    for step in range(6):
        train(model, optimizer, [step])
        scheduler.step()
        assert obeys_masks(model, pruner)
    assert pruner.step == 6
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)


@soft_and_hard
def test_accelerate_optimizers_are_unwrapped(kind: Callable[..., pm.Pruner]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net().double()
    model, optimizer = accelerator.prepare(model, make_sgd(model))
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    plain = attach_to_network(kind())
    for step in range(10):
        optimizer.zero_grad()
        accelerator.backward(compute_loss(model, step))
        optimizer.step()
    train(*plain[:2], range(10))
    assert pruner.step == 10
    assert is_identical(copy_state(pruner), copy_state(plain[2]))
    assert "pomona" in optimizer.state_dict()


@soft_and_hard
@pytest.mark.filterwarnings("ignore")
def test_opacus_optimizers_are_unwrapped(kind: Callable[..., pm.Pruner]) -> None:
    opacus = pytest.importorskip("opacus")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    data = torch.utils.data.TensorDataset(torch.randn(16, 6).double(), torch.randint(2, (16,)))
    private, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    pruner = kind(every=2).attach(private, optimizer, total_steps=8)
    assert list(pruner.masks()) == ["0.weight", "2.weight"]
    for _ in range(3):
        for x, y in loader:
            assert obeys_masks(model, pruner)
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
    assert pruner.step == 6
    assert obeys_masks(model, pruner)
    with ignore_warnings():
        pruner.finish()


def test_schedule_free_is_refused_for_soft_and_works_for_hard_methods() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    model = Net().double()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(pm.PomonaError, match=r"train\(\) and eval\(\)"):
        make_soft().attach(model, optimizer, total_steps=TOTAL)
    optimizer.train()
    pruner = make_hard(schedule="cubic").attach(model, optimizer, total_steps=TOTAL)
    for step in range(TOTAL):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
        optimizer.eval()
        assert obeys_masks(model, pruner)
        optimizer.train()
    pruner.finish()
    optimizer.eval()
    assert obeys_masks(model, pruner)
