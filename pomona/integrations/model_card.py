"""The model card of a sparse network: README.md with metadata for the Hugging Face Hub, and its sparsity by layer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import require
from ..sparse.layers import PackedLayer
from ..version import __version__

LIBRARY = "pomona"


@dataclass(frozen=True)
class CardFacts:
    """What a model card says besides what can be read off the model; everything may be left out."""

    title: str = ""
    license: str = ""  # as the Hub spells it: "apache-2.0"
    task: str = ""  # as the Hub spells it: "image-classification"
    data: str = ""  # the name of the data set
    metrics: Mapping[str, float] = field(default_factory=dict)  # such as {"accuracy": 93.1}, in per cent
    tags: Sequence[str] = ()
    method: Mapping[str, Any] | None = None  # the pruning method as a spec: name, options, pattern
    recipe: str = ""  # the TOML text of the run
    notes: Sequence[str] = ()  # sentences below the title, such as a privacy guarantee

    def __post_init__(self) -> None:
        for key, value in self.metrics.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(isinstance(key, str) and is_number, f"metrics takes names and numbers, got {key!r}: {value!r}.")


@dataclass(frozen=True)
class WeightFigures:
    """The size of one weight, and how much of it is not zero."""

    name: str
    shape: tuple[int, ...]
    params: int
    nonzeros: int


def iterate_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the dense value of each parameter, tied ones once, and of each packed weight."""
    seen: set[nn.Parameter] = set()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for leaf, weight in module.packed_weights() if isinstance(module, PackedLayer) else ():
            yield prefix + leaf, weight.dense()
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield prefix + leaf, parameter.detach()


def measure_weights(model: nn.Module) -> list[WeightFigures]:
    """Return the figures of all parameters of a model."""
    return [
        WeightFigures(name, tuple(value.shape), value.numel(), int(torch.count_nonzero(value)))
        for name, value in iterate_weights(model)
    ]


def render_card(class_name: str, weights: Sequence[WeightFigures], facts: CardFacts, usage: str) -> str:
    """Return the text of README.md; `usage` is Python code that loads the model."""
    total, left = sum(weight.params for weight in weights), sum(weight.nonzeros for weight in weights)
    title = facts.title or class_name
    sections = [
        front_matter(title, facts),
        f"# {one_line(title)}",
        f"A sparse network ({class_name}): {left:,} of {total:,} parameters are not zero, "
        f"a sparsity of {share(left, total)}. Saved with Pomona {__version__}.",
        *map(one_line, facts.notes),
        f"## Use\n\n{fence(usage, 'python')}",
    ]
    if facts.metrics:
        where = f" on {one_line(facts.data)}" if facts.data else ""
        rows = [[one_line(key), f"{value:.6g}"] for key, value in facts.metrics.items()]
        sections.append(f"## Results{where}\n\n{table(('metric', 'value'), rows)}")
    if facts.method is not None:
        sections.append(f"## Method\n\n{table(('option', 'value'), method_rows(facts.method))}")
    rows = [
        [f"`{w.name}`", "×".join(map(str, w.shape)), f"{w.params:,}", f"{w.nonzeros:,}", share(w.nonzeros, w.params)]
        for w in weights
        if len(w.shape) > 1
    ]
    header = ("weight", "shape", "parameters", "not zero", "sparsity")
    sections.append(f"## Sparsity\n\n{table(header, rows)}\n\nBiases and norms are left out.")
    if facts.recipe:
        sections.append(f"## Recipe\n\n{fence(facts.recipe, 'toml')}")
    return "\n\n".join(sections) + "\n"


def front_matter(title: str, facts: CardFacts) -> str:
    """Return the card's metadata as YAML between its two lines."""
    method = facts.method or {}
    pattern = method.get("pattern")
    names = [method.get("name"), pattern.get("name") if isinstance(pattern, Mapping) else pattern]
    tags = [LIBRARY, "sparse", "pruning", *(str(name) for name in names if name), *facts.tags]
    metadata: dict[str, Any] = {"library_name": LIBRARY, "tags": list(dict.fromkeys(tags))}
    if facts.license:
        metadata["license"] = facts.license
    if facts.task:
        metadata["pipeline_tag"] = facts.task
    if facts.data:
        metadata["datasets"] = [facts.data]
    if facts.metrics:
        metadata["metrics"] = list(facts.metrics)
    if facts.metrics and facts.task and facts.data:
        values = [{"type": key, "value": value} for key, value in facts.metrics.items()]
        result = {"task": {"type": facts.task}, "dataset": {"name": facts.data, "type": facts.data}, "metrics": values}
        metadata["model-index"] = [{"name": title, "results": [result]}]
    return "\n".join(["---", *(f"{key}: {to_yaml(value)}" for key, value in metadata.items()), "---"])


def to_yaml(value: Any) -> str:
    """Return a value in YAML's flow style, with all but ASCII characters of texts as escapes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_yaml(key)}: {to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_yaml, value)) + "]"
    if isinstance(value, float):
        text = repr(value)
        if not math.isfinite(value):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        return text if "." in text else text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a text
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", text)


def method_rows(method: Mapping[str, Any]) -> list[list[str]]:
    """Return the options of a method, nested specs as "name(option=value)"."""
    return [[one_line(key), f"`{one_line(format_spec(value))}`"] for key, value in method.items() if value != []]


def format_spec(value: Any) -> str:
    """Return a value, or a spec as its name with its options."""
    if not isinstance(value, Mapping):
        return str(value)
    options = ", ".join(f"{key}={format_spec(option)}" for key, option in value.items() if key != "name")
    return f"{value.get('name', '')}({options})" if options else str(value.get("name", ""))


def share(left: int, total: int) -> str:
    """Return the fraction that is zero in per cent."""
    return f"{1 - left / total:.2%}" if total else "0.00%"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def fence(text: str, language: str) -> str:
    """Return a fenced code block that ends where the text does, whatever the text contains."""
    ticks = "`" * 3
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text.strip()}\n{ticks}"


def one_line(text: object) -> str:
    """Return a text with all white space as single spaces."""
    return " ".join(str(text).split())
