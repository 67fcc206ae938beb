"""Batch-norm statistics of a pruned model: when they are stale, and their re-estimation by `finish(data=…)`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_cases import TOTAL, make_hard, make_soft, soft_and_hard
from engine_helpers import Net, attach_to_network, is_identical, make_batch, make_sgd, obeys_masks, save_and_load, train
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import pomona as pm
from pomona.core.batch_norm import has_stale_statistics, reestimate_statistics

BATCHES = [make_batch(step) for step in range(5)]


class DropoutNet(Net):
    """The network with dropout behind its batch norm, and an input that can be given by name."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(nn.functional.dropout(x * scale, 0.5, self.training))


def finish_trained(data: Any, model: Net | None = None, **options: Any) -> Net:
    """Return a network whose masks were changed with the last step, finished with data."""
    model = (model or Net()).double()
    optimizer = make_sgd(model)
    pruner = make_soft(settle=0.0).attach(model, optimizer, total_steps=8)
    train(model, optimizer, range(8))
    pruner.finish(data, **options)
    assert pruner.finished
    assert obeys_masks(model, pruner)
    return model


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the buffers of a model."""
    return copy.deepcopy(dict(model.named_buffers()))


@pytest.fixture(scope="module")
def left_as_trained() -> Net:
    """A finished network with the statistics that training left."""
    return finish_trained(None)


# ---- re-estimation


def test_finish_gives_the_statistics_of_update_bn_on_the_sparse_model(left_as_trained: Net) -> None:
    expected = copy.deepcopy(left_as_trained)
    update_bn(BATCHES, expected)
    finished = finish_trained(BATCHES)
    assert is_identical(finished.state_dict(), expected.state_dict())
    assert not torch.equal(finished.norm.running_mean, left_as_trained.norm.running_mean)
    assert finished.norm.momentum == 0.1


def test_the_mean_over_two_batches_by_hand() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5))
    reestimate_statistics(
        nn.Sequential(model, nn.Linear(1, 1)), [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [5.0]])], None
    )
    assert model[0].running_mean.item() == 3.5  # of 2 and 5
    assert model[0].running_var.item() == 1.0  # of 2 and 0
    assert model[0].num_batches_tracked.item() == 2


FORMS: dict[str, Callable[[], Any]] = {
    "pairs": lambda: BATCHES,
    "lists": lambda: [[x, y] for x, y in BATCHES],
    "inputs": lambda: [x for x, _ in BATCHES],
    "names": lambda: [{"x": x, "label": y} for x, y in BATCHES],
    "names and targets": lambda: [({"x": x, "scale": 1.0}, y) for x, y in BATCHES],
    "generator": lambda: ((x, y) for x, y in BATCHES),
    "loader": lambda: DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*BATCHES, strict=True))), 6),
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_may_have_any_usual_form(form: str) -> None:
    assert is_identical(
        finish_trained(FORMS[form](), DropoutNet()).state_dict(), finish_trained(BATCHES, DropoutNet()).state_dict()
    )


def test_no_more_batches_are_read_than_asked_for(left_as_trained: Net) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield BATCHES[len(read) % 5]
            read.append(1)

    read: list[int] = []
    finished = finish_trained(endless(), max_batches=3)
    assert len(read) == 2  # the generator is suspended at its third batch
    assert finished.norm.num_batches_tracked == 3
    assert is_identical(finish_trained(endless(), max_batches=0).state_dict(), left_as_trained.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_modes_gradients_and_random_state_are_unchanged(training: bool) -> None:
    model = DropoutNet().double().train(training)
    model.hidden.eval()
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    reestimate_statistics(model, BATCHES, None)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_statistics_stay() -> None:
    model = Net().double()
    model.norm.eval()
    before = statistics(model)
    reestimate_statistics(model, BATCHES, None)
    assert is_identical(statistics(model), before)
    assert not has_stale_statistics(model, 0)


class TwoNorms(nn.Module):
    """A network with two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.mark.parametrize("resumed", ["no", "with counts", "older state"])
