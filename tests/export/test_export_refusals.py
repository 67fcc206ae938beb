"""`pm.export`: what is refused, in one sentence, and that nothing is left behind then."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import build_network, images
from torch import nn

import pomona as pm
from pomona.export.comparison import largest_difference
from pomona.export.example import Example, flatten_outputs


class Noisy(nn.Module):
    """A network whose outputs differ from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.rand(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "onx", "example": images()}, "unknown format 'onx': did you mean 'onnx'?"),
        ({"format": "onnx"}, "the format onnx needs example=, an input of the network"),
        ({"format": "csr", "pack": True}, "the format csr has no option pack; its options: architecture"),
        ({"format": "csr", "example": "images"}, "example takes a tensor, a tuple of arguments, a dict"),
        ({"format": "csr", "example": (3, "x")}, "an example needs a tensor"),
        ({"format": "csr", "architecture": "resnet2"}, "did you mean 'resnet20'?"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(pm.PomonaError) as caught:
        pm.export(build_network(), tmp_path / "x", **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_outputs_beyond_the_tolerance_are_refused_and_the_old_file_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = tmp_path / "model.pt2"
    file.write_text("the old file")
    with pytest.raises(pm.PomonaError, match="more than the tolerance 0.0001: nothing was written; pass a larger"):
        pm.export(Noisy(), file, "torch-export", torch.randn(2, 4), seconds=0)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old file"]
    pm.export(Noisy(), file, "torch-export", torch.randn(2, 4), seconds=0, tolerance=100)
    assert file.stat().st_size > 1000


def test_a_network_that_torch_cannot_trace_is_refused(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(pm.PomonaError, match="torch.export cannot trace the network: ") as caught:
        pm.export(Branching(), tmp_path / "x.pt2", "torch-export", torch.randn(2, 4))
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pm.PomonaError, match="cannot be written: No such file or directory"):
        pm.export(build_network(), tmp_path / "no" / "x", "csr")


def test_an_openvino_file_ends_in_xml(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(pm.PomonaError, match="an OpenVINO file ends in .xml"):
        pm.export(build_network(), tmp_path / "x.onnx", "openvino", images())


@pytest.mark.parametrize(("file_format", "package"), [("onnx", "onnxscript"), ("openvino", "openvino")])
def test_a_missing_package_is_named_with_its_extra(
    file_format: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == package:
            raise ImportError(name=package)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(pm.PomonaError, match=rf"pip install 'pomona\[{file_format}\]'"):
        pm.export(build_network(), tmp_path / "x.xml", file_format, images())


def test_a_fixed_batch_is_not_asked_for_another(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(2, 4) * 2

    with pytest.raises(pm.PomonaError, match="dynamic_batch=False fixes the number of samples"):
        pm.export(Fixed(), tmp_path / "x.pt2", "torch-export", torch.randn(2, 4), seconds=0)
    pm.export(Fixed(), tmp_path / "x.pt2", "torch-export", torch.randn(2, 4), seconds=0, dynamic_batch=False)


# ---- examples and differences


def test_examples_of_every_kind() -> None:
    model = build_network()
    x, y = torch.zeros(2, 3), torch.zeros(2)
    assert Example.create(x, model).args == (x,)
    assert Example.create((x, y), model).tensors == [x, y]
    assert Example.create({"x": x, "flag": True}, model).kwargs == {"x": x, "flag": True}
    assert Example.create((3, 8, 8), model).args[0].shape == (1, 3, 8, 8)
    larger = Example.create({"x": torch.arange(2), "scale": torch.ones(5)}, model).resize(5)
    assert larger.kwargs["x"].tolist() == [0, 1, 0, 1, 0]
    assert larger.kwargs["scale"].tolist() == [1] * 5


def test_outputs_are_named() -> None:
    x = torch.zeros(1)
    assert list(flatten_outputs(x)) == ["output"]
    assert list(flatten_outputs((x, [x, None]))) == ["output_0", "output_1"]
    assert list(flatten_outputs({"logits": x, "states": (x, x)})) == ["logits", "states_0", "states_1"]


def test_differences_by_hand() -> None:
    nan, inf = float("nan"), float("inf")
    assert largest_difference([torch.tensor([4.0, nan, inf])], [torch.tensor([3.0, nan, inf])]) == 0.25
    assert largest_difference([torch.tensor([1.0])], [torch.tensor([nan])]) == inf
    assert largest_difference([torch.zeros(2)], [torch.zeros(3)]) == inf
    assert largest_difference([torch.zeros(2)], []) == inf
