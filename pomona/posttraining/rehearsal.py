"""The first run on calibration data, before anything is pruned: mistakes are found while the model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from .blocks import BlockChain, Calibration, observed_inputs
from .layers import CalibratedLayer


def rehearse(calibration: Calibration, layers: Sequence[CalibratedLayer], chains: Sequence[BlockChain]) -> None:
    """Run the model until each layer had an input; raise PomonaError for one that has none, or one not finite.

    The first batch of each shape also shows which chains of blocks hold: masks may differ between the blocks for long
    texts only.
    """
    reached: set[CalibratedLayer] = set()
    infinite: set[CalibratedLayer] = set()

    def observer(layer: CalibratedLayer) -> Callable[[Tensor], None]:
        def observe(x: Tensor) -> None:
            reached.update([layer] if x.numel() else [])
            infinite.update([] if bool(x.isfinite().all()) else [layer])

        return observe

    shapes: set[tuple[torch.Size, ...]] = set()
    with observed_inputs([(module, observer(layer)) for layer in layers for module in layer.modules]):
        for index in range(len(calibration.batches)):
            is_new = calibration.shapes(index) not in shapes
            if is_new or len(reached) < len(layers):
                shapes.add(calibration.shapes(index))
                with ExitStack() as stack:
                    for chain in chains:
                        stack.enter_context(chain.observed())
                    calibration.run(index)
    for layer in layers:
        layer.validate_inputs(layer in reached, layer not in infinite)
