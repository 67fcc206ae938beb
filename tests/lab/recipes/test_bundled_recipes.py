"""The bundled recipes: names and settings of the papers."""

from __future__ import annotations

import zipfile

import pytest

from pomona import lab
from pomona.errors import PomonaError
from pomona.lab.recipes.bundled import bundled_recipes, find_recipe, list_json_files


def test_bundled_recipes_have_the_settings_of_the_papers():
    bundled = {name: lab.Recipe.load(path) for name, path in bundled_recipes().items()}
    assert set(bundled) >= {"dpf-resnet20", "dpf-wrn28_2", "dense-resnet20", "digits-dpf"}
    assert all(recipe.name == name for name, recipe in bundled.items())
    resnet, wide = bundled["dpf-resnet20"], bundled["dpf-wrn28_2"]
    rates = [recipe.rate.rate_function(recipe.optimizer.lr, recipe.train.epochs, 1) for recipe in (resnet, wide)]
    # Section 5 and appendix A.1: ResNet ×0.1 at 150 and 225 of 300 epochs, WideResNet ×0.2 at 60, 120, 160 of 200.
    assert [rates[0](e) for e in (0, 149, 150, 224, 225, 299)] == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002, 0.002])
    assert [rates[1](e) for e in (0, 59, 60, 119, 120, 160)] == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.0008])
    assert resnet.method["schedule"]["until"] * 300 == 225
    assert wide.method["schedule"]["until"] * 200 == 120
    dense = bundled["dense-resnet20"]
    assert {d.split(":")[0].split(".")[0] for d in dense.differences(resnet)} == {"method"}


@pytest.mark.parametrize("given", ["digits-dpf", "digits-dpf.toml", "recipes/digits-dpf.toml"])
def test_a_bundled_recipe_is_found_outside_a_checkout(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(given).name == "digits-dpf.toml"


@pytest.mark.parametrize("given", ["other/digits-dpf.toml", "recipes/digits-dpf", "recipes/none.toml"])
def test_another_path_is_not_that_of_a_bundled_recipe(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PomonaError, match="there is no recipe"):
        find_recipe(given)


def test_an_archive_has_the_files_of_its_folder(tmp_path):
    folder, packed = tmp_path / "folder" / "runs", tmp_path / "packed" / "runs"
    folder.mkdir(parents=True)
    packed.parent.mkdir()
    for name in ("b.json", "a.json", "note.txt"):
        (folder / name).write_text(name)
    with zipfile.ZipFile(packed.with_name("runs.zip"), "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
    contents = [[(file.name, file.read_bytes()) for file in list_json_files(place)] for place in (folder, packed)]
    assert contents[0] == contents[1] == [("a.json", b"a.json"), ("b.json", b"b.json")]
    assert list(list_json_files(tmp_path / "nowhere")) == []
