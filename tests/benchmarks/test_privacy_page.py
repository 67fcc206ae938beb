"""The documentation page on privacy: its code runs, and its tables are computed from the records."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

import pomona
from pomona import privacy
from pomona.lab.tables import private_table as private
from pomona.lab.tables.rendering import layout_table

ROOT = Path(__file__).parents[2]


def test_code_on_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    pomona.privacy = privacy
    first, second, third = re.findall(r"```python\n(.*?)```", (ROOT / "docs/privacy.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(first, names)
    step = names["step"]
    assert step.steps_taken == 20
    assert step.spent == pytest.approx(2, rel=1e-3)
    assert step.lost(19) == pytest.approx(0.5, abs=0.05)
    exec(second, names)
    assert [account.steps for account in names["ledger"].accounts.values()] == [20]
    exec(third, names)
    assert names["step"].steps_taken == 2


def make_run(arm: str, epsilon: float, seed: int, accuracy: float, lost: float = 0.9) -> dict:
    private_facts = {
        "target": epsilon,
        "delta": 1e-5,
        "share": 0.01,
        "keep": 0.1,
        "schedule": {"name": "linear"},
        "sigma": 1.0,
        "lost": {"middle": 0.5, "end": lost},
        "random_loses": {"middle": 0.5, "end": 0.9},
    }
    common = {"model": "private_cnn", "method": arm, "data": "cifar10", "epoch": 16}
    return {"arm": arm, "seed": seed, "accuracy": accuracy, "private": private_facts, **common}


def test_table_has_a_cell_for_each_arm_and_budget(tmp_path):
    runs = [
        make_run("gip", 2.0, 0, 50.0),
        make_run("gip", 2.0, 1, 52.0),
        make_run("random", 2.0, 0, 49.0),
        make_run("gip", 1.0, 0, 40.0),
    ]
    (tmp_path / "record.json").write_text(json.dumps({"runs": runs}))
    result = private.private_table(tmp_path / "record.json")
    heads, rows = layout_table(result)
    assert heads == ["", "", "ε = 1", "ε = 2"]
    assert rows[0] == ["gip", "E[i]/m = 0.900", "40.00 ×1", "51.00 ± 1.41 ×2"]
    cells = result["cells"]
    assert [(c["method"], c["setting"]["epsilon"], c["mean"], c["runs"]) for c in cells] == [
        ("gip", 1.0, 40.0, 1),
        ("gip", 2.0, 51.0, 2),
        ("random", 2.0, 49.0, 1),
    ]
    assert cells[1]["std"] == pytest.approx(2**0.5)
    assert cells[0]["std"] is None
    assert cells[0]["sparsity"] == pytest.approx(0.9)
    assert cells[0]["setting"]["lost"]["end"] == 0.9
    assert private.private_table(tmp_path / "none.json")["cells"] == []


def test_arm_is_one_row_with_the_range_of_missed_indices(tmp_path):
    runs = [
        make_run("gip", 8.0, 0, 60.0, lost=0.8),
        make_run("gip", 1.0, 0, 40.0, lost=0.9),
        make_run("dpsgd", 1.0, 0, 41.0, lost=0),
    ]
    (tmp_path / "record.json").write_text(json.dumps({"runs": runs}))
    _, rows = layout_table(private.private_table(tmp_path / "record.json"))
    assert rows == [["gip", "E[i]/m = 0.800 to 0.900", "40.00 ×1", "60.00 ×1"], ["dpsgd", "", "41.00 ×1", ""]]


@pytest.mark.parametrize("record", ["[", "[]", "{}", '{"runs": [{"seed": 0}]}'])
def test_damaged_record_is_refused(tmp_path, record):
    (tmp_path / "record.json").write_text(record)
    with pytest.raises(pomona.PomonaError, match=r"record\.json' is damaged: .* makes it again"):
        private.private_table(tmp_path / "record.json")


def test_page_tables_are_computed_from_the_record(tmp_path, monkeypatch, load_script):
    privacy_page = load_script("privacy_page")
    runs = [
        make_run(arm, e, s, 50 + (arm == "gip") + 0.1 * s)
        for arm in ("gip", "random")
        for e in (1.0, 2.0)
        for s in (0, 1)
    ]
    monkeypatch.setattr(privacy_page, "ROOT", tmp_path)
    (tmp_path / private.RECORD).parent.mkdir()
    (tmp_path / private.RECORD).write_text(json.dumps({"runs": runs}))
    assert "| +1.00 ± 0.00 | helps |" in privacy_page.format_differences()
    assert "51.05 ± 0.07, 0.9000" in privacy_page.format_accuracies()
    assert "| 256 | 26 |" in privacy_page.format_index_costs()
    assert "Not measured" in privacy_page.format_intervals()
    assert "Not measured" in privacy_page.format_from_scratch()
    for run in runs:
        run["accuracy"] += run["arm"] == "gip" and run["seed"] == 1  # differences of 1 and 2
    (tmp_path / privacy_page.COMPARISON_RECORD).write_text(json.dumps({"runs": runs}))
    # Student's t of one degree of freedom is 12.706; the standard error of 1 and 2 is 0.5
    assert "| GIP − random-k | +1.50 ± 6.35 | +1.50 ± 6.35 |" in privacy_page.format_intervals()


def test_stored_budgets_of_the_experiment_meet_their_targets(load_script):
    private_cifar = load_script("private_cifar")
    arms = list(private_cifar.ARMS)
    options = Namespace(epsilons=[1.0, 2.0, 4.0, 8.0], arms=arms, seeds=[0, 1, 2], device="cpu", settings=[])
    options.recipe, options.micro = private_cifar.RECIPE, None
    budgets = json.loads(private_cifar.BUDGETS.read_text())
    recipes = [recipe for _, recipe in private_cifar.iterate_recipes(options, budgets)]
    assert len({recipe.fingerprint() for recipe in recipes}) == 72
    for recipe in {(r.private.epsilon, r.private.share): r for r in recipes}.values():
        recipe.private.with_budget(48_000, 2048, 368)  # 16 epochs of 23 samples; verified by the accountant
    assert {r.private.epsilon for r in recipes if r.private.method == "dpsgd"} == {1.0, 2.0, 4.0, 8.0}
    assert all(r.recipe.data.validation == 2000 for r in recipes)
