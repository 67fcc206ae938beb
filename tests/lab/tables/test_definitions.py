"""Definitions of tables: the bundled files, what they take from each other, and what is refused."""

from __future__ import annotations

import pytest
import torch
from small_table import SMALL_TABLE, load_small_table

from pomona import models
from pomona.errors import PomonaError
from pomona.lab.recipes import bundled
from pomona.lab.tables.catalog import find_table
from pomona.lab.tables.definitions import load_table
from pomona.methods import METHODS


def test_all_tables_and_figures_of_dpf_are_bundled():
    numbers = [*(f"table{k}" for k in range(1, 6)), *(f"figure{k}" for k in range(3, 15))]
    assert {f"dpf-{name}" for name in numbers} <= bundled.bundled_tables().keys()
    assert not bundled.bundled_tables().keys() & bundled.bundled_recipes().keys()


@pytest.mark.parametrize("name", bundled.bundled_tables())
def test_every_bundled_table_loads(name):
    found = load_table(bundled.bundled_tables()[name])
    assert found.name == name
    assert found.title
    assert found.paper


def test_table_1_has_the_numbers_of_the_paper():
    found = find_table("dpf-table1")
    printed = {(cell.label, cell.row, cell.column): cell.paper for cell in found.cells}
    assert printed["ResNet-20", "90 %", "DPF"] == "90.88 ± 0.07"
    assert printed["ResNet-20", "95 %", "DSR"] == "*"
    assert printed["WideResNet-28-8", "99.9 %", "SNIP"] == "74.50 ± 2.23"
    assert printed["WideResNet-28-4", "97.5 %", "SM"] == "93.80 ± 0.24"
    assert printed["ResNet-32", "95 %", "dense"] == "93.83 ± 0.12"
    assert printed["ResNet-20", "70 %", "DPF settled"] is None
    assert ("VGG16-D", "95 %", "DSR") not in printed
    assert {cell.own_row for cell in found.cells if cell.column == "dense"} == {""}  # a dense network has no sparsity
    rows = dict.fromkeys((cell.label, cell.row) for cell in found.cells)
    assert len(rows) == 1 + 4 + 2 + 2 + 3 + 3 + 5
    assert [cell.column for cell in found.cells[:6]] == ["dense", "SNIP", "SM", "DPF", "DPF settled", "DPF soft"]


def test_runs_of_table_1_differ_in_method_and_model_only():
    found = {
        (cell.label, cell.column): cell.runs[0].recipe
        for cell in find_table("dpf-table1").select(["sparsity=0,0.95", "seed=2"]).cells
    }
    resnet, wide = (found[label, "DPF"] for label in ("ResNet-20", "WideResNet-28-2"))
    assert (resnet.method["every"], resnet.method["settle"], resnet.method["schedule"]["until"]) == (16, 0, 0.75)
    assert (wide.method["every"], wide.method["settle"], wide.method["schedule"]["until"]) == (16, 0, 0.6)
    assert found["ResNet-20", "DPF settled"].method == {**resnet.method, "settle": 0.1, "every": None}  # also 16 there
    assert found["ResNet-56", "DPF"].model == {**resnet.model, "name": "resnet56", "block": "bottleneck"}
    assert resnet.model["shortcut"] == "B"
    assert found["ResNet-20", "SM"].method["every"] is None  # an epoch
    assert found["ResNet-20", "DSR"].method["every"] == 100
    for (label, column), recipe in found.items():
        same = wide if label.startswith("Wide") else resnet
        keys = {text.partition(":")[0].partition(".")[0] for text in recipe.differences(same)}
        assert keys <= {"method", "model"}, (label, column)
        assert recipe.seed == 2


def test_table_7_of_iterand_has_the_networks_of_openlth():
    models = {cell.column: {} for cell in find_table("iterand-table7").cells}
    for cell in find_table("iterand-table7").cells:
        models[cell.column][cell.label] = cell.runs[0].recipe.model
        assert cell.runs[0].name.startswith(("vgg11-", "resnet20-"))
        assert "model" not in cell.setting
    affine = {column: {label: model["affine"] for label, model in found.items()} for column, found in models.items()}
    assert affine["IteRand SC"] == affine["edge-popup SC"] == {"VGG11": False, "ResNet-20": False}
    assert affine["IMP, 3 retrainings"] == {"VGG11": True, "ResNet-20": True}
    assert {found["ResNet-20"]["shortcut"] for found in models.values()} == {"B"}  # 1×1 convolutions
    assert {found["VGG11"]["name"] for found in models.values()} == {"vgg11"}


