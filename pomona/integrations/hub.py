"""Sparse models in folders and on the Hugging Face Hub: safetensors, the masks, and a model card.

    hub.save_pretrained(model, "folder", architecture="resnet20", pruner=pruner)
    hub.push_to_hub("folder", "user/name")
    model = hub.from_pretrained("user/name")            # or a folder

A folder has these files:

    model.safetensors  the network, dense or packed, as `pm.save` writes it; a transformers model as it saves itself
    masks.safetensors  the masks, as bits, where they are known
    README.md          the model card
    pomona.json        what `from_pretrained` needs besides the weights

Loading unpickles nothing and runs nothing from the folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.mask_file import encode_masks, read_masks
from ..core.method import Masks
from ..core.pruner import Pruner
from ..core.targets import unwrap
from ..errors import PomonaError, require
from ..registry import spec_to_dict
from ..sparse import files
from ..sparse.layers import PackedLayer
from ..untrusted import describe, read_object
from ..version import __version__
from .model_card import CardFacts, iterate_weights, measure_weights, render_card

__all__ = ["CardFacts", "from_pretrained", "load_masks", "push_to_hub", "save_pretrained"]

VERSION = 1  # of the folder format
CONFIG_FILE, MODEL_FILE, MASKS_FILE, CARD_FILE = "pomona.json", "model.safetensors", "masks.safetensors", "README.md"
OWN, TRANSFORMERS = "pomona", "transformers"  # who reads model.safetensors

# What is uploaded and downloaded: weights without pickle, settings, and the files of tokenizers.
PATTERNS = ["*.safetensors", "*.json", "*.md", "*.txt", "*.toml", "*.model", "*.jinja"]
MAX_CONFIG_BYTES = 1_000_000  # of a JSON file from a stranger
MAX_DOWNLOAD_BYTES = 64 * 2**30  # of a repository, unless the caller allows more
MAX_NAME_LENGTH = 50  # of a name from a stranger in a message
REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")  # user/name
# Settings of transformers by which a configuration names code on the Hub.
CODE_SETTINGS = ("auto_map", "attn_implementation", "experts_implementation")

Builder = nn.Module | Callable[..., nn.Module]  # a network to fill, or what makes one


def save_pretrained(
    model: nn.Module,
    folder: Path | str,
    *,
    architecture: Mapping[str, Any] | str | None = None,
    options: Mapping[str, Any] | None = None,
    pruner: Pruner | None = None,
    masks: Masks | None = None,
    card: CardFacts | None = None,
) -> Path:
    """Write a model, its masks and its model card to a folder, for `from_pretrained`; return the folder.

    A transformers model is written by its own `save_pretrained`, so that `AutoModel.from_pretrained(folder)` reads it.

    Arguments:
        model: any model, dense or packed by `pm.compress`; its weights are not changed.
        folder: made where it does not exist; files of the same names are replaced.
        architecture: the network of `pm.models` that it is, as "resnet20" or {"name": "lstm_lm", "hidden": 1500}.
        options: of a class of your own, the arguments with which `from_pretrained(folder, model=Class)` calls it.
        pruner: the pruner that made the zeros; the card then shows its method, and its masks are written.
        masks: the masks, where there is no pruner.
        card: what else the model card should say.
    """
    model, folder, facts = unwrap(model), Path(folder), card or CardFacts()
    if pruner is not None:
        masks = pruner.masks() if masks is None else masks
        facts = facts if facts.method else dataclasses.replace(facts, method=spec_to_dict(pruner.method))
    require_zeros(model, masks or {})
    by_transformers = is_transformers_model(model)
    packed = any(isinstance(module, PackedLayer) for module in model.modules())
    require(not (by_transformers and packed), "transformers cannot read packed layers: save pm.decompress(model).")
    config = {
        "version": VERSION,
        "pomona": __version__,
        "format": TRANSFORMERS if by_transformers else OWN,
        "class": type(model).__name__,
        "architecture": {"name": architecture}
        if isinstance(architecture, str)
        else architecture and dict(architecture),
        "options": None if options is None else dict(options),
        "method": facts.method,
        "metrics": dict(facts.metrics),
    }
    text = encode_config(config)
    usage = usage_code(model, architecture is not None or by_transformers)
    readme = render_card(type(model).__name__, measure_weights(model), facts, usage)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).unlink(missing_ok=True)  # written last: an incomplete folder is not loaded
        if by_transformers:
            model.save_pretrained(folder)  # type: ignore[operator]
        else:
            files.save(model, folder / MODEL_FILE, architecture)
        (folder / MASKS_FILE).unlink(missing_ok=True)
        if masks:
            (folder / MASKS_FILE).write_bytes(encode_masks(masks))
        (folder / CARD_FILE).write_text(readme, encoding="utf-8")
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PomonaError(f"'{folder}' cannot be written: {error.strerror or error}.") from error
    return folder


def from_pretrained(
    source: Path | str,
    model: Builder | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | str | None = None,
    max_bytes: int = MAX_DOWNLOAD_BYTES,
) -> nn.Module:
    """Return the model of a folder or of a repository on the Hub, in evaluation mode.

    Arguments:
        source: a folder that `save_pretrained` has written, or "user/name" on the Hub.
        model: for networks outside `pm.models`, the network to fill, or its class, which is called with the options
            that `save_pretrained` was given. For a transformers model, a class other than the saved one.
        revision, token, cache_dir: of the download, as `huggingface_hub.snapshot_download` takes them.
        max_bytes: the largest repository that is downloaded.

    Raises PomonaError for files that are missing, damaged, or do not fit, and for a repository over `max_bytes`.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = download(str(source), revision, token, cache_dir, max_bytes)
    config = read_config(folder)
    if config["format"] == TRANSFORMERS:
        network = load_transformers_model(folder, config["class"], model)
    else:
        network = files.load(folder / MODEL_FILE, build_network(folder, config, model))
    require_zeros(network, load_masks(folder))
    return network.eval()


