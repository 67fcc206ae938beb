"""What a method is: a frozen record of its options, and one `update`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from .. import allocation as allocations
from ..errors import PomonaError, require
from ..masking import apply_mask
from ..patterns import PATTERNS, Pattern, Unstructured
from ..registry import Registry
from ..schedules import SCHEDULES, Cubic, Schedule
from .fused.random_stream import Stream
from .targets import DENSE, Target, globs, prunable

Masks = dict[str, Tensor]

WEIGHTS = {
    "hard": "entries off the mask stay zero; their gradient and momentum are masked too",
    "soft": "the optimizer moves dense weights, with the gradient taken at the pruned ones",
    "free": "weights are cut at times and grow again in between",
    "score": "the optimizer moves a score for each weight, and random weights are kept where it is high",
}


@dataclass(frozen=True)
class Time:
    """How far training is, in optimizer steps."""

    step: int
    total: int
    steps_per_epoch: int | None = None

    @property
    def next(self) -> Time:
        """One step later."""
        return replace(self, step=self.step + 1)

    def each(self, every: int | None) -> bool:
        """Whether `every` steps have passed again; None is an epoch."""
        every = self.steps_per_epoch if every is None else every
        if every is None:
            raise PomonaError("this method moves once an epoch: give attach(…, steps_per_epoch=…), or every= in steps.")
        return self.step % every == 0


def check_every(every: int | None) -> None:
    """Refuse a number of steps that is none."""
    require(every is None or every >= 1, f"every counts steps between mask updates and must be ≥ 1, got {every}.")


@dataclass(frozen=True)
class Targets:
    """What an update may look at, by parameter name; tensors come with their outputs first."""

    latent: Mapping[str, Tensor]  # what the optimizer moves
    masks: Mapping[str, Tensor]  # the masks in force, true where kept
    time: Time
    grads: Mapping[str, Tensor] = field(default_factory=dict)  # unmasked, for methods that update `before` the step
    momentum: Mapping[str, Tensor] = field(default_factory=dict)  # the optimizer's, for methods that `remember`
    memory: dict[str, Any] = field(default_factory=dict)  # plain values that a method keeps between updates
    fresh: Masks = field(default_factory=dict)  # where an update may mark weights that are to start anew, at zero


@dataclass(frozen=True, kw_only=True)
class Method:
    """The options every method shares. A method adds its own, and says when and how masks change."""

    name: ClassVar[str]
    paper: ClassVar[str]
    weights: ClassVar[str]
    dense: ClassVar[frozenset[str]] = DENSE  # the authors' choice of what is left dense
    usual: ClassVar[float] = 0.9  # the sparsity where none is given
    remembers: ClassVar[bool] = False  # whether it reads momentum off the mask, which is then left dense
    once: ClassVar[bool] = False  # whether there is one update only
    before: ClassVar[bool] = False  # whether an update comes before the step, sees its gradient, and replaces it
    ranks: ClassVar[bool] = False  # whether an update keeps the largest |latent|, and does nothing else

    sparsity: float | None = None  # the pruned fraction; None is what the pattern fixes, else the usual one
    pattern: Pattern = Unstructured()
    allocation: str = "global"
    schedule: Schedule = Cubic()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._set(pattern=PATTERNS.resolve(self.pattern), schedule=SCHEDULES.resolve(self.schedule))
        self._set(allocation=allocations.normalize_allocation(self.allocation))
        self._set(include=globs(self.include), exclude=globs(self.exclude, "exclude"))
        if self.sparsity is None:
            self._set(sparsity=self.usual if self.pattern.sparsity is None else self.pattern.sparsity)
        self._check()

    def _set(self, **options: Any) -> None:
        """Replace options by their resolved form, once, while the record is being made."""
        for key, value in options.items():
            object.__setattr__(self, key, value)

    def _check(self) -> None:
        require(
            isinstance(self.sparsity, (int, float)) and 0 <= self.sparsity < 1,
            f"sparsity is the pruned fraction and must lie in [0, 1), got {self.sparsity}.",
        )
        allocations.validate_allocation(self.allocation, self.target)
        fixed = self.pattern.sparsity
        if fixed is not None:
            require(
                abs(self.target - fixed) < 1e-6,
                f"{self.pattern} fixes the sparsity at {fixed:g}, got {self.sparsity:g}: leave sparsity out, "
                "or choose another pattern.",
            )
            require(
                self.allocation != "erk",
                f"{self.pattern} is as sparse in every layer: take allocation='uniform', not erk.",
            )

    @property
    def target(self) -> float:
        """The final sparsity."""
        return float(self.sparsity)  # type: ignore[arg-type]

    def asked(self, time: Time) -> float:
        """The sparsity asked for by then."""
        return self.target * self.schedule(time.step, time.total, time.steps_per_epoch)

    def due(self, time: Time) -> bool:
        """Whether the mask is updated after that step; step 0 is `attach`."""
        raise NotImplementedError

    def last(self, time: Time) -> bool:
        """Whether an update at that time is the last one, after which the mask is at rest."""
        return False

    def start(self, targets: Targets, sparsity: float) -> Masks | None:
        """The masks at `attach`; None keeps everything."""
        return self.update(targets, sparsity) if self.due(targets.time) and not self.before else None

    def update(self, targets: Targets, sparsity: float) -> Masks:
        """The new masks."""
        raise NotImplementedError

    def select(self, scores: Mapping[str, Tensor], sparsity: float) -> Masks:
        """Keep the highest scores, by this method's pattern and allocation."""
        return allocations.select(scores, sparsity, self.pattern, self.allocation)

    def targets(self, model: nn.Module) -> list[Target]:
        """The parameters of a model that are pruned."""
        # A whole output of the last layer is a class, and none of those is to go.
        dense = self.dense | {"classifier"} if self.pattern.removes_outputs else self.dense
        return prunable(model, self.include, self.exclude, dense).targets

    @property
    def timed(self) -> bool:
        """Whether the method must know how long training takes."""
        return True

    def bound(self, latent: Tensor) -> None:
        """Change the latent in place after a step, where a method bounds it."""

    @property
    def plain(self) -> bool:
        """Whether `project` is m ⊙ w and nothing else, and `bound` nothing."""
        return True

    @property
    def stream(self) -> Stream:
        """Where the random weights and first scores of a score method come from."""
        raise NotImplementedError

    @property
    def coin(self) -> int:
        """What the coin of a pruned weight must lie below for it to be drawn anew (see `stream`); 0: none ever is."""
        return 0

    def redraw(self, time: Time) -> int:
        """The number of the re-draw of pruned weights that comes after that step; 0 is none."""
        return 0

    @property
    def tempers(self) -> bool:
        """Whether the optimizer is to see less than the gradient at the sparse weights."""
        return False

    def temper(self, gradient: Tensor, mask: Tensor, rows: int) -> Tensor:
        """What it sees then, in a tensor of its own; `rows` is the dimension of the outputs."""
        raise NotImplementedError

    def gauge(self, latent: Tensor, mask: Tensor, rows: int) -> Tensor | None:
        """What `project` is to know of the moment a mask was taken; None: nothing.

        `rows` is the dimension of the outputs. Under a mask that keeps everything, `project` changes nothing.
        """
        return None

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, gauge: Tensor | None = None) -> None:
        """Write what the model runs on into `out`, which may be `latent` itself: m ⊙ w."""
        apply_mask(latent, mask, out)


METHODS: Registry[Method] = Registry("method")


def method(name: str, *, paper: str, weights: str) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: register a method under a name, with its paper and the kind of its weights."""
    if weights not in WEIGHTS:
        raise PomonaError(f"weights is one of {', '.join(WEIGHTS)}, got '{weights}'.")

    def register(record: type[Method]) -> type[Method]:
        record.paper, record.weights = paper, weights
        return METHODS.register(name)(record)

    return register


def options(record: type[Method]) -> dict[str, Any]:
    """The options of a method with their defaults, as it resolves them."""
    default = record()
    return {f.name: getattr(default, f.name) for f in fields(record) if f.init}
