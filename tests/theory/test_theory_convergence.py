"""Section 4 of Lin et al. (2020): the estimates by hand, on simulated runs, and on runs of the engine."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pomona as pm
from pomona import PomonaError
from pomona.theory import convergence as theory
from pomona.theory.convergence.theorems import optimal_share

PAGE = Path(__file__).parents[2] / "docs" / "convergence.md"
BLOCK = re.compile(r"```(python)?\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def page():
    """Return the names that the page's code defines, with its output under `printed`."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for kind, code in BLOCK.findall(PAGE.read_text()):
            if kind == "python":
                exec(code, names)
    return names | {"printed": printed.getvalue()}


def find_row(page, sparsity: float, name: str) -> tuple[float, theory.Estimate]:
    """Return the measured gap and the estimate of a row of the page's table."""
    return next(row[2:] for row in page["rows"] if row[:2] == (sparsity, name))


# ---- docs/convergence.md: DPF, SGD and one-shot pruning on ridge regression; DPF on a nonconvex loss


def test_ridge_runs_stay_below_their_bounds(page, record_property):
    assert theory.rates(page["mu"], 0)[0] * page["mu"] == 2  # γ_0: the theorem's first step
    eigenvalues = torch.linalg.eigvalsh(page["hessian"])
    assert eigenvalues[-1] / eigenvalues[0] <= 2
    assert len(page["rows"]) == 9
    for sparsity, name, measured, estimate in page["rows"]:
        assert 0 < measured <= estimate.bound, (sparsity, name)
    for sparsity in (0.25, 0.5):
        gaps = {
            name: find_row(page, sparsity, f"{name} iterate{s}")[0]
            for name, s in (("DPF, pruned", "s"), ("one-shot, last", ""))
        }
        record_property(f"lower at {sparsity:g}", f"{min(gaps, key=gaps.get)} of {gaps}")


def test_ridge_bound_is_vacuous_at_sparsity_half_but_not_at_a_quarter(page):
    assert not find_row(page, 0.25, "DPF, pruned iterates")[1].vacuous
    assert find_row(page, 0.5, "DPF, pruned iterates")[1].vacuous


def test_nonconvex_run_stays_below_its_bound(page):
    assert 0 < page["measured"] <= page["stationary"].bound
    assert not page["stationary"].vacuous
    # L and G of the page come from the first and the second derivative of log(1 + r²).
    r = np.linspace(-50, 50, 200_001)
    assert np.abs(2 * r / (1 + r**2)).max() <= 1
    assert np.abs(2 * (1 - r**2) / (1 + r**2) ** 2).max() <= 2


def test_numbers_on_the_page_match_the_output_of_its_code(page):
    shown = "".join(code for kind, code in BLOCK.findall(PAGE.read_text()) if not kind)
    number = re.compile(r"\d+(?:\.\d+)?")
    words = [number.sub("#", text).split() for text in (shown, page["printed"])]
    assert words[0] == words[1]
    figures = [[float(x) for x in number.findall(text)] for text in (shown, page["printed"])]
    assert figures[0] == pytest.approx(figures[1], rel=0.02, abs=2e-5)


def test_delta_matches_the_history_of_the_pruner(page):
    pruner = page["dpf"](0.5)
    w, pruned, _ = page["train"](page["sample"], page["start"], [0.1] * 5, pruner)
    delta, _ = page["measure"](w, pruned)
    assert [entry["delta"] for entry in pruner.history[:5]] == pytest.approx(delta.tolist())
    assert delta.min() > 0


# ---- every constant is needed: runs that exceed a bound with a smaller one