def test_statistics_that_training_froze_stay_in_a_model_in_evaluation_mode(resumed: str) -> None:
    torch.manual_seed(0)
    model = TwoNorms()
    frozen, adapting = model.layers[1], model.layers[4]
    frozen.num_batches_tracked.fill_(7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = make_hard().attach(model, optimizer, total_steps=8)
    frozen.eval()
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    if resumed != "no":
        state = save_and_load(pruner.state_dict())
        state = {key: value for key, value in state.items() if key != "norms" or resumed == "with counts"}
        pruner.attached_engine().detach()
        pruner = make_hard().attach(model, optimizer, total_steps=8)
        pruner.load_state_dict(state)
    before = statistics(model)
    model.eval()
    pruner.finish(data=[torch.randn(6, 4)])
    kept = all(torch.equal(before[f"layers.1.{name}"], value) for name, value in frozen.named_buffers())
    assert kept == (resumed != "older state"), "without counts the mode alone decides"
    assert adapting.num_batches_tracked == 1


def test_without_a_step_no_statistics_are_frozen() -> None:
    model = TwoNorms().eval()
    pruner = pm.OneShot(sparsity=0.5).attach(model, torch.optim.SGD(model.parameters(), 0.1))
    pruner.finish(data=[torch.randn(6, 4), torch.randn(6, 4)])
    assert model.layers[1].num_batches_tracked == 2


def test_a_model_without_batch_norm_reads_no_data() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(1, 4), nn.Linear(4, 2))
    pruner = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), total_steps=1)
    pruner.finish(data=(pytest.fail("data was read") for _ in range(1)))
    assert pruner.finished


class Broken(Exception):
    """Raised by a loader."""


def failing_loader() -> Iterator[Any]:
    """Yield a batch, and raise."""
    yield BATCHES[0]
    raise Broken


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (failing_loader, Broken, None),
        (list, pm.PomonaError, "data has no batches"),
        (lambda: 3, pm.PomonaError, "got int"),
        (lambda: BATCHES[0][0], pm.PomonaError, "got Tensor: put a single batch in a list"),
        (lambda: [(torch.zeros(2, 9),)], RuntimeError, None),
    ],
)
def test_an_error_leaves_the_statistics_and_finish_can_be_called_again(data: Any, error: Any, message: Any) -> None:
    model, optimizer, pruner = attach_to_network(make_hard(), total=8)
    train(model, optimizer, range(8))
    before, modes = statistics(model), [module.training for module in model.modules()]
    with pytest.raises(error, match=message):
        pruner.finish(data=data())
    assert is_identical(statistics(model), before)
    assert (model.norm.momentum, [module.training for module in model.modules()]) == (0.1, modes)
    assert not pruner.finished
    pruner.finish(data=BATCHES)
    assert model.norm.num_batches_tracked == 5


# ---- the warning


@soft_and_hard
def test_stale_statistics_give_one_warning_with_the_number_of_steps(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"))
    train(model, optimizer, range(TOTAL))
    steps = TOTAL - pruner.last_change
    with pytest.warns(UserWarning, match=rf"came {steps} steps before finish\(\): finish\(data=loader\)") as caught:
        pruner.finish()
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("options", [{"data": BATCHES}, {"max_batches": 0}])
def test_there_is_no_warning_with_data_or_where_none_is_wanted(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish_trained(options.pop("data", None), **options)


@pytest.mark.parametrize(
    ("momentum", "steps", "stale"),
    [(0.1, 0, True), (0.1, 28, True), (0.1, 29, False), (0.5, 5, False), (None, 30, True), (None, 39, False)],
)
def test_statistics_are_stale_while_a_twentieth_is_old(momentum: float | None, steps: int, stale: bool) -> None:
    norm = nn.BatchNorm1d(2, momentum=momentum)  # 0.9²⁸ = 0.052, 0.9²⁹ = 0.047; 30 and 39 of 40 batches
    norm.num_batches_tracked.fill_(40)
    assert has_stale_statistics(nn.Sequential(norm), steps) is stale


def test_statistics_that_were_never_estimated_are_not_stale() -> None:
    assert not has_stale_statistics(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)), 0)
