"""Commands that use a trained model: eval, generate and serve."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ingot.cli.arguments import AsJson, DeviceName, ModelPath, OptionalModelPath
from ingot.compat.nanogpt import is_ckpt
from ingot.console.entry import warn
from ingot.console.output import for_reader, print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.errors import CheckpointError, ConfigError, RunError, Setting, shown

if TYPE_CHECKING:
    from ingot.eval.evaluator import Score
    from ingot.inference.model import LoadedModel

Which = Annotated[str, Option("--checkpoint", metavar="latest|best", help="Which checkpoint of a run folder to open.")]
TokenizerName = Annotated[
    str | None, Option("--tokenizer", metavar="NAME", help="Tokenizer, for a model that was saved without one.")
]
Dtype = Annotated[str | None, Option("--dtype", metavar="NAME", help="Cast the weights to fp32, bf16 or fp16.")]


def open_any(
    path: Path, device: str, tokenizer: str | None, dtype: str | None, which: str = "latest", data: str | None = None
) -> LoadedModel:
    """Open a model trained by Ingot or gpt-simple, or nanoGPT's ckpt.pt."""
    if is_ckpt(path):
        from ingot.compat.nanogpt.checkpoint import open_ckpt

        model = open_ckpt(path, device, warn, tokenizer)
        return model if dtype is None else model.cast(dtype)
    from ingot.api import load

    return load(path, which=which, device=device, tokenizer=tokenizer, dtype=dtype, data=data)


def evaluate(
    path: OptionalModelPath = None,
    artifact: Annotated[Path | None, Option(metavar="FILE", help="Score this artifact and print its size.")] = None,
    data: Annotated[str | None, Option(metavar="DIR", help="Prepared folder to score on. Default: the run's data.")] = None,
    rows: Annotated[int | None, Option(metavar="N", help="Score only N rows, spread over the validation split.", min=1)] = None,
    stride: Annotated[int | None, Option(metavar="N", help="Tokens between row starts. Default: as in training.", min=1)] = None,
    seq_len: Annotated[int | None, Option(metavar="N", help="Tokens per row. Default: as in training.", min=1)] = None,
    self_test: Annotated[bool, Option("--self-test", help="Check that no prediction depends on later tokens.")] = False,
    tasks: Annotated[
        str | None,
        Option(metavar="A,B", help="Score any of hellaswag, lambada, arc_easy, arc_challenge, piqa, winogrande and blimp."),
    ] = None,
    task_data: Annotated[Path | None, Option(metavar="DIR", help="Folder with the task files. Default: download them.")] = None,
    limit: Annotated[int | None, Option(metavar="N", help="With --tasks, score the first N items of each file.", min=1)] = None,
    truncate: Annotated[bool, Option("--truncate", help="With --tasks, drop the beginning of items that are too long.")] = False,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
    tell_rows: Annotated[bool, Option("--tell-rows", hidden=True, help="Print a machine-readable line per batch.")] = False,
) -> None:
    """Score a trained model: loss and bits per byte of a validation split, or accuracies on tasks."""
    model_path = artifact or path
    if model_path is None or (path is not None and artifact is not None):
        raise ConfigError("give either PATH (a run folder or checkpoint) or --artifact FILE")
    if artifact is not None and not artifact.is_file():
        raise CheckpointError(f"{artifact} does not exist; give a file that ingot export wrote")
    if tasks is not None and (data or rows or stride or seq_len or self_test):
        raise ConfigError("--tasks cannot be combined with --data, --rows, --stride, --seq-len or --self-test; leave them out")
    if tasks is None and (task_data or limit or truncate):
        raise ConfigError("--task-data, --limit and --truncate need --tasks")
    if self_test and rows is not None:
        raise ConfigError("--self-test chooses the rows that it checks; leave --rows out")
    if tasks is not None:
        _score_tasks(model_path, tasks, task_data, limit, truncate, which, device, as_json)
        return
    with progress_bar("loading"):
        model = open_any(model_path, device, None, None, which, data)
    if self_test:
        with progress_bar("checking"):
            checks = model.self_test(data, stride=stride, seq_len=seq_len)
        rows_of_checks = [(check.name, "passed" if check.passed else "FAILED", check.found) for check in checks]
        print_json({"model": model.weights.path, "checks": checks}) if as_json else print_columns(rows_of_checks)
        if failed := [check.name for check in checks if not check.passed]:
            raise RunError(
                f'scores of {model.weights.path} are invalid: the check "{failed[0]}" failed; inspect the model\'s forward pass'
            )
        return

    def print_rows(done: int, total: int) -> None:
        print(f"rows {done} of {total}", file=sys.stderr, flush=True)

    with progress_bar("evaluating", unit="rows") as progress:
        score = model.evaluate(data, rows, print_rows if tell_rows else progress, stride=stride, seq_len=seq_len)
    _print_score(model, score, stride, seq_len, artifact, as_json)


