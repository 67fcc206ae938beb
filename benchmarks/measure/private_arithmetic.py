"""Measure what exact arithmetic costs a private step: integers and a cipher in place of floats and torch's generator.

    python benchmarks/measure/private_arithmetic.py [--json PATH] [--device cuda] [--quick]

Two steps of DP-SGD on the same model and batch alternate. One is `PrivateStep`. The other is the same, but it clips and
sums floating-point numbers and adds float32 noise of torch's generator, as the step did before. The cost is the ratio
of their medians. The noise of both is also timed alone. A second figure is the change of the other rows' integers when
a row is added to the batch, over the clipping norm: kernels may round a row's gradient differently in another batch. It
is measured for batches that grow by the row, and for batches of a fixed shape, as a step uses them, with the row at
several places.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interleaved_timing import PRIVATE_WARM_UP, time_call, time_in_turns
from record_file import write_record
from torch import Tensor, nn
from torch.nn import functional as F

from pomona import models
from pomona.privacy import Budget, IndexMechanism, PrivateStep, Source
from pomona.privacy.clipping import OTHER_ROWS, UNITS, GradientGrid
from pomona.privacy.example_batches import pad_rows
from pomona.privacy.fixed_shapes import repeatable_kernels
from pomona.privacy.recorded_gradients import compute_recorded_gradients

# Model, its options, and rows of the batch and of a micro-batch, on a CPU and on a GPU.
CASES: tuple[tuple[str, dict[str, Any], dict[str, tuple[int, int]]], ...] = (
    ("private_cnn", {}, {"cpu": (256, 32), "cuda": (2048, 512)}),
    ("wrn16_4", {"norm": "group"}, {"cpu": (16, 4), "cuda": (512, 128)}),
    ("mlp", {"in_features": 3072}, {"cpu": (128, 32), "cuda": (1024, 256)}),
)
TURNS = {"cpu": 7, "cuda": 11}
SIGMA, MIN_NORM = 1.0, 1e-30


class UncheckedBudget(Budget):
    """A budget that is not verified: steps are timed here, and nothing is promised."""

    def verify(self) -> None:
        """Do nothing."""


class FloatGrid:
    """The sums of a `FloatStep`, which are gradients already."""

    @staticmethod
    def to_gradient(total: Tensor, divisor: float) -> Tensor:
        """Return the mean gradient."""
        return total / divisor


class FloatStep(PrivateStep):
    """A private step with floating-point sums and noise. It is not private: it is here to be timed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.grid = FloatGrid()  # type: ignore[assignment]

    def sum_clipped_gradients(
        self, inputs: Tensor, targets: Tensor, mechanism: IndexMechanism
    ) -> tuple[Tensor, Tensor]:
        """Return the noisy sum of clipped gradients and the losses, as the step computed them before the grid."""
        total, losses = self.zeros(self.size), []
        for chunk in zip(inputs.split(self.micro), targets.split(self.micro), strict=True):
            gradients, loss = self.gradients.of_examples(*chunk)
            total += clip_and_sum([gradient.flatten(1) for gradient in gradients.values()], self.clip)
            losses.append(loss)
        total += torch.randn(self.size, device=total.device).mul_(self.budget.sigma * self.clip)
        return total, torch.cat(losses)


def clip_and_sum(gradients: list[Tensor], clip: float) -> Tensor:
    """Return Σ_i g_i min(1, C / ‖g_i‖) in floating point."""
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in gradients]).norm(dim=0)
    finite = norms.isfinite()
    if not finite.all():
        for part in gradients:
            part[~finite] = 0
    scale = torch.where(finite, (clip / norms.clamp(min=MIN_NORM)).clamp(max=1.0), 0.0)
    return torch.cat([scale.to(part.dtype) @ part for part in gradients])


