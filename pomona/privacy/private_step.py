"""Private training steps: sample rows, choose indices, clip each example, add noise, update.

    step = pm.privacy.gip(model, optimizer, rows=len(x), batch_size=512, epsilon=2, delta=1e-5, steps=1000)
    for rows in step:
        step(x[rows], y[rows])

The method decides which coordinates of the gradient are kept. All but the first use the index mechanism:

    dpsgd     all coordinates (Abadi et al., CCS 2016)
    random    coordinates drawn at random, θ = 0
    public    the top-k of a gradient of public data, θ = ∞, which costs no privacy
    gip       the noisy top-k of the private gradient (Yang et al., 2023)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import require, unknown_name_error
from ..registry import spec_to_dict
from ..schedules import SCHEDULES, Linear, Schedule
from .budget import Budget
from .clipping import GradientGrid, flatten
from .index_mechanism import IndexMechanism
from .model_validation import refuse_mixed_examples, validate
from .per_example_gradients import Gradients, Loss, compute_per_example_gradients, compute_summed_gradients
from .random_source import Source

METHODS = ("dpsgd", "random", "public", "gip")
DEFAULT_SCHEDULE = Linear(until=1.0)  # of Yang et al. (2023): fewer coordinates at every step, until the end


class PrivateStep:
    """Private training steps of a model and an optimizer within a budget.

    Iterating over the object yields the rows of each step; calling it on these rows takes the step.
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
        clip: float = 1.0,
        loss: Loss = F.cross_entropy,
        micro: int = 256,
        views: int = 1,
        public: tuple[Tensor, Tensor] | None = None,
        source: Source | None = None,
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
            clip: C, the norm to which the gradient of each example is clipped.
            loss: the mean loss of a batch.
            micro: rows whose gradients are held in memory at a time; the result does not depend on it.
            views: augmented copies of a row. Inputs are then (rows, views, …), and the gradient of an example is the
                mean over its views.
            public: inputs and targets of public data, for method "public".
            source: the random source; by default its key is the operating system's.
        """
        validate_options(budget, method, keep, group, clip, micro, views, public)
        validate(model)
        self.model, self.optimizer, self.budget, self.method = model, optimizer, budget, method
        self.keep, self.schedule, self.group = float(keep), SCHEDULES.resolve(schedule), group
        self.clip, self.loss, self.micro, self.views, self.public = clip, loss, micro, views, public
        self.parameters = trained_parameters(model, optimizer)
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.size = sum(self.sizes)
        self.grid = GradientGrid(clip, self.size)
        first = next(iter(self.parameters.values()))
        self.zeros = partial(torch.zeros, device=first.device, dtype=first.dtype)
        self.source = source or Source(first.device)
        self.steps_taken = 0
        self.pending_rows: int | None = None  # size of the sample that was drawn for the next step

    # ---- the budget

    @property
    def spent(self) -> float:
        """Return the ε spent so far."""
        return self.budget.spent(self.steps_taken)

    def kept_share(self, step: int | None = None) -> float:
        """Return the share of coordinates that a step keeps; by default of the next step."""
        step = self.steps_taken if step is None else step
        return 1.0 if self.method == "dpsgd" else 1 - (1 - self.keep) * self.schedule(step, self.budget.steps)

    def mechanism(self, step: int | None = None) -> IndexMechanism:
        """Return the index mechanism of a step; by default of the next step."""
        share = self.kept_share(step)
        if self.method == "gip":
            return IndexMechanism(share, epsilon=self.budget.index, group=self.group)
        return IndexMechanism(share, theta=0.0 if self.method == "random" else math.inf, group=self.group)

    def lost(self, step: int | None = None) -> float | None:
        """Return E[i] / m, the share of the private top-k that a step's index set is expected to miss.

        For public data it is unknown, and None is returned.
        """
        return None if self.method == "public" else self.mechanism(step).lost(self.size)

    def lost_at_random(self, step: int) -> float:
        """Return the share of the private top-k that a random index set would miss in a step."""
        return replace(self.mechanism(step), theta=0.0, epsilon=None).lost(self.size)

    # ---- steps

    def __iter__(self) -> Iterator[Tensor]:
        while self.steps_taken < self.budget.steps:
            yield self.draw()

    def draw(self) -> Tensor:
        """Draw the rows of the next step: a Poisson sample, as the accounting assumes."""
        require(
            self.steps_taken < self.budget.steps,
            f"the budget of ε={self.budget.epsilon:g} is spent after {self.budget.steps} steps: "
            "solve one for more steps before the training begins.",
        )
        rows = self.source.poisson(self.budget.rows, self.budget.rate)
        self.pending_rows = len(rows)
        return rows

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take one step on the rows that were drawn for it and return their mean loss, which is not private."""
        require(
            self.pending_rows == len(inputs) == len(targets),
            f"a step got {len(inputs)} rows where {self.pending_rows or 'none'} were drawn: pass the rows of draw(), "
            "once each; batches of a fixed size or accumulated batches are no Poisson sample and void the accounting.",
        )
        if self.steps_taken == 0:
            refuse_mixed_examples(self.model, inputs.flatten(0, 1) if self.views > 1 else inputs)
        mechanism, self.pending_rows = self.mechanism(), None
        self.steps_taken += 1  # a step that fails from here on is spent
        with self.source.seeded_torch():
            total, losses = self.sum_clipped_gradients(inputs, targets, mechanism)
        # The divisor is the expected size: the actual size is not public.
        gradient = self.grid.to_gradient(total, self.budget.batch_size)
        for parameter, part in zip(self.parameters.values(), gradient.split(self.sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.mean() if len(losses) else losses.sum()

    def sum_clipped_gradients(
        self, inputs: Tensor, targets: Tensor, mechanism: IndexMechanism
    ) -> tuple[Tensor, Tensor]:
        """Return the noisy sum of masked and clipped gradients as a flat tensor of grid units, and the losses."""
        chunks = list(zip(inputs.split(self.micro), targets.split(self.micro), strict=True)) if len(inputs) else []
        # The per-example gradients of a single chunk are used for both the index set and the sum.
        shared = self.per_example_gradients(*chunks[0]) if len(chunks) == 1 else None
        mask = self.choose_mask(chunks, mechanism, shared)
        parts = None if mask is None else mask.split(self.sizes)
        total, losses = self.zeros(self.size, dtype=torch.int64), []
        for chunk in chunks:
            gradients, loss = shared or self.per_example_gradients(*chunk)
            flat = [gradient.flatten(1) for gradient in gradients.values()]
            if parts is not None:
                flat = [gradient.mul_(part) for gradient, part in zip(flat, parts, strict=True)]
            self.grid.add_clipped(flat, total)
            losses.append(loss)
        noise = self.source.discrete_gaussian(self.size, self.grid.noise_variance(self.budget.sigma))
        total += noise if mask is None else noise.mul_(mask)
        return total, torch.cat(losses) if losses else self.zeros(0)

    def per_example_gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Gradients, Tensor]:
        """Return the gradients of each row by parameter name, and the losses."""
        return compute_per_example_gradients(self.model, self.loss, self.parameters, inputs, targets, self.views)

    def choose_mask(
        self,
        chunks: list[tuple[Tensor, Tensor]],
        mechanism: IndexMechanism,
        shared: tuple[Gradients, Tensor] | None,
    ) -> Tensor | None:
        """Return the flat mask of kept coordinates, or None to keep all.

        `shared` are the per-example gradients and losses of the sample, if it is a single chunk.
        """
        if self.method == "dpsgd":
            return None
        gradient = self.zeros(self.size)
        if self.method == "public":
            assert self.public is not None
            gradient = flatten(compute_summed_gradients(self.model, self.loss, self.parameters, *self.public))
        elif self.method == "gip" and shared is not None:
            gradient = flatten({name: rows.sum(0) for name, rows in shared[0].items()})
        elif self.method == "gip":
            for chunk in chunks:
                summed = compute_summed_gradients(self.model, self.loss, self.parameters, *chunk, self.views)
                gradient += flatten(summed)
        return mechanism.sample(gradient, self.source)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        It holds the key of all random numbers: whoever has it can subtract the noise, so it must be kept secret.
        """
        return {
            "done": self.steps_taken,
            "method": self.method,
            "budget": self.budget.to_dict(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; raise PomonaError if it has another budget or another method."""
        mine, theirs = self.budget.to_dict(), state["budget"]
        other = [f"{key}: {mine[key]}, not {theirs.get(key)}" for key in mine if mine[key] != theirs.get(key)]
        other += [f"method: {self.method}, not {state['method']}"] * (self.method != state["method"])
        require(
            not other,
            f"these steps began with another budget ({'; '.join(other[:3])}): what is spent cannot be moved to a new "
            "one, so continue with the old one or begin a new run.",
        )
        self.source.load_state_dict(state["source"])
        self.steps_taken, self.pending_rows = state["done"], None

    def facts(self) -> dict[str, Any]:
        """Return what may be published about the run; nothing in it depends on the data."""
        middle, end = self.budget.steps // 2, self.budget.steps - 1
        return {
            "method": self.method,
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
            "lost": {"middle": self.lost(middle), "end": self.lost(end)},
            "random_loses": {"middle": self.lost_at_random(middle), "end": self.lost_at_random(end)},
            "secure": self.source.secure,
        }


def gip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rows: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    steps: int,
    share: float = 0.01,
    seed: int | None = None,
    **options: Any,
) -> PrivateStep:
    """Return private training steps with gradients index pruning, after solving their budget with dp-accounting.

    Args:
        rows: of the training data.
        batch_size: expected rows of a Poisson sample.
        epsilon: ε of the whole run.
        delta: δ of the whole run, below 1 / rows.
        steps: of the whole run.
        share: of ε for the index sets, 1 % in Yang et al. (2023); ignored by other methods than "gip".
        seed: not private, for experiments only, because whoever knows it can subtract the noise. Without one the key of
            all random numbers is the operating system's.
        options: further options of `PrivateStep`.
    """
    share = share if options.get("method", "gip") == "gip" else 0.0
    budget = Budget.solve(epsilon=epsilon, delta=delta, rows=rows, batch_size=batch_size, steps=steps, share=share)
    source = Source(next(model.parameters()).device, seed=seed)
    return PrivateStep(model, optimizer, budget, source=source, **options)