def load_masks(folder: Path | str) -> Masks:
    """Return the masks in a folder that `save_pretrained` has written; none where it was given none."""
    path = Path(folder) / MASKS_FILE
    return read_masks(path) if path.is_file() else {}


def push_to_hub(
    folder: Path | str,
    repository: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload a sparse model with Pomona",
    create_pr: bool = False,
) -> str:
    """Upload a folder that `save_pretrained` has written to "user/name" on the Hub; return the commit's address.

    The repository is made where it does not exist. Without a token, that of `hf auth login` is used.
    """
    hugging_face, folder = import_huggingface_hub(), Path(folder)
    read_config(folder)
    require_repository_name(repository)
    api = hugging_face.HfApi(token=token, library_name=OWN, library_version=__version__)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            allow_patterns=PATTERNS,
            create_pr=create_pr,
        )
    except Exception as error:  # of the network, the Hub's answer, or the login
        raise PomonaError(f"'{folder}' was not uploaded to {repository}: {describe(error)}.") from error
    return str(commit.commit_url)


# ---- the folder


def encode_config(config: Mapping[str, Any]) -> str:
    """Return the text of pomona.json; raise PomonaError if options are not plain values or it would not be read."""
    try:
        text = json.dumps(config, indent=2)
    except (TypeError, ValueError) as error:
        raise PomonaError(f"options and metrics take numbers, texts and lists of them: {error}.") from error
    require(len(text) <= MAX_CONFIG_BYTES, f"options have {len(text):,} bytes, at most {MAX_CONFIG_BYTES:,} are read.")
    return text + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file from a stranger; raise PomonaError if it is missing, too large or no object."""
    require(path.is_file(), f"'{path.parent}' has no {path.name}: give a folder that hub.save_pretrained has written.")
    return read_object(path, MAX_CONFIG_BYTES)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of pomona.json after checks of their types; raise PomonaError where they are wrong."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    version = config.get("version")
    require(version == VERSION, f"'{path}' has version {version!r}, and this pomona reads version {VERSION}.")
    known = {"format": (str,), "class": (str,), "options": (dict, type(None))}
    for key, types in known.items():
        require(
            isinstance(config.get(key), types),
            f"'{path}' has no valid {key}: {str(config.get(key))[:MAX_NAME_LENGTH]!r}.",
        )
    written = config["format"][:MAX_NAME_LENGTH]
    require(written in (OWN, TRANSFORMERS), f"'{path}' has format {written!r}, not {OWN} or {TRANSFORMERS}.")
    return config


@torch.no_grad()
def require_zeros(model: nn.Module, masks: Masks) -> None:
    """Raise PomonaError unless a model has the weights that masks name, and zeros wherever they prune."""
    missing = dict(masks)
    for name, weight in iterate_weights(model):
        mask = missing.pop(name, None)
        if mask is None:
            continue
        same = mask.shape == weight.shape
        require(same, f"the mask of {name} has shape {tuple(mask.shape)}, the weight {tuple(weight.shape)}.")
        wrong = int(torch.count_nonzero(weight[~mask.to(weight.device)]))
        require(
            not wrong, f"{name} has {wrong:,} weights that are pruned and not zero: call pruner.apply(model) first."
        )
    require(not missing, f"the model has no weights called {', '.join(list(missing)[:3])}, which the masks prune.")


def build_network(folder: Path, config: Mapping[str, Any], model: Builder | None) -> nn.Module | None:
    """Return the network to fill: that given, one that the class given makes of the options, or None for pm.models."""
    name = config["class"][:MAX_NAME_LENGTH]
    is_known = model is not None or config.get("architecture") is not None
    require(is_known, f"'{folder}' holds a {name}, which is not in pm.models: pass the class, model={name}.")
    if model is None or isinstance(model, nn.Module):
        return model
    file, options = folder / MODEL_FILE, config["options"] or {}
    require(file.is_file(), f"there is no file '{file}'.")
    files.require_plausible_options(file, options, file.stat().st_size)
    try:
        return model(**options)
    except TypeError as error:
        reason = describe(error)
        raise PomonaError(f"{getattr(model, '__name__', model)} does not take the saved options: {reason}.") from error


def usage_code(model: nn.Module, is_known: bool) -> str:
    """Return the lines of Python that load a model; `is_known` says that no class needs to be given."""
    arguments = '"USER/NAME"' if is_known else f'"USER/NAME", model={type(model).__name__}'
    return (
        "from pomona.integrations import hub\n\n"
        f"model = hub.from_pretrained({arguments})  # this repository, or a folder with its files"
    )


# ---- transformers


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is one of transformers; where that is not imported there is none."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return base is not None and isinstance(model, base)


def load_transformers_model(folder: Path, class_name: str, model: Builder | None) -> nn.Module:
    """Return the transformers model of a folder, by the class of transformers with this name, or by that given."""
    try:
        import transformers
    except ImportError as error:
        raise PomonaError(f"'{folder}' needs transformers: pip install 'pomona[huggingface]'.") from error
    require(not isinstance(model, nn.Module), "a transformers model is not filled: give its class, or leave it out.")
    settings = read_json(folder / "config.json")
    for key in CODE_SETTINGS:
        names_code = "/" in json.dumps(settings.get(key)) or (key == "auto_map" and settings.get(key))
        require(not names_code, f"'{folder}' asks for code from elsewhere ({key} in config.json), which is not run.")
    found: Any = getattr(transformers, class_name, None) if model is None else model
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    name = class_name[:MAX_NAME_LENGTH]
    require(
        is_model or model is not None,
        f"'{folder}' holds a {name!r}, which is no model of transformers: pass the class, model=….",
    )
    try:
        return found.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"'{folder}' was not read by transformers: {describe(error)}.") from error


# ---- the Hub


def import_huggingface_hub() -> Any:
    """Return the package; raise PomonaError where it is missing."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise PomonaError("the Hub needs huggingface_hub: pip install 'pomona[huggingface]'.") from error
    return huggingface_hub


