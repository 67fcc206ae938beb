"""The parsers of files from strangers, each with valid files that are mutated and with files that are invented."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fuzz_case import Parser, file_parser, from_file
from fuzz_data_files import make_data_parsers
from fuzz_mutations import DEEP, HOSTILE_NUMBERS, HOSTILE_TEXTS, encode_json, mutate_bytes, mutate_tree
from fuzz_states import make_state_parsers
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors

import pomona as pm
from pomona.core.mask_file import encode_masks, read_masks
from pomona.data import SOURCES
from pomona.errors import PomonaError
from pomona.integrations import hub
from pomona.lab import Recipe, train
from pomona.lab.recipes.learning_rates import LEARNING_RATES
from pomona.lab.recipes.optimizers import OPTIMIZERS
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.runs import retrain
from pomona.lab.runs.folder import METRICS_FILE, MetricsWriter, ends_at_step
from pomona.lab.runs.model_file import load_model
from pomona.lab.sweeps.axes import expand_runs
from pomona.lab.sweeps.run_store import RunStore, read_record
from pomona.lab.tables.definitions import load_table
from pomona.methods import METHODS
from pomona.methods._round_store import RoundStore
from pomona.patterns.base import PATTERNS
from pomona.registry import Registry
from pomona.report.collection import ReportData
from pomona.report.page import make_sections
from pomona.report.run_data import RunData, read_run
from pomona.schedules import SCHEDULES
from pomona.sparse import files, ticket
from pomona.untrusted import reading

RECIPE = """\
name = "fuzz"
data = {name = "digits", validation = 100, augment = "none"}
model = "mlp(hidden=[8, 6])"
method = "dpf(sparsity=0.9, every=4, schedule='cubic(until=0.5)', pattern='balanced(block=8)')"
seed = 3
[optimizer]
name = "sgd"
lr = 0.2
momentum = 0.9
[rate]
name = "step"
milestones = [0.5, 2]
[train]
epochs = 3
batch_size = 256
device = "cpu"
[finetune]
epochs = 1
[sweep]
seed = [0, 1]
"method.sparsity" = [0.8, 0.9]
"""
PRIVATE_RECIPE = """\
data = "digits"
model = "digits_cnn(rho=0.5)"
[train]
epochs = 2
batch_size = 64
[private]
epsilon = 8
delta = 1e-5
method = "gip"
share = 0.2
schedule = "cubic"
"""
TABLE = """\
title = "a table"
seeds = [0, 1]
queue = ["A", "dpf"]
show = ["cost"]
[columns]
dense = { method = "dense" }
dpf = { method = "dpf(sparsity=0.5)", "finetune.epochs" = 1 }
mask = { from = "dpf", retrain = "init", budget = "flops" }
[[part]]
label = "A"
recipe = { data = "digits", model = "mlp", train = { epochs = 1 } }
set = { "train.clip" = 1.0 }
rows = { "method.sparsity" = [0.7, 0.8] }
paper = { dense = "92.48 ± 0.20", dpf = ["92.42 ± 0.14", "-"] }
"""
SETTINGS = (
    *("name", "seed", "data", "data.validation", "data.augment", "data.length", "model", "model.hidden", "model.name"),
    *("method", "method.sparsity", "method.every", "method.schedule", "method.pattern", "method.pattern.block"),
    *("method.allocation", "method.include", "method.exclude", "method.compressor", "optimizer", "optimizer.lr"),
    *("optimizer.betas", "rate", "rate.milestones", "rate.name", "train.epochs", "train.batch_size", "train.device"),
    *("train.average", "train.clip", "finetune", "finetune.epochs", "finetune.optimizer", "origin.run", "teacher.run"),
    *("teacher.file", "teacher.weight", "sweep", "sweep.seed", "a.b.c.d", "a" * 300, ".".join("a" * 40), "", "."),
)
VALUES = (
    *("0.5", "1", "-1", "0", "nan", "inf", "-inf", "1e400", "true", "[]", "{}", "''", '"x"', "[1, 2]", "[[1]]"),
    *("2020-01-01", "12:00:00", "{name='dpf'}", "dpf(0.9)", "dpf(sparsity=2)", "rigl", "sgd(lr=nan)", "adam(betas=1)"),
    *("unstructured", "balanced(0)", "balanced(block='x')", "nm(2, 4)", "2:4", "9:3", "filter", "cubic(until=-1)"),
    *("[0.5, 'x', nan]", "mlp(hidden=[1]*9)", "mlp(hidden=[2,3])", "lstm_lm(layers=1000000)", "resnet20", "cuda:99"),
    *("/", "..", "\x1b[31m", "9" * 5000, "[" * DEEP + "]" * DEEP, "x(" * DEEP, "'" * 50, "{a={b={c=1}}}", "-" * 500),
    *("1\nseed = 2", "oneshot(at=[0.5])", "erk", "global", "none", "power(1)", "kbit(-3)", "dense(x=1)", "f'{1}'"),
)


def make_parsers(folder: Path) -> list[Parser]:
    """Return all parsers; `folder` is for the valid files that are mutated."""
    torch.manual_seed(0)
    run = folder / "run"
    train(Recipe.load({**recipe_settings(), "train": {"epochs": 1, "batch_size": 512, "device": "cpu"}}), run)
    return [
        *make_setting_parsers(),
        *make_run_parsers(run),
        *make_model_parsers(folder, run),
        *make_data_parsers(),
        *make_state_parsers(folder / "stopped"),
    ]


def recipe_settings() -> dict[str, Any]:
    """Return settings of a small run."""
    method = "dpf(sparsity=0.9, every=2)"
    return {"name": "fuzz", "data": "digits", "model": "mlp(hidden=[8])", "method": method, "finetune": {"epochs": 1}}


# ---- recipes


def make_setting_parsers() -> list[Parser]:
    """Return the parsers of recipes, tables, settings and specs."""
    recipes = [
        RECIPE.encode(),
        *(path.read_bytes() for path in sorted(Path(pm.__file__).parents[1].glob("recipes/*.toml"))),
    ]
    recipes = [data for data in recipes if len(data) < 3000 and b"[[part]]" not in data and b"[private]" not in data]

    def draw_setting(draw: random.Random) -> tuple[str, ...]:
        return tuple(
            f"{draw.choice(SETTINGS)}={draw.choice((*VALUES, *HOSTILE_TEXTS, str(draw.choice(HOSTILE_NUMBERS))))}"
            for _ in range(draw.choice((1, 1, 2, 3)))
        )

    def draw_spec(draw: random.Random) -> str:
        text = draw.choice(VALUES + HOSTILE_TEXTS)
        return mutate_bytes(draw, text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape")

    def resolve_spec(text: str, _: Path) -> None:
        refusals = []
        for registry in registries:
            try:
                registry.resolve(text)
            except PomonaError as error:
                refusals.append(error)
        if len(refusals) == len(registries):
            raise refusals[0]

    registries: list[Registry[Any]] = [METHODS, PATTERNS, OPTIMIZERS, LEARNING_RATES, SCHEDULES, SOURCES]
    return [
        file_parser("recipe", 12, recipes, "recipe.toml", Recipe.load),
        file_parser("sweep", 2, [RECIPE.encode()], "sweep.toml", lambda path: expand_runs(path, {}, "runs")),
        file_parser("private recipe", 4, [PRIVATE_RECIPE.encode()], "private.toml", PrivateRecipe.load),
        file_parser("table", 3, [TABLE.encode()], "table.toml", load_table),
        Parser("setting", 12, [("seed=1",)], draw_setting, lambda texts, _: Recipe.load(recipe_settings(), texts)),
        Parser("spec", 6, ["dpf(0.9)"], draw_spec, resolve_spec),
    ]


# ---- run folders and records


def make_run_parsers(run: Path) -> list[Parser]:
    """Return the parsers of records and of the files of a run."""
    record = RunStore([run], []).runs
    described = next(iter(record.values())).to_record()
    names = ("recipe.toml", "summary.json", "metrics.jsonl", "env.json", "model.safetensors", "masks.safetensors")
    contents = {name: (run / name).read_bytes() for name in names}
    rounds = encode_json({"rounds": [{"round": 0, "sparsity": 0.5}], "every": 1})

    def draw_record(draw: random.Random) -> bytes:
        data = encode_json(described)
        return mutate_bytes(draw, data) if draw.random() < 0.4 else encode_json(mutate_tree(draw, described))

    def draw_folder(draw: random.Random) -> dict[str, bytes]:
        changed = draw.choice(names[:4])
        data = contents[changed]
        if changed == "metrics.jsonl" and draw.random() < 0.6:
            rows = mutate_tree(draw, [json.loads(line) for line in data.splitlines()])
            data = b"\n".join(map(encode_json, rows if isinstance(rows, list) else [rows]))
        elif changed.endswith(".json") and draw.random() < 0.6:
            data = encode_json(mutate_tree(draw, json.loads(data)))
        else:
            data = mutate_bytes(draw, data, list(contents.values())[:4])
        return contents | {changed: data}

    def parse_folder(files: Mapping[str, bytes], folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        found = read_run(folder)
        if found is not None:
            make_sections_of(found)
        try:
            retrain.training_cost(folder)
        finally:
            resume_metrics(folder)  # which cuts them off

    def parse_rounds(data: bytes, folder: Path) -> None:
        (folder / "rounds.json").write_bytes(data)
        RoundStore(folder, {"every": 1}).read_results()

    def parse_record(path: Path) -> None:
        found = read_record(path)
        if found is not None:
            found.cost()
            if found.recipe.finetune.epochs:
                found.before_finetune()

    return [
        Parser("record", 8, [encode_json(described)], draw_record, from_file("record.json", parse_record)),
        Parser("run folder", 6, [contents], draw_folder, parse_folder),
        Parser("lottery rounds", 2, [rounds], lambda draw: mutate_bytes(draw, rounds), parse_rounds),
    ]


def resume_metrics(folder: Path) -> None:
    """Read the metrics of a run as a resumed one does, up to half of their lines and beyond their end."""
    ends_at_step(folder / METRICS_FILE, None)
    for size in (2**63 - 1, (folder / METRICS_FILE).stat().st_size // 2):
        writer = MetricsWriter(folder, size)
        list(writer.read_rows())
        writer.close()


def make_sections_of(found: RunData) -> None:
    """Make the sections of a report of one run, whose HTML must hold no tag of the run's own."""
    with reading("the report"):
        sections = make_sections(ReportData("fuzz", (found,)))
    text = "".join(section.content for section in sections)
    if "<img" in text or "<script" in text:
        raise AssertionError("a report holds a tag of a run's file")


