"""Every trap of the engine: what works, works; what cannot is refused."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_helpers import (
    TARGETS,
    Net,
    attach_to_network,
    compute_loss,
    count_global_hooks,
    count_hooks,
    is_identical,
    make_adam,
    make_sgd,
    obeys_masks,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel

import pomona as pm
from pomona.masking import apply_mask

TOTAL = 40


def soft(**options: Any) -> pm.Pruner:
    return pm.DPF(**{"sparsity": 0.8, "every": 4, "schedule": "constant", **options})


def hard(**options: Any) -> pm.Pruner:
    return pm.Incremental(**{"sparsity": 0.8, "every": 4, "schedule": "constant", **options})


both = pytest.mark.parametrize("kind", [soft, hard])


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def latents(pruner: pm.Pruner) -> dict[str, Tensor]:
    return copy.deepcopy(pruner.state_dict()["latents"])


def untouched(pruner: pm.Pruner) -> dict[str, Any]:
    """All that a step moves."""
    return copy.deepcopy({"state": pruner.state_dict(), "model": pruner.model.state_dict()})


# ---- projection and gradients


def test_projection_makes_no_negative_zero_and_no_nan() -> None:
    values = torch.tensor([-1.0, torch.inf, -torch.inf, torch.nan, 2.0])
    mask = torch.tensor([False, False, False, False, True])
    apply_mask(values, mask, values)
    assert values.tolist() == [0, 0, 0, 0, 2]
    assert not values.signbit().any()


def test_soft_methods_leave_the_dense_gradient() -> None:
    model, optimizer, pruner = attach_to_network(soft())
    compute_loss(model, 0).backward()
    gradient = model.conv1.weight.grad
    before = gradient.clone()
    assert before[~pruner.masks()["conv1.weight"]].any()
    optimizer.step()
    assert model.conv1.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_pruned_filters_of_a_soft_method_keep_learning() -> None:
    model, _, pruner = attach_to_network(soft(pattern=pm.Filter(), sparsity=0.5))
    compute_loss(model, 0).backward()
    for name, mask in pruner.masks().items():
        gone = ~mask.flatten(1).any(1)
        assert gone.any()
        assert model.get_parameter(name).grad[gone].any(), f"nothing reaches the pruned filters of {name}"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "make", [soft, hard, lambda **o: pm.SFP(**o, every=4), lambda **o: pm.DPF(**o, every=4, settle=0.0)]
)
def test_a_removed_filter_leaks_nothing_after_finish(make: Callable[..., pm.Pruner], early: bool) -> None:
    model, optimizer, pruner = attach_to_network(
        make(pattern=pm.Filter(), sparsity=0.5, allocation="uniform"), total=16
    )
    train(model, optimizer, range(6 if early else 16))
    with silence():
        pruner.finish()
    gone = ~pruner.masks()["conv1.weight"].flatten(1).any(1)
    assert gone.any()
    for vector in (model.conv1.bias, model.norm.weight, model.norm.bias):
        assert not vector[gone].any()
        assert vector[~gone].any()


def test_a_compressor_leaves_biases_and_norms_alone() -> None:
    options = {"pattern": pm.Filter(), "sparsity": 0.5, "allocation": "uniform", "compressor": pm.Binary()}
    model, optimizer, pruner = attach_to_network(soft(**options), total=16)
    train(model, optimizer, range(16))
    pruner.finish()
    assert set(model.conv1.weight.unique().tolist()) == {-1, 0, 1}
    assert not set(model.norm.weight.tolist()) <= {-1, 0, 1}
    assert not set(model.conv1.bias.tolist()) <= {-1, 0, 1}


def test_hard_methods_mask_the_gradient_before_clipping_sees_it() -> None:
    model, optimizer, pruner = attach_to_network(hard())
    compute_loss(model, 0).backward()
    compute_loss(model, 1).backward()  # accumulated
    for name, mask in pruner.masks().items():
        gradient = model.get_parameter(name).grad
        assert not gradient[~mask].any()
        assert gradient[mask].any()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    kept = [p.grad[p != 0] if n in TARGETS else p.grad for n, p in model.named_parameters()]
    assert norm > 0.1
    assert torch.stack([g.square().sum() for g in kept]).sum().sqrt() == pytest.approx(0.1, rel=1e-4)
    optimizer.step()
    assert obeys_masks(model, pruner)


def test_hard_methods_mask_a_gradient_that_was_set_by_hand() -> None:
    model, optimizer, pruner = attach_to_network(hard())
    model.conv1.weight.grad = torch.ones_like(model.conv1.weight)
    optimizer.step()
    assert obeys_masks(model, pruner)
    assert not optimizer.state[model.conv1.weight]["momentum_buffer"][~pruner.masks()["conv1.weight"]].any()


@both
def test_gradient_accumulation_is_one_step_on_sparse_weights(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    for step in range(8):
        assert obeys_masks(model, pruner)
        (compute_loss(model, step) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert pruner.step == 2


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_no_momentum_off_the_mask_of_a_hard_method(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    train(model, optimizer, range(3))
    pruner = hard(schedule="cubic").attach(model, optimizer, total_steps=TOTAL)

    def clean() -> bool:
        return all(
            not value[~mask].any()
            for name, mask in pruner.masks().items()
            for value in optimizer.state[model.get_parameter(name)].values()
            if value.ndim
        )

    assert clean()
    for step in range(12):
        train(model, optimizer, [step])
        assert clean()
    assert pruner.sparsity() > 0.3


def test_attach_with_a_cut_clears_old_momentum() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    train(model, optimizer, range(3))
    pruner = pm.OneShot(sparsity=0.5).attach(model, optimizer)
    momentum = optimizer.state[model.conv1.weight]["momentum_buffer"]
    assert not momentum[~pruner.masks()["conv1.weight"]].any()
    assert momentum[pruner.masks()["conv1.weight"]].all()


# ---- closures


def closure_of(
    model: nn.Module, optimizer: Optimizer, step: int, seen: list[Any] | None = None
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute_loss(model, step)
        loss.backward()
        if seen is not None:
            seen.append(copy.deepcopy(model.state_dict()))
        return loss

    return closure


@both
@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_a_closure_runs_once_on_sparse_weights(kind: Callable[..., pm.Pruner], style: str) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    plain = attach_to_network(kind())
    for step in range(10):
        seen: list[Any] = []
        closure = closure_of(model, optimizer, step, seen)
        loss = optimizer.step(closure) if style == "positional" else optimizer.step(closure=closure)
        assert loss.item() > 0
        assert len(seen) == 1
        assert torch.equal(seen[0]["conv1.weight"], plain[0].conv1.weight)
        train(*plain[:2], [step])
    assert is_identical(untouched(pruner), untouched(plain[2]))
    assert pruner.step == 10


class Twice(SGD):
    """Calls its closure a second time, after it has moved the weights."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        closure()
        return loss


