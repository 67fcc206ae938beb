"""The parameters that are pruned by default, those that are left dense, and the reasons."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from engine_helpers import Net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import pomona as pm
from pomona.methods import METHODS, make_pruner


def list_targets(model: nn.Module, **options: object) -> list[str]:
    """Return the names of the parameters that are pruned."""
    return [target.name for target in pm.prunable(model, **options).targets]  # type: ignore[arg-type]


def list_reasons(model: nn.Module, **options: object) -> dict[str, str]:
    """Return the reason for each parameter, by name."""
    return {choice.target.name: choice.reason for choice in pm.prunable(model, **options)}  # type: ignore[arg-type]


def test_default_targets_and_reasons() -> None:
    assert list_reasons(Net()) == {
        "conv1.weight": "convolution",
        "conv1.bias": "a bias or another vector",
        "norm.weight": "part of a normalisation",
        "norm.bias": "part of a normalisation",
        "conv2.weight": "convolution",
        "conv2.bias": "a bias or another vector",
        "hidden.weight": "linear",
        "hidden.bias": "a bias or another vector",
        "head.weight": "a layer whose outputs are the network's",
        "head.bias": "a bias or another vector",
    }
    assert list_targets(Net()) == ["conv1.weight", "conv2.weight", "hidden.weight"]
    assert str(pm.prunable(Net())).splitlines()[0].split() == ["✂", "conv1.weight", "8×4×3×3", "convolution"]


class HeadFirst(nn.Module):
    """A model that defines its last layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Untraceable(HeadFirst):
    """A model whose forward branches on its data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) if x.sum() > 0 else x


def test_the_classifier_is_the_last_layer_of_a_traced_forward() -> None:
    assert list_targets(HeadFirst()) == ["body.0.weight", "body.2.weight"]
    assert list_reasons(HeadFirst())["head.weight"] == "a layer whose outputs are the network's"


def test_definition_decides_which_layers_are_classifiers_where_tracing_fails() -> None:
    assert list_targets(Untraceable()) == ["body.0.weight"], "the head takes as many inputs as the body beside it"


class WritesInForward(nn.Module):
    """A model whose forward writes into the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Tensor | None = None
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls.add_(1)
        self.last = self.body(x)
        return self.head(self.last)


def test_tracing_does_not_change_the_model() -> None:
    model = WritesInForward()
    assert list_targets(model) == ["body.weight"]
    assert (model.last, model.count, float(model.calls)) == (None, 0, 0.0)
    copy.deepcopy(model)


def test_recurrent_weights_are_targets() -> None:
    lstm = nn.ModuleDict({"embed": nn.Embedding(9, 4), "lstm": nn.LSTM(4, 4, num_layers=2), "head": nn.Linear(4, 9)})
    assert list_targets(lstm) == [f"lstm.weight_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")]
    assert list_reasons(lstm)["embed.weight"] == "an embedding"
    assert list_reasons(lstm)["lstm.bias_ih_l0"] == "a bias or another vector"
    assert list_targets(nn.Sequential(nn.GRUCell(4, 4))) == ["0.weight_ih", "0.weight_hh"]


def test_attention_projections_are_targets() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, add_bias_kv=True), "head": nn.Linear(8, 2)})
    assert list_targets(model) == ["attention.in_proj_weight", "attention.out_proj.weight"]
    apart = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=4, vdim=4), "head": nn.Linear(8, 2)})
    assert list_targets(apart) == [
        f"attention.{name}" for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    ]


class TiedLanguageModel(nn.Module):
    """A language model with its output tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.embed(x))))


def test_an_output_layer_tied_to_an_embedding_is_one_dense_tensor() -> None:
    assert list_targets(TiedLanguageModel()) == ["body.weight"]
    assert "head.weight" not in list_reasons(TiedLanguageModel())
    assert list_targets(TiedLanguageModel(), include="*embed*") == ["embed.weight"]
    assert list_targets(TiedLanguageModel(), include="*", exclude="head") == ["body.weight"], (
        "a tied tensor has two names"
    )


def test_globs_include_and_exclude() -> None:
    assert list_targets(Net(), include="conv*") == ["conv1.weight", "conv2.weight"]
    assert list_targets(Net(), include=["head", "conv1.weight"]) == ["conv1.weight", "head.weight"]
    assert list_targets(Net(), include="*", exclude="conv?") == ["hidden.weight", "head.weight"]
    assert list_targets(Net(), exclude=["conv1", "hidden.*"]) == ["conv2.weight"]
    assert list_targets(Net(), include="*.bias") == [
        "conv1.bias",
        "norm.bias",
        "conv2.bias",
        "hidden.bias",
        "head.bias",
    ]
    assert list_reasons(Net(), exclude="conv1")["conv1.weight"] == "excluded"
    assert list_reasons(Net(), include="conv1")["conv2.weight"] == "not included"


def test_a_misspelt_glob_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(pm.PomonaError, match=r"unknown layer 'hiden\.weight': did you mean 'hidden\.weight'"):
        pm.prunable(Net(), exclude="hiden.weight")
    with pytest.raises(pm.PomonaError, match="unknown layer 'layer4"):
        pm.prunable(Net(), include=["conv1", "layer4.*"])


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(pm.PomonaError, match=r"0\.weight has no shape yet: run one batch"):
        pm.prunable(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))


def prune_once(model: nn.Module, **options: object) -> dict[str, Tensor]:
    """Prune half of a model's first layer and return the masks."""
    pruner = pm.OneShot(**{"sparsity": 0.5, "pattern": pm.Filter(), "include": "0", **options})
    return pruner.attach(model, SGD(model.parameters(), lr=0.1)).masks()


