"""What a method is: a frozen record of its options that says when masks change and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from .. import allocation as allocations
from ..compressors import PLAIN_MASK, FusedProjection
from ..errors import PomonaError, require
from ..masking import apply_mask
from ..patterns import PATTERNS, Pattern, Unstructured
from ..registry import Registry, spec_to_dict
from ..schedules import SCHEDULES, Cubic, Schedule
from ..sharding import whole
from .targets import DENSE, Prunable, Target, globs, prunable

Masks = dict[str, Tensor]
M = TypeVar("M", bound="Method")

WEIGHT_KINDS = {
    "hard": "entries off the mask stay zero; their gradient and momentum are masked too",
    "soft": "the optimizer moves dense weights, with the gradient taken at the pruned ones",
    "free": "weights are set to zero at mask updates and grow again in between",
    "score": "the optimizer moves a score for each weight, and random weights are kept where it is high",
}


@dataclass(frozen=True)
class TrainingProgress:
    """How far training has come, in optimizer steps."""

    step: int
    total: int
    steps_per_epoch: int | None = None

    @property
    def next(self) -> TrainingProgress:
        """The progress one step later."""
        return TrainingProgress(self.step + 1, self.total, self.steps_per_epoch)

    def is_multiple_of(self, every: int | None) -> bool:
        """Return whether the step is a multiple of `every` steps; None stands for an epoch."""
        every = self.steps_per_epoch if every is None else every
        if every is None:
            raise PomonaError(
                "this method updates its masks once an epoch: give attach(…, steps_per_epoch=…), or every= in steps."
            )
        return self.step % every == 0


def validate_every(every: int | None) -> None:
    """Raise PomonaError unless `every` is None or a positive number of steps."""
    require(every is None or every >= 1, f"every counts steps between mask updates and must be ≥ 1, got {every}.")


class GradientBound(NamedTuple):
    """A bound on the gradients of outputs, as `methods._latent.BoundedFeedback` defines it."""

    feedback: float  # the longest gradient of a weak output, in medians of the others
    weak: float  # the share of the layer's mean norm below which an output is weak; others may have 1/weak medians


@dataclass(frozen=True)
class Targets:
    """The tensors that a mask update may read, by parameter name, with their output dimension in front."""

    latent: Mapping[str, Tensor]  # what the optimizer moves
    masks: Mapping[str, Tensor]  # the installed masks, true where kept
    progress: TrainingProgress
    grads: Mapping[str, Tensor] = field(default_factory=dict)  # unmasked, where `updates_before_step`
    momentum: Mapping[str, Tensor] = field(default_factory=dict)  # the optimizer's, where `keeps_pruned_momentum`
    memory: dict[str, Any] = field(default_factory=dict)  # plain values that a method keeps between updates
    reset: Masks = field(default_factory=dict)  # an update marks weights here that restart at zero, without momentum
    output_layers: frozenset[str] = frozenset()  # those whose outputs are the network's: none of them may be removed

    def whole_layer(self, name: str) -> Targets:
        """Return these targets with one layer only, gathered from the ranks among which it is divided."""
        fields = ("latent", "masks", "grads", "momentum")
        layer: dict[str, Any] = {
            field: {name: whole(found[name])} for field in fields if name in (found := getattr(self, field))
        }
        return replace(self, **layer)


@dataclass(frozen=True, kw_only=True)
class Method:
    """The options every method shares. A method adds its own, and says when and how masks change."""

    name: ClassVar[str]
    paper: ClassVar[str]
    weights: ClassVar[str]  # one of WEIGHT_KINDS
    left_dense: ClassVar[frozenset[str]] = DENSE  # tags of the parameters that the authors leave dense
    default_sparsity: ClassVar[float] = 0.9  # where none is given
    regrows: ClassVar[bool] = False  # for hard methods: whether an update may bring a pruned weight back
    keeps_pruned_momentum: ClassVar[bool] = False  # whether it reads momentum off the mask, which is then kept
    updates_before_step: ClassVar[bool] = False  # whether an update sees a step's gradient and replaces the step
    ranks_by_magnitude: ClassVar[bool] = False  # whether an update is `select(magnitude(latent))` and nothing else
    memory_keys: ClassVar[tuple[str, ...]] = ()  # the numbers that an update finds in its memory

    sparsity: float | None = field(default=None, kw_only=False)  # the pruned fraction; None: what the pattern fixes
    pattern: Pattern = Unstructured()  # which weights are kept or pruned together
    allocation: str | None = None  # how layers share the sparsity; None is the pattern's default
    schedule: Schedule = Cubic()  # how the sparsity rises during training
    include: Sequence[str] = ()  # globs of parameter names to prune; empty is all that the method prunes
    exclude: Sequence[str] = ()  # globs of parameter names to leave dense

    def __post_init__(self) -> None:
        self._set(pattern=PATTERNS.resolve(self.pattern), schedule=SCHEDULES.resolve(self.schedule))
        chosen = self.pattern.default_allocation if self.allocation is None else self.allocation
        self._set(allocation=allocations.normalize_allocation(chosen))
        self._set(include=globs(self.include), exclude=globs(self.exclude, "exclude"))
        if self.sparsity is None:
            self._set(sparsity=self.default_sparsity if self.pattern.sparsity is None else self.pattern.sparsity)
        self._validate()

    def _set(self, **options: Any) -> None:
        """Replace options by their resolved form while the frozen record is being made."""
        for key, value in options.items():
            object.__setattr__(self, key, value)

    def _validate(self) -> None:
        """Raise PomonaError where sparsity, pattern and allocation do not fit each other."""
        require(
            isinstance(self.sparsity, (int, float)) and 0 <= self.sparsity < 1,
            f"sparsity is the pruned fraction and must lie in [0, 1), got {self.sparsity}.",
        )
        allocations.validate_allocation(self.allocation, self.final_sparsity)  # type: ignore[arg-type]
        fixed = self.pattern.sparsity
        if fixed is not None:
            require(
                abs(self.final_sparsity - fixed) < 1e-6,
                f"{self.pattern} fixes the sparsity at {fixed:g}, got {self.sparsity:g}: leave sparsity out, "
                "or choose another pattern.",
            )
            require(
                self.allocation != "erk",
                f"{self.pattern} has the same sparsity in every layer: use allocation='uniform', not erk.",
            )

    @property
    def final_sparsity(self) -> float:
        """The sparsity at the end of training."""
        return float(self.sparsity)  # type: ignore[arg-type]

    @property
    def needs_total_steps(self) -> bool:
        """Whether the method must know the length of training."""
        return True

    def targets(self, model: nn.Module) -> list[Target]:
        """Return the parameters of a model that are pruned."""
        return self.prunable(model).targets

    def prunable(self, model: nn.Module) -> Prunable:
        """List the parameters of a model that are pruned, those that are left dense, and why."""
        dense = self.left_dense | ({"classifier"} if self.pattern.removes_outputs else set())
        found = prunable(model, self.include, self.exclude, dense, self.pattern)
        for target in found.targets if self.pattern.removes_outputs else ():
            require(
                "classifier" not in target.tags or "uncalled" in target.tags,  # the user knows what it is
                f"{target.name} computes outputs of the network (classes, say), which {self.pattern} would remove: "
                f"use exclude=['{target.name}'], or another pattern.",
            )
        return found

    def validate_targets(self, targets: Sequence[Target]) -> None:
        """Raise PomonaError where the sparsity would leave some of the targets empty."""
        shapes = [target.outputs_first for target in targets]
        allocations.validate_room(shapes, self.final_sparsity, self.pattern, self.allocation)  # type: ignore[arg-type]

    # ---- when and how masks change

    def scheduled_sparsity(self, progress: TrainingProgress) -> float:
        """Return the sparsity that the schedule asks for after this step."""
        return self.final_sparsity * self.schedule(progress.step, progress.total, progress.steps_per_epoch)

    def is_update_due(self, progress: TrainingProgress) -> bool:
        """Return whether the masks are updated after this step; step 0 is `attach`."""
        raise NotImplementedError

    def is_last_update(self, progress: TrainingProgress) -> bool:
        """Return whether an update at this step is the last one, after which the masks are fixed."""
        return False

    def interval(self, progress: TrainingProgress) -> int:
        """Return the steps between two mask updates; 0 for a method that has no such number."""
        every: int | None = getattr(self, "every", 0)
        return (progress.steps_per_epoch or 0) if every is None else every  # None is once an epoch

    def resolved_options(self, total_steps: int) -> dict[str, Any]:
        """Return all options as plain values, with the numbers that follow from the length of training."""
        return spec_to_dict(self)

    def initial_masks(self, targets: Targets, sparsity: float) -> Masks | None:
        """Return the masks at `attach`; None keeps everything."""
        if self.updates_before_step or not self.is_update_due(targets.progress):
            return None
        return self.update(targets, sparsity)

    def update(self, targets: Targets, sparsity: float) -> Masks:
        """Return new masks of the given sparsity."""
        raise NotImplementedError

    def select(self, targets: Targets, scores: Mapping[str, Tensor], sparsity: float) -> Masks:
        """Return masks that keep the highest scores, by this method's pattern and allocation.

        Where the method only prunes, pruned weights rank below all others.
        """
        return self._select(targets, scores, sparsity, magnitudes=False)

    def select_magnitudes(self, targets: Targets, sparsity: float) -> Masks:
        """Return the masks of `select` for the scores |latent|, which on a CPU need no copy of the weights."""
        return self._select(targets, targets.latent, sparsity, magnitudes=True)

    def _select(self, targets: Targets, scores: Mapping[str, Tensor], sparsity: float, magnitudes: bool) -> Masks:
        """Return masks that keep the highest scores or magnitudes."""
        within = targets.masks if self.only_prunes else None
        return allocations.select(
            scores,
            sparsity,
            self.pattern,
            self.allocation,  # type: ignore[arg-type]
            magnitudes=magnitudes,
            within=within,
        )

    @property
    def only_prunes(self) -> bool:
        """Whether a weight that is pruned once stays pruned."""
        return self.weights == "hard" and not self.regrows

    def restrict(self, targets: Targets, masks: Masks) -> Masks:
        """Return the masks without weights that are pruned already, where the method only prunes.

        The engine restricts the masks of every update, so that no method can revive a weight by accident: with units
        of several sizes, the count nearest to the one asked for may include a pruned unit.
        """
        if not self.only_prunes:
            return masks
        return {name: mask & targets.masks[name] for name, mask in masks.items()}

    # ---- what the model runs on, and what the optimizer sees

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, calibration: Tensor | None = None) -> None:
        """Write what the model runs on, m ⊙ w, into `out`, which may be `latent` itself."""
        apply_mask(latent, mask, out)

    def calibrate(self, latent: Tensor, mask: Tensor, output_dim: int) -> Tensor | None:
        """Return what `project` must know of the weights when a mask is installed; None for nothing.

        Under a mask that keeps everything, `project` must change nothing.
        """
        return None

    @property
    def calibrates_outputs(self) -> bool:
        """Whether `calibrate` gives a scale for each output, from its own weights, and the largest of thresholds.

        Ranks among which outputs are divided then measure their own, and exchange nothing but the thresholds.
        """
        return False

    @property
    def fused_projection(self) -> FusedProjection | None:
        """What the fused kernels compute in place of `project`; None where only `project` itself will do."""
        return PLAIN_MASK

    def clip_latent(self, latent: Tensor) -> None:
        """Clip the latent in place after a step, where a method bounds it."""

    @property
    def transforms_gradient(self) -> bool:
        """Whether the optimizer sees another gradient than the one at the sparse weights."""
        return False

    def transform_gradient(self, gradient: Tensor, projected: Tensor, mask: Tensor, output_dim: int) -> Tensor:
        """Return the gradient that the optimizer sees; `projected` is what the model ran on. Nothing is changed."""
        raise NotImplementedError

    @property
    def fused_gradient_bound(self) -> GradientBound | None:
        """What the fused kernels compute in place of `transform_gradient`; None where only that itself will do."""
        return None


METHODS: Registry[Method] = Registry("method")


def method(name: str, *, paper: str, weights: str) -> Callable[[type[M]], type[M]]:
    """Class decorator: register a method under a name, with its paper and the kind of its weights."""
    if weights not in WEIGHT_KINDS:
        raise PomonaError(f"weights is one of {', '.join(WEIGHT_KINDS)}, got '{weights}'.")

    def register(spec: type[M]) -> type[M]:
        spec.paper, spec.weights = paper, weights
        return METHODS.register(name)(spec)

    return register
