"""A step of private training: draw rows, choose indices, clip each example, add noise, update.

    step = pm.privacy.gip(model, optimizer, rows=len(x), batch_size=512, epsilon=2, delta=1e-5, steps=1000)
    for rows in step:
        step(x[rows], y[rows])

Which coordinates of the gradient are kept is one of four choices, all of them the index mechanism:

    dpsgd     all of them (Abadi et al., CCS 2016)
    random    drawn at random, θ = 0
    public    the top-k of a gradient of public data, θ = ∞, which costs nothing
    gip       the noisy top-k of the private gradient itself
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
from .accounting import Budget
from .examples import Gradients, Loss, per_example, summed
from .mechanism import IndexMechanism
from .noise import Source
from .validate import probe, validate

METHODS = ("dpsgd", "random", "public", "gip")
WHOLE = Linear(until=1.0)  # the authors' schedule: ever fewer coordinates, until the end


class PrivateStep:
    """Steps of a model and an optimizer within a budget. Iterating draws the rows of each step to come."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        budget: Budget,
        *,
        method: str = "gip",
        keep: float = 0.1,
        schedule: Schedule | str | dict[str, Any] = WHOLE,
        group: int | None = 256,
        clip: float = 1.0,
        loss: Loss = F.cross_entropy,
        micro: int = 256,
        views: int = 1,
        public: tuple[Tensor, Tensor] | None = None,
        source: Source | None = None,
    ) -> None:
        """`keep` is the share of coordinates at the end of `schedule`, which begins with all of them.

        `micro` rows at a time bound the memory; they change nothing else. With `views`, inputs are
        (rows, views, …) and an example's gradient is the mean over its views.
        """
        if method not in METHODS:
            raise unknown_name_error("private method", method, METHODS)
        require(0 < keep <= 1, f"keep is the share of coordinates that is left, in (0, 1], got {keep:g}.")
        require(
            group is None or round(keep * group) >= 1,
            f"keep={keep:g} leaves none of a group of {group}: give a larger keep or group, or group=None.",
        )
        require(0 < clip < math.inf, f"clip must be above 0 and finite, got {clip:g}: without it there is no privacy.")
        require(micro >= 1 and views >= 1, f"micro and views must be 1 or more, got {micro} and {views}.")
        require(
            (budget.share > 0) == (method == "gip"),
            f"share={budget.share:g} of ε is set aside for index draws, and '{method}' "
            + ("needs one: give it a share above 0." if method == "gip" else "makes none that cost: set share to 0."),
        )
        require((public is None) == (method != "public"), "public data goes with method='public', and only with it.")
        validate(model)
        self.model, self.optimizer, self.budget, self.method = model, optimizer, budget, method
        self.keep, self.schedule, self.group = float(keep), SCHEDULES.resolve(schedule), group
        self.clip, self.loss, self.micro, self.views, self.public = clip, loss, micro, views, public
        self.parameters = held(model, optimizer)
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.size = sum(self.sizes)
        first = next(iter(self.parameters.values()))
        self.zeros = partial(torch.zeros, device=first.device, dtype=first.dtype)
        self.source = source or Source(first.device)
        self.done = 0  # steps taken
        self.drawn: int | None = None  # rows of the sample that waits for its step

    # ---- the budget

    @property
    def spent(self) -> float:
        """The ε spent so far."""
        return self.budget.spent(self.done)

    def kept(self, step: int | None = None) -> float:
        """The share of coordinates that a step keeps."""
        step = self.done if step is None else step
        return 1.0 if self.method == "dpsgd" else 1 - (1 - self.keep) * self.schedule(step, self.budget.steps)

    def mechanism(self, step: int | None = None) -> IndexMechanism:
        """How the indices of a step are chosen."""
        share = self.kept(step)
        if self.method == "gip":
            return IndexMechanism(share, epsilon=self.budget.index, group=self.group)
        return IndexMechanism(share, theta=0.0 if self.method == "random" else math.inf, group=self.group)

    def lost(self, step: int | None = None) -> float | None:
        """E[i] / m: the share of the private top-k that a step's set is expected to miss; unknown of public data."""
        return None if self.method == "public" else self.mechanism(step).lost(self.size)

    def chance(self, step: int) -> float:
        """What sets drawn at random would miss in that step."""
        return replace(self.mechanism(step), theta=0.0, epsilon=None).lost(self.size)

    # ---- steps

    def __iter__(self) -> Iterator[Tensor]:
        while self.done < self.budget.steps:
            yield self.draw()

    def draw(self) -> Tensor:
        """The rows of the next step: a Poisson sample, as the accounting assumes."""
        require(
            self.done < self.budget.steps,
            f"the budget of ε={self.budget.epsilon:g} is spent after {self.budget.steps} steps: "
            "solve one for more steps before the training begins.",
        )
        rows = self.source.poisson(self.budget.rows, self.budget.rate)
        self.drawn = len(rows)
        return rows

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step on the rows that were drawn for it; their mean loss, which is not private."""
        require(
            self.drawn == len(inputs) == len(targets),
            f"a step got {len(inputs)} rows where {self.drawn or 'none'} were drawn: take the rows that draw() gives, "
            "once each, for batches of a fixed size or accumulated ones are no Poisson sample and void the accounting.",
        )
        if self.done == 0:
            probe(self.model, inputs.flatten(0, 1) if self.views > 1 else inputs)
        keep, self.drawn = self.mechanism(), None
        self.done += 1  # what fails from here on is spent
        total, losses = self.clipped(inputs, targets, keep)
        gradient = total.div_(self.budget.batch_size)  # the expected size: the real one is not public
        for parameter, part in zip(self.parameters.values(), gradient.split(self.sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.mean() if len(losses) else losses.sum()

    def clipped(self, inputs: Tensor, targets: Tensor, keep: IndexMechanism) -> tuple[Tensor, Tensor]:
        """The noisy sum of masked and clipped gradients, flat, and the losses."""
        chunks = list(zip(inputs.split(self.micro), targets.split(self.micro), strict=True)) if len(inputs) else []
        # In a single chunk the gradients of the examples serve both the choice and the sum.
        ready = self.examples(*chunks[0]) if len(chunks) == 1 else None
        mask = self.choose(chunks, keep, ready)
        parts = None if mask is None else mask.split(self.sizes)
        total, losses = self.zeros(self.size), []
        for chunk in chunks:
            gradients, loss = ready or self.examples(*chunk)
            flat = [gradient.flatten(1) for gradient in gradients.values()]
            if parts is not None:
                flat = [gradient.mul_(part) for gradient, part in zip(flat, parts, strict=True)]
            total += clip_and_sum(flat, self.clip)
            losses.append(loss)
        noise = self.source.normal(self.size).mul_(self.budget.sigma * self.clip)
        total += noise if mask is None else noise.mul_(mask)
        return total, torch.cat(losses) if losses else total.new_zeros(0)

    def examples(self, inputs: Tensor, targets: Tensor) -> tuple[Gradients, Tensor]:
        return per_example(self.model, self.loss, self.parameters, inputs, targets, self.views)

    def choose(
        self, chunks: list[tuple[Tensor, Tensor]], keep: IndexMechanism, ready: tuple[Gradients, Tensor] | None
    ) -> Tensor | None:
        """The mask of kept coordinates, flat; None keeps them all."""
        if self.method == "dpsgd":
            return None
        gradient = self.zeros(self.size)
        if self.method == "public":
            assert self.public is not None
            gradient = flatten(summed(self.model, self.loss, self.parameters, *self.public))
        elif self.method == "gip" and ready is not None:
            gradient = flatten({name: of.sum(0) for name, of in ready[0].items()})
        elif self.method == "gip":
            for chunk in chunks:
                gradient += flatten(summed(self.model, self.loss, self.parameters, *chunk, self.views))
        return keep.sample(gradient, self.source)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; with seeded randomness it foretells the noise to come, so keep it secret."""
        return {
            "done": self.done,
            "method": self.method,
            "budget": self.budget.to_dict(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on; another budget, or another method, is refused."""
        mine, theirs = self.budget.to_dict(), state["budget"]
        other = [f"{key}: {mine[key]}, not {theirs.get(key)}" for key in mine if mine[key] != theirs.get(key)]
        other += [f"method: {self.method}, not {state['method']}"] * (self.method != state["method"])
        require(
            not other,
            f"these steps began with another budget ({'; '.join(other[:3])}): what is spent cannot be moved to a new "
            "one, so go on with the old or begin anew.",
        )
        self.source.load_state_dict(state["source"])
        self.done, self.drawn = state["done"], None

    def facts(self) -> dict[str, Any]:
        """What may be told of the run: nothing here depends on the data."""
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
            "random_loses": {"middle": self.chance(middle), "end": self.chance(end)},
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
    secure: bool = False,
    **options: Any,
) -> PrivateStep:
    """Private training with gradients index pruning, of which `share` of ε goes to the indices (the authors' 1 %).

    σ and θ are solved for here, with dp-accounting. The other options are `PrivateStep`'s; another `method` there
    takes no share. A `seed` is for experiments: who knows it can take the noise away.
    """
    share = share if options.get("method", "gip") == "gip" else 0.0
    budget = Budget.solve(epsilon=epsilon, delta=delta, rows=rows, batch_size=batch_size, steps=steps, share=share)
    source = Source(next(model.parameters()).device, seed=seed, secure=secure)
    return PrivateStep(model, optimizer, budget, source=source, **options)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The model's trained parameters by name; all that the optimizer moves must be among them."""
    moved = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found = {name: p for name, p in model.named_parameters() if id(p) in moved}
    require(
        len(found) == len(moved) > 0,
        f"the optimizer moves {len(moved)} parameters, of which {len(found)} are the model's: make it from "
        "model.parameters(), after any layer was replaced.",
    )
    return found


def clip_and_sum(gradients: list[Tensor], clip: float) -> Tensor:
    """Σ_i g_i min(1, C / ‖g_i‖), flat, from (rows, …) parts; an example without a finite norm counts as zero."""
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in gradients]).norm(dim=0)
    finite = norms.isfinite()
    if not finite.all():  # NaN · 0 is NaN
        for part in gradients:
            part[~finite] = 0
    scale = torch.where(finite, (clip / norms.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    return torch.cat([scale.to(part.dtype) @ part for part in gradients])


def flatten(gradients: Gradients) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])