def test_theorem_42_fails_with_half_its_pruning_term(page):
    # Ten equal weights of which one is always missing: f(w) = Σ log(1 + (w − 0.1)²), without noise, and L = 2.
    T, gamma, optimum = 300, 1e-2, torch.full((10,), 0.1, dtype=torch.float64)

    def f(w):
        return (w - optimum).square().log1p().sum()

    w, pruned, _ = page["train"](f, 1.01 * optimum, [gamma] * (T + 1), page["dpf"](0.1))
    delta, norm = page["measure"](w, pruned)
    residual = pruned - optimum
    square = (2 * residual / (1 + residual**2)).square().sum(1)
    arguments = {"L": 2.0, "G": square.sqrt(), "gap": f(1.01 * optimum).item(), "delta": delta, "norm": norm, "T": T}
    for sharp in (False, True):
        estimate = theory.nonconvex(**arguments, gamma=gamma, sharp=sharp)
        assert estimate.bound - estimate.terms["pruning"].value / 2 < square.mean() <= estimate.bound


def test_theorem_41_fails_without_its_pruning_term(page):
    # (w − optimum)² is 2-smooth and 2-strongly convex: L = μ = 2. One of two weights is always missing.
    T, optimum = 100, torch.ones(2, dtype=torch.float64)
    w, pruned, _ = page["train"](
        lambda w: (w - optimum).square().sum(), optimum * 1.1, theory.rates(2.0, T), page["dpf"](0.5)
    )
    delta, norm = page["measure"](w, pruned)
    squares = (pruned - optimum).square().sum(1)
    estimate = theory.convex(L=2.0, mu=2.0, G=2 * squares.sqrt(), delta=delta, norm=norm, T=T, sharp=True)
    measured = theory.weights(T) @ squares.numpy()
    assert measured <= estimate.bound
    assert measured > estimate.terms["noise"].value


def noisy_sgd_moments(L: float, rates, sigma: float = 1.0):
    """Return the exact E x_t² and G_t of SGD on (L/2) x² from 0 with noise ±σ: x ← (1 − γL) x − γ noise."""
    second = [0.0]
    for rate in rates[:-1]:
        second.append((1 - rate * L) ** 2 * second[-1] + (rate * sigma) ** 2)
    second = np.array(second)
    return second, np.sqrt(L**2 * second + sigma**2)


def test_theorem_41_fails_with_half_its_noise_term():
    # For large T the gap is 16/7 G²/(μT), and the sharp constant is 4.
    mu, T = 3.0, 2000
    second, G = noisy_sgd_moments(mu, theory.rates(mu, T))
    measured = theory.weights(T) @ (mu / 2 * second)
    bound = theory.convex(L=mu, mu=mu, G=G, delta=0, norm=0, T=T, sharp=True).bound
    assert bound / 2 < measured <= bound
    assert measured * T * mu == pytest.approx(16 / 7, rel=0.05)
    last = theory.last(L=mu, mu=mu, G=G[:-1], T=T - 1).bound
    assert mu / 2 * second[-1] <= last < 8 * mu / 2 * second[-1]


def test_theorem_42_fails_with_half_its_noise_term():
    L, T, gamma = 2.0, 5000, 0.01
    second, G = noisy_sgd_moments(L, [gamma] * (T + 1))
    estimate = theory.nonconvex(L=L, G=G, gap=1e-9, delta=0, norm=0, T=T, gamma=gamma, sharp=True)
    assert estimate.bound / 2 < (L**2 * second).mean() <= estimate.bound


def test_theorem_42_fails_with_half_its_first_term():
    # √(1 + x²) is 1-smooth, and its slope is nearly 1 all the way down from 1000.
    gamma, T, x = 0.1, 10_000, 1000.0
    slopes, gap = [], math.sqrt(1 + x * x) - 1
    for _ in range(T + 1):
        slopes.append(x / math.sqrt(1 + x * x))
        x -= gamma * slopes[-1]
    measured = np.square(slopes).mean()
    estimate = theory.nonconvex(L=1.0, G=slopes, gap=gap, delta=0, norm=0, T=T, gamma=gamma, sharp=True)
    assert estimate.bound / 2 < measured <= estimate.bound


