"""`ingot generate`: let a trained model write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.output import print_json
from ingot.generate.sampling import Sampling

_path = typer.Argument(metavar="PATH", help="Run folder, checkpoint, or artifact.")
ModelPath = Annotated[Path, _path]
OptionalModelPath = Annotated[Path | None, _path]
Which = Annotated[str, typer.Option("--checkpoint", metavar="latest|best", help="Which checkpoint of a run folder.")]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N, mps or mlx.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("generate")(generate)


def generate(
    path: ModelPath,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to continue. Empty: a new document.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens to write.", min=0)] = 500,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 is the same as --greedy.", min=0)
    ] = Sampling.temperature,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens. 0: all.", min=0)
    ] = Sampling.top_k,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Draw from the likeliest that sum to P.", min=0, max=1)
    ] = Sampling.top_p,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="How many texts, each with the next seed.", min=1)] = 1,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="The same seed gives the same text.", min=0, max=2**62)
    ] = Sampling.seed,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep keys and values instead of computing them anew.")
    ] = True,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="NAME", help="For an artifact that was exported without its own.")
    ] = None,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a trained model continue a prompt."""
    if path.is_file() and path.suffix in (".pt", ".pth"):
        from ingot.doors.nanogpt.loading import open_ckpt

        model = open_ckpt(path, device, lambda line: print(line, file=sys.stderr), tokenizer)
    else:
        from ingot.api import load

        model = load(path, which=which, device=device, tokenizer=tokenizer)
    texts = []
    for number in range(samples):
        stream = model.stream(
            prompt,
            tokens=tokens,
            temperature=0.0 if greedy else temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + number,
            use_cache=cache,
        )
        pieces = [prompt]
        if not as_json:
            print(prompt, end="", flush=True)
        for piece in stream:
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=sys.stdout.isatty())
        texts.append("".join(pieces))
        if not as_json:
            print("\n" + "-" * 15 if number + 1 < samples else "")
    if as_json:
        print_json({"model": str(model.weights.path), "prompt": prompt, "texts": texts})
