"""The gradient compression of DataLens (Wang et al., CCS 2021), a baseline of GIP: signs of each example's own top-k.

Of the gradient of an example the m largest entries count, as ±C / √m. Such a vector has the norm C by construction, and
two examples choose different entries, so noise is added to all coordinates. Nothing is spent on indices. The original
rounds the signs at random and releases the sign of the noisy sum. Both are left out here, as by the authors of GIP, who
compare the top-k alone; any function of a single example that has a norm of at most C keeps the guarantee.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..patterns.selection import select_largest_per_row


@torch.no_grad()
def keep_largest_signs(parts: list[Tensor], keep: float, clip: float) -> list[Tensor]:
    """Return rows that hold ±C / √m at the m = keep · d largest entries of each row, and zeros elsewhere.

    The parts have shape (rows, n), and a row spans all of them. A row that is not finite is returned as NaN, which
    clipping counts as zero.
    """
    rows = torch.cat(parts, 1)
    kept = max(round(keep * rows.shape[1]), 1)
    top = select_largest_per_row(rows.abs().nan_to_num(), kept)
    signs = torch.where(top, rows.sign(), torch.zeros_like(rows)).mul_(clip / math.sqrt(kept))
    signs[~rows.isfinite().all(1)] = math.nan
    return list(signs.split([part.shape[1] for part in parts], 1))
