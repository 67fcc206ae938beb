"""The model card: its metadata as the Hub reads them, its tables, and texts that would break either."""

from __future__ import annotations

import math

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pomona.integrations.model_card import (
    CardFacts,
    fence,
    format_spec,
    iterate_weights,
    measure_weights,
    render_card,
    to_yaml,
)

METHOD = {"name": "dpf", "sparsity": 0.9, "pattern": {"name": "balanced", "block": 32}, "include": []}
FACTS = CardFacts(
    title="tiny: a | test",
    license="apache-2.0",
    task="image-classification",
    data="cifar10",
    metrics={"accuracy": 93.25},
    tags=["vision"],
    method=METHOD,
    recipe='name = "tiny"',
    notes=["Trained with\ncare."],
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)


def make_model() -> nn.Module:
    """Return a network of one layer of 2×4 weights, five of them zero, and a layer of the same weights."""
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0, 0, 2], [0, 0, 3, 0]]))
        first.bias.fill_(1)
    second.weight = first.weight
    return nn.Sequential(first, second)


def read_metadata(card: str) -> dict:
    """Return the YAML between the first two lines of dashes."""
    _, metadata, _ = card.split("---\n", 2)
    return yaml.safe_load(metadata)


def test_the_metadata_are_those_of_the_hub():
    metadata = read_metadata(render_card("Net", measure_weights(make_model()), FACTS, "load()"))
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": "cifar10", "type": "cifar10"},
        "metrics": [{"type": "accuracy", "value": 93.25}],
    }
    assert metadata == {
        "library_name": "pomona",
        "tags": ["pomona", "sparse", "pruning", "dpf", "balanced", "vision"],
        "license": "apache-2.0",
        "pipeline_tag": "image-classification",
        "datasets": ["cifar10"],
        "metrics": ["accuracy"],
        "model-index": [{"name": "tiny: a | test", "results": [result]}],
    }


def test_huggingface_hub_reads_the_card():
    huggingface_hub = pytest.importorskip("huggingface_hub")
    card = huggingface_hub.ModelCard(render_card("Net", measure_weights(make_model()), FACTS, "load()"))
    assert card.data.library_name == "pomona"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 93.25, "cifar10")


def test_the_tables_hold_the_zeros_the_method_and_the_results():
    card = render_card("Net", measure_weights(make_model()), FACTS, "load()")
    for line in (
        "# tiny: a | test",
        "A sparse network (Net): 7 of 12 parameters are not zero, a sparsity of 41.67%.",  # the second bias is random
        "Trained with care.",
        "| `0.weight` | 2×4 | 8 | 3 | 62.50% |",
        "| accuracy | 93.25 |",
        "| pattern | `balanced(block=32)` |",
        '```toml\nname = "tiny"\n```',
    ):
        assert line in card
    assert "1.weight" not in card  # it is the first layer's
    assert "include" not in card


def test_a_card_without_facts_has_the_table_only():
    card = render_card("Net", measure_weights(make_model()), CardFacts(), "load()")
    assert read_metadata(card) == {"library_name": "pomona", "tags": ["pomona", "sparse", "pruning"]}
    assert [line for line in card.splitlines() if line.startswith("#")] == ["# Net", "## Use", "## Sparsity"]


def test_tied_weights_are_counted_once():
    assert [name for name, _ in iterate_weights(make_model())] == ["0.weight", "0.bias", "1.bias"]
    assert sum(weight.params for weight in measure_weights(make_model())) == 12


@settings(max_examples=50)
@given(PLAIN)
def test_yaml_reads_back_every_plain_value(value):
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("value", [1e-05, 1e300, -2.5e-7, math.inf, -math.inf, 100.0])
def test_numbers_stay_numbers(value):
    assert yaml.safe_load(to_yaml(value)) == value


def test_a_title_cannot_leave_the_metadata():
    facts = CardFacts(title='x"\n---\nlicense: "mit', tags=["a\nb: c"], metrics={"loss": 1})
    card = render_card("Net", [], facts, "load()")
    assert read_metadata(card)["tags"][-1] == "a\nb: c"
    assert "license" not in read_metadata(card)


def test_a_fence_is_longer_than_those_in_its_text():
    assert fence("a\n```\nb", "toml") == "````toml\na\n```\nb\n````"


def test_specs_are_written_as_on_the_command_line():
    assert format_spec({"name": "cubic", "until": 0.5, "inner": {"name": "none"}}) == "cubic(until=0.5, inner=none)"
    assert format_spec("global") == "global"
