"""The measured latency of finished runs, kept in a file of the run's folder for later reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..lab.runs.durable_files import replace_file
from ..lab.runs.environment import describe_environment
from ..lab.runs.folder import encode_json
from ..lab.runs.shrink import load_finished_model
from ..models.example_inputs import ModelInputs, make_example_batch
from ..sparse import compress
from ..sparse.shrink.latency import measure_median_seconds
from .run_data import LATENCY_FILE


def measure_latency(run: Path) -> dict[str, Any]:
    """Measure the network of a finished run on one sample and one CPU thread, and write the result to its folder.

    Networks that `pm.compress` makes faster are also measured packed; `milliseconds` is that of the faster form.
    """
    model, shape = load_finished_model(run)
    packed = compress(model, shape, patience=0.3)
    batch = make_example_batch(model, shape)[:1]
    is_packed = any(layer.packed for layer in packed.compression.layers)  # type: ignore[union-attr]
    forms = {"plain": model} | ({"packed": packed} if is_packed else {})
    seconds = measure_median_seconds(list(forms.values()), ModelInputs((batch,)))
    found = {form: 1000 * value for form, value in zip(forms, seconds, strict=True)}
    fastest = min(found, key=lambda form: found[form])
    machine = describe_environment()["machine"]
    result = {"milliseconds": found[fastest], "form": fastest, "measured": found, "machine": machine}
    replace_file(run / LATENCY_FILE, encode_json(result))
    return result
