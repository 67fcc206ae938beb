"""`save` and `load`: a compressed model in one safetensors file, read completely or refused.

The file's metadata holds which layers are packed and how, which dense ones compute their ReLU, whether one native call
runs the convolutions, which weights are encoded (`weight_encodings`), which network of `pm.models` it is where that is
known, and a checksum over all of it.
Loading unpickles nothing and runs nothing from the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .. import models
from ..durable import replace_file
from ..errors import PomonaError, require, shorten
from ..sharding import refuse_sharded
from ..untrusted import describe, parse_json, read_tensors
from .filling import require_matching_dtypes, unchanged_on_failure
from .formats import find_format
from .layers import Conv2dReLU, PackedLayer, build_packed_layer, read_weights
from .network import is_planned, plan_network
from .packed_tensor import PackedTensor
from .quantized import QuantizedBalancedTensor
from .surgery import choose_encoder_paths, fuse_relus, replace_module
from .weight_encodings import decode_tensors, encode_tensors

VERSION = 1  # of the file format
ENCODED_VERSION = 2  # of a file with encoded weights, which the first version did not have
UNSTRUCTURED_VERSION = 3  # of a file with packed weights that are not balanced
QUANTIZED_VERSION = 4  # of a file with packed weights that are codes and scales
METADATA_KEY = "pomona"


def save(
    model: nn.Module,
    path: Path | str,
    architecture: Mapping[str, Any] | str | None = None,
    *,
    encoding: str | None = None,
) -> Path:
    """Write a model, compressed or not, to a file that appears complete or not at all; return its path.

    `architecture` names the network, as "resnet20" or {"name": "lstm_lm", "hidden": 1500}, so that `load` can build it;
    without it, `load` needs the network. `encoding`, "csr" or "2:4", stores the dense weights that become smaller by it
    without their zeros. Raise PomonaError for an unknown network or a path that cannot be written.
    """
    refuse_sharded(model, "pm.save")
    network = {"name": architecture} if isinstance(architecture, str) else architecture
    if network is not None:
        models.info(network["name"])  # raises for a name that `load` could not build
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    packed = {name: m.file_metadata() for name, m in model.named_modules() if isinstance(m, PackedLayer)}
    fused = [name for name, module in model.named_modules() if isinstance(module, Conv2dReLU)]
    header = {"version": choose_version(packed), "model": network and dict(network), "packed": packed, "fused": fused}
    if is_planned(model):
        header["planned"] = True
    if encoding is not None:
        require(not packed, "the weights of a compressed model are packed already: encode pm.decompress(model).")
        tensors, header["encoded"] = encode_tensors(tensors, encoding)
        header["version"] = ENCODED_VERSION
    text = json.dumps(header | {"digest": checksum(header, tensors)})
    replace_file(path, to_bytes(tensors, {METADATA_KEY: text}))
    return Path(path)


def choose_version(packed: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> int:
    """Return the oldest version of the file format that has the formats of these packed layers."""
    weights = [weight for layer in packed.values() for weight in layer.values()]
    if any(weight.get("format") == QuantizedBalancedTensor.format_name for weight in weights):
        return QUANTIZED_VERSION
    return VERSION if all("block" in weight for weight in weights) else UNSTRUCTURED_VERSION


def load(path: Path | str, model: nn.Module | None = None) -> nn.Module:
    """Return the model of a file in eval mode, ready to run: built by its name, or the `model` given, filled in.

    Raise PomonaError for a file that is missing, damaged, forged or does not fit the model, which is then as it was.
    """
    try:
        metadata, tensors = read_tensors(path)
        header = parse_json(metadata.get(METADATA_KEY, "null"))
    except FileNotFoundError as error:
        raise PomonaError(f"there is no file '{path}'.") from error
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"'{path}' is damaged, or not a safetensors file: {describe(error)}.") from error
    require(isinstance(header, dict), f"'{path}' was not written by pm.save.")
    version = header.get("version")
    known = version in (VERSION, ENCODED_VERSION, UNSTRUCTURED_VERSION, QUANTIZED_VERSION)
    latest = QUANTIZED_VERSION
    require(known, f"'{path}' has format version {version!r}, and this pomona reads up to version {latest}.")
    stored = header.pop("digest", None)
    require(stored == checksum(header, tensors), f"'{path}' is damaged: it does not match its checksum.")
    try:
        network = build_network(path, header["model"], tensors) if model is None else model
        shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
        tensors = decode_tensors(tensors, header.get("encoded", {}), shapes)
        require_matching_dtypes(path, network, tensors)
        with unchanged_on_failure(network):
            filled = fill_network(network, header["packed"], header.get("fused", []), tensors)  # older: no "fused"
            if header.get("planned") is True:
                plan_network(filled.eval())
            return filled.eval()
    except PomonaError:
        raise
    except Exception as error:  # a hostile file can make anything fail, and must do no more than that
        raise PomonaError(f"'{path}' does not fit the model: {describe(error)}.") from error


def build_network(path: Path | str, architecture: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the network that a file names, on the meta device."""
    named = architecture is not None
    require(named, f"'{path}' does not name its network: pass one to fill, pm.load(path, model).")
    require_plausible_options(path, architecture, sum(tensor.nbytes for tensor in tensors.values()))
    return models.build_on_meta(**architecture)


def require_plausible_options(path: Path | str, options: Mapping[str, Any], size: int) -> None:
    """Raise PomonaError if a number among a network's options is larger than the bytes of its file.

    Every layer has weights in the file, so that such an option is an attack on memory.
    """
    for option, value in options.items():
        numbers = value if isinstance(value, list) else [value]
        plausible = all(not isinstance(n, int) or abs(n) <= size for n in numbers)
        shown = f"{shorten(option)}={shorten(value)}"
        require(plausible, f"'{path}' has {size:,} bytes, too few for a network with {shown}.")


def fill_network(
    model: nn.Module, packed: Mapping[str, Any], fused: Sequence[str], tensors: Mapping[str, Tensor]
) -> nn.Module:
    """Replace the layers that are packed or fused in the file, and load the values of all; return the model."""
    for name, metadata in packed.items():
        layer = model.get_submodule(name)
        weights = {
            leaf: read_packed_weight(f"{name}.{leaf}".lstrip("."), described, tensors)
            for leaf, described in metadata.items()
        }
        for leaf, weight in weights.items():
            expected = read_weights(layer)[leaf].shape
            matches = weight.shape == expected
            stored = tuple(weight.shape)
            require(matches, f"the file has {name}.{leaf} as {stored}, the model as {tuple(expected)}.")
        model = replace_module(model, layer, build_packed_layer(layer, weights))
    fuse_relus(model, fused)
    choose_encoder_paths(model)
    wrong = [name for name in fused if not isinstance(model.get_submodule(name), Conv2dReLU)]
    require(
        not wrong, f"the file fuses a ReLU into {', '.join(wrong[:3])}, where the model has no convolution with a ReLU."
    )
    model.load_state_dict(dict(tensors), assign=True)
    missing = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    require(
        not missing,
        f"the file has no values for {', '.join(missing[:3])}: pass a model that has them, pm.load(path, model).",
    )
    return model


def read_packed_weight(name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PackedTensor:
    """Return the packed weight that a file stores under a name; raise PomonaError for contents that are not of one."""
    packed_format = find_format(metadata)
    return packed_format.from_parts([tensors[f"{name}_{part}"] for part in packed_format.part_names], metadata).verify()


def checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's header and values, in hexadecimal."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