def require_repository_name(name: str) -> None:
    """Raise PomonaError unless a name is of the form user/name."""
    require(REPOSITORY.fullmatch(name) is not None, f"'{name}' is neither a folder nor a repository, as user/name.")


def download(
    repository: str, revision: str | None, token: str | None, cache_dir: Path | str | None, max_bytes: int
) -> Path:
    """Download the files of a repository, none of them code and at most `max_bytes`, and return their folder.

    Without the Hub, the files of an earlier download are returned from the cache.
    """
    require_repository_name(repository)
    hugging_face = import_huggingface_hub()
    options = {"revision": revision, "token": token, "cache_dir": cache_dir, "allow_patterns": PATTERNS}
    try:
        size = measure_repository(hugging_face, repository, revision, token)
        require(
            size <= max_bytes,
            f"{repository} has {size:,} bytes to download, and at most {max_bytes:,} are: pass a larger max_bytes.",
        )
        return Path(hugging_face.snapshot_download(repository, **options))
    except PomonaError:
        raise
    except Exception as error:  # of the network, or the Hub's answer
        with suppress(Exception):
            return Path(hugging_face.snapshot_download(repository, **options, local_files_only=True))
        raise PomonaError(f"{repository} was not downloaded: {describe(error)}.") from error


def measure_repository(hugging_face: Any, repository: str, revision: str | None, token: str | None) -> int:
    """Return the bytes of a repository's files that `download` takes."""
    facts = hugging_face.HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in facts.siblings or ()}
    return sum(sizes[name] for name in hugging_face.utils.filter_repo_objects(sizes, allow_patterns=PATTERNS))