class Never(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Sam(SGD):
    """Climbs before it calls its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01)
        return super().step(closure)


def make_as(cls: type[Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda model: cls(model.parameters(), lr=0.05, momentum=0.9)  # type: ignore[call-arg]


@both
@pytest.mark.parametrize(
    ("cls", "message"), [(Twice, "called its closure twice"), (Never, "did not call it"), (Sam, "moved the weights")]
)
def test_optimizers_that_misuse_their_closure_are_refused(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], message: str
) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=make_as(cls))
    dense = latents(pruner)
    with pytest.raises(pm.PomonaError, match=message):
        optimizer.step(closure_of(model, optimizer, 0))
    assert pruner.step == 0
    assert is_identical(latents(pruner), dense)
    with silence():
        pruner.refresh()
    assert obeys_masks(model, pruner)
    if cls is not Sam:
        assert is_identical(latents(pruner), dense)


def test_a_refused_climb_costs_no_dense_weights() -> None:
    model, optimizer, pruner = attach_to_network(soft(), make=make_as(Sam))
    dense = latents(pruner)
    with pytest.raises(pm.PomonaError, match="moved the weights"):
        optimizer.step(closure_of(model, optimizer, 0))
    with silence():
        pruner.refresh()
    assert is_identical(latents(pruner), dense)


@both
def test_lbfgs_is_refused_at_attach(kind: Callable[..., pm.Pruner]) -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match="LBFGS calls its closure several times"):
        kind().attach(model, torch.optim.LBFGS(model.parameters()), total_steps=TOTAL)


class Breaks(SGD):
    """Dies in the middle of a step, if told to."""

    broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.broken:
            self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("out of memory")
        return super().step(closure)


@both
@pytest.mark.parametrize("where", ["step", "closure", "closure's end"])
@pytest.mark.parametrize("then", ["refresh", "step", "finish", "save"])
def test_an_exception_leaves_the_engine_whole(kind: Callable[..., pm.Pruner], where: str, then: str) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=make_as(Breaks))
    train(model, optimizer, range(5))
    dense = latents(pruner)

    def closure() -> Tensor:
        if where == "closure":
            raise RuntimeError("out of memory")
        loss = closure_of(model, optimizer, 5)()
        if where == "closure's end":
            raise RuntimeError("out of memory")
        return loss

    optimizer.broken = where == "step"
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(*[closure] * (where != "step"))
    optimizer.broken = False
    assert pruner.step == 5
    assert is_identical(latents(pruner), dense)
    if then == "refresh":
        pruner.refresh()
    elif then == "step":
        train(model, optimizer, [5])
        assert pruner.step == 6
    elif then == "finish":
        pruner.finish()
    elif then == "save":
        state = copy.deepcopy(pruner.state_dict())
        pruner.load_state_dict(state)
    assert obeys_masks(model, pruner)
    assert then == "step" or then == "finish" or is_identical(latents(pruner), dense)


def test_a_broken_step_is_taken_back_for_soft_methods() -> None:
    model, optimizer, pruner = attach_to_network(soft(), make=make_as(Breaks))
    before = untouched(pruner)
    optimizer.broken = True
    compute_loss(model, 0).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    pruner.refresh()
    after = untouched(pruner)
    assert is_identical({k: after["model"][k] for k in TARGETS}, {k: before["model"][k] for k in TARGETS})
    assert is_identical(after["state"], before["state"])


# ---- optimizers of all kinds


class Sub(SGD):
    """A subclass that goes on after super().step()."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.999)
        return loss


@both
@pytest.mark.parametrize("with_closure", [False, True])
def test_only_the_outermost_step_counts(kind: Callable[..., pm.Pruner], with_closure: bool) -> None:
    make_as(SGD)(Net())  # so that torch has hooked the inner step, too
    model, optimizer, pruner = attach_to_network(kind(), make=make_as(Sub))
    dense = latents(pruner).get("conv1.weight")
    for step in range(6):
        if with_closure:
            optimizer.step(closure_of(model, optimizer, step))
        else:
            train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
    assert pruner.step == 6
    if dense is not None:  # the decay after super().step() reached the dense weights off the mask
        off = ~pruner.masks()["conv1.weight"]
        assert (latents(pruner)["conv1.weight"][off] != dense[off]).all()


class Lookahead(Optimizer):
    """Steps an optimizer of its own, and pulls the weights back every other step."""

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


def looking_ahead(model: nn.Module) -> Optimizer:
    return Lookahead(make_as(SGD)(model))


@pytest.mark.parametrize("make", [make_as(Sub), looking_ahead])
@pytest.mark.parametrize("with_closure", [False, True])
def test_the_engine_sees_what_a_subclass_does_as_the_optimizer_would(make: Any, with_closure: bool) -> None:
    """A soft method that keeps everything is the dense training, to the bit, whatever the optimizer."""
    make_as(SGD)(Net())
    model, optimizer, pruner = attach_to_network(soft(sparsity=0.0), make=make)
    for step in range(6):
        if with_closure:
            optimizer.step(closure_of(model, optimizer, step))
        else:
            train(model, optimizer, [step])
    plain = Net().double()
    train(plain, make(plain), range(6))
    assert pruner.step == 6
    assert is_identical(model.state_dict(), plain.state_dict())


@both
def test_an_optimizer_that_steps_another_one(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=looking_ahead)
    for step in range(6):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
    assert pruner.step == 6


@both
@pytest.mark.parametrize("cls", [SGD, Sub])
@pytest.mark.parametrize("first", [False, True])
def test_learning_rate_schedulers_wrap_the_step(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], first: bool
) -> None:
    make_as(SGD)(Net())
    model = Net().double()
    optimizer = make_as(cls)(model)
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


