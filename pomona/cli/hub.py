"""The `hub` command: prepare a run for the Hugging Face Hub, and upload it where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .application import app
from .options import Json
from .output import facts_table, print_json, print_table


@app.command()
def hub(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write instead of RUN/hub.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="Packed weights of the run instead of its model.safetensors."),
    ] = None,
    license: Annotated[str, typer.Option("--license", help="License on the card, such as apache-2.0.")] = "",
    push: Annotated[
        str | None, typer.Option("--push", metavar="USER/NAME", help="Upload the folder to this repository.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    as_json: Json = False,
) -> None:
    """Write a run's network, masks and model card to a folder for the Hugging Face Hub.

    `pomona.integrations.hub.from_pretrained(FOLDER)` reads it. Nothing is sent without --push, which needs
    huggingface_hub (the extra `huggingface`) and `hf auth login`.
    """
    from pomona.integrations.hub import push_to_hub, require_repository_name
    from pomona.lab.runs.hub import save_run

    if push is not None:
        require_repository_name(push)
    folder = save_run(run, out, model_file=model, license=license)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    commit = push_to_hub(folder, push, private=private or None) if push is not None else None
    if as_json:
        print_json({"folder": str(folder), "files": files, "commit": commit})
        return
    sizes = {name: f"{size:,} bytes" for name, size in files.items()}
    print_table(facts_table({"folder": folder, **sizes, **({"commit": commit} if commit else {})}))
