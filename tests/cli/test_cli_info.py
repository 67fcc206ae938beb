"""The commands `methods`, `data` and `check`."""

from __future__ import annotations

import json
import os
import sys

import pytest

from pomona.methods import METHODS


def test_methods_lists_the_registry(run_command):
    code, out, err = run_command("methods", "--json")
    listed = {method["name"]: method for method in json.loads(out)}
    assert (code, err) == (0, "")
    assert set(listed) == set(METHODS)
    dpf = listed["dpf"]
    assert (dpf["paper"], dpf["weights"]) == ("Lin et al., ICLR 2020", "soft")
    assert dpf["options"]["every"] == 16
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