@both
def test_several_optimizers_make_one_round(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    first = SGD(model.conv1.parameters(), lr=0.1, momentum=0.9)
    rest = [p for n, p in model.named_parameters() if not n.startswith("conv1")]
    second = Adam(rest, lr=0.01)
    pruner = kind(schedule="cubic").attach(model, [first, second], total_steps=TOTAL)
    for step in range(5):
        model.zero_grad()
        compute_loss(model, step).backward()
        before = copy.deepcopy(model.state_dict())
        first.step()
        assert pruner.step == step
        assert torch.equal(model.conv2.weight, before["conv2.weight"])
        assert obeys_masks(model, pruner)
        second.step()
        assert pruner.step == step + 1
        assert obeys_masks(model, pruner)
    assert [record["step"] for record in pruner.history] == [0, 4]


@both
def test_a_parameter_without_gradient_is_not_touched(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before, dense = model.conv2.weight.clone(), latents(pruner).get("conv2.weight")
    version = model.conv2.weight._version
    compute_loss(model, 0).backward()
    model.conv2.weight.grad = None
    optimizer.step()
    assert model.conv2.weight._version == version
    assert torch.equal(model.conv2.weight, before)
    assert dense is None or torch.equal(latents(pruner)["conv2.weight"], dense)
    assert pruner.step == 1


@both
def test_accelerate_optimizer(kind: Callable[..., pm.Pruner]) -> None:
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
    assert is_identical(untouched(pruner), untouched(plain[2]))
    assert "pomona" in optimizer.state_dict()


@both
@pytest.mark.filterwarnings("ignore")
def test_opacus_optimizer(kind: Callable[..., pm.Pruner]) -> None:
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
    with silence():
        pruner.finish()


def test_schedule_free_is_refused_for_soft_and_fine_for_hard() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    model = Net().double()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(pm.PomonaError, match=r"train\(\) and eval\(\)"):
        soft().attach(model, optimizer, total_steps=TOTAL)
    optimizer.train()
    pruner = hard(schedule="cubic").attach(model, optimizer, total_steps=TOTAL)
    for step in range(TOTAL):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
        optimizer.eval()
        assert obeys_masks(model, pruner)
        optimizer.train()
    pruner.finish()
    optimizer.eval()
    assert obeys_masks(model, pruner)


# ---- mixed precision


@both
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [SGD, Adam])
def test_a_step_that_grad_scaler_skips_is_no_step(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], fused: bool
) -> None:
    def make(model: nn.Module) -> Optimizer:
        return cls(model.parameters(), lr=0.05, fused=fused)  # type: ignore[call-arg]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"), make=make)
    plain = attach_to_network(kind(schedule="cubic"), make=make)

    def step(at: int, overflow: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, at)).backward()
        if overflow:
            model.head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    for at in range(7):
        before = copy.deepcopy((dict(model.named_parameters()), pruner.state_dict()))
        step(at, overflow=True)
        assert is_identical((dict(model.named_parameters()), pruner.state_dict()), before)
        model.load_state_dict(plain[0].state_dict())  # the skipped forward moved the batch norm
        step(at, overflow=False)
        train(*plain[:2], [at])
    assert pruner.step == 7
    assert is_identical(pruner.masks(), plain[2].masks())
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)


