"""`pomona bound`: every formula from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pomona.cli.bound  # noqa: F401  registers the command
from pomona.cli import main
from pomona.theory import bounds, convergence, gip

Call = Callable[..., tuple[int, str, str]]

RUN = """
data = "digits"
model = "mlp(hidden=[16, 16])"
method = "dense"

[train]
epochs = 1
batch_size = 256
device = "cpu"
"""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs `pomona bound …` in an empty folder and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POMONA_TRACEBACK", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["bound", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a small network."""
    folder = tmp_path_factory.mktemp("bound")
    (folder / "one.toml").write_text(RUN)
    assert main(["train", str(folder / "one.toml"), "--out", str(folder / "run"), "--json"]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    "arguments",
    [
        ("magnitude", "--alpha", "0.2"),
        ("magnitude", "--epsilon", "1"),
        ("random", "--sparsity", "0.1", "--law", "moments"),
        ("random", "--alpha", "0.3", "--distinct", "--norms", "1,1,1"),
        ("random", "--alpha", "0.2", "--law", "subgaussian"),
        ("random", "--alpha", "0.2", "--law", "rows"),
        ("norm", "--shape", "64,32"),
        ("norm", "--shape", "64,32", "--law", "rows"),
        ("estimate", "E.1", "--alpha", "0.2", "--correlation", "0.01"),
        ("cnn", "--alpha", "0.2", "--beta1", "0.1"),
        ("estimate", "C.1", "--alpha", "0.2"),
        ("spectral", "--channels", "3,4", "--image", "6"),
        ("gip", "--d", "100", "--m", "10", "--epsilon", "1"),
        ("balanced", "--block", "10"),
        ("iterand", "--R", "10,100"),
        ("convergence", "--L", "1", "--G", "1", "--T", "100", "--delta", "0.1", "--norm", "1", "--gap", "1"),
    ],
)
def test_every_command_prints_a_table_and_json(call: Call, arguments: tuple[str, ...]) -> None:
    code, out, _ = call(*arguments)
    assert code == 0
    assert out
    code, out, _ = call(*arguments, "--json")
    assert code == 0
    assert json.loads(out)


def test_theorem_is_shown_in_its_three_forms(call: Call) -> None:
    code, out, _ = call("magnitude", "--widths", "64,1024,1024,10", "--alpha", "0.2", "--json")
    results = {one["form"]: one for one in json.loads(out)}
    assert code == 0
    for form in bounds.FORMS:
        one = bounds.magnitude((64, 1024, 1024, 10), alpha=0.2, **bounds.FORMS[form])
        assert results[form]["error"] == one.error
        assert results[form]["vacuous"] is one.vacuous
    assert results["printed"]["vacuous"]
    assert results["printed"]["width"] == bounds.narrowest(bounds.magnitude, (64, 1, 1, 10), alpha=0.2, printed=True)


def test_vacuous_bound_is_labelled(call: Call) -> None:
    _, out, _ = call("random", "--alpha", "0.2")
    line = next(line for line in out.splitlines() if "corrected" in line)
    assert "vacuous" in line
    assert "2,742,524,737" in line


def test_solver_without_a_solution_prints_a_note(call: Call) -> None:
    _, out, _ = call("random", "--epsilon", "10", "--json")
    printed, corrected, sharp = json.loads(out)
    assert "none: no sparsity has an error of 10 with probability 1 − 0.05" in corrected["note"]
    assert "error" not in printed
    assert corrected["width"] == bounds.narrowest(bounds.random, (64, 1, 1, 10), 10.0, 0.05)
    assert sharp["error"] <= 10


def test_width_is_solved_for(call: Call) -> None:
    _, out, _ = call("magnitude", "--alpha", "0.2", "--epsilon", "1", "--json")
    assert json.loads(out)[2]["width"] == bounds.narrowest(
        bounds.magnitude, (64, 9, 9, 10), 1.0, 0.05, alpha=0.2, sharp=True
    )


def test_gip_prints_the_values_of_the_library(call: Call) -> None:
    _, out, _ = call("gip", "--d", "1000", "--m", "100", "--theta", "0.01", "--json")
    assert json.loads(out)["expected swaps"] == gip.expected_swaps(0.01, 1000, 100)


def test_gip_prints_the_exact_error_and_its_limit(call: Call) -> None:
    exact, limit, printed = (f"mean squared error, {form}" for form in ("exact", "d → ∞", "printed"))
    arguments = ("gip", "--d", "10", "--m", "5", "--theta", "inf", "--json")
    for option in ((), ("--exact",)):
        found = json.loads(call(*arguments, *option)[1])
        assert found[exact] == pytest.approx(0.9712, abs=1e-4)
        assert found[limit] == pytest.approx(0.7133, abs=1e-4)
        assert found[printed] == pytest.approx(0.7133 / 2, abs=1e-4)
    assert exact not in json.loads(call(*arguments, "--asymptotic")[1])


