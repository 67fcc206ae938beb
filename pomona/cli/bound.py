"""`bound`: what is promised, by each formula of the papers, and for a network of one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from pomona.errors import PomonaError, require

from .application import CommandGroup, app
from .options import Json
from .output import facts_table, print_json, print_status, print_table

bound = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    help="What is promised: the bounds of the papers, solved in every direction.",
)
app.add_typer(bound, name="bound")

Widths = Annotated[str, typer.Option("--widths", metavar="D,D,…", help="d_0, …, d_l: inputs, hidden layers, outputs.")]
Alpha = Annotated[
    float | None, typer.Option("--alpha", help="Prune D^(1−α) of a layer's D weights; 0 is all, 1 is none.")
]
Sparsity = Annotated[float | None, typer.Option("--sparsity", help="The pruned fraction instead, D^−α.")]
Epsilon = Annotated[
    float | None,
    typer.Option("--epsilon", help="Solve for it: the largest sparsity, or with --alpha/--sparsity the width."),
]
Delta = Annotated[float, typer.Option("--delta", help="The probability with which the promise may fail.")]
Lipschitz = Annotated[float, typer.Option("--lipschitz", help="Of the activations.")]
Radius = Annotated[float, typer.Option("--radius", help="Of the ball of inputs, or the side of the cube.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw it, too.")]


@bound.command()
def magnitude(
    widths: Widths = "64,1024,1024,10",
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    K: Annotated[float, typer.Option("--K", help="Weights are uniform in ±K/√n.")] = math.sqrt(3),
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 1 of Qian & Klabjan: the smallest weights go."""
    from pomona.theory import bounds

    options = {"law": bounds.Uniform(K), "lipschitz": lipschitz, "radius": radius}
    answer(bounds.magnitude, counts(widths), alpha, sparsity, epsilon, delta, options, plot, as_json)