@both
def test_autocast(kind: Callable[..., pm.Pruner]) -> None:
    model = Net()
    optimizer = make_sgd(model)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(model, step)
        loss.backward()
        optimizer.step()
    assert obeys_masks(model, pruner)


@both
def test_half_precision_weights_have_a_finite_delta(kind: Callable[..., pm.Pruner]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).to(torch.float16)
    with torch.no_grad():
        model[0].weight.fill_(8.0)  # its norm is 512, the square of which float16 does not hold
    pruner = kind(sparsity=0.5).attach(model, SGD(model.parameters(), lr=0.1), total_steps=TOTAL)
    assert pruner.history[0]["delta"] == pytest.approx(0.5)


# ---- torch.compile


@both
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_pruned(kind: Callable[..., pm.Pruner], backend: str) -> None:
    torch._dynamo.reset()
    model = Net().double()
    compiled = torch.compile(model, backend=backend)
    optimizer = make_sgd(model)
    pruner = kind().attach(compiled, optimizer, total_steps=TOTAL)
    assert tuple(pruner.masks()) == TARGETS
    plain = attach_to_network(kind())
    train(compiled, optimizer, range(6))
    train(*plain[:2], range(6))
    assert pruner.step == 6
    assert obeys_masks(model, pruner)
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)


