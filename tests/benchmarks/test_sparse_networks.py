"""The measurement of whole sparse networks: all sides of a small one, the targets, and its row in README.md."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch import nn

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")


def make_timings(script: Any, times: dict[tuple[str, str], float]) -> list[Any]:
    """Return the timings of ResNet-50 without a pattern, from seconds by side and state of the caches."""
    case = ("resnet50", "unstructured", 1)
    return [script.Timing(*case, state, side, seconds, seconds, 0.0) for (side, state), seconds in times.items()]


@pytest.mark.slow
def test_all_sides_of_a_small_network(load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("sparse_networks")
    monkeypatch.setattr(script, "FLUSH_BYTES", 1 << 20)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    found = script.measure_all([script.Network("small", build, (64,), (1, 3))], None, 0.0)
    sides = ["PyTorch", "torch.compile", "ONNX Runtime", "OpenVINO", "pm.compress"]
    cases = list(product(("unstructured", "balanced"), (1, 3), ("warm", "cold"), sides))
    assert [(row["mask"], row["batch"], row["state"], row["side"]) for row in found["timings"]] == cases
    assert all(0 < row["fastest"] <= row["seconds"] for row in found["timings"])
    # At batch 1 all other sides are judged, and at other sizes those of PyTorch.
    assert len(found["targets"]) == 2 * 2 * (4 + 2)


def test_a_network_with_a_wrong_output_is_not_timed(load_script: Any) -> None:
    script = load_script("sparse_networks")
    exact = script.torch.ones(3).double()
    assert script.measure_error(exact.float(), exact) == 0
    for wrong in (exact + 0.01, exact * float("nan")):
        with pytest.raises(RuntimeError, match="differs from float64"):
            script.measure_error(wrong, exact)


def test_targets_compare_equal_states_of_the_caches(load_script: Any) -> None:
    script = load_script("sparse_networks")
    times = {("OpenVINO", "warm"): 6.0, ("OpenVINO", "cold"): 9.0, ("pm.compress", "warm"): 2.0}
    answers = script.compare_with_targets(make_timings(script, times | {("pm.compress", "cold"): 3.0}))
    assert [(one["peer"], one["state"], one["reached"]) for one in answers] == [
        ("OpenVINO", "warm", 3.0),
        ("OpenVINO", "cold", 3.0),
    ]


def test_the_readme_quotes_cold_times_beside_the_fastest_engine(load_script: Any) -> None:
    times = {("DeepSparse", "cold"): 0.03, ("OpenVINO", "cold"): 0.04, ("pm.compress", "cold"): 0.01}
    timings = make_timings(load_script("sparse_networks"), times | {("pm.compress", "warm"): 0.001})
    record = {"machine": {"gpus": [], "cpu": "AMD EPYC"}, "timings": [vars(timing) for timing in timings]}
    row = load_script("readme_page").format_any_mask("ResNet-50", record)
    assert row[0].endswith("beside DeepSparse")
    assert row[2:] == ["30.0 ms", "10.0 ms", "3.0×", ""]
