"""Private training steps: sample rows, choose indices, clip each example, add noise, update.

    step = pm.privacy.gip(model, optimizer, rows=len(x), batch_size=512, epsilon=2, delta=1e-5, steps=1000)
    for rows in step:
        step(x[rows], y[rows], rows)

The method decides which coordinates of the gradient are kept. All but the first and the last use the index mechanism:

    dpsgd     all coordinates (Abadi et al., CCS 2016)
    random    coordinates drawn at random, θ = 0
    public    the top-k of a gradient of public data, θ = ∞, which costs no privacy
    gip       the noisy top-k of the private gradient (Yang et al., 2023)
    datalens  the signs of each example's own top-k, all coordinates with noise (Wang et al., CCS 2021)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import PomonaError, require
from ..registry import spec_to_dict
from ..schedules import SCHEDULES, Linear, Schedule
from .budget import RAMPS, Budget
from .clipped_sum import ClippedSum, allows_products
from .clipping_norms import Clipping, ClippingNorms
from .datalens import keep_largest_signs
from .example_batches import Batch, are_equal, as_batch, count_rows, map_tensors
from .example_gradients import ExampleGradients, SampleGradients
from .fixed_shapes import micro_batch_rows, repeatable_kernels
from .index_draws import IndexDraws
from .index_mechanism import IndexMechanism
from .ledger import Ledger
from .model_state import unchanged_state
from .model_validation import is_test_due, refuse_mixed_examples, validate
from .optimizer_guard import OptimizerGuard, refuse_other_optimizers, refuse_other_parameters, trained_parameters
from .outer_products import RowGradients, as_tensor
from .per_example_gradients import Loss
from .private_options import DENSE_METHODS, METHODS, PRECISIONS, require_same_settings, validate_options
from .processes import Processes
from .random_source import Source
from .step_journal import StepJournal

__all__ = ["DEFAULT_SCHEDULE", "METHODS", "PrivateStep"]

DEFAULT_SCHEDULE = Linear(until=1.0)  # of Yang et al. (2023): fewer coordinates at every step, until the end


class PrivateStep:
    """Private training steps of a model and an optimizer within a budget: sampler, clipping, noise and account in one.

    Iterating over the object yields the rows of each step; calling it on these rows takes the step. A step is charged
    when its rows are drawn, whether it is taken or not. In several processes of torch.distributed each gets its part
    of the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: Budget,
        *,
        method: str = "gip",
        keep: float = 0.1,
        schedule: Schedule | str | dict[str, Any] = DEFAULT_SCHEDULE,
        group: int | None = 256,
        grouping: str = "model",
        clip: float = 1.0,
        clipping: Clipping | Mapping[str, Any] | None = None,
        loss: Loss = F.cross_entropy,
        micro: int = 256,
        views: int = 1,
        precision: str = "float32",
        ghost: bool = True,
        public: tuple[Tensor, Tensor] | None = None,
        source: Source | None = None,
        data: tuple[Batch, Batch] | None = None,
        ledger: Ledger | None = None,
        trust_rows: bool = False,
    ) -> None:
        """Validate the arguments and prepare the first step.

        Args:
            model: a model that does not mix examples; `privacy.fix` replaces batch norm.
            optimizer: any optimizer of the model's parameters.
            budget: the budget, solved for the number of rows and steps.
            method: one of `METHODS`.
            keep: the share of coordinates kept at the end of the schedule.
            schedule: how the share falls from 1 to `keep`.
            group: coordinates that share a top-k; None is one top-k for all.
            grouping: "model" groups all coordinates in their order, "parameter" those of each parameter (the authors').
            clip: C, the norm to which the gradient of each example is clipped.
            clipping: whether layers are clipped on their own, and how the norms change; see `Clipping`.
            loss: the mean loss of a batch, from the model's output and the targets.
            micro: rows whose gradients are held in memory at a time; the result does not depend on it.
            views: augmented copies of a row. Inputs are then (rows, views, …), and the gradient of an example is the
                mean over its views.
            precision: "bfloat16" computes the gradients of examples in 16 bits; "float32" in the model's own dtype.
            ghost: with method "dpsgd", take norms and sums from the inputs of layers and the gradients of their outputs
                where that costs less than gradients of examples (ghost clipping). The sum is as exact.
            public: inputs and targets of public data, for method "public".
            source: the random source; by default its key is the operating system's.
            data: inputs and targets of all rows. A step then takes its rows itself, or refuses others.
            ledger: of the data set; each step is journalled in it before its release.
            trust_rows: with a ledger, accept examples without `data`, their rows or `poisson_loader`: that they are
                those of the drawn rows is then unchecked.
        """
        budget.verify()
        self.clipping = Clipping.of(clipping)
        validate_options(budget, method, keep, group, grouping, clip, self.clipping, micro, views, precision, public)
        validate(model)
        refuse_other_optimizers(optimizer)
        self.model, self.optimizer, self.budget, self.method = model, optimizer, budget, method
        self.keep, self.schedule, self.group, self.grouping = float(keep), SCHEDULES.resolve(schedule), group, grouping
        self.clip, self.micro, self.views, self.precision, self.public = clip, micro, views, precision, public
        self.parameters = trained_parameters(model, optimizer)
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.size = sum(self.sizes)
        sizes = dict(zip(self.parameters, self.sizes, strict=True))
        self.norms = ClippingNorms(self.clipping, clip, sizes, budget)
        self.grid = self.norms.grid(0)
        first = next(iter(self.parameters.values()))
        self.zeros = partial(torch.zeros, device=first.device, dtype=first.dtype)
        self.source = source or Source(first.device)
        self.processes = Processes(model)
        self.source.key = self.processes.share_key(self.source.key)
        self.guard = OptimizerGuard.of(optimizer)
        has_products = ghost and method == "dpsgd" and allows_products(budget.rows)  # others change gradients first
        micro_rows = micro_batch_rows(budget.rows, budget.rate / self.processes.count, micro)
        self.gradients = ExampleGradients(
            model, loss, self.parameters, micro_rows, views, PRECISIONS[precision], self.add_clipped, has_products
        )
        self.indices = IndexDraws(method, budget, self.keep, self.schedule, group, grouping, tuple(self.sizes))
        self.data = None if data is None else (as_batch(data[0]), as_batch(data[1]))
        require(
            self.data is None or count_rows(*self.data) == budget.rows,
            f"the budget is for {budget.rows} rows, and the data has another number.",
        )
        self.journal = StepJournal(ledger, self.source, self.processes, budget)
        self.needs_rows = ledger is not None and data is None and not trust_rows
        self.is_loaded = False  # whether `poisson_loader` read the rows that were drawn
        self.is_tested = False  # whether the model was found not to mix examples
        self.drawn = 0  # steps that are charged
        self.steps_taken = 0
        self.pending: Tensor | None = None  # the rows that were drawn for the next step

    # ---- the budget

    @property
    def spent(self) -> float:
        """Return the ε spent so far, also by steps that were taken before an earlier state was loaded."""
        return self.budget.spent(self.journal.furthest_draw(self.drawn))

    @property
    def next_step(self) -> int:
        """Return the number of the next step to be taken, from 0."""
        return self.drawn - (self.pending is not None)

    def kept_share(self, step: int | None = None) -> float:
        """Return the share of coordinates that a step keeps; by default of the next step."""
        return self.indices.kept_share(self.next_step if step is None else step)

    def mechanism(self, step: int | None = None) -> IndexMechanism:
        """Return the index mechanism of a step; by default of the next step."""
        return self.indices.mechanism(self.next_step if step is None else step)

    def lost(self, step: int | None = None) -> float | None:
        """Return E[i] / m, the share of the private top-k that a step's index set is expected to miss.

        For public data it is unknown, and None is returned.
        """
        return self.indices.lost(self.next_step if step is None else step)

    def lost_at_random(self, step: int) -> float:
        """Return the share of the private top-k that a random index set would miss in a step."""
        return self.indices.lost_at_random(step)

    # ---- steps

    def __iter__(self) -> Iterator[Tensor]:
        while self.drawn < self.budget.steps:
            yield self.draw()

    def draw(self) -> Tensor:
        """Draw and charge the rows of the next step: a Poisson sample, as the accounting assumes."""
        require(
            self.drawn < self.budget.steps,
            f"the budget of ε={self.budget.epsilon:g} is spent after {self.budget.steps} steps: "
            "solve one for more steps before the training begins.",
        )
        self.journal.enter_draw(self.drawn, self.steps_taken)
        self.drawn += 1
        rows = self.source.poisson(self.budget.rows, self.budget.rate)
        self.pending, self.is_loaded = self.processes.own_rows(rows), False
        return self.pending.clone()

    def __call__(self, inputs: Batch = None, targets: Batch = None, rows: Tensor | None = None) -> Tensor:
        """Take one step on the rows that were drawn for it and return their mean loss, which is not private.

        `rows` may be passed to have them compared with the drawn ones. With `data` no argument is needed.
        """
        inputs, targets = self.check_examples(inputs, targets, rows)
        validate(self.model)
        refuse_other_parameters(self.model, self.optimizer, self.parameters)
        if not self.is_tested or is_test_due(self.drawn):
            flat_views = map_tensors(lambda part: part.flatten(0, 1), inputs) if self.views > 1 else inputs
            self.is_tested = refuse_mixed_examples(self.model, flat_views)
        mechanism, self.pending = self.mechanism(), None
        before = self.journal.digest_weights(self.parameters.values())
        with repeatable_kernels(), self.source.seeded_torch(self.processes.rank), unchanged_state(self.model):
            total, losses = self.sum_clipped_gradients(inputs, targets, mechanism)
        self.journal.enter_release(self.drawn, before, total)
        self.steps_taken = self.drawn
        # The divisor is the expected size: the actual size is not public.
        gradient = self.grid.to_gradient(total[: self.size], self.budget.batch_size)
        self.norms.adapt(total[self.size :])
        for parameter, part in zip(self.parameters.values(), gradient.split(self.sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        with self.guard.opened():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.mean() if len(losses) else losses.sum()

    def randomness(self) -> AbstractContextManager[None]:
        """Seed torch, NumPy and `random` from the secret key within a block, in which drawn rows are augmented.

            for rows in step:
                with step.randomness():
                    inputs = augment(x[rows])
                step(inputs, y[rows], rows)

        With numbers that others can know, those of all other rows would tell whether a row is there. A resumed run
        draws them again.
        """
        require(self.pending is not None, "there are no drawn rows to augment: call draw() before randomness().")
        return self.source.seeded_generators(self.processes.rank)

    def check_examples(self, inputs: Batch, targets: Batch, rows: Tensor | None) -> tuple[Batch, Batch]:
        """Return the examples of a step; raise PomonaError unless they are those of the rows that were drawn."""
        drawn = self.pending
        own = None
        if self.data is not None and drawn is not None:
            own = map_tensors(lambda part: part[drawn.to(part.device)], self.data)
        if inputs is None and own is not None:
            return own[0], own[1]
        require(inputs is not None and targets is not None, "a step needs inputs and targets, or data given before.")
        inputs, targets = as_batch(inputs), as_batch(targets)
        count = count_rows(inputs, targets)
        require(
            drawn is not None and count == len(drawn),
            f"a step got {count} rows where {'none' if drawn is None else len(drawn)} were drawn: pass the rows of "
            "draw(), once each; batches of a fixed size or accumulated batches are no Poisson sample and void the "
            "accounting.",
        )
        require(
            rows is not None or self.is_loaded or not self.needs_rows,
            "a step with a ledger must know which rows its examples are: pass them, as in step(x[rows], y[rows], "
            "rows), or give data=(x, y) to the private step, or set trust_rows=True to go without a check.",
        )
        is_drawn = (rows is None or are_equal(drawn, rows)) and (own is None or are_equal((inputs, targets), own))
        require(is_drawn, f"a step got {count} rows that are not the drawn ones: pass those of draw(), in their order.")
        return inputs, targets

    def sum_clipped_gradients(self, inputs: Batch, targets: Batch, mechanism: IndexMechanism) -> tuple[Tensor, Tensor]:
        """Return the noisy sum of masked and clipped gradients as a flat tensor of grid units, and the losses.

        Behind the sum are the noisy counts of examples that stay whole, where norms adapt to them.
        """
        step = self.drawn - 1
        if self.norms.is_variable:
            self.grid = self.norms.grid(step)
        sample = SampleGradients(self.gradients, inputs, targets)
        mask = self.choose_mask(sample, mechanism)
        parts = None if mask is None else mask.split(self.sizes)
        found, losses = self.begin_sum(), [self.zeros(0)]
        for flat, loss in sample:
            if parts is not None:
                flat = [as_tensor(gradient).mul_(part) for gradient, part in zip(flat, parts, strict=True)]
            if self.method == "datalens":
                flat = [*keep_largest_signs(list(map(as_tensor, flat)), self.keep, self.grid.clip)]
            found.add(flat)
            losses.append(loss)
        total = found.finish(self.processes, has_products=self.gradients.products)
        noise = self.norms.draw_noise(self.source, self.grid, self.size, self.budget.sigma_at(step))
        if mask is not None:
            noise[: self.size] *= mask
        total += noise
        return total, torch.cat(losses)

    def begin_sum(self) -> ClippedSum:
        """Return a sum of clipped gradients, which is zero."""
        return ClippedSum(self.grid, self.zeros(self.size + self.norms.counts, dtype=torch.int64))

    def add_clipped(self, gradients: list[RowGradients]) -> Tensor:
        """Return the sum of clipped gradients of rows of this process, in grid units, and the counts behind it."""
        found = self.begin_sum()
        found.add(gradients)
        return found.finish_own()

    def choose_mask(self, sample: SampleGradients, mechanism: IndexMechanism) -> Tensor | None:
        """Return the flat mask of kept coordinates, or None to keep all."""
        if self.method in DENSE_METHODS:
            return None
        gradient = self.zeros(self.size)
        if self.method == "public":
            assert self.public is not None
            gradient = self.gradients.of_batch(*self.public)
        elif self.method == "gip":
            self.processes.add(sample.add_up(gradient))
        return mechanism.sample(gradient, self.source)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        It holds the key of all random numbers: whoever has it can subtract the noise, so it must be kept secret.
        After the last step it holds no key.
        """
        pending = self.pending is not None
        return {
            "done": self.steps_taken,
            "drawn": self.drawn - pending,  # a step that was drawn and not taken is drawn again
            "method": self.method,
            "budget": self.budget.to_dict(),
            "options": self.options(),
            "source": self.source.state_dict(pending=pending, with_key=self.drawn - pending < self.budget.steps),
            "norms": self.norms.norms,
            "ledger": self.journal.checksum,
        }

    def options(self) -> dict[str, Any]:
        """Return the options that decide a step, which a resumed run must not change."""
        return {
            "clip": self.clip,
            "keep": self.keep,
            "group": self.group,
            "grouping": self.grouping,
            "views": self.views,
            "precision": self.precision,
            "ghost": self.gradients.products,
            "schedule": spec_to_dict(self.schedule),
            "clipping": self.clipping.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; raise PomonaError if it has another budget or another method."""
        before = {"clipping": {}} | state.get("options", {})
        mine, theirs = self.budget.to_dict(), {key: state["budget"].get(key) for key in self.budget.to_dict()}
        own = mine | {"method": self.method} | self.options()
        require_same_settings(own, theirs | {"method": state["method"]} | before)
        if "ghost" not in before:  # a run that began before there was this option goes on without
            self.gradients.set_products(False)
        self.journal.resume(state.get("ledger"))
        self.source.load_state_dict(state["source"])
        self.norms.norms = list(state.get("norms", self.norms.norms))
        self.steps_taken, self.drawn, self.pending = state["done"], state.get("drawn", state["done"]), None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles of the step."""
        raise PomonaError(
            "a private step cannot be copied or pickled, as its copy would use the same noise for other gradients: "
            "make another private step, and use state_dict() to resume this one."
        )

    def facts(self) -> dict[str, Any]:
        """Return what may be published about the run; nothing in it depends on the data."""
        middle, end = self.budget.steps // 2, self.budget.steps - 1
        return {
            "method": self.method,
            "coordinates": self.size,
            "epsilon": self.spent,
            "target": self.budget.epsilon,
            "delta": self.budget.delta,
            "sigma": self.budget.sigma,
            "clip": self.clip,
            "index_epsilon": self.budget.index,
            "share": self.budget.share,
            "keep": self.keep if self.method != "dpsgd" else 1.0,
            "schedule": spec_to_dict(self.schedule),
            "group": self.group,
            "grouping": self.grouping,
            "lost": {"middle": self.lost(middle), "end": self.lost(end)},
            "random_loses": {"middle": self.lost_at_random(middle), "end": self.lost_at_random(end)},
            "secure": self.source.secure,
            **{key: value for key, value in self.changes().items() if value},
        }

    def changes(self) -> dict[str, Any]:
        """Return how noise, index draws and clipping change over the steps or layers; nothing where they do not."""
        budget = self.budget.to_dict()
        return {key: budget.get(key) for key in sorted(RAMPS)} | {"clipping": self.clipping.to_dict()}