@both
@pytest.mark.parametrize("cls", [SGD, Sub])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_steps_still_fire_the_hooks(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], backend: str
) -> None:
    torch._dynamo.reset()
    make_as(SGD)(Net())
    model, optimizer, pruner = attach_to_network(kind(), make=make_as(cls))
    plain = attach_to_network(kind(), make=make_as(cls))

    @torch.compile(backend=backend)
    def step(at: int) -> None:
        optimizer.step()

    for at in range(6):
        optimizer.zero_grad()
        compute_loss(model, at).backward()
        step(at)
        assert obeys_masks(model, pruner)
    train(*plain[:2], range(6))
    assert pruner.step == 6
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)


# ---- the user changes weights


def test_edited_weights_become_the_latent_with_a_warning() -> None:
    model, optimizer, pruner = attach_to_network(soft())
    train(model, optimizer, range(2))
    other = Net(seed=5).double()
    model.load_state_dict(other.state_dict())
    optimizer.zero_grad()
    compute_loss(model, 0).backward()
    with pytest.warns(UserWarning, match="was changed between two steps") as caught:
        optimizer.step()
    assert [str(w.message).split()[0] for w in caught] == list(TARGETS)
    assert obeys_masks(model, pruner)
    off = ~pruner.masks()["conv1.weight"]
    moved = (latents(pruner)["conv1.weight"] - other.conv1.weight).abs()
    assert moved[off].max() < 0.1, "the latents are still the old ones"
    train(model, optimizer, [3])  # and no second warning


def test_edits_of_a_hard_model_are_masked_again() -> None:
    model, optimizer, pruner = attach_to_network(hard())
    model.load_state_dict(Net(seed=5).double().state_dict())
    compute_loss(model, 0).backward()
    with pytest.warns(UserWarning, match="was changed between two steps"):
        optimizer.step()
    assert obeys_masks(model, pruner)


@both
def test_loading_the_same_sparse_weights_is_no_edit(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before = latents(pruner)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    pruner.refresh()
    assert is_identical(latents(pruner), before)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, [0])  # a warning would fail the test


