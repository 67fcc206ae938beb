"""The live page: its answers while a run trains, who may ask, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from report_runs import metrics, write_run

from pomona.errors import PomonaError
from pomona.report import page
from pomona.report.live import LiveServer


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Return a server of one run that is under way."""
    monkeypatch.setattr(page, "read_plotly_script", lambda: "Plotly = {};")
    with LiveServer([write_run(tmp_path / "run", complete=False)], port=0) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def fetch(server: LiveServer, path: str = "", **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_the_page_says_that_it_is_live(server):
    status, text = fetch(server)
    assert status == 200
    assert b'data-live="true"' in text


def test_data_come_when_they_are_new(server):
    status, body = fetch(server, "report.json?version=")
    data = json.loads(body)
    assert status == 200
    assert len(data["figures"]["learning"][0]["data"][0]["y"]) == 3
    assert "epoch 3 of 3" in data["contents"]["summary"]
    assert fetch(server, f"report.json?version={data['version']}") == (204, b"")
    (run,) = server.sources
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(4, 90.0, 0.9, {}, 1)[-1]) + "\n")
    status, body = fetch(server, f"report.json?version={data['version']}")
    assert status == 200
    assert len(json.loads(body)["figures"]["learning"][0]["data"][0]["y"]) == 4


def test_only_this_machine_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    assert fetch(server, Host="evil.example:80")[0] == 403
    assert fetch(server, "../../etc/passwd")[0] == 404


def test_a_port_in_use_and_a_folder_without_runs_are_refused(server, tmp_path):
    with pytest.raises(PomonaError, match="give another with --port"):
        LiveServer(server.sources, server.server_address[1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PomonaError, match="holds no run"):
        LiveServer([tmp_path / "empty"], 0)


def test_ctrl_c_ends_the_command_cleanly(tmp_path):
    command = [sys.executable, "-m", "pomona", "watch", str(write_run(tmp_path / "run")), "--port", "0"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore Ctrl-C
    )
    assert process.stderr is not None
    assert "http://127.0.0.1:" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == ""
    process.stderr.close()