def test_batches_of_table_3_divide_among_the_processes_of_torchrun():
    for run in find_table("dpf-table3").runs():
        assert (run.recipe.train.batch_size % 16, run.recipe.train.drop_last) == (0, True)


def test_tables_share_their_runs():
    small, large = ({run.key for run in find_table(name).runs()} for name in ("dpf-table1", "dpf-table4"))
    assert small < large
    assert find_table("dpf-table1").queue == find_table("dpf-table4").queue
    assert find_table("dpf-figure5").queue == ("DPF", "mask retrained", "dense")
    assert {run.key for run in find_table("dpf-figure3").runs()} < large
    # The dense networks, and DPF before its fine-tuning.
    tuned = {run.key for run in find_table("dpf-table2").select(["column=dense,DPF,DPF settled"]).runs()}
    assert tuned < small


def test_figures_of_masks_share_the_runs_of_tables_but_track_them():
    printed, figure4, figure7, large = (
        {run.key: run.recipe for run in find_table(f"dpf-{name}").runs()}
        for name in ("printed", "figure4", "figure7", "table4")
    )
    assert figure4.keys() == figure7.keys() < large.keys()
    assert [recipe.seed in (1, 2) for recipe in printed.values()] == [key in large for key in printed]
    assert all(recipe.train.track for recipe in [*printed.values(), *figure4.values(), *figure7.values()])
    assert {recipe.train.eval_every for recipe in printed.values()} == {1}
    filters = {run.key for run in find_table("dpf-table5").runs()}
    retrained = find_table("dpf-figure13").runs()
    assert {run.key for run in retrained if run.retraining is None} < filters
    assert {run.retraining for run in retrained} == {None, ("init", "epochs"), ("random", "epochs")}
    assert {run.key for run in find_table("dpf-figure14").runs()} < filters


def test_every_method_of_the_cosine_table_has_the_same_training():
    found = {cell.column: cell.runs[0].recipe for cell in find_table("dpf-cosine").select(["sparsity=0,0.95"]).cells}
    gradual, others = (
        {"incremental", "ST-3", "Feather", "DPF"},
        {"dense", "random", "SNIP", "SET", "SM", "DSR", "RigL", "SRigL", "AC/DC", "one-shot"},
    )
    assert found.keys() == gradual | others
    for recipe in found.values():
        assert (recipe.rate.name, recipe.train.epochs) == ("cosine", 300)
        assert {text.partition(".")[0].partition(":")[0] for text in recipe.differences(found["DPF"])} <= {"method"}
    methods = {column: recipe.method for column, recipe in found.items()}
    until = {name: method["schedule"]["until"] for name, method in methods.items() if "schedule" in method}
    assert until == {"incremental": 0.75, "ST-3": 0.75, "Feather": 0.5, "DPF": 0.75}
    assert methods["Feather"]["compressor"]["name"] == "power"
    assert methods["ST-3"]["compressor"]["name"] == methods["DPF"]["compressor"]["name"] == "soft"
    assert (methods["DPF"]["settle"], methods["one-shot"]["at"]) == (0.1, 0.8)
    assert {methods[column]["feedback"] for column in ("DPF", "ST-3", "Feather", "SM", "AC/DC")} == {1.0}
    shared, one_pass = (
        {run.key for run in find_table(name).select([f"column={columns}", "label=ResNet-20"]).runs()}
        for name, columns in (
            ("dpf-cosine", "DPF,incremental,dense"),
            ("dpf-onepass", "'DPF default, cosine','incremental, cosine','dense, cosine'"),
        )
    )
    assert shared == one_pass  # what is written out here is DPF's default