@both
def test_refresh_projects_loaded_weights_at_once(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    other = Net(seed=5).double()
    model.load_state_dict(other.state_dict())
    pruner.refresh()
    mask = pruner.masks()["conv2.weight"]
    assert obeys_masks(model, pruner)
    assert torch.equal(model.conv2.weight[mask], other.conv2.weight[mask])
    if kind is soft:
        assert torch.equal(latents(pruner)["conv2.weight"], other.conv2.weight)
    train(model, optimizer, [0])  # nothing left to warn of


@both
def test_finish_keeps_weights_that_were_loaded_before_it(kind: Callable[..., pm.Pruner]) -> None:
    """Load the best checkpoint, then finish: what is saved must be the best, not the last."""
    model, optimizer, pruner = attach_to_network(kind(), total=8)
    train(model, optimizer, range(8))
    best = {k: v.clone() if k not in TARGETS else v * 2 for k, v in model.state_dict().items()}
    model.load_state_dict(best)
    with silence():
        pruner.finish()
    assert is_identical(model.state_dict(), best)


@both
def test_replaced_parameters_are_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, _ = attach_to_network(kind())
    train(model, optimizer, range(2))
    model.load_state_dict(Net(seed=5).double().state_dict(), assign=True)
    optimizer.zero_grad()
    compute_loss(model, 0).backward()
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is in no attached optimizer"):
        optimizer.step()


@both
def test_replaced_parameters_that_the_optimizer_took_over_are_followed(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    train(model, optimizer, range(2))
    old = dict(model.named_parameters())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    new = {id(old[name]): parameter for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    train(model, optimizer, range(2, 7))
    assert pruner.step == 7
    assert obeys_masks(model, pruner)
    if kind is hard:
        compute_loss(model, 0).backward()
        assert not model.conv1.weight.grad[~pruner.masks()["conv1.weight"]].any(), "clipping sees the raw gradient"


@both
def test_a_rebuilt_optimizer_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, _, _ = attach_to_network(kind())
    rebuilt = make_sgd(model)
    compute_loss(model, 0).backward()
    with pytest.raises(pm.PomonaError, match="optimizer"):
        rebuilt.step()


@both
def test_a_rebuilt_optimizer_is_fine_after_finish(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(), total=4)
    train(model, optimizer, range(4))
    pruner.finish()
    train(model, make_sgd(model), range(2))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_changes_its_type_is_followed(kind: Callable[..., pm.Pruner], dtype: torch.dtype) -> None:
    model = Net().to(torch.float64 if dtype == torch.float32 else torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    pruner = kind(schedule="cubic").attach(model, optimizer, total_steps=16)
    train(model, optimizer, range(2))
    model.to(dtype)
    train(model, optimizer, range(2, 16))
    assert model.conv1.weight.dtype == dtype
    assert all(value.dtype == dtype for value in latents(pruner).values())
    assert obeys_masks(model, pruner)
    pruner.finish()
    assert obeys_masks(model, pruner)


@both
@pytest.mark.parametrize("pattern", [pm.Unstructured(), pm.Filter()])
def test_weights_of_several_types_are_ranked_together(kind: Callable[..., pm.Pruner], pattern: Any) -> None:
    model = Net()
    model.conv1.to(torch.bfloat16)
    model.hidden.double()
    weights = torch.cat([model.get_parameter(name).detach().double().abs().flatten() for name in TARGETS])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = kind(pattern=pattern, sparsity=0.75).attach(model, optimizer, total_steps=16)
    if pattern == pm.Unstructured():
        kept = torch.cat([mask.flatten() for mask in pruner.masks().values()])
        assert weights[kept].min() >= weights[~kept].max()
    for _ in range(16):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for name, mask in pruner.masks().items():
            assert not model.get_parameter(name)[~mask].any()
    assert pruner.sparsity() == pytest.approx(0.75, abs=0.03)
    assert 0 <= pruner.history[-1]["delta"] < 1
    pruner.finish()


@both
def test_moving_a_model_keeps_its_masks(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    before = untouched(pruner)
    model.to("cpu", memory_format=torch.channels_last)
    assert is_identical(untouched(pruner), before)
    train(model, optimizer, range(6))
    assert obeys_masks(model, pruner)


# ---- what is pruned


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.two(F.relu(self.one(x)))))


@both
def test_a_tied_tensor_is_one_target(kind: Callable[..., pm.Pruner]) -> None:
    model = Tied()
    optimizer = make_sgd(model)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    assert list(pruner.masks()) == ["one.weight"]
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    assert obeys_masks(model, pruner)
    assert model.one.weight is model.two.weight
    assert pruner.sparsity() == round(0.8 * 36) / 36


@both
def test_apply_projects_an_average_of_weights(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    average = AveragedModel(model)
    for step in range(20):
        train(model, optimizer, [step])
        average.update_parameters(model)
    mask = pruner.masks()["conv1.weight"]
    assert average.module.conv1.weight[~mask].any()
    before = average.module.conv1.weight.clone()
    pruner.apply(average)
    assert obeys_masks(average.module, pruner)
    assert torch.equal(average.module.conv1.weight[mask], before[mask])
    plain = copy.deepcopy(model)
    plain.load_state_dict(Net(seed=3).state_dict())
    pruner.apply(plain)
    assert obeys_masks(plain, pruner)
    assert obeys_masks(model, pruner)


def test_apply_compresses_weights_and_leaves_biases_and_norms_alone() -> None:
    model, optimizer, pruner = attach_to_network(soft(pattern=pm.Filter(), sparsity=0.5, compressor=pm.Binary()))
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    twin.load_state_dict(Net(seed=3).state_dict())
    before = copy.deepcopy(twin.state_dict())
    pruner.apply(twin)
    assert set(twin.hidden.weight.unique().tolist()) <= {-1, 0, 1}
    for name in ("conv1.bias", "norm.weight", "hidden.bias"):  # nothing of them has fallen yet
        assert torch.equal(twin.state_dict()[name], before[name])


def test_apply_refuses_another_model_and_a_pruner_without_masks() -> None:
    _, _, pruner = attach_to_network(soft())
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is missing"):
        pruner.apply(other)
    with pytest.raises(pm.PomonaError, match="not attached"):
        soft().apply(Net())


# ---- attach, twice and otherwise


@both
def test_two_pruners_may_share_an_optimizer_not_a_parameter(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    one = kind(include="conv*").attach(model, optimizer, total_steps=TOTAL)
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is pruned by another pruner"):
        kind().attach(model, optimizer, total_steps=TOTAL)
    two = soft(include="hidden", sparsity=0.5).attach(model, optimizer, total_steps=TOTAL)
    for step in range(TOTAL):
        if step % 2:
            train(model, optimizer, [step])
        else:
            optimizer.step(closure_of(model, optimizer, step))
        assert obeys_masks(model, one)
        assert obeys_masks(model, two)
    assert (one.step, two.step) == (TOTAL, TOTAL)
    state = copy.deepcopy(optimizer.state_dict())
    for slot in (*one.slots, *two.slots):
        slot.mask.fill_(True)
    optimizer.load_state_dict(state)
    assert one.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert two.sparsity() == pytest.approx(0.5, abs=1e-3)


def test_the_states_of_two_pruners_never_mix() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    one, two, three = (soft(include=name) for name in TARGETS)
    one.attach(model, optimizer, total_steps=TOTAL)
    two.attach(model, optimizer, total_steps=TOTAL)
    one.finish()
    three.attach(model, optimizer, total_steps=TOTAL)
    state = optimizer.state_dict()
    carried = [set(v["masks"]) for k, v in state.items() if k.startswith("pomona")]
    assert sorted(carried, key=str) == [{"conv2.weight"}, {"hidden.weight"}]
    optimizer.load_state_dict(copy.deepcopy(state))


@both
def test_attach_twice_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    with pytest.raises(pm.PomonaError, match="attached already"):
        pruner.attach(model, optimizer, total_steps=TOTAL)
    with silence():
        pruner.finish()
    with pytest.raises(pm.PomonaError, match="finished: make a new one"):
        pruner.attach(model, optimizer, total_steps=TOTAL)


def spoil(model: Net, value: float) -> None:
    with torch.no_grad():
        model.hidden.weight[0, 0] = value


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_without_a_magnitude_are_refused(kind: Callable[..., pm.Pruner], value: float) -> None:
    model = Net()
    spoil(model, value)
    with pytest.raises(pm.PomonaError, match=r"hidden\.weight holds NaN or inf"):
        kind().attach(model, make_sgd(model), total_steps=TOTAL)


def bad_attaches() -> dict[str, tuple[Callable[[Net, Optimizer], Any], str]]:
    return {
        "nan": (lambda m, o: (spoil(m, torch.nan), soft().attach(m, o, total_steps=9)), "NaN"),
        "no steps": (lambda m, o: soft().attach(m, o), "needs total_steps"),
        "steps": (lambda m, o: soft().attach(m, o, total_steps=0), "got 0"),
        "glob": (lambda m, o: soft(exclude="conv3").attach(m, o, total_steps=9), "did you mean 'conv"),
        "shape": (
            lambda m, o: soft(pattern=pm.NM(5, 8), sparsity=None).attach(m, o, total_steps=9),
            "groups of 8 do not divide",
        ),
        "nothing": (lambda m, o: soft(exclude="*").attach(m, o, total_steps=9), "nothing to prune"),
        "optimizer": (lambda m, o: soft().attach(m, SGD([m.head.weight]), total_steps=9), "in no attached optimizer"),
        "no optimizer": (lambda m, o: soft().attach(m, 3, total_steps=9), "needs a torch.optim.Optimizer, got int"),
        "epochs": (lambda m, o: soft().attach(m, o, total_steps=9, steps_per_epoch=-1), "steps_per_epoch"),
    }


@pytest.mark.parametrize("case", bad_attaches())
def test_where_attach_raises_nothing_is_changed(case: str) -> None:
    act, message = bad_attaches()[case]
    model = Net()
    optimizer = make_sgd(model)
    train(model, optimizer, range(2))
    before = count_hooks(model, optimizer)
    weights = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(pm.PomonaError, match=message):
        act(model, optimizer)
    assert count_hooks(model, optimizer) == before
    weights[0]["hidden.weight"][0, 0] = model.hidden.weight[0, 0].detach()
    assert case == "nan" or is_identical((model.state_dict(), optimizer.state_dict()), weights)
    spoil(model, 0.1)
    soft().attach(model, optimizer, total_steps=9)


def test_a_method_that_fails_at_attach_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = make_sgd(model)
    before, weights = (count_hooks(model, optimizer), count_global_hooks()), copy.deepcopy(model.state_dict())
    pruner = hard()

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(pruner.method), "update", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            pruner.attach(model, optimizer, total_steps=TOTAL)
    assert (count_hooks(model, optimizer), count_global_hooks()) == before
    assert is_identical(model.state_dict(), weights)
    pruner.attach(model, optimizer, total_steps=TOTAL)


@both
def test_frozen_parameters_are_pruned_and_not_trained(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    model.conv1.weight.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pruner = kind(allocation="uniform").attach(model, optimizer, total_steps=TOTAL)
    before = model.conv1.weight.clone()
    train(model, optimizer, range(6))
    assert obeys_masks(model, pruner)
    assert torch.equal(model.conv1.weight, before)
    model.conv1.weight.requires_grad_(True)  # thawed, and given to the optimizer
    optimizer.add_param_group({"params": [model.conv1.weight]})
    train(model, optimizer, range(6, 12))
    assert obeys_masks(model, pruner)
    assert not torch.equal(model.conv1.weight, before)


@both
def test_empty_and_added_groups(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, range(3))
    assert obeys_masks(model, pruner)
    assert pruner.step == 3


# ---- the end


@both
def test_finish_before_the_end_warns_and_cuts(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    train(model, optimizer, range(5))
    assert pruner.sparsity() < 0.8
    with pytest.warns(UserWarning, match="finish.. came at step 5 of 40"):
        pruner.finish()
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert obeys_masks(model, pruner)
    pruner.finish()  # twice is fine


def test_after_finish_only_the_masks_are_left() -> None:
    model, optimizer, pruner = attach_to_network(soft(), total=4)
    with pytest.raises(pm.PomonaError, match="not attached"):
        soft().finish()
    train(model, optimizer, range(4))
    pruner.finish()
    for act in (pruner.tick, pruner.refresh, lambda: pruner.load_state_dict({})):
        with pytest.raises(pm.PomonaError, match="finished"):
            act()
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)
    train(model, optimizer, range(2))
    assert not obeys_masks(model, pruner)


@both
@pytest.mark.parametrize("stepped", [False, True])
def test_a_pruner_that_is_dropped_unfinished_holds_nothing(kind: Callable[..., pm.Pruner], stepped: bool) -> None:
    before = count_global_hooks()
    model, optimizer, pruner = attach_to_network(kind())
    if stepped:
        train(model, optimizer, range(2))
    watch = weakref.ref(model), weakref.ref(pruner), weakref.ref(model.conv1.weight)
    del model, optimizer, pruner
    gc.collect()
    assert [ref() for ref in watch] == [None, None, None]
    assert count_global_hooks() == before


def test_tick_counts_and_updates() -> None:
    _, _, pruner = attach_to_network(soft())
    for _ in range(4):
        pruner.tick()
    assert pruner.step == 4
    assert [record["step"] for record in pruner.history] == [0, 4]


# ---- states of other models


def shrunk() -> Net:
    model = Net()
    model.hidden, model.head = nn.Linear(12, 8), nn.Linear(8, 5)
    return model


def turned() -> Net:
    model = Net()
    model.hidden = nn.Linear(16, 12)  # as many weights, another shape
    return model


@both
@pytest.mark.parametrize("other", [shrunk, turned])
def test_the_state_of_another_model_is_refused_whole(kind: Callable[..., pm.Pruner], other: Callable[[], Net]) -> None:
    _, _, pruner = attach_to_network(kind())
    stranger = other()
    state = kind().attach(stranger, make_sgd(stranger), total_steps=TOTAL).state_dict()
    before = untouched(pruner)
    with pytest.raises(pm.PomonaError, match=r"hidden\.weight has shape"):
        pruner.load_state_dict(state)
    assert is_identical(untouched(pruner), before)


@both
def test_the_state_of_another_method_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    _, _, pruner = attach_to_network(kind())
    _, _, other = attach_to_network(kind(sparsity=0.7))
    with pytest.raises(pm.PomonaError, match="sparsity = 0.7, this pruner has 0.8"):
        pruner.load_state_dict(other.state_dict())
    with pytest.raises(pm.PomonaError, match="version"):
        pruner.load_state_dict({"version": 99})


@both
def test_a_damaged_state_is_refused_whole(kind: Callable[..., pm.Pruner]) -> None:
    _, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    train(pruner.model, optimizer, range(8))
    whole = copy.deepcopy(pruner.state_dict())
    train(pruner.model, optimizer, range(8, 16))
    before = untouched(pruner)
    for key in whole.keys() - {"version"}:
        damaged = {k: v for k, v in whole.items() if k != key}
        if kind is hard and key == "latents":
            continue
        with pytest.raises(pm.PomonaError, match=key):
            pruner.load_state_dict(damaged)
        assert is_identical(untouched(pruner), before)
