"""Pruning after training, with calibration data and without an optimizer.

The layers of a model are pruned one transformer block after the other, each with the inputs that it has once the
blocks before it are pruned. One block and its statistics are in use at a time, so that models too large to train can be
pruned.

layers       the weight of a layer as a matrix, and its inputs as rows
input_statistics   what is kept of a layer's inputs: the norms of its columns, or all second moments
blocks       the order of the layers, and the inputs that reach them
rehearsal    the first run, before anything is pruned, which finds mistakes
method       what the methods share: options, `prune` and its report
wanda        Wanda, and magnitude within the same groups
sparsegpt    SparseGPT: pruning that updates the weights that are left
lora         low-rank fine-tuning of a pruned model, merged without losing its zeros
"""

from __future__ import annotations

from .lora import add_lora, merge_lora
from .sparsegpt import SparseGPT
from .wanda import Magnitude, Wanda

__all__ = ["Magnitude", "SparseGPT", "Wanda", "add_lora", "merge_lora"]
