"""Checkpoints: what goes in comes out, and no accident loses the last good one."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pomona.errors import PomonaError
from pomona.lab.runs import checkpoint, durable_files


def same(a, b) -> bool:
    """Equal in structure, types, dtypes and every bit (NaN included)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(j) is type(k) for j, k in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]),
    st.integers(0, 99),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "0", "a/b"])
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(keys, nests, max_size=4))
def test_nested_tensors_and_values_round_trip(tmp_path, state):
    checkpoint.save(tmp_path, state)
    assert same(checkpoint.load(tmp_path), state)


def test_an_optimizer_state_round_trips(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    checkpoint.save(tmp_path, {"optimizer": optimizer.state_dict()})
    loaded = checkpoint.load(tmp_path)["optimizer"]
    assert list(loaded["state"]) == [0]  # an int, as torch needs it
    assert same(loaded["param_groups"][0]["betas"], (0.9, 0.999))
    other = torch.optim.Adam([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    other.load_state_dict(loaded)
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_tied_tensor_is_stored_once_and_strides_do_not_matter(tmp_path):
    image = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    checkpoint.save(tmp_path, {"a": image, "b": image, "column": image[..., 0]})
    loaded = checkpoint.load(tmp_path)
    assert torch.equal(loaded["b"], image)
    assert torch.equal(loaded["column"], image[..., 0])
    size = (tmp_path / "checkpoint" / "tensors.safetensors").stat().st_size
    assert size < 24 * 4 + 6 * 4 + 400


def test_bfloat16_round_trips(tmp_path):
    state = {"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    checkpoint.save(tmp_path, state)
    loaded = checkpoint.load(tmp_path)["x"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, state["x"])


def test_an_unsupported_object_is_refused_by_its_path(tmp_path):
    with pytest.raises(TypeError, match="/a/0, a object"):
        checkpoint.save(tmp_path, {"a": [object()]})
    assert not list(tmp_path.iterdir())


def two(folder):
    checkpoint.save(folder, {"step": 1, "x": torch.ones(500)})
    checkpoint.save(folder, {"step": 2, "x": torch.ones(500)})


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["truncate", "empty", "remove", "flip"])
def test_a_damaged_checkpoint_falls_back_with_a_note(tmp_path, file, harm):
    two(tmp_path)
    path = tmp_path / "checkpoint" / file
    data = path.read_bytes()
    match harm:
        case "truncate":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
        case "flip":
            at = data.rindex(b'"step": 2') + 8 if file == "state.json" else len(data) - 3
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    notes: list[str] = []
    assert checkpoint.load(tmp_path, notes.append)["step"] == 1
    assert len(notes) == 1
    assert "'checkpoint' is damaged" in notes[0]
    assert "'checkpoint.previous'" in notes[0]


def test_two_damaged_checkpoints_are_an_error(tmp_path):
    two(tmp_path)
    for name in ("checkpoint", "checkpoint.previous"):
        (tmp_path / name / "state.json").write_text("{")
    with pytest.raises(PomonaError, match="no checkpoint of .* can be used: 'checkpoint' is damaged .* and"):
        checkpoint.load(tmp_path)


def test_loading_without_a_checkpoint_is_an_error(tmp_path):
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(PomonaError, match="there is no checkpoint"):
        checkpoint.load(tmp_path)


def test_a_newer_version_is_refused(tmp_path):
    checkpoint.save(tmp_path, {"step": 1})
    path = tmp_path / "checkpoint" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(PomonaError, match="version 99"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, file):
    two(tmp_path)
    write = durable_files.write_file

    def full(path, data, **options):
        if path.name == file:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data, **options)

    monkeypatch.setattr(durable_files, "write_file", full)
    with pytest.raises(PomonaError, match="the disk is full.*free some space"):
        checkpoint.save(tmp_path, {"step": 3, "x": torch.ones(500)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoint.previous"]
    assert checkpoint.load(tmp_path)["step"] == 2


def test_replace_file_writes_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    durable_files.replace_file(path, b"old")

    def full(path, data):
        path.write_bytes(data[:1])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable_files, "write_file", full)
    with pytest.raises(PomonaError, match="the disk is full"):
        durable_files.replace_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"old"


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_a_kill_between_any_two_operations_leaves_a_loadable_state(tmp_path, monkeypatch, at, damaged):
    two(tmp_path)
    if damaged:
        (tmp_path / "checkpoint" / "state.json").write_text("{")
    count = 0

    def killing(operation):
        def run(*args, **options):
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            return operation(*args, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "write_file", killing(durable_files.write_file))
        patch.setattr(durable_files, "sync_folder", killing(durable_files.sync_folder))
        patch.setattr(shutil, "rmtree", killing(shutil.rmtree))
        patch.setattr(type(tmp_path), "rename", killing(type(tmp_path).rename))
        if at < 7:  # two writes, two syncs, one removal, two renames
            with pytest.raises(Killed):
                checkpoint.save(tmp_path, {"step": 3, "x": torch.ones(500)})
        else:
            checkpoint.save(tmp_path, {"step": 3, "x": torch.ones(500)})
    old = 1 if damaged else 2
    whole = at >= 2  # both files are there, under whatever name
    assert checkpoint.load(tmp_path)["step"] == (3 if whole else old)
    # And the next save builds on whatever was left.
    checkpoint.save(tmp_path, {"step": 4})
    assert checkpoint.load(tmp_path)["step"] == 4
    assert not (tmp_path / "checkpoint.part").exists()


def test_a_kill_during_the_first_save_leaves_no_checkpoint(tmp_path):
    part = tmp_path / "checkpoint.part"
    part.mkdir()
    (part / "tensors.safetensors").write_bytes(b"half")
    assert not checkpoint.exists(tmp_path)
    checkpoint.save(tmp_path, {"step": 1})
    assert checkpoint.load(tmp_path) == {"step": 1}
