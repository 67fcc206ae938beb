"""The gradients of the examples of a sample, computed in micro-batches of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .clipping import flatten
from .example_batches import Batch, count_rows, pad_rows, split_rows
from .per_example_gradients import (
    Gradients,
    Loss,
    choose_gradients,
    compute_gradients_one_by_one,
    compute_summed_gradients,
)
from .row_independence import require_independent_rows


class ExampleGradients:
    """How the gradients of single examples of a model are computed; `dtype` is that of the layers, if not the model's.

    In a smaller dtype the gradients of a row must be the same whatever its place and the other rows are. That is tested
    before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: Mapping[str, nn.Parameter],
        micro_rows: int,
        views: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.loss, self.parameters = model, loss, parameters
        self.micro_rows, self.views, self.dtype = micro_rows, views, dtype
        self.compute: Callable[..., tuple[Gradients, Tensor]] | None = None  # known after the first examples

    def of_examples(self, inputs: Batch, targets: Batch) -> tuple[Gradients, Tensor]:
        """Return the gradients of each row by parameter name, and the losses.

        They are computed in a batch of a fixed number of rows, which rows of zeros fill up, or one after another.
        """
        count, arguments = count_rows(targets), (self.model, self.loss, self.parameters)
        is_first = self.compute is None
        if self.compute is None:
            self.compute = choose_gradients(*arguments, inputs, targets, self.views, self.dtype)
        if self.compute is not compute_gradients_one_by_one:
            inputs, targets = pad_rows((inputs, targets), self.micro_rows)
        if is_first and self.dtype is not None:
            compute = self.compute
            require_independent_rows(lambda *batch: compute(*arguments, *batch, self.views)[0], inputs, targets)
        gradients, losses = self.compute(*arguments, inputs, targets, self.views)
        return {name: rows[:count] for name, rows in gradients.items()}, losses[:count]

    def of_batch(self, inputs: Batch, targets: Batch, views: int = 1) -> Tensor:
        """Return the sum of the gradients of all rows as a flat tensor, by one backward pass."""
        return flatten(compute_summed_gradients(self.model, self.loss, self.parameters, inputs, targets, views))


class SampleGradients:
    """The gradients of one sample, a micro-batch at a time; those of a single micro-batch are computed once."""

    def __init__(self, gradients: ExampleGradients, inputs: Batch, targets: Batch) -> None:
        self.gradients = gradients
        self.chunks = split_rows((inputs, targets), gradients.micro_rows)
        self.single = gradients.of_examples(*self.chunks[0]) if len(self.chunks) == 1 else None

    def __iter__(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield the gradients of each micro-batch, as parts of shape (rows, n), and its losses."""
        for chunk in self.chunks:
            gradients, losses = self.single or self.gradients.of_examples(*chunk)
            yield [gradient.flatten(1) for gradient in gradients.values()], losses

    def add_up(self, total: Tensor) -> Tensor:
        """Add the gradients of all examples, not clipped, to a flat tensor and return it."""
        if self.single is not None:
            return total.add_(flatten({name: rows.sum(0) for name, rows in self.single[0].items()}))
        for inputs, targets in self.chunks:
            if self.gradients.dtype is None:
                total += self.gradients.of_batch(inputs, targets, self.gradients.views)
            else:  # one backward pass of the model itself would be one in its own dtype
                rows = self.gradients.of_examples(inputs, targets)[0]
                total += flatten({name: part.sum(0, dtype=total.dtype) for name, part in rows.items()})
        return total
