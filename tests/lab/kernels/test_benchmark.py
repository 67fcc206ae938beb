"""`pomona bench` and `pomona export`: every side is checked, and the file runs without the training code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pomona import lab
from pomona.cli import main
from pomona.lab.kernels import benchmark as bench
from pomona.lab.kernels import implementations
from pomona.lab.runs.shrink import load_finished_model
from pomona.sparse import load
from pomona.sparse import timing as clock
from pomona.sparse.layers import PackedLayer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FLUSH_BYTES", 1 << 20)


def test_all_implementations_of_a_small_matrix() -> None:
    found = bench.benchmark_matrices([(64, 96)], [1, 3], device="cpu", states=["warm"], patience=0.01)
    names = ["dense", "CSR", "block-sparse 8×8", "balanced", "unstructured", "2:4"]
    assert [r.side for r in found.rows if r.batch == 3] == names
    sides = {(r.side, r.batch): r for r in found.rows}
    assert sides["2:4", 1].seconds is None
    assert sides["2:4", 1].note == "needs a GPU"
    assert sides["dense", 1].nbytes == 64 * 96 * 4
    assert sides["balanced", 1].nbytes == 64 * 3 * (3 * 4 + 2)
    steps, rest = divmod(sides["unstructured", 1].nbytes - 64 * 4 - 5 * 8, 16 * (4 + 2))
    assert rest == 0
    assert 16 * steps >= 64 * 9  # the same count, in rows of unequal length
    assert sides["CSR", 3].nbytes == 64 * 9 * 8 + 65 * 4  # the same count, with indices of 32 bits
    assert all(r.error is not None and r.error < 1e-6 for r in found.rows if r.seconds)
    assert all(r.speedup == pytest.approx(sides["dense", r.batch].seconds / r.seconds) for r in found.rows if r.seconds)
    assert found.sparsity == 1 - 3 / 32
    assert found.seconds(64, 96, 3, "warm", "balanced") == sides["balanced", 3].seconds
    assert found.seconds(64, 96, 4, "warm", "balanced") is None


def test_a_matrix_that_no_tile_divides_is_still_measured() -> None:
    found = bench.benchmark_matrices([(30, 50)], device="cpu", states=["cold"], patience=0.01)
    assert [r.note for r in found.rows if r.side == "block-sparse"] == ["tiles of 8×8 do not divide it"]


def test_a_wrong_implementation_of_ours_is_an_error() -> None:
    weight = torch.eye(4)
    wrong = implementations.Implementation("balanced", lambda x: x @ weight * 1.001, weight, 0)
    with pytest.raises(AssertionError, match="balanced is wrong: it differs from float64 by 1.0e-03"):
        implementations.measure_error(wrong, torch.randn(2, 4))


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_an_inaccurate_implementation_of_others_is_marked(factor: float) -> None:
    """It does not end the benchmark, and an accurate variant is preferred to a faster one that is not."""
    weight = torch.eye(4)
    sides = [
        implementations.Implementation("dense", lambda x: x @ weight, weight, 64),
        implementations.Implementation("CSR", lambda x: x @ weight * factor, weight, 1),
        implementations.Implementation("BSR", lambda x: x @ weight * factor, weight, 1),
        implementations.Implementation("BSR", lambda x: (x @ weight).double().float(), weight, 2),
    ]
    head = {"rows": 4, "columns": 4, "batch": 3, "state": "warm"}
    rows = tuple(bench.time_implementations(sides, {}, torch.randn(3, 4), head, None, 1.0, 0.0))
    assert [row.note for row in rows] == ["", bench.INACCURATE, ""]
    assert rows[2].nbytes == 2
    table = bench.Benchmark(rows, "cpu", "float32", 1, 32, 3, 1.0).__rich__()
    assert [cell.endswith("!") for cell in table.columns[-1].cells] == [False, True, False]
    assert table.caption == "! less accurate than rounding explains"


def test_the_fastest_of_several_variants_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.eye(4)
    sides = [
        implementations.Implementation("dense", lambda x: x @ weight, weight, 64),
        implementations.Implementation("CSR", lambda x: x @ weight, weight, 1),
        implementations.Implementation("CSR", lambda turned: turned.T @ weight, weight, 2, lambda x: x.T),
        implementations.Implementation("CSR", lambda x: x @ weight.view(-1), weight, 3),  # one that cannot
    ]
    monkeypatch.setattr(bench, "median_seconds", lambda runs, *_, **options: [6.0, 3.0, 2.0][: len(runs)])
    head = {"rows": 4, "columns": 4, "batch": 3, "state": "warm"}
    dense, csr = bench.time_implementations(sides, {}, torch.randn(3, 4), head, None, 1.0, 0.0)
    assert (dense.side, csr.side, csr.seconds, csr.speedup, csr.nbytes) == ("dense", "CSR", 2.0, 3.0, 2)


def test_models_are_pruned_where_they_are_by_default() -> None:
    torch.manual_seed(0)
    model = bench.prune_balanced(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(64, 10)), 0.9, 32)
    assert int(model[0].weight.count_nonzero()) == 8 * 3  # 3 of 27, padded to 32
    assert int(model[2].weight.count_nonzero()) == 640  # the classifier


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_bench_command(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ("--device", "cpu", "--seconds", "0.01")
    options = ("--block", "16", "--sparsity", "0.75", "--batch", "1,2")
    (result,) = call(capsys, "bench", "32x64", *options, *quick)
    assert {row["batch"] for row in result["rows"]} == {1, 2}
    assert (result["block"], result["kept"], result["sparsity"]) == (16, 4, 0.75)
    (result,) = call(capsys, "bench", "mlp", *quick)
    assert set(result["seconds"]) == {"dense", "all packed", "compressed"}
    assert main(["bench", "32x32", *quick]) == 0
    assert "balanced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "0x3"], "a matrix has at least one row and column, got '0x3'"),
        (["bench", "resnet2"], "unknown model 'resnet2': did you mean 'resnet20'"),
        (["bench", "8x8", "--batch", "x"], "--batch takes whole numbers such as 1,8,64, got 'x'"),
        (["bench", "8x8", "--batch", "0"], "--batch takes numbers of 1 or more, got '0'"),
        (["bench", "8x8", "--dtype", "float"], "unknown dtype 'float'"),
        (["bench", "8x8", "--device", "gpu"], "unknown device 'gpu'"),
        (["export", "nowhere"], "'nowhere' is not a finished run"),
        (["export", "nowhere", "--format", "coo"], "unknown format 'coo'"),
        (["export", "nowhere", "--dtype", "int8"], "unknown dtype 'int8'"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def trained(folder: Path, pattern: str) -> Path:
    """A finished run of some steps on the digits."""
    recipe = {
        "name": "short",
        "data": "digits",
        "model": "digits_cnn",
        "method": {"name": "oneshot", "pattern": pattern, "sparsity": 0.75, "at": 0.5},
        "train": {"epochs": 1, "batch_size": 256, "device": "cpu"},
    }
    lab.train(lab.Recipe.load(recipe), folder)
    return folder


def test_an_exported_run_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run", "balanced(block=4, pad=True)")
    told = call(capsys, "export", str(run), "--keep", "all", "--format", "balanced", "--seconds", "0")
    assert told["file"] == str(run / "balanced.safetensors")
    model = load(told["file"])
    assert any(isinstance(m, PackedLayer) for m in model.modules())
    dense, shape = load_finished_model(run)
    x = torch.randn(3, *shape)
    with torch.no_grad():
        assert torch.allclose(model(x), dense(x), atol=1e-5)
    half = call(
        capsys,
        "export",
        str(run),
        "--keep",
        "all",
        "--dtype",
        "float16",
        "--out",
        str(tmp_path / "half"),
        "--seconds",
        "0",
    )
    assert Path(half["file"]).stat().st_size < Path(told["file"]).stat().st_size


def test_a_run_without_zeros_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    recipe = {"data": "digits", "model": "digits_cnn", "train": {"epochs": 1, "batch_size": 512, "device": "cpu"}}
    lab.train(lab.Recipe.load(recipe), run)
    assert main(["export", str(run), "--seconds", "0"]) == 2
    assert "has no layer with balanced blocks" in capsys.readouterr().err
    assert not (run / "balanced.safetensors").exists()


@pytest.mark.gpu
def test_gpu_timings_replay_a_graph():
    x = torch.zeros(3, device="cuda")
    replay, calls = clock.capture_calls(lambda: x.add_(1), 3)
    before = x[0].item()
    replay()
    assert x.tolist() == [before + calls] * 3

    def waits() -> None:  # a call that no graph can hold is called itself
        x.mul_(2).sum().item()

    assert clock.capture_calls(waits, 3) == (waits, 1)
    assert torch.randn(4, device="cuda").isfinite().all(), "a failed capture leaves the random generator usable"