def test_inequality_4_is_tight():
    # f = (3/2)(w − 2)², w = 1 pruned to 0: gaps 1.5 and 6; 2 · 1.5 + 3 · 1 · 1² = 6.
    for sharp in (False, True):
        estimate = theory.one_shot(L=3.0, gap=1.5, delta=1.0, norm=1.0, sharp=sharp)
        assert estimate.bound == pytest.approx(6)
    # w = 1, optimum 3: gaps 6 and 13.5 = (√6 + √1.5)², where the paper has 12 + 3.
    assert theory.one_shot(L=3.0, gap=6.0, delta=1.0, norm=1.0, sharp=True).bound == pytest.approx(13.5)
    assert theory.one_shot(L=3.0, gap=6.0, delta=1.0, norm=1.0).bound == pytest.approx(15)


# ---- by hand


def test_theorem_41_matches_a_hand_computation():
    # T = 1, μ = 1, L = 2: p = 1/3, 2/3; γ = 2, 4/3; noise 1/3·2·9 + 2/3·4/3·1 = 62/9; E = 2/3·(1/4)·4 = 2/3.
    arguments = {"L": 2.0, "mu": 1.0, "G": [3.0, 1.0], "delta": [0.0, 0.25], "norm": [5.0, 2.0], "T": 1}
    estimate = theory.convex(**arguments)
    assert estimate.terms["noise"].value == pytest.approx(62 / 9)
    assert estimate.terms["pruning"].constant == pytest.approx(2 * 2 + 1)
    assert estimate.bound == pytest.approx(62 / 9 + 5 * 2 / 3)
    # Printed: 8·9/(1·3) + 3·2·2/3. Known without: (1/3·9 + 2/3·1)/2.
    assert theory.convex(**arguments, printed=True).bound == pytest.approx(24 + 4)
    assert estimate.trivial == pytest.approx(11 / 6)
    assert estimate.vacuous
    # Last: L/μ = 2 times the noise, 2·3 times E. Dense: twice the gap, and L E.
    assert theory.last(**arguments).bound == pytest.approx(2 * 62 / 9 + 6 * 2 / 3)
    assert theory.dense(L=2.0, gap=1.0, delta=arguments["delta"], norm=arguments["norm"], T=1).bound == pytest.approx(
        2 + 4 / 3
    )


def test_theorem_42_matches_a_hand_computation():
    # γ = √(2·2/(4·1·100)) = 0.1: 2·2/(0.1·100) + 4·0.1·1 + 16·0.01·1 = 0.4 + 0.4 + 0.16.
    arguments = {"L": 4.0, "G": 1.0, "gap": 2.0, "T": 99}
    assert theory.rate(**arguments) == pytest.approx(0.1)
    estimate = theory.nonconvex(**arguments, delta=0.01, norm=1.0)
    assert [term.value for term in estimate.terms.values()] == pytest.approx([0.4, 0.4, 0.16])
    assert str(estimate) == "Theorem 4.2: ≤ 0.96 = 0.4 (start) + 0.4 (noise) + 0.16 (pruning)"
    assert not estimate.vacuous  # 0.96 < G² = 1
    # Printed, at c/√(T+1) = 0.1/√2: 3 √(2·4/100) in place of 2 √(2·2·4/100).
    printed = theory.nonconvex(**arguments, delta=0.01, norm=1.0, printed=True)
    assert printed.bound == pytest.approx(3 * math.sqrt(0.08) + 0.16)
    assert printed.vacuous


def test_estimates_average_over_runs():
    runs = np.array([[0.1, 0.3], [0.3, 0.5]])
    arguments = {"L": 2.0, "mu": 1.0, "G": 1.0, "norm": 2.0, "T": 1}
    assert theory.convex(**arguments, delta=runs).bound == pytest.approx(
        theory.convex(**arguments, delta=[0.2, 0.4]).bound
    )


