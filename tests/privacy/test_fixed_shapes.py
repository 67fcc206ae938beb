"""Micro-batches of a fixed shape: their size, what fills them up, and that other rows do not matter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from private_training import make_budget, make_data, make_step

from pomona import models
from pomona.privacy.clipping import OTHER_ROWS, UNITS, GradientGrid
from pomona.privacy.example_batches import pad_rows
from pomona.privacy.fixed_shapes import micro_batch_rows, repeatable_kernels
from pomona.privacy.per_example_gradients import compute_per_example_gradients


@pytest.mark.parametrize(
    ("rows", "rate", "micro", "expected"),
    [
        (50_000, 4096 / 50_000, 256, 249),  # 17 parts of 249 rows for 4218
        (50_000, 64 / 50_000, 256, 80),  # a small batch is not filled up to 256
        (512, 1.0, 512, 512),  # all rows, always
        (512, 1.0, 128, 128),
        (10, 0.01, 256, 1),
        (3, 0.9, 256, 3),
    ],
)
def test_size_follows_from_public_numbers(rows, rate, micro, expected):
    assert micro_batch_rows(rows, rate, micro) == expected


def test_all_batches_of_a_run_have_one_shape():
    x, y = make_data()
    model, step = make_step(budget=make_budget(steps=30), micro=9)
    shapes, sizes = set(), set()
    model.register_forward_pre_hook(lambda module, inputs: shapes.add(tuple(inputs[0].shape)))
    seen = []
    compute = compute_per_example_gradients

    def watch(model, loss, parameters, inputs, targets, views):
        seen.append(len(inputs))
        return compute(model, loss, parameters, inputs, targets, views)

    step.gradients.compute = watch
    for rows in step:
        sizes.add(len(rows))
        step(x[rows], y[rows])
    assert len(sizes) > 3
    assert set(seen) == {step.gradients.micro_rows} == {9}


def test_filled_rows_add_nothing():
    """With all rows or a few, the sum is that of single rows: a step without padding is the reference."""
    (x, y), ends = make_data(), []
    for fixed in (True, False):
        model, step = make_step(noiseless=True)
        for _ in range(3):
            rows = step.draw()
            step.gradients.micro_rows = 29 if fixed else max(len(rows), 1)
            step(x[rows], y[rows])
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_other_rows_do_not_change_when_a_row_is_added(device, place):
    torch.manual_seed(0)
    model = models.build("private_cnn").to(device)
    parameters = dict(model.named_parameters())
    size = sum(p.numel() for p in parameters.values())
    x, y = torch.randn(12, 3, 32, 32, device=device), torch.randint(10, (12,), device=device)
    grid = GradientGrid(1.0, size)

    def add(inputs, targets):
        with repeatable_kernels():
            batch = pad_rows((inputs, targets), 16)
            gradients, _ = compute_per_example_gradients(model, F.cross_entropy, parameters, *batch)
        total = torch.zeros(size, dtype=torch.int64, device=device)
        grid.add_clipped([gradient.flatten(1)[: len(inputs)] for gradient in gradients.values()], total)
        return total

    rest = torch.arange(12, device=device) != place
    change = add(x, y) - add(x[rest], y[rest]) - add(x[~rest], y[~rest])
    assert float(change.double().norm()) <= OTHER_ROWS * UNITS


def test_settings_of_the_process_are_restored():
    torch.set_float32_matmul_precision("medium")
    with repeatable_kernels():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
