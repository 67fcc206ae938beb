"""`Certified`: prune a network as far as leaves a given share of its predictions provably unchanged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from ... import allocation as allocations
from ...core.attachment import find_targets
from ...core.batch_norm import iterate_batches
from ...core.method import Masks, Method
from ...core.targets import Target, unwrap
from ...errors import require
from ...methods import OneShot
from ...methods._mask_holder import MaskHolder
from ...patterns import PATTERNS, Pattern, Unstructured
from ...scores import exclude_pruned
from ...sharding import refuse_sharded
from ...table_view import TableView
from ..certificate.margin_bounds import NetworkPair
from ..certificate.prediction_attack import worst_inputs
from ..certificate.predictions import CertifiedPredictions, certify_pair, share_of
from ..certificate.regions import InputSet, neighbourhoods
from .margin_costs import DAMPING, MarginCosts, MarginDrops

SELECTIONS = 20  # selections of weights between two computations of the costs, each with the drift of those before
ATTACK_STEPS = 40  # of the attack on the result
MAX_EXAMPLES = 1000  # that are read of the data


@dataclass(frozen=True)
class LayerCost:
    """One layer: its number of weights, its sparsity, and the share of predictions that its pruning alone costs."""

    name: str
    weights: int
    sparsity: float
    cost: float


@dataclass(frozen=True)
class CertifiedReport(TableView):
    """What `Certified` did: the masks, the sparsity that was reached over them, and the predictions that it kept.

    sparsity      the pruned fraction of the targets
    certifiable   the share of examples that are proven for the dense network, beside itself: 1 at radius 0
    certified     the share of examples whose prediction is proven unchanged
    unchanged     the share of examples that an attack does not change: the true share is at most this
    layers        the sparsity of each layer, and what its pruning alone costs
    """

    method: Certified
    masks: Masks = field(repr=False)
    sparsity: float
    certifiable: float
    certified: float
    unchanged: float
    examples: int
    layers: tuple[LayerCost, ...] = field(repr=False)

    @property
    def summary(self) -> str:
        """The result in a line."""
        return (
            f"{self.sparsity:.2%} of the weights pruned, {self.method.pattern}: {self.certified:.1%} of "
            f"{self.examples} predictions proven unchanged"
        )

    def __rich__(self) -> Table:
        table = Table("layer", title=self.summary)
        for heading in ("weights", "sparsity", "predictions lost by it alone"):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            table.add_row(layer.name, f"{layer.weights:,}", f"{layer.sparsity:.2%}", f"{layer.cost:.2%}")
        return table


@dataclass(frozen=True, kw_only=True)
class Certified:
    """Prune as much as keeps a share of the predictions on given data provably unchanged.

        report = pm.Certified(budget=0.99, radius=0.01, low=0, high=1).prune(model, data)

    The weights whose removal costs the margins of the predictions least are pruned first, over all layers together.
    After each step the predictions are certified by `certify_predictions`, and a step that breaks the budget is taken
    back, so that the result never breaks it. The budget is a share of the predictions that can be certified for the
    dense network itself, at radius 0 of all.
    """

    budget: float = field(default=0.99, kw_only=False)  # share of the certifiable predictions that stay certified
    radius: float = 0.0  # of the region around each example
    norm: str = "linf"  # of the radius: "linf" or "l2"
    low: float | None = None  # the range of an input
    high: float | None = None
    pattern: Pattern = Unstructured()  # which weights are pruned together
    allocation: str | None = None  # how layers share the sparsity; None is the pattern's default
    include: str | Sequence[str] = ()  # globs of layers to prune; empty is all that `pm.prune` prunes
    exclude: str | Sequence[str] = ()  # globs of layers to leave dense
    step: float = 0.1  # the share of the remaining weights that is pruned between two computations of the costs
    precision: float = 0.002  # the sparsity to which the search goes
    holdout: float = 0.0  # the share of examples that the costs do not see and that must keep the budget by themselves

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", PATTERNS.resolve(self.pattern))
        require(0 < self.budget <= 1, f"budget is a share of predictions in (0, 1], got {self.budget:g}.")
        require(0 < self.step < 1, f"step is a share of the weights in (0, 1), got {self.step:g}.")
        require(0 <= self.holdout < 1, f"holdout is a share of the examples in [0, 1), got {self.holdout:g}.")
        require(0 < self.precision < 1, f"precision is a sparsity in (0, 1), got {self.precision:g}.")

    def prune(self, model: nn.Module, data: Tensor | Iterable[Any]) -> CertifiedReport:
        """Prune a model in place and return what was pruned.

        `data` is a tensor of examples, one in each row, or an iterable of batches, of which the first 1000 examples are
        read. Labels are not used: what must not change is the prediction of the dense model.
        """
        refuse_sharded(model, "pm.Certified")
        x = read_examples(data).to(next(model.parameters()).device)
        search = Search(self, model, x)
        masks, found = search.verified(search.masks_of_layers() if self.pattern.sparsity else search.masks_of_weights())
        installed = install_masks(model, self.pattern, masks, quiet=False)
        layers = tuple(search.layer_cost(target, masks) for target in search.targets)
        kept = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
        return CertifiedReport(
            self, installed, 1 - kept, share_of(search.certifiable), found.share, found.largest_share, len(x), layers
        )


class Search:
    """The search for the masks of `Certified` on one model and its examples."""

    def __init__(self, options: Certified, model: nn.Module, x: Tensor) -> None:
        self.options = options
        # Examples are often sorted by class: those that the costs do not see are drawn, and come last.
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)) if options.holdout else ...
        self.x = x = x[order]
        seen = max(1, len(x) - round(options.holdout * len(x)))
        self.parts = [slice(0, len(x)), slice(seen, len(x))]  # the examples that must keep the budget
        self.dense = copy.deepcopy(unwrap(model)).eval()
        sparsity = options.pattern.sparsity or 0.0
        self.method: Method = OneShot(
            sparsity,
            pattern=options.pattern,
            allocation=options.allocation,
            include=options.include,
            exclude=options.exclude,
        ).method
        self.targets: list[Target] = find_targets(self.dense, self.method)
        self.inputs: InputSet = neighbourhoods(x, options.radius, norm=options.norm, low=options.low, high=options.high)
        self.pair = NetworkPair.of(self.dense, self.dense, x[0])
        whole = self.certify(self.dense)
        self.classes = whole.classes
        self.certifiable = whole.robust
        require(
            bool(self.certifiable.any()),
            f"no prediction of the dense network is certified at radius {options.radius:g}: choose a smaller radius.",
        )
        points = self.points(self.dense)[:seen]
        self.costs = MarginCosts(self.targets, options.pattern, self.dense, points, self.classes[:seen])

    # ---- the masks

    def masks_of_weights(self) -> list[Masks]:
        """Return masks of rising sparsity that keep the budget, by steps that are halved where they break it."""
        masks = self.full_masks()
        accepted, step = [masks], self.options.step
        shapes = [t.outputs_first for t in self.targets]
        limit = allocations.largest_sparsity(shapes, self.options.pattern)
        sparsity = 0.0
        while step * (1 - sparsity) > self.options.precision and sparsity < limit:
            costs, damping = self.next_costs(masks), DAMPING
            while step * (1 - sparsity) > self.options.precision:
                wanted = min(sparsity + step * (1 - sparsity), limit)
                proposed = self.select(costs, masks, sparsity, wanted, damping)
                if self.keeps_budget(proposed):
                    masks, sparsity = proposed, wanted
                    accepted.append(masks)
                    break
                step, damping = step / 2, 2 * damping
        return accepted

    def masks_of_layers(self) -> list[Masks]:
        """Return masks for a pattern that fixes the sparsity: layers are pruned one by one, the cheapest first."""
        full = self.full_masks()
        costs = self.next_costs(full)
        scores = self.costs.scores(costs, self.costs.own_costs(costs), self.costs.drift(costs))
        chosen = allocations.select(scores, self.method.final_sparsity, self.options.pattern, "uniform")
        alone = {name: int(self.find_kept({**full, name: mask}).sum()) for name, mask in chosen.items()}
        accepted = [full]
        for name in sorted(alone, key=lambda one: -alone[one]):
            proposed = {**accepted[-1], name: chosen[name]}
            if self.keeps_budget(proposed):
                accepted.append(proposed)
        return accepted

    def full_masks(self) -> Masks:
        """Return masks that keep every weight."""
        return {t.name: torch.ones(t.outputs_first, dtype=torch.bool, device=self.x.device) for t in self.targets}

    def next_costs(self, masks: Masks) -> MarginDrops:
        """Return the drops of the margins of the network under masks, at the inputs where they are small."""
        model = self.masked_copy(masks)
        return self.costs.differentiate(model, self.points(model))

    def points(self, model: nn.Module) -> Tensor:
        """Return an input for each example, in the dtype of the model: the example itself at radius 0."""
        return worst_inputs(model, self.inputs, self.classes).to(self.x.dtype)

    def select(self, found: MarginDrops, masks: Masks, sparsity: float, wanted: float, damping: float) -> Masks:
        """Return masks of a higher sparsity, in several selections that each see the drift of those before."""
        own, drift = damping * self.costs.own_costs(found), self.costs.drift(found)
        for number in range(1, SELECTIONS + 1):
            scores = exclude_pruned(self.costs.scores(found, own, drift), masks)
            target = sparsity + (wanted - sparsity) * number / SELECTIONS
            allocation: str = self.method.allocation  # type: ignore[assignment]
            chosen = allocations.select(scores, target, self.options.pattern, allocation)
            chosen = {name: mask & masks[name] for name, mask in chosen.items()}
            removed = torch.cat([(masks[t.name] & ~chosen[t.name]).flatten() for t in self.targets])
            drift = drift + found.drops @ removed.to(found.drops.dtype)
            masks = chosen
        return masks

    # ---- the budget

    def keeps_budget(self, masks: Masks) -> bool:
        """Return whether the predictions under masks keep the budget, as far as `find_kept` can tell."""
        return self.is_within_budget(self.find_kept(masks))

    def is_within_budget(self, kept: Tensor) -> bool:
        """Return whether enough of the certifiable predictions are kept, among all and among those held out."""
        counts = [(int(kept[part].sum()), int(self.certifiable[part].sum())) for part in self.parts]
        return all(count >= self.options.budget * total for count, total in counts)

    def find_kept(self, masks: Masks) -> Tensor:
        """Return which certifiable predictions stay the same at the inputs where their margins are small.

        No others stay certified. The search steps by these, and the proof decides at its end.
        """
        model = self.masked_copy(masks)
        with torch.no_grad():
            same = model(self.points(model)).flatten(1).argmax(1) == self.classes
        return same & self.certifiable

    @torch.no_grad()
    def certify(self, model: nn.Module, steps: int = 0) -> CertifiedPredictions:
        """Return the certified predictions of a pruned copy of the model."""
        return certify_pair(self.pair.with_pruned(model), self.inputs, "the examples", steps=steps)

    def verified(self, accepted: list[Masks]) -> tuple[Masks, CertifiedPredictions]:
        """Return the sparsest of some masks, found by bisection, that the proof accepts, and the predictions."""
        proven, refused = 0, len(accepted)
        while refused - proven > 1:
            middle = refused - 1 if refused == len(accepted) else (proven + refused) // 2
            found = self.certify(self.masked_copy(accepted[middle]))
            keeps = self.is_within_budget(found.unchanged & self.certifiable)
            proven, refused = (middle, refused) if keeps else (proven, middle)
        return accepted[proven], self.certify(self.masked_copy(accepted[proven]), steps=ATTACK_STEPS)

    def layer_cost(self, target: Target, masks: Masks) -> LayerCost:
        """Return what one layer contributes to the result."""
        mask = masks[target.name]
        alone = self.masked_copy({**self.full_masks(), target.name: mask})
        lost = self.certifiable & ~self.certify(alone).unchanged
        return LayerCost(target.name, mask.numel(), 1 - float(mask.double().mean()), share_of(lost))

    def masked_copy(self, masks: Masks) -> nn.Module:
        """Return a copy of the dense model under masks."""
        model = copy.deepcopy(self.dense)
        install_masks(model, self.options.pattern, masks, quiet=True)
        return model.eval()


def install_masks(model: nn.Module, pattern: Pattern, masks: Masks, quiet: bool) -> Masks:
    """Prune a model in place under masks with their outputs first, and return them as the layers store their weights.

    With whole outputs their biases and norms are pruned, as `pm.prune` does. Warnings are left out where `quiet`.
    """
    held = pattern if pattern.sparsity is None else Unstructured()
    pruner = MaskHolder(OneShot(0.0, pattern=held, include=list(masks)).method, masks, None)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        pruner.attach(model, torch.optim.SGD(unwrap(model).parameters()))
        pruner.finish(max_batches=0)
    return pruner.masks()


def read_examples(data: Tensor | Iterable[Any]) -> Tensor:
    """Return the examples of a tensor or of batches, at most MAX_EXAMPLES of them."""
    if isinstance(data, Tensor):
        return data[:MAX_EXAMPLES]
    batches: list[Tensor] = []
    for batch in iterate_batches(data):
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        require(
            isinstance(inputs, Tensor),
            f"certified pruning takes networks of one input, a tensor, got a batch of {type(inputs).__name__}.",
        )
        batches.append(inputs)
        if sum(map(len, batches)) >= MAX_EXAMPLES:
            break
    require(bool(batches), "the data has no batches: give examples to certify.")
    return torch.cat(batches)[:MAX_EXAMPLES]
