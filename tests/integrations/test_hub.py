"""Folders of models and the Hugging Face Hub: saved, loaded, uploaded and refused."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from hub_server import running_hub
from run_helpers import digits_recipe
from safetensors.torch import load_file, save_file
from torch import nn

import pomona as pm
from pomona.cli import main
from pomona.errors import PomonaError
from pomona.integrations import hub
from pomona.lab import train


class Net(nn.Module):
    """A network of the user's own."""

    def __init__(self, hidden: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


def prune(model: nn.Module, sparsity: float = 0.75, **options) -> pm.Pruner:
    """Prune a model at random and return the finished pruner."""
    pruner = pm.Random(sparsity=sparsity, **options)
    pruner.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1)
    pruner.finish()
    return pruner


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two models have the same tensors, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("hub") / "run"
    method = "dpf(sparsity=0.75, every=2, pattern='balanced(block=8)')"
    train(digits_recipe(method, epochs=1, model="mlp(hidden=[32])"), folder)
    return folder


# ---- round trips


def test_a_network_of_pomona_comes_back_by_its_name(tmp_path):
    model = pm.models.build("digits_cnn", rho=0.5)
    pruner = prune(model)
    folder = hub.save_pretrained(
        model, tmp_path / "a" / "b", architecture={"name": "digits_cnn", "rho": 0.5}, pruner=pruner
    )
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "masks.safetensors",
        "README.md",
        "pomona.json",
    }
    loaded = hub.from_pretrained(folder)
    assert same_state(loaded, model)
    assert not loaded.training
    masks = hub.load_masks(folder)
    assert masks.keys() == pruner.masks().keys()
    assert all(torch.equal(mask, pruner.masks()[name]) for name, mask in masks.items())
    assert json.loads((folder / "pomona.json").read_text())["method"]["name"] == "random"


@pytest.mark.parametrize("given", [Net(4, 3), Net, lambda hidden, depth: Net(hidden, depth)])
def test_a_class_of_the_user_is_built_from_the_saved_options(tmp_path, given):
    model = Net(4, 3)
    prune(model)
    hub.save_pretrained(model, tmp_path, options={"hidden": 4, "depth": 3})
    assert same_state(hub.from_pretrained(tmp_path, model=given), model)


def test_a_packed_network_stays_packed(tmp_path):
    model = pm.models.build("mlp", in_features=64, hidden=[32], num_classes=10)
    pruner = prune(model, pattern="balanced(block=8)")
    packed = pm.compress(model, policy="all")
    options = {"name": "mlp", "in_features": 64, "hidden": [32], "num_classes": 10}
    hub.save_pretrained(packed, tmp_path, architecture=options, pruner=pruner)
    loaded = hub.from_pretrained(tmp_path)
    assert same_state(loaded, packed)
    assert same_state(pm.decompress(loaded), model)
    (name,) = pruner.masks()
    assert f"| `{name}` | 32×64 | 2,048 | 512 | 75.00% |" in (tmp_path / "README.md").read_text()


def test_saving_again_replaces_the_old_files(tmp_path):
    model = Net()
    hub.save_pretrained(model, tmp_path, pruner=prune(model))
    hub.save_pretrained(Net(), tmp_path)
    assert hub.load_masks(tmp_path) == {}
    hub.from_pretrained(tmp_path, model=Net)


def test_a_wrapped_model_is_unwrapped(tmp_path):
    model = Net()
    hub.save_pretrained(nn.DataParallel(model), tmp_path)
    assert same_state(hub.from_pretrained(tmp_path, model=Net), model)


# ---- transformers


