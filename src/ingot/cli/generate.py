"""`ingot generate`: let a trained model write, for a reader or, a line of JSON for each text, for a program."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.backends.sampling import DTYPES, GenerationOptions, Sampling
from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.compat.nanogpt import is_ckpt
from ingot.console.entry import warn
from ingot.console.output import for_reader, print_json
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.inference.model import LoadedModel

_path = typer.Argument(metavar="PATH", help="Run folder, checkpoint, or artifact.")
ModelPath = Annotated[Path, _path]
OptionalModelPath = Annotated[Path | None, _path]
Which = Annotated[str, typer.Option("--checkpoint", metavar="latest|best", help="Which checkpoint of a run folder.")]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N, mps or mlx.")]
OutputDir = Annotated[
    str | None,
    typer.Option("--output-dir", metavar="RUN", help="Instead of --checkpoint DIR: the newest checkpoint of a run folder."),
]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the lines of JSON there.")]
TokenizerName = Annotated[str | None, typer.Option("--tokenizer", metavar="NAME", help="For a model that came without its own.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="NAME", help="Number format of the weights: fp32, bf16 or fp16.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="X", help="0 is the same as --greedy.", min=0)]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens. 0: all.", min=0)]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Draw from the likeliest that sum to P: above 0, to 1.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Penalty = Annotated[
    float,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1: what the text has written already becomes less likely."),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text.", min=0, max=2**62)]
FullText = Annotated[bool, typer.Option("--return-full-text", help="Lines of JSON: put the prompt before the text.")]
CheckpointName = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="latest|best|DIR", help="Of the run folder PATH; or, instead of PATH, a checkpoint."),
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="What to continue; -: stdin. Empty: a new document.")]
PromptFile = Annotated[Path | None, typer.Option(metavar="FILE", help="What to continue, as the text of a file.")]
PromptsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Objects with a prompt, one per line of JSON.")]
Tokens = Annotated[
    int | None, typer.Option("--tokens", "--max-new-tokens", metavar="N", help="Tokens to write: 500, or 100.", min=0)
]
Samples = Annotated[
    int, typer.Option("--samples", metavar="N", help="How many texts, each with the next seed.", min=1, max=10**6)
]
StopAtEnd = Annotated[
    bool | None,
    typer.Option("--stop-at-end/--no-stop-at-end", help="Stop where the model ends the document; lines of JSON do so."),
]
Stream = Annotated[bool, typer.Option("--stream", help="Print each piece as it is written; of lines of JSON, a line for each.")]
WithCache = Annotated[bool, typer.Option("--cache/--no-cache", help="Keep keys and values instead of computing them anew.")]


@app.command("generate")
def generate(
    path: OptionalModelPath = None,
    checkpoint: CheckpointName = None,
    output_dir: OutputDir = None,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    prompts_file: PromptsFile = None,
    output: Output = None,
    tokens: Tokens = None,
    temperature: Temperature = Sampling.temperature,
    top_k: TopK = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    repetition_penalty: Penalty = 1.0,
    samples: Samples = 1,
    seed: Seed = None,
    stop_at_end: StopAtEnd = None,
    return_full_text: FullText = False,
    stream: Stream = False,
    cache: WithCache = True,
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a trained model continue prompts: as text or, of a file or with --checkpoint DIR or --output-dir, as lines of JSON."""
    from ingot.console.completions import DEFAULTS, DTYPE, asked_for, generate_records, model_path, read_prompt

    prompt = read_prompt(prompt, prompt_file)
    base = GenerationOptions(500, seed=Sampling.seed, stop_at_end=False) if path is not None else DEFAULTS
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is not known; there are {', '.join(DTYPES)}")
    asked: dict[str, Any] = {"max_new_tokens": tokens, "top_k": top_k, "top_p": top_p, "seed": seed}
    options = replace(
        base,
        **{name: value for name, value in asked.items() if value is not None},
        temperature=temperature,
        greedy=greedy,
        repetition_penalty=repetition_penalty,
        stop_at_end=(path is None or prompts_file is not None) if stop_at_end is None else stop_at_end,
        return_full_text=return_full_text,
        use_cache=cache,
    )
    is_read = path is not None and output_dir is None and prompts_file is None and output is None
    checked = replace(options, max_new_tokens=1) if is_read and tokens == 0 else options  # a reader may want the prompt alone
    check_options(checked)
    if path is not None and is_read:
        model = open_any(path, device, tokenizer, dtype, checkpoint or "latest")
        _write_text(model, prompt or "", options, samples, stream, as_json)
        return
    if samples != 1:
        raise ConfigError("--samples is for text that is read; give the prompt again on a line of its own in --prompts-file")
    if path is not None and output_dir is not None:
        raise ConfigError("give PATH, --checkpoint DIR or --output-dir RUN; one of them")
    found = str(path) if path is not None else model_path(checkpoint, output_dir)
    if found is None:
        raise ConfigError("give PATH, --checkpoint DIR or --output-dir RUN: which model is to write")
    given = asked_for(prompt, prompts_file)
    which = checkpoint if path is not None and checkpoint is not None else "latest"
    model = open_any(Path(found), device, tokenizer, dtype if path is not None else dtype or DTYPE, which)
    generate_records(model, given, options, output, stream, warn)


def check_options(options: GenerationOptions) -> None:
    """Refuse values that no text can be drawn with, by the names of their options."""
    named = [problem.replace(", or null", "").partition(" ") for problem in options.problems()]
    if named:
        raise ConfigError("; ".join(f"--{name.replace('_', '-')} {said}" for name, _, said in named))


def open_any(path: Path, device: str, tokenizer: str | None, dtype: str | None, which: str = "latest") -> LoadedModel:
    """A model from wherever it lies: ours, gpt-simple's, or a ckpt.pt of nanoGPT's."""
    if is_ckpt(path):
        from ingot.compat.nanogpt.start import open_ckpt

        model = open_ckpt(path, device, warn, tokenizer)
        return model if dtype is None else model.cast(dtype)
    from ingot.api import load

    return load(path, which=which, device=device, tokenizer=tokenizer, dtype=dtype)


def _write_text(model: LoadedModel, prompt: str, options: GenerationOptions, samples: int, stream: bool, as_json: bool) -> None:
    """Texts for a reader, as they are written."""
    texts = []
    for number in range(samples):
        pieces = [prompt]
        written = model.stream_batch([prompt], options.alone(number)) if options.max_new_tokens else ()
        if not as_json:
            print(for_reader(prompt), end="", flush=True)
        for _, piece in written:
            pieces.append(piece)
            if not as_json:
                print(for_reader(piece), end="", flush=stream or sys.stdout.isatty())
        texts.append("".join(pieces))
        if not as_json:
            print("\n" + "-" * 15 if number + 1 < samples else "")
    if as_json:
        print_json({"model": str(model.weights.path), "prompt": prompt, "texts": texts})
