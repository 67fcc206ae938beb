"""The registry of rules: how the bounds of a step follow from those of its inputs, for each ATen operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....errors import PomonaError
from ..intervals import PairBounds
from ..linear_form import Form, Substitution
from ..steps import Step

BoundsFunction = Callable[[Step, list[PairBounds]], PairBounds]
OpenEntries = Callable[[Step, PairBounds], Tensor]
RelaxFunction = Callable[[Step, list[PairBounds]], Any]
RelaxedFunction = Callable[[Step, Form, list[PairBounds], Any], Substitution]
SubstituteFunction = Callable[[Step, Form, list[PairBounds]], "Substitution | None"]


def no_substitution(step: Step, form: Form, inputs: list[PairBounds]) -> Substitution | None:
    """Return None: the operation has no linear relaxation, and forms on it are bounded by its intervals."""
    return None


@dataclass(frozen=True)
class Rule:
    """The bounds of an operation: by intervals, and by substitution of linear forms on its result.

    The functions work on one example and are called under torch.vmap, so that no Python branch may depend on bounds.
    `inputs` has the bounds of each value that the step reads, in the order of `step.inputs`. An `affine` rule
    substitutes without loss, and does not use the bounds of its inputs except for rounding.
    A rule with `relax` computes what depends on the bounds once for each step, and substitutes many forms with it.
    `open_entries` says where the substitution of a function of one input loses something: the other entries need no
    tighter bounds. Without it, all do.
    """

    bounds: BoundsFunction
    substitute: SubstituteFunction = no_substitution
    affine: bool = False
    open_entries: OpenEntries | None = None
    relax: RelaxFunction | None = None
    substitute_relaxed: RelaxedFunction | None = None

    def substitution(
        self, step: Step, form: Form, inputs: list[PairBounds], relaxation: Any = None
    ) -> Substitution | None:
        """Return forms on a step's result as forms on its inputs, or None where the rule has no linear relaxation."""
        if self.relax is None or self.substitute_relaxed is None:
            return self.substitute(step, form, inputs)
        relaxation = self.relax(step, inputs) if relaxation is None else relaxation
        return self.substitute_relaxed(step, form, inputs, relaxation)


Condition = Callable[[Step], bool]
RULES: dict[str, list[tuple[Condition, Rule]]] = {}


def always(step: Step) -> bool:
    """Return True: the rule holds for every step of the operation."""
    return True


def register(rule: Rule, *operations: str, when: Condition = always) -> None:
    """Make a rule the one of these ATen operations, for the steps where a condition holds."""
    for operation in operations:
        RULES.setdefault(operation, []).append((when, rule))


def rule_of(step: Step) -> Rule:
    """Return the rule of a step, the first whose condition holds; raise PomonaError for an operation without one."""
    for condition, rule in RULES.get(step.op, []):
        if condition(step):
            return rule
    raise unsupported(step)


def unsupported(step: Step, what: str = "") -> PomonaError:
    """Return the error for a step that no rule covers."""
    detail = f" ({what})" if what else ""
    return PomonaError(f"certify has no bound for the operation '{step.op}' at '{step.name}'{detail}.")