def test_gip_says_where_the_error_is_only_a_limit(call: Call) -> None:
    code, out, err = call("gip", "--d", "10000000000", "--m", "10", "--theta", "inf")
    assert code == 0
    assert "exact" not in out
    assert "limit for d → ∞: the exact one is computed up to d = 1,000,000,000" in err
    code, _, err = call("gip", "--d", "10000000000", "--m", "10", "--theta", "inf", "--exact")
    assert code == 2
    assert "the exact error is computed up to d = 1,000,000,000" in err


def test_assumptions_of_the_weights_are_printed(call: Call) -> None:
    for law, assumption in (("subgaussian", "independent sub-Gaussian weights"), ("correlated", "jointly Gaussian")):
        _, out, _ = call("random", "--alpha", "0.2", "--law", law)
        assert f"assumes  {assumption}" in out
        _, out, _ = call("random", "--alpha", "0.2", "--law", law, "--json")
        assert all(one["assumption"].startswith(assumption) for one in json.loads(out))
    _, out, _ = call("norm", "--shape", "64,32", "--law", "correlated", "--K1", "2")
    assert "no eigenvalue above 2/n" in out


def test_forms_that_do_not_cover_the_weights_say_so(call: Call) -> None:
    code, out, _ = call("random", "--alpha", "0.2", "--law", "rows", "--json")
    printed, corrected, sharp = json.loads(out)
    assert code == 0
    assert printed["note"] == corrected["note"]
    assert "Lemma 4 needs independent weights" in printed["note"]
    assert sharp["proven"]


def test_norm_prints_the_bounds_of_the_library(call: Call) -> None:
    _, out, _ = call("norm", "--shape", "64,32", "--K1", "2", "--delta", "0.1", "--json")
    found = json.loads(out)
    law = bounds.SubGaussian(2.0)
    assert found["mean norm, at most"] == law.expected(64, 32)
    assert found["norm, at most, except with probability 0.1"] == bounds.norm_level(law, (64, 32), 0.1)
    assert found["basis"] == "proven"
    assert json.loads(call("norm", "--shape", "64,32", "--law", "moments", "--json")[1])["basis"] == "by a measured C"


def test_convergence_prints_the_estimates_of_the_library(call: Call) -> None:
    given = {"L": 2.0, "G": 1.5, "T": 100}
    flags = [text for name, value in given.items() for text in (f"--{name}", f"{value:g}")]
    _, out, _ = call("convergence", *flags, "--delta", "0.1", "--norm", "3", "--mu", "1", "--gap", "5", "--json")
    found = {one["name"]: one["bound"] for one in json.loads(out)}
    pruned = convergence.convex(**given, mu=1.0, delta=0.1, norm=3.0).bound
    sgd = convergence.last(**given, mu=1.0).bound
    assert found == {
        "Theorem 4.1": pruned,
        "dense iterates": pytest.approx(2 * pruned + 2 * 0.1 * 9),
        "last iterate": sgd,
        "inequality 4": pytest.approx(2 * sgd + 2 * 0.1 * 9),
        "Theorem 4.2": convergence.nonconvex(**given, gap=5.0, delta=0.1, norm=3.0).bound,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("magnitude", "--alpha", "0.2"),
        ("random", "--alpha", "0.2"),
        ("cnn", "--alpha", "0.2"),
        ("estimate", "C.2", "--alpha", "0.2"),
        ("spectral", "--channels", "3,4", "--image", "6", "--stride", "2"),
        ("gip", "--d", "1000", "--m", "100", "--theta", "1"),
        ("balanced",),
        ("iterand", "--R", "10"),
        ("convergence", "--L", "1", "--G", "1", "--T", "100", "--delta", "0.1", "--norm", "1", "--mu", "0.1"),
    ],
)
def test_plot_option_writes_a_chart(call: Call, arguments: tuple[str, ...]) -> None:
    code, _, err = call(*arguments, "--plot", "chart.svg")
    assert code == 0
    assert "chart written to chart.svg" in err
    drawing = ElementTree.parse("chart.svg").getroot()
    lines = [e for e in drawing.iter() if e.tag.endswith("polyline")]
    assert lines
    assert all("nan" not in line.get("points", "nan") for line in lines)


def test_certify_prunes_a_run(call: Call, run: Path) -> None:
    code, out, _ = call("certify", str(run), "--sparsity", "0.5", "--steps", "10", "--json")
    one = json.loads(out)
    assert code == 0
    assert 0 < one["found"] <= one["error"]
    assert [layer["name"] for layer in one["layers"]] == ["layers.1", "layers.3", "layers.5"]
    assert one["layers"][1]["removed"] > 0
    code, out, _ = call("certify", str(run), "--sparsity", "0.5", "--steps", "10", "--cube", "--plot", "chart.svg")
    assert code == 0
    assert "sup ‖f − F‖ ≤" in out
    assert Path("chart.svg").is_file()


