"""The inputs of a run: its data set, the options of its model, and the weights and masks of the run it starts from."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pomona import data, models
from pomona.core.method import Masks
from pomona.data import Dataset
from pomona.errors import PomonaError, require
from pomona.registry import spec_to_dict

from ..recipes.recipe import Recipe
from . import masks
from .concurrency import CONCURRENT_RUN
from .folder import MODEL_FILE, read_summary, require_same_tensors

_shared_datasets: weakref.WeakValueDictionary[str, Dataset] = weakref.WeakValueDictionary()


def load_data(recipe: Recipe, data_dir: Path | str | None, device: torch.device) -> Dataset:
    """Return the recipe's data set on the device; concurrent runs share one copy of it."""
    options = spec_to_dict(recipe.data.source) | {
        "root": data_dir,
        "device": device,
        "validation": recipe.data.validation,
    }
    key = repr(options)
    found = _shared_datasets.get(key) if CONCURRENT_RUN.get() else None
    if found is None:
        found = data.load(options.pop("name"), **options)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other runs read it on their own streams
        _shared_datasets[key] = found
    return found


def model_options(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Return the name and the options of the model; options that follow from the data may be set by the recipe.

    Raises PomonaError if the model does not take this kind of data.
    """
    info = models.info(recipe.model["name"])
    if not _takes_data(info, dataset.kind):
        suitable = [name for name in models.names() if _takes_data(models.info(name), dataset.kind)]
        raise PomonaError(
            f"model '{info.name}' does not fit data set '{dataset.name}', which holds {dataset.kind}s: "
            f"choose one of {', '.join(suitable)}."
        )
    from_data = info.fit_options(dataset.input_shape, dataset.classes)
    if info.takes_tokens:
        from_data["vocabulary"] = dataset.vocab
    return {**from_data, **recipe.model}


def _takes_data(info: models.ModelInfo, kind: str) -> bool:
    """Return whether a model takes a kind of data: token ids or not, one class for a sample or one for each token."""
    return info.takes_tokens == (kind in ("tokens", "text")) and ("num_classes" in info.options) == (kind != "text")


def select_matching(weights: dict[str, Tensor], model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the weights that have the name and shape of one of the model's; raise PomonaError if there are none."""
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor for name, tensor in weights.items() if own.get(name) == tensor.shape}
    require(
        bool(found),
        f"none of the {len(weights)} tensors of the run '{folder}' has the name and shape of one of this model's: "
        "choose the model of that run.",
    )
    return found


def load_origin(recipe: Recipe, model: nn.Module, device: torch.device) -> Masks | None:
    """Load the weights of the recipe's origin into the model, and return its masks where the recipe fine-tunes them.

    Raises PomonaError if the run that the recipe names is missing, damaged or another one than at its start.
    """
    origin = recipe.origin
    if origin.run is None:
        return None
    folder = Path(origin.run)
    summary = read_summary(folder)
    if summary is None:
        raise PomonaError(f"the run '{folder}', from which this one starts, is not there (any more).")
    found = summary["fingerprint"]
    require(
        found == origin.fingerprint,
        f"the run in '{folder}' has the fingerprint {found}, and this one started from {origin.fingerprint}.",
    )
    if origin.weights != "new":
        try:
            weights = safetensors.torch.load_file(folder / MODEL_FILE)
        except (OSError, SafetensorError) as error:
            raise PomonaError(f"the weights of the run '{folder}' cannot be read: train it again.") from error
        if origin.weights == "final":
            require_same_tensors(weights, model.state_dict(), folder)
        model.load_state_dict(select_matching(weights, model, folder), strict=False)
    if recipe.method["name"] == "finetune":
        return {name: mask.to(device) for name, mask in masks.load(folder).items()}
    return None
