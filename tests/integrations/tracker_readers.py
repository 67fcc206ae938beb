"""Readers of what trackers have written: the configuration, and the values of each key by step, in their order."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, list[tuple[int, float]]]

WANDB_BLOCK = 32768  # bytes; a .wandb file has the layout of a LevelDB log, behind a header of 7 bytes
FULL, LAST = 1, 4  # kinds of fragments with which a record ends


def read_tensorboard(folder: Path) -> tuple[str, Values]:
    """Return the text of the configuration and the scalars, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return config, {key: [(e.step, e.value) for e in events.Scalars(key)] for key in events.Tags()["scalars"]}


def read_mlflow(folder: Path) -> tuple[str, Values]:
    """Return the parameters as lines and the metrics of the only run in a store, which must have ended."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(folder.resolve().as_uri())
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status in ("FINISHED", "KILLED")
    values = {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics
    }
    return "\n".join(f"{key}={value}" for key, value in run.data.params.items()), values


def read_wandb(folder: Path) -> tuple[str, Values]:
    """Return the configuration as lines and the history of the offline runs in a folder, which must have one id."""
    import wandb

    wandb.teardown()  # waits for its process, which writes the end of a file after `finish` has returned
    config, values, ids = {}, {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in read_wandb_records(file.read_bytes()):
            for item in record.run.config.update:
                config[item.key] = item.value_json
            if record.run.run_id:
                ids.add(record.run.run_id)
            row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for key in row.keys() - {"_step", "_runtime", "_timestamp"}:
                values.setdefault(key, []).append((row["_step"], row[key]))
    assert len(ids) == 1
    return "\n".join(f"{key}={value}" for key, value in config.items()), values


def read_wandb_records(data: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, fragments = 7, b""
    while position + 7 <= len(data):
        left = WANDB_BLOCK - position % WANDB_BLOCK
        if left < 7:  # the rest of a block that is too short for the header of a fragment
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        fragments += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(fragments)
            fragments = b""
            yield record


def read_trackio(folder: Path) -> tuple[str, Values]:
    """Return the configuration and the metrics of the only run in a folder of trackio."""
    with sqlite3.connect(folder / "pomona.db") as database:
        config = database.execute("select config from configs").fetchall()
        rows = database.execute("select step, metrics, run_name from metrics order by id").fetchall()
    assert len({name for _, _, name in rows}) == 1
    values: Values = {}
    for step, metrics, _ in rows:
        for key, value in json.loads(metrics).items():
            values.setdefault(key, []).append((step, value))
    return str(config[0][0]), values


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb, "trackio": read_trackio}