# ---- properties on random runs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.floats(1, 3), st.floats(0, 1))
def test_bounds_hold_for_random_masks_on_random_quadratics(seed, T, condition, kept):
    draw = np.random.default_rng(seed)
    d, mu = 6, 0.5
    curve, best = mu * draw.uniform(1, condition, d), draw.normal(size=d)
    L = curve.max()
    w, dense, pruned = draw.normal(size=d), [], []
    for rate in theory.rates(mu, T):
        dense.append(w)
        pruned.append(w * (draw.random(d) < kept))
        w = w - rate * curve * (pruned[-1] - best)
    dense, pruned = np.array(dense), np.array(pruned)
    norm = np.linalg.norm(dense, axis=1)
    arguments = {"L": L, "delta": ((dense - pruned) ** 2).sum(1) / norm**2, "norm": norm, "T": T}
    G = np.linalg.norm(curve * (pruned - best), axis=1)
    p, slack = theory.weights(T), 1 + 1e-9

    def gap(x):
        return (curve / 2 * (x - best) ** 2).sum(-1)

    sharp, usual = theory.convex(**arguments, mu=mu, G=G, sharp=True), theory.convex(**arguments, mu=mu, G=G)
    assert p @ gap(pruned) <= sharp.bound * slack
    assert sharp.bound <= usual.bound * slack <= theory.convex(**arguments, mu=mu, G=G, printed=True).bound * slack**2
    assert gap(w) <= theory.last(**arguments, mu=mu, G=G).bound * slack
    four = theory.dense(**arguments, gap=p @ gap(pruned), sharp=True).bound
    assert p @ gap(dense) <= four * slack <= theory.dense(**arguments, gap=p @ gap(pruned)).bound * slack**2


