"""Tables 1 to 3 and Figures 1 and 2 of Qian & Klabjan (2021), with fewer draws and smaller networks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pomona.data.dataset import Dataset
from pomona.data.split import Split
from pomona.errors import PomonaError
from pomona.theory import qian_tables
from pomona.theory.qian_tables import standard_errors_off
from pomona.theory.qian_tables.random_matrices import measure_lemma4, spectral_norms


def find_cell(table: dict[str, Any], **setting: Any) -> dict[str, Any]:
    """Return the first cell of a table with these settings."""
    return next(c for c in table["cells"] if all(c["setting"].get(k) == v for k, v in setting.items()))


@pytest.fixture(scope="module")
def table2() -> dict[str, Any]:
    return qian_tables.table2(runs=300, widest=64)


@pytest.fixture(scope="module")
def table3() -> dict[str, Any]:
    return qian_tables.table3(runs=300, widest=64)


def test_table_2_agrees_with_the_printed_means(table2: dict[str, Any]) -> None:
    """Every mean within 4 combined standard errors, 300 matrices of seed 0; standard deviations within a sixth."""
    means = [c for c in table2["cells"] if c["setting"]["quantity"] == "‖B‖"]
    assert len(means) == 6
    for one in means:
        assert standard_errors_off(one) <= 4
        assert one["std"] == pytest.approx(one["paper_std"], rel=1 / 6, abs=0.0005)


def test_constants_of_table_2(table2: dict[str, Any]) -> None:
    one = find_cell(table2, n1=32, n2=64, K="√3", q=0.99)
    assert one["setting"]["delta0"] == 0.021  # as printed
    assert one["mean"] == pytest.approx(one["paper"], rel=0.03)
    unit = find_cell(table2, n1=32, n2=64, K="1", q=0.99)
    assert one["mean"] == pytest.approx(math.sqrt(3) * unit["mean"])


def test_table_3_agrees_with_the_printed_values(table3: dict[str, Any]) -> None:
    """Every number within 4 combined standard errors, 300 matrices of seed 0."""
    assert len(table3["cells"]) == 12 * 5
    for one in table3["cells"]:
        # The largest of d estimated row sums is biased upwards, and the more so the fewer matrices there are.
        if one["setting"]["quantity"] not in ("rows", "columns"):
            assert standard_errors_off(one) <= 4, one
        else:
            assert one["mean"] == pytest.approx(one["paper"], abs=0.02)


def test_rows_with_alpha_hold_the_norm_of_the_kept_entries(table3: dict[str, Any]) -> None:
    """The printed norm is that of the kept part, while (19) is about the removed one: d = 32, α = 0.01, seed 1."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(300, 32, 32, generator=generator).double() / math.sqrt(32)
    positions = torch.randint(1024, (300, math.floor(32**1.99)), generator=generator)
    kept = whole.flatten(1).scatter(1, positions, 0.0).view_as(whole)
    printed = find_cell(table3, d=32, alpha=0.01, quantity="norm")["paper"]
    for part, agrees in ((kept, True), (whole - kept, False)):
        value, std = measure_lemma4([part], 32)["norm"]
        assert (abs(value - printed) < 4 * std / math.sqrt(300) + 0.0005) is agrees
    assert find_cell(table3, d=32, alpha=0.01)["sparsity"] == pytest.approx(0.6194, abs=1e-3)


def test_lemma_4_terms_match_a_hand_computation() -> None:
    """Two 2 × 2 matrices: E A² = [[1, 2], [8.5, 0.5]] and Σ E A⁴ = 1 + 8 + 128.5 + 0.5."""
    batch = torch.tensor([[[1.0, 0.0], [4.0, 1.0]], [[1.0, 2.0], [1.0, 0.0]]], dtype=torch.float64)
    found = measure_lemma4([batch[:1], batch[1:]], 2)
    assert found["rows"][0] == pytest.approx(3)
    assert found["columns"][0] == pytest.approx(math.sqrt(9.5))
    assert found["fourth"][0] == pytest.approx(138**0.25)
    sizes = torch.linalg.matrix_norm(batch, 2)
    assert found["norm"][0] == pytest.approx(float(sizes.mean()))
    assert found["C"][0] == pytest.approx(float(sizes.mean()) / (3 + math.sqrt(9.5) + 138**0.25))


def test_spectral_norms_of_wide_and_tall_matrices() -> None:
    batch = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)).double()
    for each in (batch, batch.mT):
        assert torch.allclose(spectral_norms(each), torch.linalg.matrix_norm(each, 2))