@bound.command()
def random(
    widths: Widths = "64,1024,1024,10",
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    law: Annotated[
        str, typer.Option("--law", help="uniform, gaussian, or moments: any law with K1 and K2.")
    ] = "uniform",
    K1: Annotated[float, typer.Option("--K1", help="E w² ≤ K1/n.")] = 1.0,
    K2: Annotated[float | None, typer.Option("--K2", help="E w⁴ ≤ K2/n², for --law moments.")] = None,
    norms: Annotated[str | None, typer.Option("--norms", metavar="N,N,…", help="Known bounds of ‖W_k‖.")] = None,
    deltas: Annotated[str | None, typer.Option("--deltas", metavar="D,D,…", help="How often these fail.")] = None,
    distinct: Annotated[bool, typer.Option("--distinct", help="Draw without replacement (E.2).")] = False,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 2 of Qian & Klabjan: weights go at random."""
    from pomona.theory import bounds

    laws: dict[str, Callable[[], Any]] = {
        "uniform": lambda: bounds.Uniform(math.sqrt(3 * K1)),
        "gaussian": lambda: bounds.Gaussian(K1),
        "moments": lambda: bounds.Moments(K1, 1.8 * K1**2 if K2 is None else K2),
    }
    require(law in laws, f"unknown law '{law}': choose one of {', '.join(laws)}.")
    options = {"law": laws[law](), "lipschitz": lipschitz, "radius": radius, "replacement": not distinct}
    options |= {"norms": norms and numbers(norms), "deltas": deltas and numbers(deltas)}
    answer(bounds.random, counts(widths), alpha, sparsity, epsilon, delta, options, plot, as_json)


@bound.command()
def cnn(
    widths: Annotated[
        str, typer.Option("--widths", metavar="D,D,…", help="Channels of the image and the convolutions; classes.")
    ] = "3,64,64,64,10",
    image: Annotated[int, typer.Option("--image", help="p: height and width.")] = 32,
    kernel: Annotated[int, typer.Option("--kernel", help="q.")] = 3,
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    epsilon: Epsilon = None,
    delta: Delta = 0.05,
    C1: Annotated[float, typer.Option("--C1", help="E w² ≤ C1/p²d.")] = 1.0,
    C2: Annotated[float | None, typer.Option("--C2", help="E w⁴ ≤ C2/p⁴d²; a Gaussian's 3 C1² unless given.")] = None,
    beta1: Annotated[float | None, typer.Option("--beta1", help="Chosen best unless given.")] = None,
    beta2: Annotated[float | None, typer.Option("--beta2", help="Chosen best unless given.")] = None,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Theorem 3 of Qian & Klabjan: 2-D kernels of convolutions go at random."""
    from pomona.theory import bounds

    options: dict[str, Any] = {"image": image, "kernel": kernel, "C1": C1, "C2": 3 * C1**2 if C2 is None else C2}
    options |= {"beta1": beta1, "beta2": beta2, "lipschitz": lipschitz, "radius": radius}
    answer(bounds.cnn, counts(widths), alpha, sparsity, epsilon, delta, options, plot, as_json)


@bound.command()
def estimate(
    extension: Annotated[str, typer.Argument(metavar="C.1|C.2|E.2|E.3", help="The section of the appendix.")],
    widths: Widths = "64,1024,1024,10",
    alpha: Alpha = None,
    sparsity: Sparsity = None,
    law: Annotated[str, typer.Option("--law", help="uniform or gaussian.")] = "gaussian",
    K: Annotated[float, typer.Option("--K", help="Uniform in ±K/√n, or Gaussian of variance K/n.")] = 1.0,
    kernel: Annotated[int, typer.Option("--kernel", min=1, help="q, for C.2.")] = 3,
    lipschitz: Lipschitz = 1.0,
    radius: Radius = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What the appendices of Qian & Klabjan make likely for wide layers: asymptotic, no bound."""
    from pomona.theory import bounds

    laws: dict[str, Any] = {"uniform": bounds.Uniform, "gaussian": bounds.Gaussian}
    require(law in laws, f"unknown law '{law}': choose one of {', '.join(laws)}.")
    options: dict[str, Any] = {"law": laws[law](K), "kernel": kernel, "lipschitz": lipschitz, "radius": radius}
    sizes = counts(widths)
    found = bounds.estimate(extension, sizes, alpha=alpha, sparsity=sparsity, **options)
    tell(dataclasses.asdict(found), as_json)
    if plot is not None:
        shares = [k / 50 for k in range(1, 50)]
        lines = {
            e: [(s, bounds.estimate(e, sizes, sparsity=s, **options).error) for s in shares] for e in bounds.EXTENSIONS
        }
        draw(
            plot,
            {e: [point for point in points if 0 < point[1] < math.inf] for e, points in lines.items()},
            title="What is likely for wide layers",
            subtitle="asymptotic, no bound: the extensions of appendices C and E",
            x_label="sparsity",
            y_label="sup ‖f − F‖, about",
            dashed=[e for e in lines if e != extension],
            log_axes=(False, True),
        )


@bound.command()
def certify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="RUN", help="The run whose network RUN is measured against, of the same kind."
        ),
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option("--sparsity", help="Or prune RUN's own network by magnitude, once, this much.")
    ] = None,
    pattern: Annotated[str, typer.Option("--pattern", help="What falls together.")] = "unstructured",
    allocation: Annotated[str, typer.Option("--allocation", help="uniform, global or erk.")] = "uniform",
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Or find the largest sparsity that is certified to err by less.")
    ] = None,
    cube: Annotated[bool, typer.Option("--cube", help="Inputs in [LOW, HIGH] each, instead of a ball.")] = False,
    low: Annotated[float, typer.Option("--low")] = 0.0,
    high: Annotated[float, typer.Option("--high")] = 1.0,
    radius: Annotated[float, typer.Option("--radius", help="Of the ball.")] = 1.0,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Of the attack; 0 leaves it out.")] = 100,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """How far a pruned network can be from the one it came from: a certificate, and an attack.

    A run keeps the network it ends with. What pruning took from it is known only beside the network that still has
    it: that of another run (--against: RUN is the pruned one), or RUN's own before a cut (--sparsity).
    """
    from pomona.lab.runs.shrink import load_finished_model
    from pomona.theory import certificate

    ways = [against is not None, sparsity is not None, epsilon is not None]
    require(
        sum(ways) == 1,
        "say what RUN is compared with: --against RUN, or --sparsity S to prune it, or --epsilon E to find how much.",
    )
    region: certificate.Region = certificate.Cube(low, high) if cube else certificate.Ball(radius)
    model, shape = load_finished_model(run)
    size = tuple(shape)
    if epsilon is not None:
        sparsity = certificate.largest(model, size, epsilon, region=region, pattern=pattern, allocation=allocation)
        if sparsity is None:
            tell(
                {"epsilon": epsilon, "sparsity": None, "note": "no sparsity is certified to err by so little."}, as_json
            )
            return
    if against is None:
        assert sparsity is not None
        dense, pruned = model, certificate.cut(model, sparsity, pattern=pattern, allocation=allocation)
    else:
        dense, pruned = load_finished_model(against)[0], model
    try:
        found = certificate.certify(dense, pruned, size, region=region, steps=steps)
    except RuntimeError as error:
        raise PomonaError(f"'{run}' and '{against}' are networks of different shapes: give two of one kind.") from error
    record = {"sparsity": sparsity, "region": repr(region), **dataclasses.asdict(found)}
    if as_json:
        print_json(record)
    else:
        table = Table("layer", "‖W*‖ dense", "‖W‖ pruned", "‖removed‖", "outputs apart by at most", box=None)
        for layer in found.layers:
            table.add_row(escape(layer.name), *(f"{v:.4g}" for v in dataclasses.astuple(layer)[1:]))
        print_table(table)
        print_table(
            facts_table(
                {
                    "region": region,
                    **({"sparsity": f"{sparsity:.4f}"} if sparsity is not None else {}),
                    "certified": f"sup ‖f − F‖ ≤ {found.error:.4g}",
                    "found": f"‖f − F‖ = {found.found:.4g} by {steps} steps of ascent",
                    "of outputs": f"that move by at most {found.output:.4g}",
                }
            )
        )
    if plot is not None:
        places = range(1, len(found.layers) + 1)
        lines = {
            "apart": [(k, x.gap) for k, x in zip(places, found.layers, strict=True) if x.gap > 0],
            "‖removed‖": [(k, x.removed) for k, x in zip(places, found.layers, strict=True) if x.removed > 0],
            "‖W‖": [(k, x.dense) for k, x in zip(places, found.layers, strict=True) if x.dense > 0],
        }
        draw(
            plot, lines, title="A certificate, layer by layer", x_label="layer", y_label="norm", log_axes=(False, True)
        )


@bound.command()
def fraction(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="How far one round of pruning may move the outputs.")],
    delta: Delta = 0.05,
    radius: Annotated[float, typer.Option("--radius", help="Of the ball of inputs.")] = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """How much one round of iterative pruning may take from a run's network.

    By Theorem 1, for networks that are drawn like this one (chains of linear layers, their inner weights), and by the
    certificate, for this one and all its layers that are pruned.
    """
    from pomona.lab.runs.shrink import load_finished_model
    from pomona.theory import bounds, certificate

    model, shape = load_finished_model(run)
    found: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    try:
        found["theorem"] = bounds.fraction_per_round(model, epsilon, delta, radius=radius)
    except PomonaError as error:
        found |= {"theorem": None, "note": str(error)}
    size, region = tuple(shape), certificate.Ball(radius)
    found["certified"] = certificate.largest(model, size, epsilon, region=region)
    tell(found, as_json)
    if plot is not None:
        lines: dict[str, list[tuple[float, float]]] = {"certificate": [], "Theorem 1": []}
        for share in (k / 16 for k in range(1, 16)):
            pruned = certificate.cut(model, share)
            lines["certificate"].append((share, certificate.certify(model, pruned, size, region=region, steps=0).error))
        if "note" not in found:
            widths, K = bounds.measure_chain(model)
            options = {"law": bounds.Uniform(K), "radius": radius}
            lines["Theorem 1"] = over_alpha(bounds.magnitude, widths, delta, options)["sharp"]
        draw(
            plot,
            lines,
            title="One round of pruning: what is promised",
            subtitle=f"the certificate for this network, Theorem 1 for those drawn like it (sharp, δ = {delta:g})",
            x_label="sparsity",
            y_label="sup ‖f − F‖ at most",
            log_axes=(False, True),
        )


@bound.command()
def spectral(
    channels: Annotated[str, typer.Option("--channels", metavar="OUT,IN")] = "64,64",
    kernel: Annotated[int, typer.Option("--kernel", min=1)] = 3,
    image: Annotated[int, typer.Option("--image", min=1)] = 32,
    stride: Annotated[int, typer.Option("--stride", min=1)] = 1,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """The norm of a random convolution (Lemma 7): wrap-around padding, and a bound for zero padding."""
    import torch

    from pomona.theory import spectral as lemma7

    out, inputs = counts(channels, 2)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inputs, kernel, kernel, generator=generator) / math.sqrt(inputs * kernel**2)

    def norms(size: int) -> dict[str, float]:
        found = {"zero padding, at most": lemma7.conv_bound(weight, size, stride=stride)}
        if size % stride == 0:  # else the circle does not close
            found = {"wrap-around padding": lemma7.conv_norm(weight, size, stride=stride), **found}
        return found

    tell(norms(image), as_json)
    if plot is not None:
        lines: dict[str, list[tuple[float, float]]] = {}
        for size in sorted({stride * max(1, round(image * k / 12 / stride)) for k in range(1, 13)}):
            for name, value in norms(size).items():
                lines.setdefault(name.split(" ")[0], []).append((size, value))
        draw(
            plot,
            lines,
            title="The norm of a convolution",
            x_label="image",
            y_label="‖W‖₂ by padding",
            log_axes=(False, False),
        )


@bound.command()
def gip(
    d: Annotated[int, typer.Option("--d", min=1, help="Gradients.")],
    m: Annotated[int, typer.Option("--m", min=0, help="How many are kept.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The privacy budget.")] = None,
    theta: Annotated[float | None, typer.Option("--theta", help="Or the mechanism's θ.")] = None,
    sigma: Annotated[float, typer.Option("--sigma", help="Standard deviation of a gradient.")] = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Private index pruning: θ, ε, swapped indices and the error of the pruned gradient."""
    from pomona.theory import gip as paper

    require((epsilon is None) != (theta is None), "give one of --epsilon and --theta.")
    if theta is None:
        assert epsilon is not None
        theta = paper.theta_for_epsilon(epsilon, d, m)
    found = {
        "theta": theta,
        "epsilon": paper.epsilon_for_theta(theta, d, m),
        "expected swaps": paper.expected_swaps(theta, d, m),
        "log psi": paper.log_psi(theta, d, m),
        "mean squared error": paper.pruning_mse(theta, d, m, sigma),
        "mean squared error, printed": paper.pruning_mse(theta, d, m, sigma, printed=True),
    }
    tell(found, as_json)
    if plot is not None:
        thetas = [10 ** (k / 8) for k in range(-24, 9)]  # from a mask at random to the top-m
        lines = {
            name: [(paper.epsilon_for_theta(t, d, m), paper.pruning_mse(t, d, m, sigma, printed=how)) for t in thetas]
            for name, how in (("right", False), ("printed", True))
        }
        draw(
            plot,
            lines,
            title="What a private mask costs",
            subtitle=f"the error of {m:,} of {d:,} gradients, over the budget of one draw",
            x_label="ε",
            y_label="mean squared error",
            log_axes=(True, False),
        )


@bound.command()
def balanced(
    sparsity: Annotated[float, typer.Option("--sparsity")] = 0.9,
    block: Annotated[int | None, typer.Option("--block", min=1, help="Weights in a block; any without.")] = None,
    sigma_w: Annotated[float, typer.Option("--sigma-w")] = 1.0,
    sigma_x: Annotated[float, typer.Option("--sigma-x")] = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Balanced sparsity: what is lost of a weight and of an output, beside unconstrained pruning."""
    from pomona.theory import balanced as paper

    found = {
        "removed second moment": paper.removed_second_moment(sparsity, sigma_w, block),
        "output variance": paper.output_variance(sparsity, sigma_w, sigma_x, block),
        "output variance, unconstrained": paper.output_variance(sparsity, sigma_w, sigma_x),
    }
    tell(found, as_json)
    if plot is not None:
        lines = {"any": [(s / 64, paper.output_variance(s / 64, sigma_w, sigma_x)) for s in range(1, 64)]}
        for b in (64, 16, 4):
            shares = [k / b for k in range(1, b)]
            lines[f"blocks of {b}"] = [(s, paper.output_variance(s, sigma_w, sigma_x, b)) for s in shares]
        draw(
            plot,
            lines,
            title="What pruning adds to an output",
            x_label="sparsity",
            y_label="variance",
            log_axes=(False, True),
        )


@bound.command()
def iterand(
    widths: Annotated[str, typer.Option("--widths", metavar="D,D,…", help="The target's d_0, …, d_l.")] = "3,4,2",
    epsilon: Annotated[float, typer.Option("--epsilon")] = 0.5,
    delta: Annotated[float, typer.Option("--delta")] = 0.1,
    R: Annotated[str, typer.Option("--R", metavar="R,R,…", help="Draws of each weight.")] = "1,10,100",
    trial: Annotated[int, typer.Option("--trial", min=0, help="Build it in so many random networks.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """IteRand: the hidden widths in which a random network holds a target, as printed and as the proof needs."""
    from pomona.theory import iterand as paper

    sizes, rows = counts(widths, 2), []
    for r in counts(R, 1):
        row: dict[str, Any] = {
            "R": r,
            "widths": paper.widths(sizes, epsilon, delta, r),
            "printed": paper.widths(sizes, epsilon, delta, r, printed=True),
        }
        if trial:
            row["trial"] = dataclasses.asdict(paper.trial(sizes, epsilon, delta, r, seeds=trial))
        rows.append(row)
    if as_json:
        print_json(rows)
    else:
        table = Table("R", "hidden widths", "printed", *["fits of trials"] * bool(trial), box=None)
        for row in rows:
            more = [f"{row['trial']['fits']} of {row['trial']['seeds']}"] if trial else []
            table.add_row(str(row["R"]), *(", ".join(f"{w:,}" for w in row[k]) for k in ("widths", "printed")), *more)
        print_table(table)
    if plot is not None:
        draws = [round(10 ** (k / 8)) for k in range(33)]
        lines = {
            name: [(r, max(paper.widths(sizes, epsilon, delta, r, printed=how))) for r in draws]
            for name, how in (("needed", False), ("printed", True))
        }
        draw(plot, lines, title="The widest hidden layer", x_label="draws R of each weight", y_label="width")


@bound.command()
def convergence(
    L: Annotated[float, typer.Option("--L", help="Smoothness.")],
    G: Annotated[float, typer.Option("--G", help="Root of E‖g‖².")],
    T: Annotated[int, typer.Option("--T", min=0, help="The last step's number.")],
    lost: Annotated[float, typer.Option("--delta", help="δ = ‖w − w̃‖²/‖w‖² of the masks.")],
    norm: Annotated[float, typer.Option("--norm", help="‖w‖.")],
    mu: Annotated[float | None, typer.Option("--mu", help="Strong convexity, for Theorem 4.1.")] = None,
    gap: Annotated[float | None, typer.Option("--gap", help="f(w_0) − f*, for Theorem 4.2.")] = None,
    sharp: Annotated[bool, typer.Option("--sharp", help="The best constants.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """DPF: Theorems 4.1 (with --mu) and 4.2 (with --gap) from measured quantities.

    Beside Theorem 4.1 stand the dense iterates of the same run, and plain SGD: its last model, and that pruned once.
    """
    from pomona.theory import convergence as paper

    require(mu is not None or gap is not None, "give --mu for Theorem 4.1, or --gap for Theorem 4.2, or both.")

    def estimates(steps: int) -> list[Any]:
        seen: dict[str, Any] = {"L": L, "delta": lost, "norm": norm, "sharp": sharp}
        run = {**seen, "G": G, "T": steps}
        found = [] if gap is None else [paper.nonconvex(gap=gap, **run)]
        if mu is None:
            return found
        pruned, sgd = paper.convex(mu=mu, **run), paper.last(L=L, mu=mu, G=G, T=steps)
        dense, once = paper.dense(gap=pruned.bound, T=steps, **seen), paper.one_shot(gap=sgd.bound, **seen)
        return [pruned, dense, sgd, once, *found]

    found = estimates(T)
    if as_json:
        print_json([{"name": e.name, "bound": e.bound, "vacuous": e.vacuous, "terms": terms(e)} for e in found])
    else:
        for one in found:
            print(one)
    if plot is not None:
        steps = sorted({round(max(T, 1) ** (k / 24)) for k in range(1, 25)})
        lines = {e.name: [(t, estimates(t)[k].bound) for t in steps] for k, e in enumerate(found)}
        draw(plot, lines, title="Where dynamic pruning must arrive", x_label="steps T", y_label="bound")


# ---- what they share


def terms(one: Any) -> dict[str, float]:
    return {name: term.value for name, term in one.terms.items()}


def answer(
    theorem: Callable[..., Any],
    widths: tuple[int, ...],
    alpha: float | None,
    sparsity: float | None,
    epsilon: float | None,
    delta: float,
    options: Mapping[str, Any],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Ask a theorem in its three forms, forward or backward, and print."""
    from pomona.theory import bounds

    how: dict[str, Any] = {"alpha": alpha, "sparsity": sparsity}
    require(
        epsilon is not None or alpha is not None or sparsity is not None,
        "say how much is pruned, --alpha or --sparsity, or how much error is allowed, --epsilon.",
    )
    solve = epsilon is not None and alpha is None and sparsity is None
    records = []
    for form in bounds.FORMS:
        record: dict[str, Any] = {"form": form, "note": ""}
        try:
            if solve:
                found = bounds.largest(theorem, widths, epsilon or 0.0, delta, **bounds.FORMS[form], **options)
            else:
                found = theorem(widths, delta=delta, **bounds.FORMS[form], **how, **options)
        except bounds.TooNarrow as error:
            # A condition on the widths is part of the answer, as long as one form has one.
            found, record["note"] = None, str(error)
        if found is not None:
            record |= {**dataclasses.asdict(found), "sparsity": found.sparsity, "vacuous": found.vacuous}
            record |= {"loss_gap": found.loss_gap(), "proven": found.proven}
        elif solve and not record["note"]:
            record["note"] = f"none: no sparsity has an error of {epsilon:g} with probability 1 − {delta:g}"
        if epsilon is not None and not solve:
            record["width"] = bounds.narrowest(theorem, widths, epsilon, delta, **bounds.FORMS[form], **how, **options)
        elif found is None or found.vacuous:
            at = {"epsilon": epsilon, "delta": delta} if solve else how
            record["width"] = bounds.narrowest(theorem, widths, **bounds.FORMS[form], **at, **options)
        records.append(record)
    if as_json:
        print_json(records)
    else:
        print_status("the promise is for weights that are drawn at random; the forms are told apart in docs/errata.md.")
        print_table(forms(records))
    if plot is not None:
        draw(
            plot,
            over_alpha(theorem, widths, delta, options),
            title="The promise over what is pruned",
            subtitle=f"widths {', '.join(map(str, widths))}, δ = {delta:g}; where it is vacuous there is no line",
            x_label="sparsity",
            y_label="sup ‖f − F‖ at most",
        )


def forms(records: Sequence[Mapping[str, Any]]) -> Table:
    """One line a form of a theorem."""
    table = Table("form", "sparsity", "error", "probability", "loss gap", "smallest width", "", box=None)
    for one in records:
        cells = ["–"] * 4
        if "error" in one:
            cells = [
                f"{one['sparsity']:.4g}",
                f"{one['error']:.4g}",
                f"{one['probability']:.4g}",
                f"{one['loss_gap']:.4g}",
            ]
        width = ("none" if one["width"] is None else f"{one['width']:,}") if "width" in one else ""
        rests = "proven" if one.get("proven") else "by a measured C" if "proven" in one else one["note"]
        note = "vacuous" if one.get("vacuous") else rests
        table.add_row(one["form"], *cells, width, escape(note))
    return table


def over_alpha(
    theorem: Callable[..., Any], widths: tuple[int, ...], delta: float, options: Mapping[str, Any]
) -> dict[str, list[tuple[float, float]]]:
    """Errors over sparsities, where they are promised."""
    from pomona.theory import bounds

    lines: dict[str, list[tuple[float, float]]] = {form: [] for form in bounds.FORMS}
    for form, points in lines.items():
        most = bounds.least_pruning(theorem, widths, bounds.FORMS[form])
        for k in range(1, 41 if most > 0 else 1):
            try:
                one = theorem(widths, alpha=most * k / 40, delta=delta, **bounds.FORMS[form], **options)
            except bounds.TooNarrow:
                continue
            if not one.vacuous and one.error > 0:
                points.append((one.sparsity, one.error))
    return lines


def draw(file: Path, lines: Mapping[str, Sequence[tuple[float, float]]], **options: Any) -> None:
    """Write a chart."""
    from pomona.lab.tables.chart import line_chart

    require(any(lines.values()), "there is nothing to draw: the bound is vacuous everywhere.")
    try:
        file.write_text(line_chart(lines, **options))
    except OSError as error:
        raise PomonaError(f"'{file}' cannot be written: {error.strerror}.") from error
    print_status(f"drawn in {file}")


def tell(values: Mapping[str, Any], as_json: bool) -> None:
    """Names and values, for a program or a person."""
    if as_json:
        print_json(dict(values))
    else:
        print_table(facts_table({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in values.items()}))


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise PomonaError(f"'{text}' is no list of numbers, such as 1.5,2,1.5.") from error


def counts(text: str, least: int = 4) -> tuple[int, ...]:
    """Widths such as 64,1024,10."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise PomonaError(f"'{text}' is no list of whole numbers, such as 64,1024,1024,10.") from error
    require(
        len(values) >= least and min(values) >= 1,
        f"{least} whole numbers or more are needed, each at least 1, got '{text}'.",
    )
    return values
