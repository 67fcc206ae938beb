"""The registry of networks."""

from __future__ import annotations

import pytest
import torch

from pomona.errors import PomonaError
from pomona.models import build, info, names


def test_names_are_listed_by_pattern():
    assert names("wrn28_*") == ["wrn28_10", "wrn28_2", "wrn28_4", "wrn28_8"]
    assert names("resnet*0") == ["resnet110", "resnet20", "resnet50"]
    assert names("alexnet") == []
    assert {"mlp", "lenet300", "conv6", "digits_cnn", "vgg16_d", "densenet40", "lstm_lm"} <= set(names())


def test_info_has_the_defaults_of_the_signature():
    resnet50 = info("resnet50")
    assert (resnet50.name, resnet50.input_shape) == ("resnet50", (3, 224, 224))
    assert resnet50.options["stem"] == "imagenet"
    assert resnet50.options["num_classes"] == 1000
    assert info("resnet18").options["stem"] == "cifar"
    assert dict(info("resnet56").options) == {
        "num_classes": 10,
        "in_channels": 3,
        "shortcut": "A",
        "affine": True,
        "block": "basic",
    }
    assert resnet50.paper
    assert not resnet50.takes_tokens
    assert info("bilstm").takes_tokens


def test_info_options_are_read_only():
    with pytest.raises(TypeError):
        info("resnet20").options["num_classes"] = 3  # type: ignore[index]


def test_options_reach_the_network():
    model = build("resnet20", num_classes=7, in_channels=1).eval()
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize("name", [n for n in names() if n != "lstm_lm"])
def test_every_classifier_takes_num_classes(name):
    assert "num_classes" in info(name).options


@pytest.mark.parametrize("name", ["digits_cnn", "conv2", "mlp", "resnet20"])
def test_fit_options_adapt_a_network_to_the_data(name):
    model = build(name, **info(name).fit_options((2, 12, 12), num_classes=5)).eval()
    assert model(torch.zeros(3, 2, 12, 12)).shape == (3, 5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet2", {}, "unknown model 'resnet2': did you mean 'resnet"),
        ("wrn28-2", {}, "did you mean 'wrn28_2'"),
        ("resnet20", {"num_class": 3}, "option of model 'resnet20' 'num_class': did you mean 'num_classes'"),
        ("resnet20", {"rho": 2.0}, "choose one of affine, block, in_channels, num_classes, shortcut"),
        ("resnet20", {"depth": 56}, "unknown option"),
        ("resnet20", {"shortcut": "C"}, "unknown shortcut 'C': choose one of A, B"),
        ("resnet18", {"stem": "imagnet"}, "did you mean 'imagenet'"),
        ("wrn28_2", {"norm": "layer"}, "unknown norm 'layer'"),
        ("wrn28_2", {"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ("conv6", {"rho": 0.001}, "rho=0.001 leaves no channel of 64"),
        ("conv6", {"image_size": 4}, "give 8 or more"),
        ("conv6", {"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ("conv6", {"num_classes": "ten"}, "num_classes takes int, got 'ten'"),
        ("mlp", {"hidden": 300}, "hidden takes a list of widths"),
        ("mlp", {"hidden": [300, 0]}, "hidden takes a list of widths"),
    ],
)
def test_invalid_names_and_options_are_refused(name, options, message):
    with pytest.raises(PomonaError, match=message):
        build(name, **options)
