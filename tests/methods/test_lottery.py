"""The lottery ticket: rounds of training, pruning and rewinding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import TARGETS, Net, compute_loss, is_identical, make_sgd, train
from reference_methods import LinearStack, get_weight_rows, keep_largest_globally, step_with_gradients
from torch import Tensor, nn

import pomona as pm
from pomona.methods import _round_store


def test_round_sparsities_by_hand() -> None:
    """Of 1000 weights at a rate of 0.2 about 0.8^L are kept, as ⌈0.2 · remaining⌉ are pruned in each round."""
    levels = pm.Lottery(sparsity=0.9).method.round_sparsities(1000)
    # 1000 − 200, 800 − 160, 640 − 128, 512 − ⌈102.4⌉, 409 − ⌈81.8⌉, 327 − ⌈65.4⌉, 261 − ⌈52.2⌉, 208 − ⌈41.6⌉,
    # 166 − ⌈33.2⌉, 132 − ⌈26.4⌉, and of 105 the last 5 to prune.
    kept = [1000, 800, 640, 512, 409, 327, 261, 208, 166, 132, 105, 100]
    assert levels == [(1000 - k) / 1000 for k in kept]
    assert all(abs(k / 1000 - 0.8**level) < 0.003 for level, k in enumerate(kept[:-1]))


@pytest.mark.parametrize(
    ("options", "count", "kept"),
    [
        ({"sparsity": 0.875, "retrainings": 3}, 1000, [1000, 500, 250, 125]),  # half, half, half
        ({"sparsity": 0.9, "retrainings": 1}, 1000, [1000, 100]),
        # 1 − 0.1^(1/3) = 0.5358: 1000 − ⌈535.8⌉, 464 − ⌈248.6⌉, 215 − ⌈115.2⌉ = 99, which is past the goal
        ({"sparsity": 0.9, "retrainings": 3}, 1000, [1000, 464, 215, 100]),
        ({"sparsity": 0.5, "rate": 0.1}, 20, [20, 18, 16, 14, 12, 10]),  # ⌈1.8⌉, ⌈1.6⌉, ⌈1.4⌉, ⌈1.2⌉
        ({"sparsity": 0.2, "rate": 0.07}, 100, [100, 93, 86, 80]),  # 0.07 · 100 counts as 7, not as 7.000000000000001
        ({"sparsity": 0.0}, 1000, [1000]),
    ],
)
def test_round_sparsities(options: dict[str, Any], count: int, kept: list[int]) -> None:
    levels = pm.Lottery(**options).method.round_sparsities(count)
    assert [round((1 - level) * count) for level in levels] == kept


def test_rounds_by_hand() -> None:
    # A training takes w to w − 1·g − 1·g. Five of ten weights are pruned: ⌈0.2·10⌉ = 2, ⌈0.2·8⌉ = 2, and one of
    # ⌈0.2·6⌉.
    #   w₀     1  2  3  4  5      g  −1  1  2  0  0      w₀ − 2g   3  0  −1   4  5
    #         −1 −2 −3 −4 −5          3  0  0 −1 −2                −7 −2  −3  −2 −1
    # Round 1: the smallest of the trained are 0 at (0,1) and of the 1s the later, (1,4).
    # Round 2, from w₀ on the eight others, which train to the same: −1 at (0,2), and −2 at (1,3).
    # Round 3: of 3, 4, 5, −7, −2, −3 the −2 at (1,1).
    initial = [[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, -2.0, -3.0, -4.0, -5.0]]
    model = LinearStack(a=initial)
    starts = []

    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> list[list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        pruner.attach(model, optimizer, total_steps=2)
        starts.append(get_weight_rows(model))
        for _ in range(2):
            step_with_gradients(model, optimizer, a=[[-1.0, 1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, -1.0, -2.0]])  # type: ignore[arg-type]
        pruner.finish()
        return get_weight_rows(model)

    rounds = pm.Lottery(sparsity=0.5, include=["a"]).rounds(model, training)
    assert [r["sparsity"] for r in rounds] == [0.0, 0.2, 0.4, 0.5]
    assert [r["round"] for r in rounds] == [0, 1, 2, 3]
    assert starts == [
        initial,
        [[1.0, 0.0, 3.0, 4.0, 5.0], [-1.0, -2.0, -3.0, -4.0, 0.0]],
        [[1.0, 0.0, 0.0, 4.0, 5.0], [-1.0, -2.0, -3.0, 0.0, 0.0]],
        [[1.0, 0.0, 0.0, 4.0, 5.0], [-1.0, 0.0, -3.0, 0.0, 0.0]],
    ]
    assert [r["result"] for r in rounds] == [
        [[3.0, 0.0, -1.0, 4.0, 5.0], [-7.0, -2.0, -3.0, -2.0, -1.0]],
        [[3.0, 0.0, -1.0, 4.0, 5.0], [-7.0, -2.0, -3.0, -2.0, 0.0]],
        [[3.0, 0.0, 0.0, 4.0, 5.0], [-7.0, -2.0, -3.0, 0.0, 0.0]],
        [[3.0, 0.0, 0.0, 4.0, 5.0], [-7.0, 0.0, -3.0, 0.0, 0.0]],
    ]
    assert get_weight_rows(model) == rounds[-1]["result"]


STEPS = 3


def train_round(model: nn.Module, pruner: pm.Pruner, index: int) -> int:
    """Train for a few steps on data that differ from round to round, so that the masks differ."""
    optimizer = make_sgd(model, lr=0.2)
    pruner.attach(model, optimizer, total_steps=STEPS)
    train(model, optimizer, range(STEPS * index, STEPS * (index + 1)))
    pruner.finish()
    return index


class ObservedTraining:
    """A training that saves the weights and masks that each round starts from, and is interrupted in round `fail`."""

    def __init__(self, fail: int | None = None) -> None:
        self.starts: dict[int, dict[str, Tensor]] = {}
        self.masks: dict[int, dict[str, Tensor]] = {}
        self.fail = fail

    def __call__(self, model: nn.Module, pruner: pm.Pruner, index: int) -> int:
        if index == self.fail:
            train(model, make_sgd(model), [0])  # leaves the model in another state
            raise KeyboardInterrupt
        attach = pruner.attach

        def attach_and_save(*args: Any, **options: Any) -> pm.Pruner:
            attach(*args, **options)
            self.starts[index] = {name: value.clone() for name, value in model.state_dict().items()}
            self.masks[index] = {name: mask.clone() for name, mask in pruner.masks().items()}
            return pruner

        pruner.attach = attach_and_save  # type: ignore[method-assign]
        return train_round(model, pruner, index)


@pytest.mark.parametrize("rewind", [0, 2])
def test_fifty_rounds_match_a_reference(rewind: int) -> None:
    """open_lth prunes ⌈rate · remaining⌉ by one threshold over all layers, rewinds and trains again."""
    rate, model = 0.04, Net().double()
    masks = {name: np.ones(model.get_parameter(name).shape, dtype=bool) for name in TARGETS}
    count = sum(mask.size for mask in masks.values())
    start: dict[str, Tensor] = {}
    history = []
    for index in range(51):
        if index:
            kept = sum(int(mask.sum()) for mask in masks.values())
            size = {n: np.where(m, model.get_parameter(n).detach().abs().numpy(), -1) for n, m in masks.items()}
            masks = keep_largest_globally(size, kept - math.ceil(rate * kept))
            model.load_state_dict(start)
            history.append({name: torch.from_numpy(mask) for name, mask in masks.items()})
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(torch.from_numpy(mask))
        optimizer = make_sgd(model, lr=0.2)
        for t in range(STEPS):
            if index == 0 and t == rewind:
                start = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer.zero_grad()
            compute_loss(model, STEPS * index + t).backward()
            for name, mask in masks.items():
                model.get_parameter(name).grad.mul_(torch.from_numpy(mask))  # type: ignore[union-attr]
            optimizer.step()
    sparsity = 1 - sum(int(mask.sum()) for mask in masks.values()) / count

    ticket, observed = Net().double(), ObservedTraining()
    rounds = pm.Lottery(sparsity=sparsity, rate=rate, rewind=rewind, allocation="global(floor=0)").rounds(
        ticket, observed
    )
    assert len(rounds) == 51
    for index, expected in enumerate(history, start=1):
        for name, mask in expected.items():
            assert torch.equal(observed.masks[index][name], mask), f"{name} differs in round {index}"
    for name, value in ticket.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("rewind", [0, 1, STEPS])
def test_a_round_starts_from_the_bits_of_the_snapshot(rewind: int) -> None:
    snapshot = Net().double()
    train(snapshot, make_sgd(snapshot, lr=0.2), range(rewind))
    expected = snapshot.state_dict()
    observed = ObservedTraining()
    pm.Lottery(sparsity=0.6, rate=0.3, rewind=rewind).rounds(Net().double(), observed)
    assert len(observed.starts) == 4
    for index in (1, 2, 3):
        for name, value in observed.starts[index].items():
            kept = observed.masks[index].get(name, torch.ones_like(value, dtype=torch.bool))
            assert torch.equal(value, torch.where(kept, expected[name], 0)), f"{name} in round {index}"
    pruned = [sum(int((~mask).sum()) for mask in observed.masks[i].values()) for i in range(4)]
    # 1344 weights: ⌈403.2⌉, 940 left, ⌈282⌉ more, 658 left, and up to 60 %, ⌊806.4⌋, the rest.
    assert pruned == [0, 404, 686, 806]


def test_masks_are_nested_from_round_to_round() -> None:
    observed = ObservedTraining()
    pm.Lottery(sparsity=0.8).rounds(Net().double(), observed)
    for index in range(1, len(observed.starts)):
        for name in TARGETS:
            assert not (observed.masks[index][name] & ~observed.masks[index - 1][name]).any()
            assert torch.equal(observed.starts[index][name] != 0, observed.masks[index][name])


@pytest.mark.parametrize("fail", [0, 1, 3])
@pytest.mark.parametrize("rewind", [0, 2])
def test_rounds_resume_after_those_that_are_done(tmp_path: Path, fail: int, rewind: int) -> None:
    options = {"sparsity": 0.7, "retrainings": 4, "rewind": rewind}
    whole = Net().double()
    expected = pm.Lottery(**options).rounds(whole, train_round)

    with pytest.raises(KeyboardInterrupt):
        pm.Lottery(**options).rounds(Net().double(), ObservedTraining(fail), folder=tmp_path)
    resumed, observed = Net().double(), ObservedTraining()
    rounds = pm.Lottery(**options).rounds(resumed, observed, folder=tmp_path)
    assert sorted(observed.starts) == list(range(fail, 5)), "finished rounds were repeated"
    assert rounds == expected
    assert is_identical(resumed.state_dict(), whole.state_dict())

    third = Net(1).double()
    assert pm.Lottery(**options).rounds(third, ObservedTraining(0), folder=tmp_path) == expected, (
        "a finished lottery was repeated"
    )
    assert is_identical(third.state_dict(), whole.state_dict())
    assert not list(tmp_path.glob("*.partial"))


def test_the_folder_of_another_lottery_is_refused(tmp_path: Path) -> None:
    pm.Lottery(sparsity=0.5).rounds(Net().double(), train_round, folder=tmp_path)
    with pytest.raises(pm.PomonaError, match="is of a lottery with other options: choose another folder"):
        pm.Lottery(sparsity=0.6).rounds(Net().double(), train_round, folder=tmp_path)


def test_the_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    pm.Lottery(sparsity=0.5).rounds(Net().double(), train_round, folder=tmp_path)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    with pytest.raises(pm.PomonaError, match="is of a lottery with other layers: choose another folder"):
        pm.Lottery(sparsity=0.5).rounds(other, train_round, folder=tmp_path)


@pytest.mark.parametrize("total", [STEPS, None])
def test_rewinding_past_the_end_is_refused(total: int | None) -> None:
    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        optimizer = make_sgd(model)
        pruner.attach(model, optimizer, total_steps=total)
        train(model, optimizer, range(STEPS))
        pruner.finish()

    with pytest.raises(pm.PomonaError, match=f"rewind=4 lies past the end of training, which (has|took) {STEPS} steps"):
        pm.Lottery(sparsity=0.5, rewind=4).rounds(Net(), training)


def test_training_that_ends_before_the_step_to_rewind_to_is_refused() -> None:
    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        optimizer = make_sgd(model)
        pruner.attach(model, optimizer, total_steps=10)
        train(model, optimizer, range(STEPS))
        pruner.finish()

    with pytest.raises(pm.PomonaError, match="rewind=4 lies past the end of training"):
        pm.Lottery(sparsity=0.5, rewind=4).rounds(Net(), training)


@pytest.mark.parametrize("how", ["not attached", "not finished"])
def test_a_training_that_does_not_use_the_pruner_is_refused(how: str) -> None:
    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        optimizer = make_sgd(model)
        if how == "not finished":
            pruner.attach(model, optimizer, total_steps=STEPS)
        train(model, optimizer, range(STEPS))

    with pytest.raises(pm.PomonaError, match="must attach the pruner, train, and finish"):
        pm.Lottery(sparsity=0.5).rounds(Net(), training)


def test_attach_is_refused() -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match=r"lottery trains several times: call pm.Lottery\(…\).rounds"):
        pm.Lottery(sparsity=0.5).attach(model, make_sgd(model), total_steps=10)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.0}, {"retrainings": 0}, {"rewind": -1}])
def test_invalid_options_of_lottery_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {next(iter(options.values()))}"):
        pm.Lottery(**options)


def test_weights_that_start_at_zero_are_trained() -> None:
    """A zero is not a pruned weight: Fixup and other schemes initialize whole layers with zeros."""
    model = Net().double()
    nn.init.zeros_(model.hidden.weight)

    def training(model: Net, pruner: pm.Pruner, index: int) -> int:
        train_round(model, pruner, index)
        return int((model.hidden.weight != 0).sum())

    rounds = pm.Lottery(sparsity=0.3, rate=0.2).rounds(model, training)  # type: ignore[arg-type]
    # Weights behind an inactive unit get no gradient, so that some are still zero after three steps.
    assert rounds[0]["result"] > 0.5 * model.hidden.weight.numel()
    assert rounds[-1]["result"] > 0


def test_outputs_of_transposed_layers_are_pruned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.Flatten(), nn.Linear(45, 2)).double()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)

    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pruner.attach(model, optimizer, total_steps=2)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        pruner.finish()

    pm.Lottery(sparsity=0.4, rate=0.4, pattern=pm.Filter()).rounds(model, training)
    kept = (model[0].weight != 0).flatten(2).any(2)  # (in, out)
    assert kept.any(0).sum() == 3
    assert kept.any(1).all()
    assert not model[0](x)[:, ~kept.any(0)].any(), "the bias of a removed output is not zero"


def test_filters_are_removed_with_their_norms() -> None:
    model = Net().double()
    pm.Lottery(sparsity=0.5, retrainings=2, pattern=pm.Filter(), allocation="uniform").rounds(model, train_round)
    removed = ~model.conv1.weight.flatten(1).any(1)
    assert removed.sum() == 4
    for training in (True, False):
        model.train(training)
        assert not model.norm(model.conv1(torch.randn(3, 4, 5, 5, dtype=torch.float64)))[:, removed].any()


def test_a_wrapped_model_gives_the_same_rounds() -> None:
    whole = Net().double()
    expected = pm.Lottery(sparsity=0.5, retrainings=2).rounds(whole, train_round)
    wrapped = nn.DataParallel(Net().double())
    assert pm.Lottery(sparsity=0.5, retrainings=2).rounds(wrapped, train_round) == expected
    assert is_identical(wrapped.module.state_dict(), whole.state_dict())


def test_no_pruner_is_attached_after_the_rounds() -> None:
    model = Net().double()
    pm.Lottery(sparsity=0.5, retrainings=2).rounds(model, train_round)
    zeros = {name: model.get_parameter(name) == 0 for name in TARGETS}
    train(model, make_sgd(model), [0])
    assert all(model.get_parameter(name)[zero].any() for name, zero in zeros.items()), "pruned weights are still masked"


def test_a_result_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> Any:
        train_round(model, pruner, index)
        return {"path": tmp_path}

    assert len(pm.Lottery(sparsity=0.5, retrainings=1).rounds(Net().double(), training)) == 2, (
        "a result in memory may be anything"
    )
    with pytest.raises(pm.PomonaError, match="which a folder cannot store"):
        pm.Lottery(sparsity=0.5, retrainings=1).rounds(Net().double(), training, folder=tmp_path)


@pytest.mark.parametrize("rewind", [0, 1])
def test_a_run_killed_at_any_write_resumes_to_the_same_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewind: int
) -> None:
    """The ticket does not depend on where a run was killed, also where kept weights are zero."""
    options = {"sparsity": 0.059, "rate": 0.02, "rewind": rewind}

    def train_to_zeros(model: nn.Module, pruner: pm.Pruner, index: int) -> int:
        """Train and set more weights to zero than are pruned, as an L1 penalty does."""
        optimizer = make_sgd(model, lr=0.2)
        pruner.attach(model, optimizer, total_steps=STEPS)
        train(model, optimizer, range(STEPS * index, STEPS * (index + 1)))
        with torch.no_grad():
            for name in TARGETS:
                parameter = model.get_parameter(name)
                parameter.masked_fill_(parameter.abs() < 0.02, 0)
        pruner.finish()
        return index

    whole = Net().double()
    expected = pm.Lottery(**options).rounds(whole, train_to_zeros)
    assert len(expected) == 4
    store, calls = _round_store.RoundStore, {"remaining": 0}

    def interrupt(method: Any) -> Any:
        def run(*args: Any) -> Any:
            if calls["remaining"] == 0:
                raise KeyboardInterrupt
            calls["remaining"] -= 1
            return method(*args)

        return run

    write_tensors, write_results = store.write_tensors, store.write_results
    for survived in range(13):  # four writes of the first round, three of each other
        folder = tmp_path / str(survived)
        calls["remaining"] = survived
        monkeypatch.setattr(store, "write_tensors", interrupt(write_tensors))
        monkeypatch.setattr(store, "write_results", interrupt(write_results))
        with pytest.raises(KeyboardInterrupt):
            pm.Lottery(**options).rounds(Net().double(), train_to_zeros, folder=folder)
        monkeypatch.setattr(store, "write_tensors", write_tensors)
        monkeypatch.setattr(store, "write_results", write_results)
        resumed = Net().double()
        assert pm.Lottery(**options).rounds(resumed, train_to_zeros, folder=folder) == expected
        assert is_identical(resumed.state_dict(), whole.state_dict()), f"killed after {survived} writes"
