"""The comparison of a model with its earlier state in one native call: `cpu/snapshot.c`.

It reads Python's objects by functions of Python's stable interface, and tensors by functions of PyTorch's library.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...native import library
from ...native.library import supported_instruction_sets
from ...native.toolchain import SNAPSHOT_SOURCE

NUMBER, ADDRESS = ctypes.c_int64, ctypes.c_void_p
PYTHON_FUNCTIONS = ("PyDict_Next", "PyDict_Size", "PyList_Size", "PyList_GetItem")
TORCH_FUNCTIONS = (
    *(f"aoti_torch_get_{name}" for name in ("data_ptr", "dim", "sizes", "strides")),  # of its stable C interface
    "_ZNK2at10TensorBase8_versionEv",  # TensorBase::_version
)
TENSOR_CLASSES = (Tensor, nn.Parameter)
UNVERSIONED = -1  # the version of an inference tensor
KINDS = ("empty", "dicts", "lists", "tensors", "vectors")  # of what is compared

Values = Collection[Any] | dict[Any, Any]  # of a dictionary, its values count


class Container(ctypes.Structure):
    """A dictionary or list, as `snapshot.c` declares it."""

    _fields_ = [("object", ADDRESS), ("count", NUMBER)]


class TensorState(ctypes.Structure):
    """A tensor: where Python's object holds it, what it holds, the address of its values, and its version."""

    _fields_ = [
        *((name, ADDRESS) for name in ("handle", "held", "data")),
        *((name, NUMBER) for name in ("version", "dimensions")),
    ]


class Memory(ctypes.Structure):
    """Memory whose contents are compared."""

    _fields_ = [("address", ADDRESS), ("bytes", NUMBER)]


class Record(ctypes.Structure):
    """All that is compared."""

    _fields_ = [
        ("functions", ADDRESS),
        *((f"{kind}_count", NUMBER) for kind in KINDS),
        *((name, ADDRESS) for name in (*KINDS, "members", "layouts", "contents")),
    ]


class NativeSnapshot:
    """Containers, tensors and values of vectors at one time. Who has a snapshot keeps all of them alive."""

    def __init__(
        self, empty: Sequence[Any], containers: Sequence[Values], tensors: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> None:
        dicts = [one for one in containers if type(one) is dict]
        lists = [one for one in containers if type(one) is list]
        members = [id(member) for group in chain(*map(dict.items, dicts), lists) for member in group]
        layouts = [number for tensor in tensors for number in (*tensor.shape, *tensor.stride())]
        contents = b"".join(ctypes.string_at(vector.data_ptr(), vector.nbytes) for vector in vectors)
        kinds = (
            make_array(ADDRESS, [id(one) for one in empty]),
            make_array(Container, [(id(one), len(one)) for one in dicts]),
            make_array(Container, [(id(one), len(one)) for one in lists]),
            make_array(TensorState, list(map(describe_tensor, tensors))),
            make_array(Memory, [(vector.data_ptr(), vector.nbytes) for vector in vectors]),
        )
        others = make_array(ADDRESS, members), make_array(NUMBER, layouts), ctypes.create_string_buffer(contents)
        parts = (find_functions(), *kinds, *others)
        functions, *addresses = map(ctypes.addressof, parts)
        self.parts = parts  # to which the record points
        self.record = Record(functions, *map(len, kinds), *addresses)
        self.compare, self.compare_tensors = require_functions()
        self.address = ctypes.addressof(self.record)
        self.others = [list_values(one) for one in containers if type(one) not in (dict, list)]
        self.ids = list(map(id, chain.from_iterable(self.others)))

    def matches(self) -> bool:
        """Return whether containers have the same members, and tensors and hooks are as they were."""
        same = self.compare(self.address) == 1
        return same and (not self.others or self.has_same_others())

    def has_same_tensors(self) -> bool:
        """Return whether the dictionaries that were empty are, and the tensors and vectors are as they were."""
        return self.compare_tensors(self.address) == 1

    def has_same_others(self) -> bool:
        """Return whether containers of other types than `dict` and `list` have the same members."""
        try:
            return list(map(id, chain.from_iterable(self.others))) == self.ids
        except Exception:  # a class of the user's
            return False


def make_native_snapshot(
    empty: Sequence[Any], containers: Sequence[Values], tensors: Sequence[Tensor], vectors: Sequence[Tensor]
) -> NativeSnapshot | None:
    """Return a native snapshot, or None without a library, or for tensors that it cannot read."""
    is_known = (
        load_functions() is not None
        and find_functions() is not None
        and all(type(one) in TENSOR_CLASSES and has_handle(one) for one in tensors)
        and all(vector.is_contiguous() for vector in vectors)
    )
    return NativeSnapshot(empty, containers, tensors, vectors) if is_known else None


def list_values(container: Values) -> Collection[Any]:
    """Return what is compared of a container: the values of a dictionary, else the items."""
    return container.values() if isinstance(container, dict) else container


@cache
def load_functions() -> tuple[Callable[[int], int], ...] | None:
    """Return the native functions, which keep Python's lock; None without a library or where Python has no lock."""
    functions = library.load_library(SNAPSHOT_SOURCE)
    if functions is None or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    prefix, found = f"pomona_{supported_instruction_sets()[0]}_snapshot", ctypes.PyDLL(functions._name)
    both = getattr(found, f"{prefix}_matches"), getattr(found, f"{prefix}_has_same_tensors")
    for function in both:
        function.restype, function.argtypes = ctypes.c_int, [ADDRESS]
    return both


def require_functions() -> tuple[Callable[[int], int], ...]:
    """Return the native functions; raise RuntimeError without a library."""
    functions = load_functions()
    if functions is None:
        raise RuntimeError("there is no native library: see `pomona.native`.")
    return functions


@cache
def find_functions() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the addresses of the functions of Python and PyTorch that are called, or None where any is missing."""
    try:
        torch_library = ctypes.CDLL(torch._C.__file__)
        found = [getattr(ctypes.pythonapi, name) for name in PYTHON_FUNCTIONS]
        found += [getattr(torch_library, name) for name in TORCH_FUNCTIONS]
    except (AttributeError, OSError):
        return None
    return make_array(ADDRESS, [ctypes.cast(function, ADDRESS).value for function in found])


@cache
def find_handle_offset() -> int | None:
    """Return where a Python object of a tensor holds the C++ tensor, a single pointer; None where it does not."""
    tensor = torch.empty(0)
    words = [has_word(tensor, offset) for offset in range(0, Tensor.__basicsize__, ctypes.sizeof(ADDRESS))]
    return words.index(True) * ctypes.sizeof(ADDRESS) if any(words) else None


def has_word(tensor: Tensor, offset: int) -> bool:
    """Return whether a tensor's Python object has, at an offset, the pointer that is its C++ tensor."""
    return ctypes.c_void_p.from_address(id(tensor) + offset).value == tensor._cdata


def has_handle(tensor: Tensor) -> bool:
    """Return whether the Python object of a tensor holds the C++ tensor where those of others do."""
    offset = find_handle_offset()
    return offset is not None and has_word(tensor, offset)


def describe_tensor(tensor: Tensor) -> tuple[int, ...]:
    """Return the fields of a tensor's state."""
    version = UNVERSIONED if tensor.is_inference() else tensor._version
    handle = id(tensor) + (find_handle_offset() or 0)
    return handle, tensor._cdata, tensor.data_ptr(), version, tensor.ndim


def make_array(kind: Any, items: Sequence[Any]) -> Any:
    """Return items as an array of a C type."""
    return (kind * len(items))(*items)
