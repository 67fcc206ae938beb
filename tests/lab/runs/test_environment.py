"""The facts about the machine are plain, true and name no place on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from pomona.lab.runs import environment as env
from pomona.version import __version__


def test_the_environment_is_described_by_plain_values():
    facts = env.describe_environment()
    assert json.loads(json.dumps(facts)) == facts
    assert set(facts) == {"versions", "machine", "commit", "command"}
    assert facts["versions"]["pomona"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["cpu"]
    assert len(facts["machine"]["gpus"]) == torch.cuda.device_count()


def test_a_package_that_is_missing_has_no_version():
    assert env._package_version("no-such-package-anywhere") is None


def test_the_command_line_has_no_absolute_paths(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/pomona", "train", "a b.toml"])
    assert env.command_line() == "pomona train 'a b.toml'"


def test_the_commit_is_that_of_this_repository_or_none(monkeypatch, tmp_path):
    env.current_commit.cache_clear()
    found = env.current_commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{12,}\+?", found)
    # A copy installed inside somebody else's repository is not of that repository's commit.
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    site = tmp_path / "site" / "pomona" / "lab" / "runs"
    site.mkdir(parents=True)
    monkeypatch.setattr(env, "__file__", str(site / "environment.py"))
    env.current_commit.cache_clear()
    assert env.current_commit() is None
    # In its own repository it is.
    own = tmp_path / "pomona" / "lab" / "runs"
    own.mkdir(parents=True)
    monkeypatch.setattr(env, "__file__", str(own / "environment.py"))
    env.current_commit.cache_clear()
    assert re.fullmatch(r"[0-9a-f]{12}", str(env.current_commit()))
    env.current_commit.cache_clear()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    env.current_commit.cache_clear()
    assert env.current_commit() is None
    env.current_commit.cache_clear()


def test_the_environment_names_no_path_of_this_machine():
    assert str(Path.home()) not in json.dumps(env.describe_environment()["machine"]) + json.dumps(
        env.describe_environment()["versions"]
    )
