"""The gradients of the examples of a sample, computed in micro-batches of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .clipping import flatten
from .example_batches import Batch, count_rows, pad_rows, split_rows
from .model_state import copy_model, repeatable_random_numbers
from .model_validation import is_test_due
from .outer_products import MixedGradients, OuterProducts, RowGradients, as_tensor
from .per_example_gradients import (
    Loss,
    choose_gradients,
    compute_gradients_one_by_one,
    compute_summed_gradients,
)
from .row_independence import AddClipped, require_independent_rows

NARROW = 2  # bytes of a number whose rounding errors are not within the margin of the private sum


class ExampleGradients:
    """How the gradients of single examples of a model are computed; `dtype` is that of the layers, if not the model's.

    With `products`, gradients are outer products where these cost less.

    Where all rows are computed together, the gradients of a row must not depend on its place and the other rows: not
    by a single bit where numbers have 16, and otherwise within the margin of the sum that `add_clipped` returns. That
    is tested in the first sample, the second, the fourth and so on, as a model can change.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: Mapping[str, nn.Parameter],
        micro_rows: int,
        views: int,
        dtype: torch.dtype | None,
        add_clipped: AddClipped,
        products: bool = False,
    ) -> None:
        self.model, self.loss, self.parameters, self.add_clipped = model, loss, parameters, add_clipped
        self.micro_rows, self.views, self.dtype, self.products = micro_rows, views, dtype, products
        self.compute: Callable[..., tuple[MixedGradients, Tensor]] | None = None  # known after the first examples
        self.samples = 0
        self.is_due = True  # whether the rows of the next micro-batch are tested first
        self.is_tested = False  # whether some were

    def set_products(self, is_wanted: bool) -> None:
        """Set whether gradients are outer products where these cost less."""
        if is_wanted != self.products:
            self.products, self.compute = is_wanted, None

    def begin_sample(self) -> None:
        """Count a sample, and have the independence of its rows tested where it is due."""
        self.samples += 1
        self.is_due = self.is_due or is_test_due(self.samples)

    def of_examples(self, inputs: Batch, targets: Batch) -> tuple[MixedGradients, Tensor]:
        """Return the gradients of each row by parameter name, and the losses.

        They are computed in a batch of a fixed number of rows, which rows of zeros fill up, or one after another.
        """
        count, arguments = count_rows(targets), (self.model, self.loss, self.parameters)
        if self.compute is None:
            batch = inputs, targets
            self.compute = choose_gradients(*arguments, *batch, self.views, self.dtype, products=self.products)
        if self.compute is not compute_gradients_one_by_one:
            inputs, targets = pad_rows((inputs, targets), self.micro_rows)
            if self.is_due:
                self.test_independence(inputs, targets)
        self.is_due = False
        gradients, losses = self.compute(*arguments, inputs, targets, self.views)
        return {name: rows[:count] for name, rows in gradients.items()}, losses[:count]

    def test_independence(self, inputs: Batch, targets: Batch) -> None:
        """Raise PomonaError if rows of a whole micro-batch change the gradients of each other.

        In the mode that the model has, rows stay at their places, and all random numbers are the same in each pass.
        The first time, rows also move to other places, in evaluation mode, where nothing is random. Each pass has a
        copy of the model, so that nothing that a first pass sets is common to both.
        """
        is_exact = self.is_exact(inputs)
        remedy = "remove the layer that mixes them"
        if is_exact:
            remedy += ", or " + ("use model.float()" if self.dtype is None else 'leave precision="bfloat16" out')
        with repeatable_random_numbers(next(iter(self.parameters.values())).device) as repeat:
            for is_training in (False, None)[self.is_tested :]:

                def compute(*batch: Batch, is_training: bool | None = is_training) -> MixedGradients:
                    repeat()
                    assert self.compute is not None
                    trial = copy_model(self.model)
                    trial = trial if is_training is None else trial.train(is_training)
                    own = {name: one for name, one in trial.named_parameters() if name in self.parameters}
                    return self.compute(trial, self.loss, own, *batch, self.views)[0]

                require_independent_rows(
                    compute,
                    inputs,
                    targets,
                    None if is_exact else self.add_clipped,
                    moves=is_training is not None,
                    seed=self.samples,
                    remedy=remedy,
                )
        self.is_tested = True

    def is_exact(self, inputs: Batch) -> bool:
        """Return whether gradients of a row must be equal bit for bit: where anything has 16 bits or less."""
        device = next(iter(self.parameters.values())).device.type
        tensors = [*self.model.parameters(), *self.model.buffers(), *pytree.tree_leaves(inputs)]
        return (
            self.dtype is not None
            or torch.is_autocast_enabled(device)
            or any(part.is_floating_point() and part.element_size() <= NARROW for part in tensors)
        )

    def of_batch(self, inputs: Batch, targets: Batch, views: int = 1) -> Tensor:
        """Return the sum of the gradients of all rows as a flat tensor, by one backward pass."""
        return flatten(compute_summed_gradients(self.model, self.loss, self.parameters, inputs, targets, views))


class SampleGradients:
    """The gradients of one sample, a micro-batch at a time; those of a single micro-batch are computed once."""

    def __init__(self, gradients: ExampleGradients, inputs: Batch, targets: Batch) -> None:
        self.gradients = gradients
        gradients.begin_sample()
        self.chunks = split_rows((inputs, targets), gradients.micro_rows)
        self.single = gradients.of_examples(*self.chunks[0]) if len(self.chunks) == 1 else None

    def __iter__(self) -> Iterator[tuple[list[RowGradients], Tensor]]:
        """Yield the gradients of each micro-batch, as parts of shape (rows, n), and its losses."""
        for chunk in self.chunks:
            gradients, losses = self.single or self.gradients.of_examples(*chunk)
            yield [flatten_rows(gradient) for gradient in gradients.values()], losses

    def add_up(self, total: Tensor) -> Tensor:
        """Add the gradients of all examples, not clipped, to a flat tensor and return it."""
        if self.single is not None:
            return total.add_(flatten({name: as_tensor(rows).sum(0) for name, rows in self.single[0].items()}))
        for inputs, targets in self.chunks:
            if self.gradients.dtype is None:
                total += self.gradients.of_batch(inputs, targets, self.gradients.views)
            else:  # one backward pass of the model itself would be one in its own dtype
                rows = self.gradients.of_examples(inputs, targets)[0]
                total += flatten({name: as_tensor(part).sum(0, dtype=total.dtype) for name, part in rows.items()})
        return total


def flatten_rows(gradient: RowGradients) -> RowGradients:
    """Return the gradients of rows as (rows, n), or outer products as they are."""
    return gradient if isinstance(gradient, OuterProducts) else gradient[:, None].flatten(1)
