"""The bundled recipes: names and settings of the papers."""

from __future__ import annotations

import pytest

from pomona import lab
from pomona.lab.recipes.bundled import bundled_recipes


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
