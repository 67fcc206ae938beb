"""`save` and `load`: a compressed model in one safetensors file, whole or refused.

The file's metadata says which layers are packed and how, which dense ones do their ReLU, which network of `pm.models`
it is where that is known, and a checksum over all of it. Loading unpickles nothing and runs nothing from the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .. import models
from ..errors import PomonaError, require
from .compress import fuse, make, swap
from .format import BalancedTensor
from .layers import Conv2dReLU, Packed

VERSION = 1
KEY = "pomona"


def save(model: nn.Module, path: Path | str, architecture: Mapping[str, Any] | str | None = None) -> Path:
    """Write a model, compressed or not, to a file that appears whole or not at all.

    `architecture` names the network, as "resnet20" or {"name": "lstm_lm", "hidden": 1500}, so that `load`
    can build it; without it `load` has to be given the network.
    """
    known = {"name": architecture} if isinstance(architecture, str) else architecture
    if known is not None:
        models.info(known["name"])  # refuses a name that nobody could load
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    packed = {name: module.plan() for name, module in model.named_modules() if isinstance(module, Packed)}
    fused = [name for name, module in model.named_modules() if isinstance(module, Conv2dReLU)]
    head = {"version": VERSION, "model": known and dict(known), "packed": packed, "fused": fused}
    text = json.dumps(head | {"digest": digest(head, tensors)})
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(to_bytes(tensors, {KEY: text}))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PomonaError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    return path


def load(path: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The model of a file, ready to run: built by its name, or the `model` given, filled in."""
    try:
        with safe_open(path, "pt") as file:
            head = json.loads((file.metadata() or {}).get(KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    except FileNotFoundError as error:
        raise PomonaError(f"there is no file '{path}'.") from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise PomonaError(f"'{path}' is damaged, or no safetensors file: {reason(error)}.") from error
    require(isinstance(head, dict), f"'{path}' was not written by pm.save.")
    version = head.get("version")
    require(version == VERSION, f"'{path}' is of version {version!r}, this pomona reads version {VERSION}.")
    told = head.pop("digest", None)
    require(told == digest(head, tensors), f"'{path}' is damaged: it does not match its checksum.")
    try:
        shell = skeleton(path, head["model"], tensors) if model is None else model
        return fill(shell, head["packed"], head.get("fused", []), tensors)  # older files have nothing fused
    except PomonaError:
        raise
    except Exception as error:  # a file that means harm can trip up anything, and must do no more than that
        raise PomonaError(f"'{path}' does not fit the model: {reason(error)}.") from error


def skeleton(path: Path | str, known: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The network a file names, without values."""
    require(known is not None, f"'{path}' does not say which network it is: pm.load(path, model) fills yours.")
    size = sum(tensor.nbytes for tensor in tensors.values())
    for option, value in known.items():  # no layer without weights: whoever asks for more wants to do harm
        numbers = value if isinstance(value, list) else [value]
        fair = all(not isinstance(n, int) or abs(n) <= size for n in numbers)
        require(fair, f"'{path}' asks for {option}={value} and has {size:,} bytes.")
    with torch.device("meta"):
        return models.build(**known).eval()


def fill(model: nn.Module, packed: Mapping[str, Any], fused: Sequence[str], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Put packed layers and convolutions with their ReLU where the file has some, and give every layer its values."""
    for name, plan in packed.items():
        layer = model.get_submodule(name)
        packs = {
            leaf: BalancedTensor(
                tensors[f"{name}.{leaf}_values".lstrip(".")],
                tensors[f"{name}.{leaf}_indices".lstrip(".")],
                torch.Size(facts["shape"]),
                facts["block"],
            ).verify()
            for leaf, facts in plan.items()
        }
        for leaf, pack in packs.items():
            wanted = layer.get_parameter(leaf).shape
            require(
                pack.shape == wanted,
                f"the file has {name}.{leaf} as {tuple(pack.shape)}, the model as {tuple(wanted)}.",
            )
        model = swap(model, layer, make(layer, packs))
    fuse(model, fused)
    odd = [name for name in fused if not isinstance(model.get_submodule(name), Conv2dReLU)]
    require(not odd, f"the file has {', '.join(odd[:3])} with a ReLU behind it, the model has not.")
    model.load_state_dict(dict(tensors), assign=True)
    lost = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    require(not lost, f"the file has no values for {', '.join(lost[:3])}: give the model, pm.load(path, model).")
    return model


def digest(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum over the facts and the values."""
    total = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def reason(error: Exception) -> str:
    """The first line of what went wrong."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
