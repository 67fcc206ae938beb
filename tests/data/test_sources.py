"""Locating data sets, their catalog, and validation parts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from pomona.data import SOURCES, catalog, load, locate
from pomona.errors import PomonaError


def test_search_order_is_given_folder_environment_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given, env, cache = tmp_path / "given", tmp_path / "env", tmp_path / "cache" / "pomona"
    monkeypatch.setenv("POMONA_DATA", str(env))
    for base in (cache, env, given):
        (base / "aclImdb").mkdir(parents=True)
        assert locate("imdb", given) == base / "aclImdb"
    assert locate("imdb") == env / "aclImdb"


def test_error_for_a_missing_data_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POMONA_DATA", str(tmp_path / "env"))
    with pytest.raises(PomonaError) as error:
        load("cifar10", root=tmp_path / "given")
    text = str(error.value)
    for base in ("given", "env", "cache/pomona"):
        assert str(tmp_path / base / "cifar-10-batches-bin") in text
    assert "run `pomona data --download cifar10`" in text
    assert "--data-dir" in text


def test_unknown_names_and_options(tmp_path: Path):
    with pytest.raises(PomonaError, match="unknown data set 'cifar': did you mean 'cifar10'"):
        load("cifar")
    with pytest.raises(PomonaError, match="unknown option of data set 'imdb' 'max_len': did you mean 'maxlen'"):
        load("imdb", max_len=3)
    with pytest.raises(PomonaError, match="maxlen takes int, got 'long'"):
        load("imdb", maxlen="long")
    with pytest.raises(PomonaError, match="built in"):
        locate("digits")


def test_catalog_lists_every_data_set(tmp_path: Path):
    (tmp_path / "covertype").mkdir()
    entries = {e.name: e for e in catalog(tmp_path)}
    assert set(entries) == set(SOURCES)
    assert entries["digits"].present
    assert entries["digits"].path is None
    assert entries["covertype"].path == str(tmp_path / "covertype")
    assert not entries["mnist"].present
    assert str(tmp_path / "mnist") in entries["mnist"].looked
    assert all(e.get and e.licence and e.citation for e in entries.values())
    json.dumps([dataclasses.asdict(e) for e in entries.values()])


@pytest.mark.parametrize(("validation", "count"), [(47, 47), (0.1, 135), (0, 0), (0.0, 0)])
def test_validation_part_is_held_out(validation: float, count: int):
    whole, data = load("digits"), load("digits", validation=validation, seed=4)
    assert torch.equal(whole.test.x, data.test.x)
    if not count:
        assert data.valid is None
        return
    assert (len(data.train), len(data.valid)) == (1347 - count, count)
    parts = torch.cat([data.train.x, data.valid.x]).flatten(1).tolist()
    assert sorted(parts) == sorted(whole.train.x.flatten(1).tolist())
    again, other = load("digits", validation=count, seed=4), load("digits", validation=count, seed=5)
    assert torch.equal(data.valid.x, again.valid.x)
    assert not torch.equal(data.valid.x, other.valid.x)


@pytest.mark.parametrize("validation", [-1, 1347, 1.0, 1.5, float("nan")])
def test_invalid_validation_sizes_are_refused(validation: float):
    with pytest.raises(PomonaError, match="a count from 0 to 1346 or a fraction below 1"):
        load("digits", validation=validation)


def test_describe_and_part():
    data = load("digits", validation=100)
    facts = data.describe()
    json.dumps(facts)
    assert (facts["name"], facts["train"], facts["valid"], facts["test"]) == ("digits", 1247, 100, 450)
    assert facts["input_shape"] == [1, 8, 8]
    with pytest.raises(PomonaError, match="unknown part 'tests': did you mean 'test'"):
        data.part("tests")
    with pytest.raises(PomonaError, match="has no validation part"):
        load("digits").part("valid")