@given(st.floats(1e-6, 1e6), st.floats(0, 1e6))
def test_optimal_share_minimizes_the_bound(a, b):
    best = (math.sqrt(b) + math.sqrt(a + b)) ** 2
    grid = np.linspace(0.001, 0.999, 999)
    assert best <= ((a + b / grid) / (1 - grid)).min() * (1 + 1e-9)
    theta = optimal_share(a, b)
    assert (a + (b / theta if theta else 0)) / (1 - theta) == pytest.approx(best)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mu": 3.0}, "μ=3 exceeds L=2"),
        ({"L": 0.0}, "L must be positive and finite, got 0"),
        ({"T": -1}, "T is the last step's number, counted from 0, got -1"),
        ({"delta": [0.1, 0.2]}, "delta has 2 entries along its last axis, and t = 0 … T=2 needs 3"),
        ({"delta": [0.1, -0.2, 0.3]}, "cannot be negative, got -0.2"),
        ({"sharp": True, "printed": True}, "leave out sharp or printed"),
        ({"G": float("nan")}, "G must be finite for every t"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    arguments = {"L": 2.0, "mu": 1.0, "G": 1.0, "delta": 0.1, "norm": 1.0, "T": 2} | change
    with pytest.raises(PomonaError, match=message):
        theory.convex(**arguments)


def test_negative_gap_is_refused():
    with pytest.raises(PomonaError, match="is f\\* the minimum"):
        theory.one_shot(L=1.0, gap=-0.1, delta=0.1, norm=1.0)


# ---- measurement of a run


def linear_model(start: torch.Tensor) -> torch.nn.Linear:
    """Return a linear layer without bias whose weights are `start`."""
    model = torch.nn.Linear(len(start), 1, bias=False, dtype=start.dtype)
    with torch.no_grad():
        model.weight.copy_(start)
    return model


@pytest.mark.parametrize("closure", [False, True])
def test_trace_matches_the_measurements_of_the_page(page, closure):
    T, gamma = 20, 0.1
    w, pruned, _ = page["train"](page["f"], page["start"], [gamma] * (T + 1), page["dpf"](0.5))
    delta, norm = page["measure"](w, pruned)

    model = linear_model(page["start"])
    optimizer = torch.optim.SGD(model.parameters(), lr=gamma)
    pruner = page["dpf"](0.5).attach(model, optimizer, total_steps=T + 1)
    trace = theory.Trace(optimizer, pruner)

    def loss():
        optimizer.zero_grad()
        value = page["f"](model.weight[0])
        value.backward()
        return value

    slopes = []
    for _ in range(T + 1):
        slopes.append(torch.autograd.grad(page["f"](model.weight[0]), model.weight)[0].norm().item())
        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    measured = trace.measured
    assert measured["T"] == T
    assert measured["delta"] == pytest.approx(delta.numpy())
    assert measured["norm"] == pytest.approx(norm.numpy())
    assert measured["G"] == pytest.approx(np.array(slopes))
    assert trace.rates == pytest.approx(gamma)
    assert theory.nonconvex(**measured, L=1.0, gap=1.0, gamma=gamma).bound > 0

    trace.stop()
    loss()
    optimizer.step()
    assert trace.measured["T"] == T


def test_bound_from_a_traced_run_holds():
    # f(w) = Σ c (w − a)² / 2 without noise: L and μ are the ends of c; DPF at a third, Theorem 4.1's rates.
    T, curve = 200, torch.linspace(1.0, 1.8, 6, dtype=torch.float64)
    optimum = 0.5 ** torch.arange(6, dtype=torch.float64)
    model = linear_model(torch.ones(6, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": 1, "printed": True, "schedule": pm.Constant(), "include": "*"}
    pruner = pm.DPF(sparsity=1 / 3, **options).attach(model, optimizer, total_steps=T + 1)
    trace, gaps = theory.Trace(optimizer, pruner), []
    for rate in theory.rates(1.0, T):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        value = (curve / 2 * (model.weight[0] - optimum) ** 2).sum()
        value.backward()
        optimizer.step()
        gaps.append(value.item())
    assert trace.rates == pytest.approx(theory.rates(1.0, T))
    estimate = theory.convex(**trace.measured, L=1.8, mu=1.0)
    assert 0 < theory.weights(T) @ gaps <= estimate.bound


def test_trace_of_plain_sgd_and_inequality_4_at_its_end():
    T, optimum = 100, torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64)
    model = linear_model(torch.zeros(3, dtype=torch.float64))  # ‖w_0‖ = 0, so δ_0 is 0/0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trace, draw = theory.Trace(optimizer), torch.Generator().manual_seed(0)
    for rate in theory.rates(2.0, T):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        noise = torch.randn(3, generator=draw, dtype=torch.float64) / 10
        ((model.weight[0] - optimum).square().sum() + noise @ model.weight[0]).backward()
        optimizer.step()
    measured = trace.measured
    assert not measured["delta"].any()
    end = theory.last(**measured, L=2.0, mu=2.0)
    w = model.weight[0].detach()
    pruned = torch.where(w.abs() > w.abs().min(), w, 0)
    arguments = {"L": 2.0, "delta": float((w - pruned).square().sum() / w.square().sum()), "norm": float(w.norm())}
    assert (w - optimum).square().sum() <= end.bound
    gap = float((pruned - optimum).square().sum())
    assert gap <= theory.one_shot(**arguments, gap=float((w - optimum).square().sum())).bound
    assert gap <= theory.one_shot(**arguments, gap=end.bound).bound


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: theory.Trace(torch.optim.Adam(p)), "Adam makes others"),
        (lambda p: theory.Trace(torch.optim.SGD(p, lr=0.1, momentum=0.9)), "SGD with momentum makes others"),
        (lambda p: theory.Trace(torch.optim.SGD(p, lr=0.1), pm.DPF(sparsity=0.5)), "not attached.* attach DPF first"),
        (lambda p: theory.Trace(torch.optim.SGD(p, lr=0.1)).measured, "no step"),
    ],
)
def test_unsupported_runs_are_refused(make, message):
    with pytest.raises(PomonaError, match=message):
        make([torch.nn.Parameter(torch.ones(3))])


def test_curvature_is_the_largest_eigenvalue():
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(12, 8, generator=draw, dtype=torch.float64)
    w = [torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=True) for size in (5, 3)]

    def loss(sign=1):
        return sign * (A @ torch.cat(w)).square().sum() / 2

    expected = torch.linalg.eigvalsh(A.T @ A).max().item()
    assert theory.curvature(loss, w, steps=300) == pytest.approx(expected, rel=1e-6)
    assert theory.curvature(lambda: loss(-1), w, steps=300) == pytest.approx(expected, rel=1e-6)
    assert theory.curvature(loss, w, steps=3) <= expected * (1 + 1e-12)
    flat = torch.ones(2, requires_grad=True)
    assert theory.curvature(lambda: (flat * 0).square().sum(), [flat]) == 0