def _print_score(
    model: LoadedModel, score: Score, stride: int | None, seq_len: int | None, artifact: Path | None, as_json: bool
) -> None:
    from ingot.eval.evaluator import bucket_record
    from ingot.runs.reporter import by_rows

    by = model.scored_by(stride, seq_len)
    buckets = {name: bucket_record(bucket) for name, bucket in score.buckets.items()}
    size = artifact.stat().st_size if artifact is not None else None
    if as_json:
        record = {"model": str(model.weights.path), "val_loss": score.loss, "val_bpb": score.bits_per_byte, **score.other}
        record |= {name: getattr(score, name) for name in ("tokens", "bytes", "rows", "rows_of")}
        record |= {"seq_len": by.data.seq_len, "stride": by.stride, "sliding": score.stride is not None, "bytes_by": score.rule}
        record |= {"buckets": buckets} if buckets else {}
        print_json(record | ({"artifact_bytes": size} if size is not None else {}))
        return
    sliding = by_rows(None, None, by.stride if score.stride is not None else None)
    rows = [
        ("model", str(model.weights.path)),
        ("val loss", f"{score.loss:.4f}{sliding}"),
        ("val_bpb", f"{score.bits_per_byte:.4f}{sliding}"),
        *((name, f"{value:.4f}") for name, value in score.other.items()),
        ("tokens", f"{score.tokens:,}"),
        ("bytes", f"{score.bytes:,}, of the {score.rule}"),
        ("rows", f"{score.rows:,} of {score.rows_of:,}, {by.data.seq_len:,} tokens long, {by.stride:,} apart"),
        *((f"val_bpb {name}", f"{bucket['val_bpb']:.4f}") for name, bucket in buckets.items() if "val_bpb" in bucket),
    ]
    print_columns([*rows, *([("artifact", f"{size:,} bytes")] if size is not None else [])])


def _score_tasks(
    path: Path, names: str, folder: Path | None, limit: int | None, truncate: bool, which: str, device: str, as_json: bool
) -> None:
    from ingot.eval.tasks import task_names
    from ingot.inference.scoring import read_items, score_tasks, task_rows

    with progress_bar("reading"):
        items = read_items(task_names(names), folder, limit)
    with progress_bar("loading"):
        model = open_any(path, device, None, None, which)
    tasks = task_rows(items, model.tokenizer, model.context, None if truncate else Setting("--truncate"))
    with progress_bar("scoring", unit="texts") as progress:
        scores = score_tasks(tasks, model.backend, progress)
    rows = []
    for name, score in scores.items():
        parts = []
        for metric, (value, error) in score.metrics.items():
            form = ".4g" if metric == "perplexity" else ".4f"
            parts.append(f"{metric} {value:{form}}{'' if error is None else f' +- {error:{form}}'}")
        rows.append((name, f"{', '.join(parts)} ({score.items:,} items)"))
    record = {"model": model.weights.path, "tasks": {name: score.record() for name, score in scores.items()}}
    print_json(record) if as_json else print_columns(rows)