def make_clusters(count: int = 600) -> Dataset:
    """Return points from seven Gaussian clusters in 54 dimensions; the test points are from the same clusters."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(7, (2 * count,), generator=generator)
    x = torch.randn(7, 54, generator=generator)[y] + torch.randn(2 * count, 54, generator=generator)
    train, test = Split(x[:count], y[:count]), Split(x[count:], y[count:])
    return Dataset("clusters", train, test, classes=7, input_shape=(54,), kind="table")


def test_table_1_moments_of_a_small_network() -> None:
    """Trained weights keep the order of their initialization: E w² is O(1/d) and E w⁴ is O(1/d²) in layers 2 to 5."""
    network = qian_tables.train_on_covertype(data=make_clusters(), width=64, epochs=15)
    assert "15 epochs on 600 rows" in network.origin
    accuracy = re.search(r"classifies ([\d.]+)% of 600 test examples", network.origin)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    table = qian_tables.table1(network=network)
    assert [c["paper"] for c in table["cells"] if c["setting"]["quantity"] == "variance"] == list(
        qian_tables.PRINTED_VARIANCES
    )
    for name, low, high in (("d E w²", 0.3, 4), ("d² E w⁴", 0.3, 40)):
        values = [c["mean"] for c in table["cells"] if c["setting"]["quantity"] == name]
        assert len(values) == 4
        assert all(low < v < high for v in values)


def test_figure_1_histograms_count_every_weight() -> None:
    calls: list[tuple[int, int]] = []
    network = qian_tables.train_on_covertype(
        0, lambda *call: calls.append(call), data=make_clusters(100), width=16, epochs=1
    )
    figure = qian_tables.figure1(network=network)
    assert [c["runs"] for c in figure["cells"]] == [54 * 16, *[256] * 4, 16 * 7]
    assert calls == [(1, 1)]
    for one in figure["cells"]:
        assert 0.98 * one["runs"] <= sum(one["histogram"]["counts"]) <= one["runs"]
        assert 1 < one["kurtosis"] < 9


def test_figure_2_comes_from_a_vgg16_with_sixteen_layers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    part = Split(x, torch.arange(8))
    images = Dataset("images", part, part, classes=10, input_shape=(3, 32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)
    figure = qian_tables.figure2(network=qian_tables.train_on_cifar10(data=images, images=4, epochs=1))
    assert len(figure["cells"]) == 13 + 3
    assert figure["notes"].startswith("It was trained here with Adam for 1 epochs on 4 images of CIFAR-10")
    assert all(abs(one["mean"]) < one["std"] for one in figure["cells"])


def make_state() -> dict[str, torch.Tensor]:
    """Return the state dict of a network with 11 convolutions and 3 matrices, whose weights tell its layers apart."""
    layers = [nn.Conv2d(1, 2, 3), *(nn.Conv2d(2, 2, 3) for _ in range(10))]
    model = nn.Sequential()
    model.features = nn.Sequential(*layers)
    model.classifier = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))
    for k, layer in enumerate(m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)):
        nn.init.constant_(layer.weight, float(k))
    return model.state_dict()


@pytest.mark.parametrize("name", ["vgg.safetensors", "vgg.pt"])
def test_weights_of_a_file_are_read_layer_by_layer(tmp_path: Path, name: str) -> None:
    """The layers keep their order: number 10 after number 9, matrices after convolutions, no biases and statistics."""
    file = tmp_path / name
    save_file(make_state(), file) if name.endswith("safetensors") else torch.save(make_state(), file)
    network = qian_tables.read_network(file)
    assert [float(w.mean()) for w in network.weights] == list(range(14))
    assert [w.dim() for w in network.weights] == [4] * 11 + [2] * 3
    figure = qian_tables.figure2(weights=file)
    assert [cell["mean"] for cell in figure["cells"]] == list(range(14))
    assert figure["notes"] == f"Its weights were read from {name}."
    table = qian_tables.table1(weights=file)
    assert {cell["paper"] for cell in table["cells"]} == {None}
    inner = {c["setting"]["quantity"]: c["mean"] for c in table["cells"] if c["setting"]["layer"] == 2}
    assert inner["d E w²"] == pytest.approx(3 * 12**2)
    assert inner["d² E w⁴"] == pytest.approx(9 * 12**4)


class RunsCode:
    """An object that would create a file if its pickle were executed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_a_file_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    file, trace = tmp_path / "code.pt", tmp_path / "trace"
    torch.save({"weight": RunsCode(trace)}, file)
    with pytest.raises(PomonaError, match="cannot be read as a state dict"):
        qian_tables.read_network(file)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pt", None, "is not a file"),
        ("text.safetensors", b"text", "is not a safetensors file"),
        ("text.pt", b"text", "cannot be read as a state dict"),
        ("list.pt", [torch.ones(2, 2)], "holds a list"),
        ("model.pt", {"model": {"weight": torch.ones(2, 2)}}, "holds a dict that is no state dict"),
        ("bias.pt", {"bias": torch.ones(2)}, "no weights of two dimensions"),
        ("nan.pt", {"weight": torch.full((2, 2), math.nan)}, "not finite"),
    ],
)
def test_files_that_are_no_state_dict_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(PomonaError, match=message):
        qian_tables.read_network(file)


def test_table_1_needs_three_linear_layers(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "one.pt")
    with pytest.raises(PomonaError, match="has 1"):
        qian_tables.table1(weights=tmp_path / "one.pt")


def test_tables_are_registered_by_name_and_docstring() -> None:
    assert list(qian_tables.TABLES) == ["qian-table1", "qian-table2", "qian-table3", "qian-figure1", "qian-figure2"]
    for name, make in qian_tables.TABLES.items():
        kind, number = name.removeprefix("qian-")[:-1].capitalize(), name[-1]
        assert (make.__doc__ or "").startswith(f"{kind} {number}:")
    assert len(qian_tables.PRINTED_TABLE2) == 15
    assert len(qian_tables.PRINTED_TABLE3) == 27