def test_filters_of_a_transposed_convolution_are_its_outputs() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 4, 1), nn.Conv2d(4, 1, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 4, 2, 3], [1, 4, 2, 3]]).view(2, 4, 1, 1))
    mask = prune_once(model)["0.weight"].view(2, 4)
    assert mask.tolist() == [[False, True, False, True]] * 2
    assert model[0].weight.view(2, 4)[0].tolist() == [0, 4, 0, 3]


class Conv1D(nn.Module):
    """GPT-2's linear layer, which stores (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, outputs + 1).repeat(inputs, 1))
        self.bias = nn.Parameter(torch.ones(outputs))


def test_gpt2_layers_are_linear_with_the_output_dimension_second() -> None:
    model = nn.Sequential(Conv1D(3, 4), nn.Linear(4, 2))
    assert list_targets(model) == ["0.weight"]
    assert prune_once(model)["0.weight"].tolist() == [[False, False, True, True]] * 3
    model = nn.Sequential(Conv1D(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 8], [2, 7], [3, 6], [4, 5]]))
    mask = prune_once(model, pattern=pm.NM(2, 4), sparsity=None)["0.weight"]  # two of four inputs for each output
    assert mask.T.tolist() == [[False, False, True, True], [True, True, False, False]]


@pytest.mark.parametrize("style", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
def test_weight_norm_is_left_dense_by_default_and_refused_when_included(style: object) -> None:
    model = nn.Sequential(style(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))  # type: ignore[operator]
    assert list_targets(model) == ["1.weight"]
    assert "parametrized: a zero in it is no zero in the layer" in list_reasons(model).values()
    with pytest.raises(pm.PomonaError, match="remove the parametrization first"):
        pm.prunable(model, include="0*")


def test_weight_norm_of_a_recurrent_weight_is_left_dense() -> None:
    lstm = nn.utils.weight_norm(nn.LSTM(4, 4), name="weight_hh_l0")
    assert list_targets(nn.ModuleList([lstm])) == ["0.weight_ih_l0"]


def test_wrapped_models_keep_their_parameter_names() -> None:
    own = list_targets(Net())
    assert list_targets(nn.DataParallel(Net())) == own
    assert list_targets(torch.compile(Net(), backend="eager")) == own  # type: ignore[arg-type]


def test_an_unknown_layer_is_left_dense_and_can_be_included() -> None:
    model = nn.ModuleDict({"own": nn.ParameterList([nn.Parameter(torch.ones(4, 4))]), "body": nn.Linear(4, 4)})
    assert list_reasons(model)["own.0"] == "part of a layer of unknown kind"
    assert list_targets(model, include="own.0") == ["own.0"]


def test_a_model_with_nothing_to_prune_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(pm.PomonaError, match="Sequential has nothing to prune"):
        pm.DPF().attach(model, SGD(model.parameters(), lr=0.1), total_steps=4)


class Decoder(nn.Module):
    """A decoder with GPT-2's linear layer and a transposed convolution, which store their outputs second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Conv1D(4, 8)
        self.up = nn.ConvTranspose2d(8, 6, 2, groups=2)
        self.head = nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x @ self.inner.weight + self.inner.bias)
        return self.head(F.relu(self.up(x[:, :, None, None]))).mean((2, 3))


def train_decoder(model: nn.Module, pruner: pm.Pruner) -> None:
    """Train a decoder for eight steps and finish its pruner."""
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    pruner.attach(model, optimizer, total_steps=8, steps_per_epoch=2)
    for step in range(8):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
    pruner.finish()


SCORED = {"edge_popup", "iterand"}  # these draw matrices only, and refuse vectors


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"lottery", "srigl"} - SCORED))
def test_every_method_prunes_the_biases_of_layers_that_store_outputs_second(name: str) -> None:
    model = Decoder()
    sparsity = {} if name == "finetune" else {"sparsity": 0.5}
    pattern = {"pattern": pm.Unstructured()} if name == "sfp" else {}
    if name == "finetune":
        nn.init.zeros_(model.up.bias[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eight steps are few for some
        train_decoder(model, make_pruner({"name": name, "include": ["*.bias"], **sparsity, **pattern}))
    biases = [model.inner.bias, model.up.bias, model.head.bias]
    assert sum(int((bias == 0).sum()) for bias in biases) >= (3 if name == "finetune" else 9)


@pytest.mark.parametrize("make", [lambda: pm.SNIP(sparsity=0.5), pm.Finetune], ids=["snip", "finetune"])
def test_methods_that_prune_biases_by_default_take_layers_that_store_outputs_second(
    make: Callable[[], pm.Pruner],
) -> None:
    pruner, model = make(), Decoder()
    train_decoder(model, pruner)
    assert {"inner.bias", "up.bias"} <= pruner.masks().keys()
    assert {
        t.name: t.output_dim
        for t in pm.prunable(model, include="*").targets + pm.prunable(model, include="*.bias").targets
    } == {"inner.weight": 1, "up.weight": 1, "head.weight": 0, "inner.bias": 0, "up.bias": 0, "head.bias": 0}


def test_frozen_layers_are_left_dense_unless_they_are_included() -> None:
    model = Net()
    model.conv1.requires_grad_(False)
    assert list_targets(model) == ["conv2.weight", "hidden.weight"]
    assert list_reasons(model)["conv1.weight"] == "frozen: training could not make up for what is pruned"
    assert list_targets(model, include="conv*") == ["conv1.weight", "conv2.weight"]
    assert "conv1.weight" in [t.name for t in pm.Finetune().method.targets(model)], "its zeros are kept as they are"
    model.requires_grad_(False)
    with pytest.raises(pm.PomonaError, match=r"Net has nothing to prune: .* that is trained"):
        pm.OneShot().attach(model, SGD(model.parameters(), lr=0.1))
