"""Read the pickles of CIFAR's python version without executing them.

A pickle is a program. This interpreter knows the few instructions those files consist of: literals,
lists, dictionaries, tuples, the memo, and the one idiom by which numpy writes a uint8 array. It
imports nothing and calls nothing that a file names; anything else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# What may be named, and the plain word that stands for it here.
NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}


class Named(str):
    """A permitted name; a type of its own, so that no string in a file can pass for one."""


class Array:
    """An array to be: numpy's pickles make it empty first and fill it later."""

    value: np.ndarray | None = None


class Byte:
    """The dtype of one unsigned byte, the only one these files have."""


def unpickle(data: bytes) -> dict[str, Any]:
    """The dictionary in a pickle of plain values and uint8 arrays; `ValueError` for anything else."""
    machine = Machine()
    for opcode, argument, _ in pickletools.genops(data):
        try:
            machine.run(opcode.name, argument)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a broken pickle at {opcode.name}") from error
    result = machine.stack[-1] if machine.stack else None
    if not isinstance(result, dict):
        raise ValueError("a pickle that holds no dictionary")
    return {_text(k): v.value if isinstance(v, Array) else v for k, v in result.items()}


class Machine:
    """The pickle stack machine, less everything that could act."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack at open marks
        self.memo: dict[int, Any] = {}
        push, take, marked = self.stack.append, self.take, self.marked
        self.actions: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self.put),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda key: push(self.memo[key])),
            "MEMOIZE": lambda _: self.put(len(self.memo)),
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_TUPLE": lambda _: push(()),
            "LIST": lambda _: push(marked()),
            "DICT": lambda _: push(_pairs(marked())),
            "TUPLE": lambda _: push(tuple(marked())),
            "TUPLE1": lambda _: push(tuple(take(1))),
            "TUPLE2": lambda _: push(tuple(take(2))),
            "TUPLE3": lambda _: push(tuple(take(3))),
            "APPEND": lambda _: self.fill(list, take(1)),
            "APPENDS": lambda _: self.fill(list, marked()),
            "SETITEM": lambda _: self.fill(dict, take(2)),
            "SETITEMS": lambda _: self.fill(dict, marked()),
            "GLOBAL": lambda name: push(_named(name)),
            "REDUCE": lambda _: push(_reduced(*take(2))),
            "BUILD": lambda _: push(_built(*take(2))),
        }

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in LITERALS:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif opcode in self.actions:
            self.actions[opcode](argument)
        else:
            raise ValueError(f"the pickle instruction {opcode}, which is not read here")

    def take(self, count: int) -> list[Any]:
        """Pop `count` values."""
        place = len(self.stack) - count
        if place < (self.marks[-1] if self.marks else 0):
            raise IndexError
        taken = self.stack[place:]
        del self.stack[place:]
        return taken

    def marked(self) -> list[Any]:
        """Pop the values above the last mark."""
        return self.take(len(self.stack) - self.marks.pop())

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def fill(self, kind: type, values: list[Any]) -> None:
        """Add values to the container on top of the stack."""
        container = self.stack[-1]
        if kind is list and isinstance(container, list):
            container.extend(values)
        elif kind is dict and isinstance(container, dict):
            container.update(_pairs(values))
        else:
            raise ValueError(f"values added to a {type(container).__name__}")


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _named(name: str) -> Named:
    if name not in NAMES:
        raise ValueError(f"the name '{name}', which is never imported from a data file")
    return Named(NAMES[name])


def _reduced(function: Any, arguments: Any) -> Array | Byte:
    """`_reconstruct(ndarray, (0,), 'b')` and `dtype('u1', …)`: recognised, not called."""
    if isinstance(function, Named) and function == "array" and isinstance(arguments[0], Named):
        return Array()
    if isinstance(function, Named) and function == "dtype" and _text(arguments[0]) == "u1":
        return Byte()
    raise ValueError("a call other than those that make a uint8 array")


def _built(target: Any, state: Any) -> Array | Byte:
    """Fill an array from (version, shape, dtype, Fortran order, bytes); a byte needs no more telling."""
    if isinstance(target, Byte):
        return target
    if not isinstance(target, Array):
        raise ValueError("the state of an unknown object")
    _, shape, dtype, fortran, content = state
    if not isinstance(dtype, Byte):
        raise ValueError("an array of other than uint8")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    target.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
    return target


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
