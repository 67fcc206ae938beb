"""The commands `methods`, `data` and `check`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys

import pytest
from rich.cells import cell_len

from pomona.methods import METHODS


def test_methods_lists_the_registry(run_command):
    code, out, err = run_command("methods", "--json")
    listed = {method["name"]: method for method in json.loads(out)}
    assert (code, err) == (0, "")
    assert set(listed) == set(METHODS)
    dpf = listed["dpf"]
    assert (dpf["paper"], dpf["weights"]) == ("Lin et al., ICLR 2020", "soft")
    assert dpf["options"]["every"] is None  # 16, or fewer in a short training
    assert dpf["options"]["schedule"] == {"name": "cubic", "start": 0.0, "until": 0.75}
    for method in listed.values():  # the options as printed make the method they were read from
        assert METHODS.resolve({"name": method["name"], **method["options"]}) == METHODS[method["name"]]()


def test_data_lists_present_and_missing_data_sets(run_command, work_folder):
    code, out, _ = run_command("data", "--json", "--data-dir", "mine")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert entries["digits"]["present"]
    assert not entries["cifar10"]["present"]
    assert entries["cifar10"]["looked"][0] == "mine/cifar-10-batches-bin"
    (work_folder / "mine" / "cifar-10-batches-bin").mkdir(parents=True)
    _, out, _ = run_command("data", "--json", "--data-dir", "mine")
    assert next(e for e in json.loads(out) if e["name"] == "cifar10")["path"] == "mine/cifar-10-batches-bin"


def test_check_describes_the_machine(run_command):
    import torch

    code, out, _ = run_command("check", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["machine"]["cores"] == os.cpu_count()
    assert len(found["machine"]["gpus"]) == torch.cuda.device_count()
    assert found["data"] == ["digits"]


@pytest.mark.parametrize("command", ["methods", "data", "check"])
def test_commands_print_tables_without_json(run_command, command):
    code, out, err = run_command(command)
    assert (code, err) == (0, "")
    assert {"methods": "dpf", "data": "pomona data --download cifar10", "check": "torch"}[command] in out


def test_methods_explains_one_method(run_command):
    code, out, err = run_command("methods", "dpf")
    assert (code, err) == (0, "")
    for text in ("Lin et al., ICLR 2020", "p: steps between mask updates", "pm.DPF(sparsity=0.9)", "pomona train"):
        assert text in out
    code, out, _ = run_command("methods", "dpf", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["name"] == "dpf"
    assert found["options"]["settle"] == 0.1
    assert found["meanings"].keys() == found["options"].keys()


def test_the_command_of_an_explanation_is_accepted(run_command):
    for name in ("dpf", "lottery", "srigl"):
        words = shlex.split(json.loads(run_command("methods", name, "--json")[1])["command"])
        assert words[0] == "pomona"
        assert run_command(*words[1:], "--dry-run", "--json")[0] == 0


def test_data_explains_one_data_set(run_command, work_folder):
    code, out, err = run_command("data", "cifar10", "--data-dir", "mine")
    assert (code, err) == (0, "")
    for text in ("mine/cifar-10-batches-bin", "pomona data --download cifar10", "50 000 + 10 000", "Krizhevsky"):
        assert text in out
    assert re.search(r"^found +no", out, re.MULTILINE)
    (work_folder / "mine" / "cifar-10-batches-bin").mkdir(parents=True)
    _, out, _ = run_command("data", "cifar10", "--data-dir", "mine")
    assert re.search(r"^found +mine/cifar-10-batches-bin", out, re.MULTILINE)
    found = json.loads(run_command("data", "imdb", "--json")[1])
    assert found["options"]["maxlen"] == 80
    assert found["meanings"]["maxlen"] == "tokens per review"
    assert found["downloads"]["aclImdb"][0]["url"].endswith("aclImdb_v1.tar.gz")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["methods", "dfp"], "unknown method 'dfp': did you mean 'dpf'?"),
        (["data", "cifar1"], "unknown data set 'cifar1': did you mean 'cifar10'?"),
        (["data", "mnist", "--download", "cifar10"], "name one data set"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(assert_refused, words, expected):
    assert_refused(words, expected)


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_of_methods_is_aligned(run_command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    listed = json.loads(run_command("methods", "--json")[1])
    lines = run_command("methods")[1].splitlines()
    assert {cell_len(line) for line in lines} == {columns}
    borders = {tuple(i for i, char in enumerate(line) if char in "┳╇│┃┼┴") for line in lines if line[0] in "│┃"}
    assert len(borders) == 1  # every line has its borders in the same columns
    rows = [[cell.rstrip() for cell in line.split("│")[1:-1]] for line in lines if line[0] == "│"]
    starts = {cells[2].index(cells[2].split()[1]) for cells in rows if len(cells[2].split()) > 1}
    assert len(starts) == 1  # and every default begins in the same column, beside its option
    shown: dict[str, list[str]] = {}
    for name, _, options in rows:
        if name.strip():
            shown[name.strip()] = []
        if options.startswith(" ") and options[1] != " ":
            shown[list(shown)[-1]].append(options.split()[0])
    assert shown == {method["name"]: list(method["options"]) for method in listed}
