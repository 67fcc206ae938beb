"""Latency of models on one CPU thread, measured in turns so that they can be compared."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...models.example_inputs import ModelInputs

WARMUP_ROUNDS = 5  # not counted
MAX_ROUNDS = 501
MAX_SECONDS = 3.0  # of the first model; no round begins after it


@torch.no_grad()
def measure_median_seconds(models: Sequence[nn.Module], example: ModelInputs) -> list[float]:
    """Return the median seconds that each model needs for an example in evaluation mode on one CPU thread."""
    models = [copy.deepcopy(model).cpu().eval() for model in models]
    example, threads = example.map_tensors(Tensor.cpu), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times: list[list[float]] = [[] for _ in models]
        for round_number in range(-WARMUP_ROUNDS, MAX_ROUNDS):
            for model, model_times in zip(models, times, strict=True):
                start = time.perf_counter()
                example.call(model)
                if round_number >= 0:
                    model_times.append(time.perf_counter() - start)
            if sum(times[0]) > MAX_SECONDS:
                break
        return [statistics.median(model_times) for model_times in times]
    finally:
        torch.set_num_threads(threads)