def test_the_cosine_table_has_every_method_that_trains_weights_in_one_pass():
    cells = find_table("dpf-cosine").cells
    methods = {cell.attributes["method"] for cell in cells}
    assert methods == set(METHODS) - {"finetune", "lottery", "edge_popup", "iterand"} | {"dense"}
    filters = {cell.column: cell.runs[0].recipe for cell in cells if cell.label == "ResNet-20, filters"}
    allocations = {column: recipe.method["allocation"] for column, recipe in filters.items()}
    assert allocations == {"SFP": "uniform", "one-shot": "global", "incremental": "global", "DPF, filters": "global"}
    for recipe in filters.values():
        assert (recipe.rate.name, recipe.train.epochs, recipe.method["pattern"]["of"]) == ("cosine", 300, "filters")
    shared, one_pass = (
        {run.key for run in find_table(name).select([f"column={columns}", "label='ResNet-20, filters'"]).runs()}
        for name, columns in (("dpf-cosine", "'DPF, filters'"), ("dpf-onepass", "'DPF default, cosine'"))
    )
    assert shared == one_pass


def test_printed_tables_have_sparse_momentum_as_its_authors_print_it():
    for name in ("table1", "table3", "table4", "first"):
        cells = [cell for cell in find_table(f"dpf-{name}").cells if cell.column == "SM"]
        assert cells
        assert {run.recipe.method["feedback"] for cell in cells for run in cell.runs} == {None}


def test_learning_rates_are_tuned_on_held_out_images_in_short_runs():
    table = find_table("dpf-tune")
    assert table.measure == "valid_accuracy"
    assert {run.recipe.data.validation for run in table.runs()} == {5000}
    assert max(run.recipe.train.epochs for run in table.runs()) == 60
    grids = {label: set() for label in ("SNIP", "incremental", "one-shot + FT")}
    for cell in table.cells:
        grids[cell.label].add((cell.attributes["method"], cell.runs[0].recipe.optimizer.lr))
    paper = [0.05, 0.1, 0.15, 0.2]  # appendix A.2
    assert grids["SNIP"] >= {("snip", lr) for lr in paper}
    assert grids["incremental"] >= {("incremental", lr) for lr in paper}
    tuned = {cell.column: cell.runs[0].recipe for cell in find_table("dpf-tuned").cells}
    for label, method in (("SNIP", "snip"), ("incremental", "incremental"), ("one-shot + FT", "oneshot")):
        assert (method, tuned[label].optimizer.lr) in grids[label]


def test_dsr_does_not_converge_in_the_paper_where_fewer_weights_are_left_than_it_moves():
    """The authors' N_p of 20,000 weights for every network; docs/methods.md has the explanation."""
    for cell in find_table("dpf-table4").select(["column=DSR"]).cells:
        recipe = cell.runs[0].recipe
        with torch.device("meta"):
            targets = METHODS.resolve(recipe.method).targets(models.build(**recipe.model))
        left = (1 - recipe.method["sparsity"]) * sum(target.shape.numel() for target in targets)
        assert (cell.paper == "*") == (left < 20_000), (cell.label, cell.row, left)


def test_the_first_runs_belong_to_tables_of_the_paper():
    first, *others = (
        {run.key for run in find_table(f"dpf-{name}").runs()}
        for name in ("first", "table1", "table2", "table5", "onepass")
    )
    assert first <= set.union(*others)


def test_table_5_prunes_filters():
    for cell in find_table("dpf-table5").select(["column=SFP,DPF"]).cells:
        assert cell.runs[0].recipe.method["pattern"] == {"name": "filter", "norm": 2, "of": "filters", "norms": False}
        assert cell.setting["pattern"] == "filter(of='filters', norms=False)"
    assert find_table("dpf-table5").select(["column=dense"]).cells[0].setting == {}


def test_a_part_may_have_its_own_seeds(tmp_path):
    found = load_small_table(tmp_path, SMALL_TABLE.replace('label = "wide"', 'label = "wide"\nseeds = [7]'))
    assert {(cell.label, *(run.recipe.seed for run in cell.runs)) for cell in found.cells} == {
        ("narrow", 0, 1),
        ("wide", 7),
    }


def test_overrides_apply_to_every_run(tmp_path):
    found = load_small_table(tmp_path, SMALL_TABLE, "train.epochs=3", "optimizer.lr=0.5")
    assert {run.recipe.train.epochs for run in found.runs()} == {3}
    assert {run.recipe.optimizer.lr for run in found.runs()} == {0.5}
    with pytest.raises(PomonaError, match="'train.epochs' is not of the form key=value"):
        load_small_table(tmp_path, SMALL_TABLE, "train.epochs")


