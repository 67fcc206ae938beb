"""Models beyond one tensor in and one out: several inputs, recurrent layers, checkpointing, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from private_training import ROWS, NoiselessSource, assert_close_on_grid, make_budget, mean_of_clipped
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from pomona.errors import PomonaError
from pomona.privacy import PrivateStep, Source, fix, poisson_loader
from pomona.privacy.example_batches import call_model, map_tensors

LENGTH, WIDTH, CLASSES = 5, 4, 3


def make_rows(seed: int = 0):
    """Return ROWS sequences of vectors, their lengths, token ids and labels."""
    torch.manual_seed(seed)
    vectors = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    lengths, tokens = torch.randint(1, LENGTH + 1, (ROWS,)), torch.randint(0, 11, (ROWS, LENGTH))
    return vectors, lengths, tokens, torch.randint(0, CLASSES, (ROWS,))


def assert_step_is_right(model, inputs, targets, loss=F.cross_entropy, clip=0.3):
    """Compare a step without noise with clipped gradients that are computed one row at a time."""
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        make_budget(),
        method="dpsgd",
        loss=loss,
        clip=clip,
        micro=7,
        source=NoiselessSource(seed=3),
    )
    before = torch.cat([p.detach().flatten() for p in step.parameters.values()]).clone()
    rows, expected = step.draw(), []
    for k in rows.tolist():
        row = map_tensors(lambda part, k=k: part[k : k + 1], inputs)
        loss(call_model(model, row), targets[k : k + 1]).backward()
        expected.append(torch.cat([p.grad.flatten() for p in step.parameters.values()]))
        model.zero_grad()
    step(map_tensors(lambda part: part[rows], inputs), targets[rows])
    after = torch.cat([p.detach().flatten() for p in step.parameters.values()])
    assert not torch.equal(before, after)
    assert_close_on_grid((before - after).double(), mean_of_clipped(torch.stack(expected).double(), clip), clip)


class Recurrent(nn.Module):
    """A recurrent layer and a classifier on its last output."""

    def __init__(self, layer: nn.Module, width: int, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.packed = layer, nn.Linear(width, CLASSES), packed

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.layer(packed)[1][-1])
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (nn.GRU(WIDTH, 6, batch_first=True), 6),
        (nn.GRU(WIDTH, 6, 2, batch_first=True, bidirectional=True, bias=False), 12),
        (nn.RNN(WIDTH, 6, batch_first=True), 6),
        (nn.RNN(WIDTH, 6, 2, nonlinearity="relu", batch_first=True), 6),
        (nn.LSTM(WIDTH, 6, batch_first=True, proj_size=3), 3),
        (nn.LSTM(WIDTH, 6, 2, batch_first=True, bidirectional=True, proj_size=2, bias=False), 4),
    ],
)
def test_recurrent_layers(layer, width):
    vectors, _, _, targets = make_rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they are batched, not computed one by one
        assert_step_is_right(Recurrent(layer, width).double(), vectors, targets)


def test_packed_sequences_are_computed_one_by_one():
    vectors, lengths, _, targets = make_rows()
    model = Recurrent(nn.GRU(WIDTH, 6, batch_first=True), 6, packed=True).double()
    with pytest.warns(UserWarning, match="Recurrent is trained one example at a time"):
        assert_step_is_right(model, (vectors, lengths.clamp(min=1)), targets)


def test_packed_input_is_refused():
    model = nn.Linear(4, 2)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), make_budget(), method="dpsgd")
    step.draw()
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([2, 2, 1]), batch_first=True)
    with pytest.raises(PomonaError, match="a packed sequence has no row for each example"):
        step(packed, torch.zeros(3))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5 + WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.embedding(tokens).mean(1), vectors.mean(1)], -1))


@pytest.mark.parametrize("named", [False, True])
def test_several_and_named_inputs(named):
    vectors, _, tokens, targets = make_rows()
    inputs = {"vectors": vectors, "tokens": tokens} if named else (tokens, vectors)
    assert_step_is_right(TwoInputs().double(), inputs, targets)


def test_hugging_face_model_from_a_config():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).double().eval()
    _, lengths, tokens, targets = make_rows()
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one example at a time")
        assert_step_is_right(
            model,
            {"input_ids": tokens, "attention_mask": mask},
            targets,
            loss=lambda output, target: F.cross_entropy(output.logits, target),
        )


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(lambda part: self.body(part).tanh(), x.mean(1), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    vectors, _, _, targets = make_rows()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one example at a time")
        assert_step_is_right(Checkpointed(reentrant).double(), vectors.requires_grad_(reentrant), targets)


class WholeBatch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 2:
            raise ValueError("two rows at least")
        return super().forward(x)


def test_model_that_needs_a_whole_batch_is_refused():
    model = WholeBatch(4, 2)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), make_budget(), method="dpsgd")
    rows = step.draw()
    with pytest.raises(PomonaError, match=r"single examples of WholeBatch cannot be computed \(two rows at least\)"):
        step(torch.randn(len(rows), 4), torch.zeros(len(rows), dtype=torch.int64))


def test_embedding_with_max_norm_is_refused_and_repaired():
    model = TwoInputs()
    model.embedding = nn.Embedding(11, 5, max_norm=1.0)
    with pytest.raises(PomonaError, match="'embedding' is a Embedding, which rescales the rows that examples use"):
        PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), make_budget(), method="dpsgd")
    assert fix(model).embedding.max_norm is None


def test_frozen_batch_norm_is_allowed_until_it_is_trained():
    vectors, _, _, targets = make_rows()
    model = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    model[2].eval()
    assert_step_is_right(model, vectors, targets)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), make_budget(), method="dpsgd")
    rows = step.draw()
    model.train()
    with pytest.raises(PomonaError, match="'2' is a BatchNorm1d, which mixes"):
        step(vectors[rows], targets[rows])


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_the_drawn_rows(workers):
    vectors, _, _, targets = make_rows()
    model = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES)).double()
    options = {"method": "dpsgd", "data": (vectors, targets), "source": Source(seed=1)}  # the data is compared
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), make_budget(batch=1), **options)
    sizes = []
    for inputs, labels in poisson_loader(step, TensorDataset(vectors, targets), num_workers=workers):
        step(inputs, labels)
        sizes.append(len(inputs))
    assert len(sizes) == step.steps_taken == 8
    assert 0 in sizes
    assert max(sizes) > 0
    with pytest.raises(PomonaError, match="leave out shuffle"):
        next(poisson_loader(step, TensorDataset(vectors, targets), shuffle=True))
    with pytest.raises(PomonaError, match="the data set has 39"):
        next(poisson_loader(step, TensorDataset(vectors[1:], targets[1:])))