# ---- models, masks and tickets


def make_model_parsers(folder: Path, run: Path) -> list[Parser]:
    """Return the parsers of packed models, model files, masks, tickets and folders of the Hub."""
    network = pm.models.build("mlp", hidden=(32,), in_features=64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter[torch.rand_like(parameter) < 0.9] = 0
    structured = []
    for pattern, name in (("2:4", "2:4"), ("block((4, 4))", "blocks")):
        pm.prune(masked := copy.deepcopy(network), None if name == "2:4" else 0.75, pattern=pattern)
        structured.append(pm.compress(masked, policy="all", formats=[name], patience=0.01))
    packed = []
    for number, (model, options) in enumerate(
        (
            *((network, {}), (network, {"encoding": "csr"}), (pm.compress(network, policy="all", patience=0.01), {})),
            *((model, {}) for model in structured),
        )
    ):
        files.save(
            model, folder / f"{number}.safetensors", {"name": "mlp", "hidden": [32], "in_features": 64}, **options
        )
        packed.append((folder / f"{number}.safetensors").read_bytes())
    hub.save_pretrained(network, folder / "hub", architecture={"name": "mlp", "hidden": [32], "in_features": 64})
    hub_files = {path.name: path.read_bytes() for path in sorted((folder / "hub").iterdir())}
    masks = encode_masks({name: parameter != 0 for name, parameter in network.named_parameters()})
    trained = (run / "model.safetensors").read_bytes()

    def parse_hub(data: Mapping[str, bytes], place: Path) -> None:
        for name, content in data.items():
            (place / name).write_bytes(content)
        hub.from_pretrained(place)

    def draw_hub(draw: random.Random) -> dict[str, bytes]:
        config = json.loads(hub_files["pomona.json"])
        return hub_files | {"pomona.json": encode_json(mutate_tree(draw, config))}

    return [
        Parser("packed model", 8, packed, lambda d: draw_packed(d, packed), from_file("p.safetensors", files.load)),
        Parser(
            "model file", 5, [trained], lambda d: draw_safetensors(d, trained), from_file("m.safetensors", load_model)
        ),
        Parser("masks", 5, [masks], lambda d: draw_safetensors(d, masks), from_file("k.safetensors", read_masks)),
        Parser("hub folder", 3, [hub_files], draw_hub, parse_hub),
        make_ticket_parser(),
    ]


def split_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the metadata and the tensors of a valid safetensors file."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}), dict(sorted(decode_tensors(data).items()))


def draw_safetensors(draw: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with other bytes, another header, or other values in its metadata."""
    kind = draw.randrange(3)
    size = int.from_bytes(data[:8], "little")
    if kind == 0:
        return mutate_bytes(draw, data)
    if kind == 1:
        header = encode_json(mutate_tree(draw, json.loads(data[8 : 8 + size])))
        return len(header).to_bytes(8, "little") + header + data[8 + size :]
    metadata, tensors = split_safetensors(data)
    key = draw.choice(list(metadata))
    return encode_tensors(tensors, metadata | {key: json.dumps(mutate_tree(draw, json.loads(metadata[key])))})


def draw_packed(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a packed model that is damaged, or one with another content and the checksum of that content."""
    data = draw.choice(seeds)
    if draw.random() < 0.3:
        return draw_safetensors(draw, data)
    metadata, tensors = split_safetensors(data)
    header = json.loads(metadata[files.METADATA_KEY])
    header.pop("digest")
    if draw.random() < 0.6:
        header = mutate_tree(draw, header)
    else:
        tensors = {k: v for k, v in mutate_tree(draw, tensors).items() if isinstance(v, torch.Tensor)}
        tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    if isinstance(header, dict):
        header["digest"] = files.checksum(header, tensors)
    return encode_tensors(tensors, {files.METADATA_KEY: json.dumps(header)})


def make_ticket_parser() -> Parser:
    """Return the parser of tickets, whose inputs mostly have a right checksum."""
    tickets = []
    for method in (pm.EdgePopup(sparsity=0.6), pm.IteRand(sparsity=0.6, every=1, rate=0.5, distribution="ku")):
        network = pm.models.build("mlp", hidden=(16,), in_features=64)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        pruner = method.attach(network, optimizer, total_steps=3)
        for _ in range(3):
            network(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        drawn = {s.name: ticket.DrawnTensor(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
        model = {"name": "mlp", "hidden": [16], "in_features": 64}
        tickets.append(ticket.dumps(network.state_dict(), drawn, pruner.method.stream, model))

    def draw_ticket(draw: random.Random) -> bytes:
        data = draw.choice(tickets)
        content, kind = data[: -ticket.DIGEST_SIZE], draw.randrange(8)
        start = len(ticket.MAGIC) + ticket.PREFIX.size
        version, length = ticket.PREFIX.unpack_from(content, len(ticket.MAGIC))
        head, body = content[start : start + length], content[start + length :]
        if kind == 0:
            return mutate_bytes(draw, data, tickets)
        if kind == 1:
            content = mutate_bytes(draw, content, tickets)
        elif kind == 2:
            head = zlib.compress(b" " * (1 << draw.choice((20, 26))), 9)
            content = ticket.MAGIC + ticket.PREFIX.pack(version, len(head)) + head + body
        elif kind == 3:
            content = ticket.MAGIC + ticket.PREFIX.pack(version, length) + head + mutate_bytes(draw, body)
        else:
            head = zlib.compress(encode_json(mutate_tree(draw, json.loads(zlib.decompress(head)))))
            content = ticket.MAGIC + ticket.PREFIX.pack(version, len(head)) + head + body
        return content + hashlib.sha256(content).digest()

    return Parser("ticket", 10, tickets, draw_ticket, lambda data, _: ticket.loads(data).build())
