"""What the Triton kernels of this package share."""

from __future__ import annotations

import torch
import triton.language as tl

ROW = 1024  # weights of an output that a program reads at a time

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