def build_model_and_batch(
    name: str, options: dict[str, Any], batch: int, device: str
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model of `pomona.models` and a random batch for it."""
    torch.manual_seed(0)
    model = models.build(name, **options).to(device)
    return model, torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def make_step(
    step_class: type[PrivateStep], name: str, options: dict[str, Any], rows: tuple[int, int], device: str
) -> Callable[[], None]:
    """Return a function that takes one step."""
    batch, micro = rows
    model, x, y = build_model_and_batch(name, options, batch, device)
    budget = UncheckedBudget(8.0, 1e-5, batch, batch, 10**6, 0.0, SIGMA, 0.0, ((10**6, 8.0),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = step_class(
        model, optimizer, budget, method="dpsgd", micro=micro, ghost=False
    )  # both have gradients of examples

    def work() -> None:
        drawn = step.draw()
        step(x[drawn], y[drawn])

    return work


def measure_case(name: str, options: dict[str, Any], rows: tuple[int, int], device: str, turns: int) -> dict[str, Any]:
    """Time both steps in turns, and the noise of both alone."""
    steps = {kind.__name__: make_step(kind, name, options, rows, device) for kind in (PrivateStep, FloatStep)}
    times = {
        kind: statistics.median(values)
        for kind, values in time_in_turns(steps, turns, 1, device, PRIVATE_WARM_UP).items()
    }
    size = sum(p.numel() for p in models.build(name, **options).parameters())
    source, variance = Source(device), GradientGrid(1.0, size).noise_variance(SIGMA)
    noises: dict[str, Callable[[], Any]] = {
        "integers": lambda: source.discrete_gaussian(size, variance),
        "floats": lambda: torch.randn(size, device=device).mul_(SIGMA),
    }
    noise = {kind: min(time_call(draw, device) for _ in range(turns)) for kind, draw in noises.items()}
    exact, floats = times["PrivateStep"], times["FloatStep"]
    return {
        "model": name,
        "device": device,
        "batch": rows[0],
        "micro": rows[1],
        "size": size,
        "exact_ms": 1000 * exact,
        "floats_ms": 1000 * floats,
        "cost_percent": 100 * (exact / floats - 1),
        "noise_ms": {kind: 1000 * seconds for kind, seconds in noise.items()},
        "threads": torch.get_num_threads(),
    }


def measure_other_rows(name: str, options: dict[str, Any], rows: int, device: str) -> dict[str, float]:
    """Return the largest change of the other rows' integers when a row is inserted, over the clipping norm.

    Without padding the batch grows by the row. With padding it has a fixed number of rows, of which some are zeros.
    """
    model, x, y = build_model_and_batch(name, options, rows, device)
    parameters = dict(model.named_parameters())
    size = sum(p.numel() for p in parameters.values())
    grid = GradientGrid(1.0, size)

    def add(inputs: Tensor, targets: Tensor, shape: int) -> Tensor:
        batch = pad_rows((inputs, targets), shape)
        with repeatable_kernels():
            gradients, _ = compute_recorded_gradients(model, F.cross_entropy, parameters, *batch)
        total = torch.zeros(size, dtype=torch.int64, device=device)
        grid.add_clipped([gradient.flatten(1)[: len(inputs)] for gradient in gradients.values()], total)
        return total

    found = {"other_rows": 0.0, "other_rows_padded": 0.0}
    for place in (0, rows // 3, rows - 1):
        rest = torch.arange(rows, device=device) != place
        for key, shapes in (("other_rows", (rows, rows - 1, 1)), ("other_rows_padded", (rows, rows, rows))):
            batches = (x, y), (x[rest], y[rest]), (x[~rest], y[~rest])
            whole, others, one = (add(*batch, shape) for batch, shape in zip(batches, shapes, strict=True))
            found[key] = max(found[key], float((whole - others - one).double().norm() / UNITS))
    return found


def is_noise_portable(device: str) -> bool:
    """Return whether a device draws the same rows, index keys and noise as a CPU."""
    one, other = Source(device, seed=1), Source(seed=1)
    draws: tuple[Callable[[Source], Tensor], ...] = (
        lambda source: source.poisson(10_000, 0.1),
        lambda source: source.bits(10_001),
        lambda source: source.discrete_gaussian(1_000_001, 1 << 42),
    )
    return all(torch.equal(draw(one).cpu(), draw(other)) for draw in draws)


def describe(found: dict[str, Any]) -> str:
    """Return the result of a case as a line of text."""
    noise = found["noise_ms"]
    return (
        f"{found['model']:12} {found['device']:5} batch {found['batch']:5} d {found['size']:8} "
        f"exact {found['exact_ms']:8.1f} ms  floats {found['floats_ms']:8.1f} ms  cost {found['cost_percent']:6.1f} %  "
        f"noise {noise['integers']:6.1f} / {noise['floats']:6.1f} ms  "
        f"other rows {found['other_rows']:.1e} of C, {found['other_rows_padded']:.1e} in a fixed shape, "
        f"margin {OTHER_ROWS:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="a single turn")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    results = []
    for name, settings, rows in CASES:
        turns = 1 if options.quick else TURNS[options.device]
        found = measure_case(name, settings, rows[options.device], options.device, turns)
        found |= measure_other_rows(name, settings, rows[options.device][1], options.device)
        results.append(found)
        print(describe(found), flush=True)
    print(f"noise on {options.device} equals noise on a CPU: {is_noise_portable(options.device)}")
    write_record(options.json, arithmetic=results)


if __name__ == "__main__":
    main()
