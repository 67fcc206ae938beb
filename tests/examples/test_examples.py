"""Every script and notebook of examples/ runs from beginning to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import slow_unless

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
# The package that an example needs beyond those of Pomona.
NEEDS = {
    "finetune_transformer.py": "transformers",
    "prune_language_model.py": "transformers",
    "prune_transformer.ipynb": "transformers",
    "shrink_and_export.py": "torch_pruning",
    "deploy_cnn.ipynb": "torch_pruning",
}
# Shorter than by default; what the script must print in the end.
OPTIONS = {
    "finetune_transformer.py": ["--epochs", "2"],
    "prune_language_model.py": ["--steps", "20", "--windows", "16"],
    "shrink_and_export.py": ["--epochs", "2"],
    "sweep_methods.py": ["--epochs", "1", "--sparsities", "0.9"],
    "own_method.py": [],
}
PRINTED = {
    "finetune_transformer.py": r"80% sparse: [\d.]+%, saved in sparse-vit",
    "prune_language_model.py": r"75\.00% of .*\nperplexity: dense [\d.]+, pruned [\d.]+\nMACs [\s\S]*packed\.safe",
    "shrink_and_export.py": r"largest difference of an output (0\.0e\+00|\d\.\de-0[5-9])",
    "sweep_methods.py": r"dpf .*90%.*\nincremental .*90%",
    "own_method.py": r"incremental +90% sparse: .*\nrow_relative +90% sparse",
}


def environment() -> dict[str, str]:
    """Return the environment of an example: this tree, and one thread as in all tests."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_every_script_has_a_test() -> None:
    assert set(SCRIPTS) == set(OPTIONS) == set(PRINTED)


@pytest.mark.parametrize("script", slow_unless(["own_method.py"], SCRIPTS))
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(script, "torch"))
    command = [sys.executable, str(EXAMPLES / script), *OPTIONS[script]]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[script], done.stdout), done.stdout


def prune_language_model(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run the example on a GPT-2 made from a config; without a tokenizer its tokens are the bytes of the text."""
    transformers = pytest.importorskip("transformers")
    if not (folder / "dense").exists():
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / "dense")
        (folder / "text.txt").write_text("To be, or not to be, that is the question: " * 200)
    command = [sys.executable, str(EXAMPLES / "prune_language_model.py"), *words.split()]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_a_language_model_of_a_folder_is_pruned_exported_and_timed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = "--method wanda --pattern 2:4 --format csr --windows 8 --out out"
    done = prune_language_model(tmp_path, f"--model dense --text text.txt {words}")
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED["prune_language_model.py"].replace("75", "50"), done.stdout), done.stdout
    pruned = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for block in pruned.transformer.h:
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            kept = (layer.weight.T.reshape(-1, 4) != 0).sum(1)  # of every four inputs of an output
            assert bool((kept == 2).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model nowhere --text text.txt", "--model nowhere is no folder with a config.json"),
        ("--model dense --text nowhere.txt", "--text nowhere.txt cannot be read: "),
        ("--model dense --text dense/model.safetensors", "--text dense/model.safetensors cannot be read: "),
        ("--model dense --text short.txt", "the text has 1 windows of 64 tokens, fewer than 10: give a longer one"),
        ("--text short.txt", "the text has 1 windows of 64 tokens, fewer than 10: give a longer one"),
        ("--model dense --text text.txt --windows 0", "--windows must be 1 or more, got 0"),
        ("--model dense --text text.txt --pattern 3:5", "NM(n=3, m=5) fits no layer of GPT2LMHeadModel"),
        ("--model dense --text text.txt --sparsity 75", "the pruned fraction and must lie in [0, 1), got 75"),
    ],
)  # fmt: skip
def test_mistakes_with_a_language_model_are_explained(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("To be, or not to be, that is the question: " * 2)
    done = prune_language_model(tmp_path, words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "sparse-llama").exists()


@pytest.mark.slow
def test_the_tokenizer_of_a_language_model_goes_with_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"be": 0, "to": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    prune_language_model(tmp_path, "--model nowhere")  # which makes the folder
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    wrapped.save_pretrained(tmp_path / "dense")
    done = prune_language_model(tmp_path, "--model dense --text text.txt --tokens 16 --out out")
    assert done.returncode == 0, done.stderr
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("to be").input_ids == [1, 0]


@pytest.mark.parametrize("notebook", slow_unless(["quick_start.ipynb"], NOTEBOOKS))
def test_a_notebook_runs(notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip(NEEDS.get(notebook, "torch"))
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    content = nbformat.read(EXAMPLES / notebook, as_version=4)
    nbformat.validate(content)
    kernel = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(content, timeout=300, resources=kernel).execute()
    counts = [cell.execution_count for cell in done.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("example", [*SCRIPTS, *NOTEBOOKS])
def test_an_example_is_listed(example: str) -> None:
    assert f"({example})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs(notebook: str) -> None:
    cells = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