@pytest.fixture
def bert():
    """Return a small BERT classifier whose weights are 3/4 zero, with its pruner."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    model = transformers.BertForSequenceClassification(config)
    return model, prune(model)


def test_transformers_reads_its_own_folder_with_exact_zeros(tmp_path, bert):
    from transformers import AutoModel, AutoModelForSequenceClassification, BertModel

    model, pruner = bert
    hub.save_pretrained(model, tmp_path, pruner=pruner, card=hub.CardFacts(license="apache-2.0"))
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "masks.safetensors"}
    assert same_state(AutoModelForSequenceClassification.from_pretrained(tmp_path), model)
    assert same_state(hub.from_pretrained(tmp_path), model)
    body = AutoModel.from_pretrained(tmp_path).state_dict()
    for name, mask in pruner.masks().items():
        if name.startswith("bert."):
            assert not body[name.removeprefix("bert.")][~mask].any()
    with pytest.raises(PomonaError, match="the model has no weights called bert.encoder"):
        hub.from_pretrained(tmp_path, model=BertModel)  # the masks have the names of the saved class


def test_a_transformers_folder_that_names_code_is_refused(tmp_path, bert):
    hub.save_pretrained(bert[0], tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for change in ({"auto_map": {"AutoModel": "mine.Model"}}, {"attn_implementation": "stranger/kernel"}):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(PomonaError, match=f"asks for code from elsewhere .{next(iter(change))} in config.json"):
            hub.from_pretrained(tmp_path)


def test_a_transformers_folder_with_pickled_weights_is_refused(tmp_path, bert):
    hub.save_pretrained(bert[0], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(bert[0].state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(PomonaError, match="was not read by transformers"):
        hub.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["os", "pipeline", "AutoModel", "BertConfig", "Nobody"])
def test_only_models_of_transformers_are_built(tmp_path, bert, name):
    hub.save_pretrained(bert[0], tmp_path)
    path = tmp_path / "pomona.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class": name}))
    with pytest.raises(PomonaError, match=f"holds a '{name}', which is no model of transformers"):
        hub.from_pretrained(tmp_path)


# ---- refused


def test_weights_that_are_pruned_and_not_zero_are_refused(tmp_path):
    model = Net()
    masks = prune(model).masks()
    with torch.no_grad():
        model.layers[0].weight.fill_(1)
    with pytest.raises(PomonaError, match=r"layers.0.weight has 192 weights that are pruned and not zero"):
        hub.save_pretrained(model, tmp_path / "folder", masks=masks)
    with pytest.raises(PomonaError, match="the model has no weights called other"):
        hub.save_pretrained(model, tmp_path / "folder", masks={"other": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(PomonaError, match="the mask of layers.0.weight has shape"):
        hub.save_pretrained(model, tmp_path / "folder", masks={"layers.0.weight": torch.ones(2, dtype=torch.bool)})
    assert not (tmp_path / "folder").exists()


def test_weights_changed_after_saving_are_refused(tmp_path):
    model = Net()
    hub.save_pretrained(model, tmp_path, pruner=prune(model))
    weights = {name: torch.ones_like(value) for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(PomonaError, match="was not written by pm.save"):
        hub.from_pretrained(tmp_path, model=Net)
    pm.save(Net(), tmp_path / "model.safetensors")  # a valid file, whose weights are dense
    with pytest.raises(PomonaError, match="pruned and not zero"):
        hub.from_pretrained(tmp_path, model=Net)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[1]", "it holds no object"),
        ("[" * 100_000, "is damaged"),
        ('"' + "x" * 2_000_000 + '"', "has 2,000,002 bytes, and at most 1,000,000 are read"),
        ("{}", "has version None, and this pomona reads version 1"),
        ('{"version": 1, "format": "pomona", "class": 3, "options": null}', "has no valid class: '3'"),
        ('{"version": 1, "format": "pickle", "class": "Net", "options": null}', "has format 'pickle'"),
        ('{"version": 1, "format": "pomona", "class": "Net", "options": [1]}', "has no valid options"),
        (
            '{"version": 1, "format": "pomona", "class": "Net", "options": {"hidden": 10000000000}}',
            "too few for a network",
        ),
        (
            '{"version": 1, "format": "pomona", "class": "Net", "options": {"evil": 1}}',
            "does not take the saved options",
        ),
    ],
)
def test_a_forged_configuration_is_refused_with_one_sentence(tmp_path, text, message):
    hub.save_pretrained(Net(), tmp_path)
    (tmp_path / "pomona.json").write_text(text)
    with pytest.raises(PomonaError, match=message) as caught:
        hub.from_pretrained(tmp_path, model=Net)
    assert "\n" not in str(caught.value)


def test_a_pickled_model_file_is_refused_and_not_run(tmp_path):
    class Exploit:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    hub.save_pretrained(Net(), tmp_path)
    for name in ("model.safetensors", "masks.safetensors"):
        kept = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        (tmp_path / name).write_bytes(pickle.dumps(Exploit()))
        with pytest.raises(PomonaError, match=f"{name}' is damaged"):
            hub.from_pretrained(tmp_path, model=Net)
        if kept is not None:
            (tmp_path / name).write_bytes(kept)
    assert not (tmp_path / "executed").exists()


def test_sources_and_targets_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(PomonaError, match="is neither a folder nor a repository, as user/name"):
        hub.from_pretrained("./missing")
    with pytest.raises(PomonaError, match="has no pomona.json: give a folder that hub.save_pretrained has written"):
        hub.from_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PomonaError, match="cannot be written"):
        hub.save_pretrained(Net(), tmp_path / "file")
    with pytest.raises(PomonaError, match="options and metrics take numbers, texts and lists"):
        hub.save_pretrained(Net(), tmp_path / "folder", options={"layer": Net})
    with pytest.raises(PomonaError, match="metrics takes names and numbers"):
        hub.CardFacts(metrics={"accuracy": "high"})
    assert not (tmp_path / "folder").exists()


def test_a_network_that_no_name_builds_is_asked_for(tmp_path):
    hub.save_pretrained(Net(), tmp_path)
    with pytest.raises(PomonaError, match="holds a Net, which is not in pm.models: pass the class, model=Net"):
        hub.from_pretrained(tmp_path)


def test_missing_packages_are_named_with_the_line_that_installs_them(tmp_path, bert, monkeypatch):
    hub.save_pretrained(bert[0], tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (
        lambda: hub.from_pretrained(tmp_path),
        lambda: hub.from_pretrained("user/name"),
        lambda: hub.push_to_hub(tmp_path, "user/name"),
    ):
        with pytest.raises(PomonaError, match=r"pip install 'pomona\[huggingface\]'"):
            call()


# ---- the Hub


@pytest.fixture
def hub_server(monkeypatch, tmp_path):
    """Return a substitute for the Hub, to which huggingface_hub sends all its requests."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with running_hub() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield server