def generate(
    path: ModelPath,
    prompt: Annotated[str | None, Option(metavar="TEXT", help="Text to continue; - reads stdin. Default: no text.")] = None,
    prompt_file: Annotated[Path | None, Option(metavar="FILE", help="Read the prompt from this text file.")] = None,
    prompts_file: Annotated[
        Path | None, Option("--input", "--prompts-file", metavar="FILE", help="Read one prompt per line from a JSON lines file.")
    ] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="Write the completions to this file as JSON lines.")] = None,
    tokens: Annotated[
        int, Option("--tokens", "--max-new-tokens", metavar="N", help="Maximum number of tokens to generate.", min=0, max=10**8)
    ] = 500,
    temperature: Annotated[float, Option(metavar="X", help="Sampling temperature; 0 is the same as --greedy.", min=0)] = 0.8,
    top_k: Annotated[int | None, Option(metavar="K", help="Sample from the K likeliest tokens. Default: all.", min=0)] = None,
    top_p: Annotated[float | None, Option(metavar="P", help="Sample from the likeliest tokens with total probability P.")] = None,
    greedy: Annotated[bool, Option("--greedy", help="Always take the likeliest token.")] = False,
    repetition_penalty: Annotated[float, Option(metavar="X", help="Above 1, tokens already generated become less likely.")] = 1.0,
    samples: Annotated[int, Option(metavar="N", help="Number of completions, with consecutive seeds.", min=1, max=10**6)] = 1,
    seed: Annotated[int, Option(metavar="N", help="Random seed; the same seed gives the same text.", min=0, max=2**62)] = 1337,
    stop_at_end: Annotated[
        bool | None, Option(help="Stop when the model ends the document. Default: on with --input, off otherwise.")
    ] = None,
    return_full_text: Annotated[bool, Option("--return-full-text", help="In JSON lines, put the prompt before a text.")] = False,
    stream: Annotated[bool, Option("--stream", help="Print text as it is generated; in JSON lines, one line per chunk.")] = False,
    which: Which = "latest",
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue prompts with a trained model. The result is text or, with --input or --output, JSON lines."""
    from ingot.backends.sampling import GenerationOptions
    from ingot.console.completions import generate_records, read_prompt
    from ingot.inference.prompt_files import read_prompts

    prompt = read_prompt(prompt, prompt_file)
    options = GenerationOptions(
        max_new_tokens=max(tokens, 1),  # with --tokens 0 nothing is generated, so the 1 is unused
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_at_end=prompts_file is not None if stop_at_end is None else stop_at_end,
        return_full_text=return_full_text,
    )
    if problems := [problem.replace(", or null", "").partition(" ") for problem in options.problems()]:
        raise ConfigError("; ".join(f"--{name.replace('_', '-')} {problem}" for name, _, problem in problems))
    if prompts_file is not None or output is not None:
        if samples != 1:
            raise ConfigError("--samples does not work with --input or --output; repeat the prompt on several lines of --input")
        if prompts_file is not None and prompt is not None:
            raise ConfigError("give either --prompt TEXT or --prompts-file FILE, not both")
        prompts = [{"prompt": prompt or ""}] if prompts_file is None else read_prompts(prompts_file)
        generate_records(open_any(path, device, tokenizer, dtype, which), prompts, options, output, stream, warn)
        return
    model, texts = open_any(path, device, tokenizer, dtype, which), []
    for number in range(samples):
        pieces = [prompt or ""]
        completion = model.stream_batch([pieces[0]], options.alone(number)) if tokens else ()
        if not as_json:
            print(for_reader(pieces[0]), end="", flush=True)
        for _, piece in completion:
            pieces.append(piece)
            if not as_json:
                print(for_reader(piece), end="", flush=stream or sys.stdout.isatty())
        texts.append("".join(pieces))
        if not as_json:
            print("\n" + "-" * 15 if number + 1 < samples else "")
    if as_json:
        print_json({"model": str(model.weights.path), "prompt": prompt or "", "texts": texts})


TOKEN_VARIABLE = "INGOT_SERVE_TOKEN"


def serve(
    path: ModelPath,
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on; a public one needs --token.")] = "127.0.0.1",
    port: Annotated[int, Option(metavar="N", help="Port to listen on; 0 picks a free port.", min=0, max=65535)] = 8000,
    token: Annotated[str | None, Option(metavar="TEXT", help=f"API token for clients. Default: ${TOKEN_VARIABLE}.")] = None,
    name: Annotated[str | None, Option(metavar="TEXT", help="Model name shown to clients. Default: the name of PATH.")] = None,
    which: Which = "latest",
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
) -> None:
    """Serve a trained model through OpenAI's /v1/completions API. Needs the extra `serve`."""
    try:
        from ingot.serve.app import is_own_name, listen, make_app, serve_until_stopped
    except ImportError:
        raise ConfigError("ingot serve needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[serve]'") from None
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    address = f"[{host}]" if ":" in host else host
    if token is None and not is_own_name(address):
        raise ConfigError(f"--host {host} can be reached from other machines; give a --token, or leave --host out")
    listening = listen(host, port)  # before loading the model, so that a port in use is reported at once
    with progress_bar("loading"):
        model = open_any(path, device, tokenizer, dtype, which)
    name = _served_name(path, name)
    app = make_app(model, name, token)
    print(
        f"serving {name} at http://{address}:{listening.getsockname()[1]}/v1 on {model.backend.device.name}; Ctrl-C to stop",
        flush=True,
    )
    serve_until_stopped(app, listening)


def _served_name(path: Path, name: str | None) -> str:
    """Return the model name shown to clients, in printable characters: `name`, else the run folder's name or the file's stem."""
    resolved = path.resolve()
    folder = resolved.parent.parent if resolved.parent.name == "checkpoints" else resolved
    return shown(name or (resolved.stem if resolved.is_file() else folder.name), kept="")
