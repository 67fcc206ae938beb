"""Read the pickles of CIFAR's Python version without executing them.

A pickle is a program. The interpreter in this module supports only the few instructions that these files consist of:
literals, lists, dictionaries, tuples, the memo, and the call sequence with which numpy writes a uint8 array. It imports
and calls nothing that a file names, and refuses everything else. Lists hold literals and keys are text, so that a file
cannot nest values so deeply, or repeat them so often, that a later step fails or never ends.
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
MAX_INSTRUCTIONS = 3_000_000  # the largest published file has less than half a million
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# The globals that a file may name, and the word that represents each of them here.
ALLOWED_GLOBALS = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}


class AllowedGlobal(str):
    """The word for an allowed global; a separate type, so that no string in a file can be mistaken for one."""


class PendingArray:
    """An array whose content follows: numpy's pickles first create an empty array and fill it later."""

    value: np.ndarray | None = None


class Uint8Dtype:
    """The dtype uint8, the only one in these files."""


def unpickle(data: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain values and uint8 arrays; raise ValueError for anything else."""
    machine = PickleMachine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count == MAX_INSTRUCTIONS:
            raise ValueError(f"a pickle of more than {MAX_INSTRUCTIONS:,} instructions")
        try:
            machine.execute(opcode.name, argument)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a broken pickle at {opcode.name}") from error
    result = machine.stack[-1] if machine.stack else None
    if not isinstance(result, dict):
        raise ValueError("a pickle that holds no dictionary")
    return {_to_text(k): v.value if isinstance(v, PendingArray) else v for k, v in result.items()}


class PickleMachine:
    """The stack machine of pickle, without any instruction that could import or call something."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack at open marks
        self.memo: dict[int, Any] = {}
        push, pop, pop_to_mark = self.stack.append, self.pop, self.pop_to_mark
        self.actions: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self.memoize),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda key: push(self.memo[key])),
            "MEMOIZE": lambda _: self.memoize(len(self.memo)),
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_TUPLE": lambda _: push(()),
            "LIST": lambda _: push(_require_literals(pop_to_mark())),
            "DICT": lambda _: push(_to_dict(pop_to_mark())),
            "TUPLE": lambda _: push(tuple(pop_to_mark())),
            "TUPLE1": lambda _: push(tuple(pop(1))),
            "TUPLE2": lambda _: push(tuple(pop(2))),
            "TUPLE3": lambda _: push(tuple(pop(3))),
            "APPEND": lambda _: self.extend_top(list, pop(1)),
            "APPENDS": lambda _: self.extend_top(list, pop_to_mark()),
            "SETITEM": lambda _: self.extend_top(dict, pop(2)),
            "SETITEMS": lambda _: self.extend_top(dict, pop_to_mark()),
            "GLOBAL": lambda name: push(_resolve_global(name)),
            "REDUCE": lambda _: push(_interpret_call(*pop(2))),
            "BUILD": lambda _: push(_set_state(*pop(2))),
        }

    def execute(self, opcode: str, argument: Any) -> None:
        """Execute one instruction; raise ValueError if it is not supported."""
        if opcode in LITERALS:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif opcode in self.actions:
            self.actions[opcode](argument)
        else:
            raise ValueError(f"the pickle instruction {opcode}, which is not supported")

    def pop(self, count: int) -> list[Any]:
        """Pop `count` values; raise IndexError if there are fewer above the last mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_to_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def memoize(self, key: int) -> None:
        """Store the value on top of the stack in the memo."""
        self.memo[key] = self.stack[-1]

    def extend_top(self, kind: type, values: list[Any]) -> None:
        """Add values to the list or dictionary on top of the stack."""
        container = self.stack[-1]
        if kind is list and isinstance(container, list):
            container.extend(_require_literals(values))
        elif kind is dict and isinstance(container, dict):
            container.update(_to_dict(values))
        else:
            raise ValueError(f"values added to a {type(container).__name__}")


def _to_dict(values: list[Any]) -> dict[Any, Any]:
    """Return a dictionary of alternating keys and values; raise ValueError for a key that is not text."""
    if any(type(key) not in (str, bytes) for key in values[::2]):
        raise ValueError("a dictionary with a key that is not text")
    return dict(zip(values[::2], values[1::2], strict=True))


def _require_literals(values: list[Any]) -> list[Any]:
    """Return the items of a list; raise ValueError if one is a container."""
    wrong = next((value for value in values if not isinstance(value, (int, float, str, bytes, type(None)))), None)
    if wrong is not None:
        raise ValueError(f"a {type(wrong).__name__} in a list")
    return values


def _resolve_global(name: str) -> AllowedGlobal:
    """Return the word for an allowed global; raise ValueError for any other name."""
    if name not in ALLOWED_GLOBALS:
        raise ValueError(f"the name '{name}', which is never imported from a data file")
    return AllowedGlobal(ALLOWED_GLOBALS[name])


def _interpret_call(function: Any, arguments: Any) -> PendingArray | Uint8Dtype:
    """Recognize `_reconstruct(ndarray, (0,), 'b')` and `dtype('u1', …)` without calling them."""
    if isinstance(function, AllowedGlobal) and function == "array" and isinstance(arguments[0], AllowedGlobal):
        return PendingArray()
    if isinstance(function, AllowedGlobal) and function == "dtype" and arguments[0] in ("u1", b"u1"):
        return Uint8Dtype()
    raise ValueError("a call other than those that make a uint8 array")


def _set_state(target: Any, state: Any) -> PendingArray | Uint8Dtype:
    """Fill an array from (version, shape, dtype, Fortran order, bytes); the state of a dtype is ignored."""
    if isinstance(target, Uint8Dtype):
        return target
    if not isinstance(target, PendingArray):
        raise ValueError("the state of an unknown object")
    _, shape, dtype, fortran, content = state
    if not isinstance(dtype, Uint8Dtype):
        raise ValueError("an array of a dtype other than uint8")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    target.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
    return target


def _to_text(value: str | bytes) -> str:
    """Return bytes decoded as Latin-1, and a string as it is."""
    return value.decode("latin-1") if isinstance(value, bytes) else value
