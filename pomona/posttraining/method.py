"""What the methods that prune after training share: their options, `prune`, and its report."""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..allocation import layer_sparsities, parse_allocation
from ..core.attachment import find_targets
from ..core.guards import refuse_unranked
from ..core.sparsity import Sparsity
from ..core.targets import DENSE, prunable, unwrap
from ..errors import PomonaError, require
from ..methods._prune import PruningReport
from ..methods.oneshot import OneShot
from ..models.example_inputs import without_cache
from ..patterns import PATTERNS, Pattern
from ..sharding import refuse_sharded
from .blocks import BlockChain, BlockInputs, Calibration, find_block_lists, observed_inputs
from .input_statistics import InputStatistics
from .layers import CalibratedLayer, is_calibrated
from .rehearsal import rehearse

DEFAULT_SPARSITY = 0.5  # where neither the user nor the pattern gives one
UNKNOWN_SHARE = 0.1  # of a model's weights in layers of unknown kind, above which a warning says that they stay dense
STATISTICS_BYTES = 2**31  # of layers outside blocks whose inputs are observed in one pass


class LayerSelection(OneShot):
    """The one-shot method, which also takes layers that are frozen: nothing is trained here."""

    left_dense: ClassVar[frozenset[str]] = DENSE - {"frozen"}