def test_certify_compares_two_runs(call: Call, run: Path) -> None:
    code, out, _ = call("certify", str(run), "--against", str(run), "--json", "--steps", "2")
    assert code == 0
    assert json.loads(out)["error"] < 1e-6


def test_certify_finds_the_largest_sparsity(call: Call, run: Path) -> None:
    code, out, _ = call("certify", str(run), "--epsilon", "0.5", "--json", "--steps", "0")
    one = json.loads(out)
    assert code == 0
    assert one["error"] <= 0.5
    assert 0 < one["sparsity"] < 1
    _, out, _ = call("certify", str(run), "--epsilon", "1e-9", "--json")
    assert json.loads(out)["sparsity"] is None


def test_certify_says_what_is_proven_and_what_was_found(call: Call, run: Path) -> None:
    code, out, _ = call("certify", str(run), "--sparsity", "0.5", "--steps", "0", "--radius", "0.5")
    assert code == 0
    assert re.search(r"certified +sup ‖f − F‖ ≤ [\d.]+, proven by (norms|intervals|linear)", out)
    assert re.search(r"found +no attack", out)
    code, _, err = call("certify", str(run), "--sparsity", "0.5", "--cube", "--radius", "2")
    assert code != 0
    assert "--cube and --radius 2.0 both choose the inputs: give one of them." in err


def test_certify_proves_predictions(call: Call, run: Path) -> None:
    options = ("--sparsity", "0.2", "--predictions", "--examples", "12", "--steps", "5")
    code, out, _ = call("certify", str(run), *options, "--radius", "0.01", "--json")
    one = json.loads(out)
    assert code == 0
    assert one["examples"] == len(one["classes"]) == 12
    assert one["region"] == "the linf radius 0.01"
    assert sum(one["unchanged"]) / 12 == pytest.approx(one["share"])
    assert 0 <= one["share"] <= one["largest_share"] <= 1
    code, out, _ = call("certify", str(run), *options)
    assert code == 0
    assert "predictions proven unchanged over the examples themselves" in out
    code, out, _ = call("certify", str(run), *options, "--cube", "--low", "-9", "--high", "9", "--json")
    assert code == 0
    assert json.loads(out)["region"] == "Cube(low=-9.0, high=9.0)"


@pytest.mark.slow
def test_fraction_of_one_round_of_pruning(call: Call, run: Path) -> None:
    code, out, _ = call("fraction", str(run), "--epsilon", "0.5", "--json")
    one = json.loads(out)
    assert code == 0
    assert 0 < one["certified"] < 1
    assert one["theorem"] is None or 0 < one["theorem"] < 1
    code, out, _ = call("fraction", str(run), "--epsilon", "1e6", "--plot", "chart.svg")
    assert code == 0
    assert "certified" in out
    assert Path("chart.svg").read_text().count("<polyline") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("magnitude", "--alpha", "1"), "alpha must lie between 0"),
        (("magnitude",), "say how much is pruned"),
        (("magnitude", "--widths", "3,x", "--alpha", "0.2"), "no list of whole numbers"),
        (("magnitude", "--widths", "3,4", "--alpha", "0.2"), "4 whole numbers or more"),
        (("magnitude", "--alpha", "0.2", "--epsilon", "-1"), "epsilon must be positive, got -1"),
        (("magnitude", "--alpha", "0.2", "--plot", "missing/chart.svg"), "'missing/chart.svg' cannot be written"),
        (("spectral", "--channels", "0,3"), "each at least 1, got '0,3'"),
        (("random", "--alpha", "0.2", "--law", "cauchy"), "unknown law 'cauchy'"),
        (("random", "--alpha", "0.2", "--norms", "1,1,1", "--deltas", "0.1,0.1,0.1"), "cannot be met"),
        (("random", "--alpha", "0.2", "--norms", "1;1"), "no list of numbers"),
        (("magnitude", "--alpha", "0.2", "--law", "subgaussian"), "Theorem 1 needs uniform weights, not SubGaussian"),
        (("estimate", "C.1", "--alpha", "0.2", "--correlation", "0.1"), "--correlation belongs to E.1"),
        (("norm", "--shape", "64,32", "--delta", "2"), "delta is a probability between 0 and 1, got 2"),
        (("norm", "--shape", "64"), "2 whole numbers or more"),
        (("gip", "--d", "10", "--m", "1"), "one of --epsilon and --theta"),
        (("convergence", "--L", "1", "--G", "1", "--T", "9", "--delta", "0", "--norm", "1"), "give --mu"),
        (("certify", "missing"), "say what RUN is compared with"),
        (("certify", "missing", "--sparsity", "0.5"), "is not a finished run"),
        (("certify", "missing", "--epsilon", "0.5", "--predictions"), "--epsilon bounds outputs"),
        (("estimate", "C.9", "--alpha", "0.2"), "unknown extension 'C.9'"),
        (("magnitud",), "did you mean 'magnitude'"),
    ],
)
def test_invalid_arguments_give_one_sentence(call: Call, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = call(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