def test_settings_without_effect_are_not_in_the_name_of_a_run(tmp_path):
    plain, changed = (
        load_small_table(tmp_path, SMALL_TABLE, *more).runs()
        for more in ([], ["train.eval_every=300", "train.device=cpu"])
    )
    assert [run.name for run in changed] == [run.name for run in plain]
    assert {run.recipe.train.eval_every for run in changed} == {300}
    clipped = load_small_table(tmp_path, SMALL_TABLE, "train.clip=1.0")
    assert all("clip1.0" in run.name for run in clipped.runs())
    assert {cell.setting["train.clip"] for cell in clipped.cells} == {1.0}
    assert not any(
        "train.eval_every" in cell.setting
        for cell in load_small_table(tmp_path, SMALL_TABLE, "train.eval_every=9").cells
    )


@pytest.mark.parametrize("key", ["seed", "method.sparsity"])
def test_settings_that_differ_between_runs_are_not_overridden(tmp_path, key):
    with pytest.raises(PomonaError, match=f"{key} differs between the runs of a table: select runs with --only"):
        load_small_table(tmp_path, SMALL_TABLE, f"{key}=0.5")


def test_a_table_like_another_selects_rows_and_columns(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(SMALL_TABLE)
    monkeypatch.setattr(bundled, "bundled_files", lambda: {"small": tmp_path / "small.toml"})
    text = 'title = "less"\nlike = "small"\ncolumns = ["DPF"]\n[[part]]\nlabel = "narrow"\n'
    (tmp_path / "less.toml").write_text(text + 'rows = { "method.sparsity" = [0.8] }\n')
    (only,) = load_table(tmp_path / "less.toml").cells
    assert (only.column, only.row, only.paper, len(only.runs)) == ("DPF", "80 %", "90.00 ± 0.10", 2)
    (tmp_path / "less.toml").write_text(text + 'rows = { "method.sparsity" = [0.9] }\n')
    with pytest.raises(PomonaError, match="unknown value of method.sparsity '0.9': did you mean '0.8'"):
        load_table(tmp_path / "less.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title", "titel", "unknown key of a table 'titel': did you mean 'title'"),
        ("label =", "lable =", "unknown key of a part 'lable': did you mean 'label'"),
        ('DPF = ["88.0"]', 'DFP = ["88.0"]', "the table small: unknown column 'DFP': did you mean 'DPF'"),
        ('["*", "90.00 ± 0.10"]', '["*"]', "narrow has 1 numbers of DPF for its 2 rows"),
        ('["88.0"]', '["about 88"]', "'about 88' is not of the form '92.42 ± 0.14', '\\*' or '-'"),
        ('from = "DPF"', 'from = "DFP"', "unknown column 'DFP': did you mean 'DPF'"),
        ('from = "DPF", ', "", "again retrains a mask: name the column that finds it with from"),
        ('from = "dense"', 'from = "again"', "one-shot \\+ FT cannot start from a retraining"),
        ('from = "dense"', 'from = "one-shot + FT"', "one-shot \\+ FT starts from itself"),
        ('retrain = "init"', 'retrain = "int"', "unknown start of a retraining 'int': did you mean 'init'"),
        ('"flops"', '"flop"', "unknown budget 'flop': did you mean 'flops'"),
        ("seeds = [0, 1]", "seeds = [0.5]", r"seeds takes whole numbers, got \[0.5\]"),
        ('show = ["cost"]', 'show = ["speed"]', "unknown measure to show 'speed'"),
        ('show = ["cost"]', 'charts = ["layer"]', "unknown chart 'layer': did you mean 'layers'"),
        ('show = ["cost"]', 'measure = "test_accuracy"', "unknown measure 'test_accuracy'"),
        ("[columns]", "[columns", "cannot be read"),
        ('"optimizer.lr" = 0.02', '"optimizer.lrr" = 0.02', "did you mean 'lr'"),
    ],
)
def test_invalid_definitions_are_refused(tmp_path, old, new, message):
    assert old in SMALL_TABLE
    with pytest.raises(PomonaError, match=message):
        load_small_table(tmp_path, SMALL_TABLE.replace(old, new))
