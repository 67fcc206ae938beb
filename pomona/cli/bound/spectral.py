"""`pomona bound spectral`: norms of convolutions, Lemma 7 of Qian & Klabjan (2021)."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from .group import bound
from .options import Json, Plot, parse_counts
from .output import Series, print_values, write_chart

CHART_SIZES = 12


@bound.command()
def spectral(
    channels: Annotated[str, typer.Option("--channels", metavar="OUT,IN", help="Output and input channels.")] = "64,64",
    kernel: Annotated[int, typer.Option("--kernel", min=1, help="Height and width of the kernel.")] = 3,
    image: Annotated[int, typer.Option("--image", min=1, help="Height and width of the image.")] = 32,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Stride of the convolution.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random weights.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Norm of a random convolution (Lemma 7): circular padding, and a bound for zero padding."""
    import torch

    from pomona.theory import spectral as norms

    out, inputs = parse_counts(channels, 2)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inputs, kernel, kernel, generator=generator) / math.sqrt(inputs * kernel**2)

    def norms_at(size: int) -> dict[str, float]:
        found = {"zero padding, at most": norms.conv_bound(weight, size, stride=stride)}
        if size % stride == 0:  # circular padding needs an image of whole strides
            found = {"wrap-around padding": norms.conv_norm(weight, size, stride=stride), **found}
        return found

    print_values(norms_at(image), as_json)
    if plot is None:
        return
    series: Series = {}
    for size in sorted({stride * max(1, round(image * k / CHART_SIZES / stride)) for k in range(1, CHART_SIZES + 1)}):
        for name, value in norms_at(size).items():
            series.setdefault(name.split(" ")[0], []).append((size, value))
    write_chart(
        plot,
        series,
        title="The norm of a convolution",
        x_label="image",
        y_label="‖W‖₂ by padding",
        log_axes=(False, False),
    )