def test_a_folder_is_uploaded_and_downloaded(tmp_path, hub_server):
    model = pm.models.build("digits_cnn", rho=0.5)
    architecture = {"name": "digits_cnn", "rho": 0.5}
    folder = hub.save_pretrained(model, tmp_path / "folder", architecture=architecture, pruner=prune(model))
    (folder / "notes.py").write_text("import os")
    (folder / "optimizer.pt").write_bytes(b"pickle")
    address = hub.push_to_hub(folder, "user/sparse-digits", private=True, token="hf_test")
    assert address == f"{hub_server.address}/user/sparse-digits/commit/{'a' * 40}"
    stored = hub_server.repositories["user/sparse-digits"]
    assert set(stored) == {"model.safetensors", "masks.safetensors", "README.md", "pomona.json"}
    assert stored["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert "private" in (hub_server.created[0].get("visibility"), *hub_server.created[0])  # by either of its options
    stored["evil.py"] = b"raise SystemExit"
    loaded = hub.from_pretrained("user/sparse-digits", cache_dir=tmp_path / "cache")
    assert same_state(loaded, model)
    assert not list((tmp_path / "cache").rglob("*.py"))


def test_a_repository_over_the_size_limit_is_refused_before_its_download(tmp_path, hub_server):
    folder = hub.save_pretrained(pm.models.build("digits_cnn"), tmp_path / "folder", architecture="digits_cnn")
    hub.push_to_hub(folder, "user/digits", token="hf_test")
    stored = hub_server.repositories["user/digits"]
    size = sum(map(len, stored.values()))
    stored["unused.bin"] = b"0" * 10_000  # not among the files that are downloaded, and not counted
    hub_server.requests.clear()
    with pytest.raises(PomonaError, match=rf"user/digits has {size:,} bytes to download, and at most {size - 1:,} are"):
        hub.from_pretrained("user/digits", cache_dir=tmp_path / "cache", max_bytes=size - 1)
    assert not any("/resolve/" in path for path in hub_server.requests)
    hub.from_pretrained("user/digits", cache_dir=tmp_path / "cache", max_bytes=size)


def test_a_downloaded_repository_is_read_from_the_cache_without_the_hub(tmp_path, hub_server):
    model = pm.models.build("digits_cnn")
    folder = hub.save_pretrained(model, tmp_path / "folder", architecture="digits_cnn")
    hub.push_to_hub(folder, "user/digits", token="hf_test")
    hub.from_pretrained("user/digits", cache_dir=tmp_path / "cache")
    hub_server.shutdown()
    hub_server.server_close()
    assert same_state(hub.from_pretrained("user/digits", cache_dir=tmp_path / "cache"), model)


def test_a_missing_repository_and_a_refused_upload_are_one_sentence(tmp_path, hub_server):
    with pytest.raises(PomonaError, match="user/nothing was not downloaded") as caught:
        hub.from_pretrained("user/nothing", cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    hub.save_pretrained(Net(), tmp_path / "folder")
    with pytest.raises(PomonaError, match="is neither a folder nor a repository"):
        hub.push_to_hub(tmp_path / "folder", "no-user")
    hub_server.server_close()
    with pytest.raises(PomonaError, match="was not uploaded to user/x"):
        hub.push_to_hub(tmp_path / "folder", "user/x", token="hf_test")


# ---- runs


def test_a_run_is_written_with_its_card(tmp_path, digits_run, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["hub", str(digits_run), "--out", "folder", "--license", "mit", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["commit"] is None
    assert set(made["files"]) == {"model.safetensors", "masks.safetensors", "README.md", "pomona.json"}
    loaded = hub.from_pretrained("folder")
    weights = load_file(digits_run / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    summary = json.loads((digits_run / "summary.json").read_bytes())
    text = Path("folder/README.md").read_text()
    assert f"| accuracy | {summary['accuracy']:.6g} |" in text
    assert (digits_run / "recipe.toml").read_text().strip() in text
    assert "| pattern | `balanced(block=8" in text
    assert main(["hub", str(digits_run)]) == 0
    assert "README.md" in capsys.readouterr().out
    assert hub.load_masks(digits_run / "hub").keys() == hub.load_masks("folder").keys()


def test_the_packed_weights_of_a_run_are_written(tmp_path, digits_run, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(digits_run), "--policy", "all", "--out", "packed.safetensors", "--seconds", "0"]) == 0
    assert main(["hub", str(digits_run), "--model", "packed.safetensors", "--out", "folder"]) == 0
    assert same_state(hub.from_pretrained("folder"), pm.load("packed.safetensors"))


def test_the_hub_command_uploads_and_refuses(tmp_path, digits_run, capsys, monkeypatch, hub_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    assert main(["hub", str(digits_run), "--out", "folder", "--push", "user/run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commit"].endswith("a" * 40)
    assert main(["hub", str(digits_run), "--out", "other", "--push", "nobody"]) == 2
    assert main(["hub", "missing"]) == 2
    assert "is not a finished run" in capsys.readouterr().err
    assert not Path("other").exists()