def validate_options(
    budget: Budget,
    method: str,
    keep: float,
    group: int | None,
    clip: float,
    micro: int,
    views: int,
    public: tuple[Tensor, Tensor] | None,
) -> None:
    """Raise PomonaError for options of `PrivateStep` that are out of range or contradict each other."""
    if method not in METHODS:
        raise unknown_name_error("private method", method, METHODS)
    require(0 < keep <= 1, f"keep is the share of coordinates that are kept, in (0, 1], got {keep:g}.")
    require(
        group is None or round(keep * group) >= 1,
        f"keep={keep:g} leaves none of a group of {group}: give a larger keep or group, or group=None.",
    )
    require(0 < clip < math.inf, f"clip must be above 0 and finite, got {clip:g}: without it there is no privacy.")
    require(micro >= 1 and views >= 1, f"micro and views must be 1 or more, got {micro} and {views}.")
    require(
        (budget.share > 0) == (method == "gip"),
        f"the budget reserves share={budget.share:g} of ε for index draws, and '{method}' "
        + ("needs one: give it a share above 0." if method == "gip" else "makes none that cost: set share to 0."),
    )
    require((public is None) == (method != "public"), "public data goes with method='public', and only with it.")


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates, by name; raise PomonaError if one is not the model's."""
    updated = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found = {name: p for name, p in model.named_parameters() if id(p) in updated}
    require(
        len(found) == len(updated) > 0,
        f"the optimizer updates {len(updated)} parameters, of which {len(found)} are the model's: make it from "
        "model.parameters(), after any layer was replaced.",
    )
    return found
