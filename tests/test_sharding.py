"""What needs whole weights refuses a model of FSDP2 with one sentence, and takes one that was gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import pomona as pm
from pomona.errors import PomonaError
from pomona.posttraining import add_lora
from pomona.sparse import ticket

X = torch.linspace(-1, 1, 32 * 64).view(32, 64)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a group of this process alone."""
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def build_network() -> nn.Sequential:
    """Return a network of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def shard(model: nn.Sequential) -> nn.Module:
    """Return the model as FSDP2 divides it."""
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def save_ticket(model: nn.Module, folder: Path) -> None:
    """Write the ticket of a model whose weights are drawn."""
    pruner = pm.EdgePopup(0.5)
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2)
    ticket.save(folder / "ticket", pruner)


CALLS: dict[str, Callable[[nn.Module, Path], object]] = {
    "pm.Lottery": lambda model, _: pm.Lottery(0.5).rounds(model, lambda *arguments: None),
    "pm.Wanda": lambda model, _: pm.Wanda(0.5).prune(model, [X]),
    "pm.SparseGPT": lambda model, _: pm.SparseGPT(0.5).prune(model, [X]),
    "pm.Certified": lambda model, _: pm.Certified(budget=0.99).prune(model, X),
    "pm.compress": lambda model, _: pm.compress(model, X),
    "pm.shrink": lambda model, _: pm.shrink(model, X),
    "pm.save": lambda model, folder: pm.save(model, folder / "model"),
    "add_lora": lambda model, _: add_lora(model),
    "a ticket": save_ticket,
}


@pytest.mark.parametrize("name", CALLS)
def test_sharded_weights_are_refused(name: str, tmp_path: Path) -> None:
    model = shard(build_network())
    with pytest.raises(PomonaError, match=f"{name} needs whole weights, and those of .* are divided among ranks"):
        CALLS[name](model, tmp_path)
    assert not list(tmp_path.iterdir())
    assert model(X).shape == (32, 10)


def test_a_model_gathered_as_the_sentence_says_is_taken(tmp_path: Path) -> None:
    state = get_model_state_dict(shard(build_network()), options=StateDictOptions(full_state_dict=True))
    plain = build_network()
    plain.load_state_dict(state)
    pm.Wanda(0.5).prune(plain, [X])
    pm.save(plain, tmp_path / "model")
    assert torch.equal(pm.load(tmp_path / "model", build_network())(X), plain.eval()(X))