@dataclass(frozen=True)
class PostTraining(ABC):
    """Options of a method that prunes a trained model at once, with calibration data."""

    paper: ClassVar[str]
    statistics: ClassVar[type[InputStatistics]]  # what the method keeps of a layer's inputs

    sparsity: float | None = None  # the pruned fraction; None: what the pattern fixes, else 0.5
    pattern: Pattern | str = field(default="unstructured", kw_only=True)  # which weights are pruned together
    allocation: str = field(default="uniform", kw_only=True)  # how layers share the sparsity: "uniform" or "erk"
    include: str | Sequence[str] = field(default=(), kw_only=True)  # globs of layers to prune; empty is all
    exclude: str | Sequence[str] = field(default=(), kw_only=True)  # globs of layers to leave dense

    def __post_init__(self) -> None:
        name, _ = parse_allocation(self.allocation)
        require(
            name != "global",
            f"{type(self).__name__} prunes one layer at a time, and a common threshold would need all of them: use "
            "allocation='uniform' or 'erk'.",
        )
        object.__setattr__(self, "pattern", PATTERNS.resolve(self.pattern))
        if self.sparsity is None:
            fixed = self.resolved_pattern.sparsity
            object.__setattr__(self, "sparsity", DEFAULT_SPARSITY if fixed is None else fixed)
        require(
            not self.resolved_pattern.removes_outputs,
            f"{self.resolved_pattern} removes outputs with their biases and norms, which pm.prune does: use it, or "
            "another pattern.",
        )
        _ = self.selection  # refuses options that do not fit each other

    @property
    def resolved_pattern(self) -> Pattern:
        """The pattern, which may have been given by its name."""
        return PATTERNS.resolve(self.pattern)

    @property
    def selection(self) -> LayerSelection:
        """The one-shot method with the same options, which chooses the layers and validates the options."""
        return LayerSelection(
            self.sparsity,
            pattern=self.resolved_pattern,
            allocation=self.allocation,
            include=self.include,
            exclude=self.exclude,
        )

    @abstractmethod
    def prune_matrix(
        self, matrix: Tensor, statistics: InputStatistics, sparsity: float, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Return the pruned matrix, outputs × inputs, and its mask; `shape` is that of the weight, outputs first."""

    @torch.no_grad()
    def prune(
        self,
        model: nn.Module,
        data: Iterable[Any],
        *,
        max_batches: int | None = 128,
        device: torch.device | str | None = None,
    ) -> PruningReport:
        """Prune a trained model in place with calibration data, and return what was pruned.

        The first batch of each shape runs through the whole model, where the model is; all batches run through one
        block after the other. Mistakes in the options, the model and the data are found before anything is pruned.
        Where an error stops it later, some layers are pruned and others not.

        Arguments:
            model: the model, which is run in evaluation mode.
            data: an iterable of batches: inputs, a tuple that begins with them, or a dictionary of the model's
                arguments. A few hundred samples like those the model will see are enough; labels are not used.
            max_batches: the number of batches that are read of `data`; None reads all.
            device: where the blocks of the model are pruned, one at a time. By default they stay where they are.
        """
        inner, method, place = unwrap(model), self.selection, find_device(device)
        refuse_sharded(inner, f"pm.{type(self).__name__}")
        layers = find_calibrated_layers(inner, method)
        calibration = Calibration(inner, data, max_batches)
        wanted = self.sparsities_of(layers, method)
        homes = {layer.name: layer.target.parameter.device for layer in layers}
        masks: dict[str, Tensor] = {}

        def prune_observed(group: Sequence[CalibratedLayer], run: Callable[[], None]) -> None:
            for layer, statistics in self.observe(group, run).items():
                layer.validate_inputs(statistics.count > 0, statistics.is_finite())
                matrix, kept = self.prune_matrix(
                    layer.read_matrix(), statistics, wanted[layer.name], layer.target.outputs_first
                )
                layer.write_matrix(matrix)
                masks[layer.name] = layer.as_mask(kept).to(homes[layer.name])

        with evaluation_mode(inner), without_cache(inner):  # its keys would be those of blocks before their pruning
            lists = find_block_lists(inner, [module for layer in layers for module in layer.modules])
            chains = [BlockChain(blocks) for blocks in lists]
            rehearse(calibration, layers, chains)
            for block, inputs in itertools.chain.from_iterable(calibration.walk(chain, place) for chain in chains):
                inside = [layer for layer in layers if set(layer.modules) <= set(block.modules())]
                prune_observed(inside, lambda block=block, inputs=inputs: run_block(block, inputs))  # type: ignore[misc]
            for group in self.group_by_memory([layer for layer in layers if layer.name not in masks]):
                prune_observed(group, calibration.run_whole_model)
        ordered = {layer.name: masks[layer.name] for layer in layers}
        return PruningReport(method, ordered, measure_sparsity(layers, ordered))

    def sparsities_of(self, layers: Sequence[CalibratedLayer], method: OneShot) -> dict[str, float]:
        """Return the sparsity of each layer, by name."""
        name, _ = parse_allocation(self.allocation)
        shapes = [layer.target.outputs_first for layer in layers]
        sparsities = layer_sparsities(name, shapes, method.final_sparsity, method.pattern)
        return dict(zip((layer.name for layer in layers), sparsities, strict=True))

    def observe(
        self, layers: Sequence[CalibratedLayer], run: Callable[[], None]
    ) -> dict[CalibratedLayer, InputStatistics]:
        """Return the statistics of the layers' inputs while `run()` runs the model or a block."""
        collected = {
            layer: self.statistics(layer.columns, layer.target.parameter.device, layer.compute_dtype)
            for layer in layers
        }

        def observer(layer: CalibratedLayer) -> Callable[[Tensor], None]:
            return lambda x: collected[layer].add(layer.input_rows(x))

        with observed_inputs([(module, observer(layer)) for layer in layers for module in layer.modules]):
            run()
        return collected

    def group_by_memory(self, layers: Sequence[CalibratedLayer]) -> Iterator[list[CalibratedLayer]]:
        """Yield the layers in groups whose statistics fit into `STATISTICS_BYTES`, at least one in each."""
        group: list[CalibratedLayer] = []
        used = 0
        for layer in layers:
            size = layer.columns**2 * layer.compute_dtype.itemsize
            if group and used + size > STATISTICS_BYTES:
                yield group
                group, used = [], 0
            group.append(layer)
            used += size
        if group:
            yield group


def run_block(block: nn.Module, inputs: Sequence[BlockInputs]) -> None:
    """Run a block on all of its inputs."""
    for one in inputs:
        one.run(block)


def find_calibrated_layers(model: nn.Module, method: OneShot) -> list[CalibratedLayer]:
    """Return the layers that a method prunes, with a warning for each whose inputs cannot be observed.

    The observed inputs are those of the layer's calls: a layer whose weight another one multiplies, as
    nn.MultiheadAttention does with its projection, is never called.
    """
    targets = find_targets(model, method)
    warn_of_unknown_layers(model)
    attention = {part for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in m.modules()}
    layers = []
    for target in targets:
        refuse_unranked(target.name, target.parameter)
        if is_calibrated(target.module) and target.leaf == "weight" and target.module not in attention:
            holders = [model.get_submodule(name.rpartition(".")[0]) for name in target.aliases]
            layers.append(CalibratedLayer(target, (target.module, *holders)))
        else:
            kind = type(target.module).__name__
            warnings.warn(
                f"{target.name} is left dense: the inputs of its {kind} are not observed; pm.prune prunes it by "
                "magnitude.",
                stacklevel=3,
            )
    if not layers:
        raise PomonaError(
            f"{type(model).__name__} has no layer whose inputs can be observed: prune it by magnitude, with pm.prune."
        )
    return layers


def warn_of_unknown_layers(model: nn.Module) -> None:
    """Warn where much of a model is in layers of unknown kind, such as the experts of a mixture, and is left dense."""
    unknown = [choice.target for choice in prunable(model) if "other" in choice.target.tags]
    count, whole = (sum(p.numel() for p in group) for group in ([t.parameter for t in unknown], model.parameters()))
    if count > UNKNOWN_SHARE * whole:
        largest = max(unknown, key=lambda target: target.parameter.numel())
        warnings.warn(
            f"{count / whole:.0%} of {type(model).__name__}'s weights are in layers of unknown kind, such as "
            f"{largest.name}, and are left dense: their inputs are not observed.",
            stacklevel=4,
        )


def find_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device that is there, or None for none; raise PomonaError for another one."""
    if device is None:
        return None
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise PomonaError(f"there is no device {device!r} here: use device='cpu', or leave it out.") from error
    return place


def measure_sparsity(layers: Sequence[CalibratedLayer], masks: Mapping[str, Tensor]) -> Sparsity:
    """Return the pruned share of the layers' weights, and the share that is zero."""
    count = sum(mask.numel() for mask in masks.values())
    pruned = sum(int((~mask).sum()) for mask in masks.values())
    zeros = sum(int((layer.target.parameter == 0).sum()) for layer in layers)
    return Sparsity(pruned / count, zeros / count)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module back into its own mode at the end."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
