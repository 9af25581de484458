"""Commands that use a trained model: eval, generate and serve."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson, DeviceName, ModelPath, OptionalModelPath
from ingot.compat.nanogpt import is_ckpt
from ingot.console.entry import warn
from ingot.console.output import for_reader, print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.errors import CheckpointError, ConfigError, RunError, Setting, shown

if TYPE_CHECKING:
    from ingot.backends.sampling import GenerationOptions
    from ingot.eval.evaluator import Score as TextScore
    from ingot.inference.model import LoadedModel

Which = Annotated[str, typer.Option("--checkpoint", metavar="latest|best", help="Which checkpoint of a run folder to open.")]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="The tokenizer of a model that was saved without one.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="NAME", help="The dtype of the weights: fp32, bf16 or fp16.")]


def open_any(path: Path, device: str, tokenizer: str | None, dtype: str | None, which: str = "latest") -> LoadedModel:
    """Open a model of ours, one of gpt-simple's, or nanoGPT's ckpt.pt."""
    if is_ckpt(path):
        from ingot.compat.nanogpt.checkpoint import open_ckpt

        model = open_ckpt(path, device, warn, tokenizer)
        return model if dtype is None else model.cast(dtype)
    from ingot.api import load

    return load(path, which=which, device=device, tokenizer=tokenizer, dtype=dtype)


# ingot eval


def evaluate(
    path: OptionalModelPath = None,
    artifact: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Score the model in this file, as `ingot export` wrote it.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Prepared folder whose validation split is scored. Default: the data of the run."),
    ] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Score N rows spread over the split.", min=1)] = None,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens from one row to the next. Default: as in its training.", min=1)
    ] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens per row. Default: as in its training.", min=1)] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Do not score: check that no token can see itself or the future, and similar errors."),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Score hellaswag, lambada, arc_easy, arc_challenge, piqa, winogrande or blimp."),
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the files of the tasks. Default: the Hugging Face hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Tasks: score the first N items of each file.", min=1)] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Tasks: cut the beginning of items that are too long.")] = False,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
    tell_rows: Annotated[bool, typer.Option("--tell-rows", hidden=True, help="For programs: print a line per batch.")] = False,
) -> None:
    """Score a trained model: loss and bits per byte of a validation split, or accuracies on tasks."""
    from ingot.api import load

    model_path = _model_to_score(path, artifact)
    if tasks is not None and (data or rows or stride or seq_len or self_test):
        raise ConfigError(
            "--tasks are scored whole, from --task-data; leave --data, --rows, --stride, --seq-len and --self-test out"
        )
    if tasks is None and (task_data or limit or truncate):
        raise ConfigError("--task-data, --limit and --truncate need --tasks")
    if self_test and rows is not None:
        raise ConfigError("--self-test checks some tokens of all rows; leave --rows out")
    if tasks is not None:
        _score_tasks(model_path, tasks, task_data, limit, truncate, which, device, as_json)
        return
    with progress_bar("loading"):
        if is_ckpt(model_path):
            model = open_any(model_path, device, None, None)
        else:
            model = load(model_path, which=which, device=device, data=data)
    if self_test:
        _self_test(model, data, stride, seq_len, as_json)
        return
    with progress_bar("evaluating", unit="rows") as progress:
        score = model.evaluate(data, rows, _print_rows if tell_rows else progress, stride=stride, seq_len=seq_len)
    record = _score_record(model, score, stride, seq_len, artifact)
    print_json(record) if as_json else _print_score(record, list(score.other))


def _print_rows(done: int, total: int) -> None:
    """Print progress for the program that waits for the score."""
    print(f"rows {done} of {total}", file=sys.stderr, flush=True)


def _model_to_score(path: Path | None, artifact: Path | None) -> Path:
    model_path = artifact or path
    if model_path is None or (path is not None and artifact is not None):
        raise ConfigError("give either a run folder or checkpoint, or --artifact FILE")
    if artifact is not None and artifact.is_dir():
        raise CheckpointError(f"--artifact {artifact} is a folder; give a file in it, or the folder without --artifact")
    if artifact is not None and not artifact.is_file():
        raise CheckpointError(f"there is no file {artifact}; give one that ingot export wrote")
    return model_path


def _score_record(
    model: LoadedModel, score: TextScore, stride: int | None, seq_len: int | None, artifact: Path | None
) -> dict[str, Any]:
    from ingot.eval.evaluator import bucket_record

    by = model.scored_by(stride, seq_len)
    buckets = {name: bucket_record(bucket) for name, bucket in score.buckets.items()}
    return {
        "model": str(model.weights.path),
        "val_loss": score.loss,
        "val_bpb": score.bits_per_byte,
        **score.other,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "rows": score.rows,
        "rows_of": score.rows_of,
        "seq_len": by.data.seq_len,
        "stride": by.stride,
        "sliding": score.stride is not None,
        "bytes_by": score.rule,
        **({"buckets": buckets} if buckets else {}),
        **({"artifact_bytes": artifact.stat().st_size} if artifact is not None else {}),
    }


def _print_score(record: Mapping[str, Any], other: Sequence[str]) -> None:
    from ingot.runs.reporter import by_rows

    sliding = by_rows(None, None, record["stride"] if record["sliding"] else None)
    rows = [("model", record["model"]), ("val loss", f"{record['val_loss']:.4f}{sliding}")]
    rows.append(("val_bpb", f"{record['val_bpb']:.4f}{sliding}"))
    rows += [(name, f"{record[name]:.4f}") for name in other]
    rows += [("tokens", f"{record['tokens']:,}"), ("bytes", f"{record['bytes']:,}, of the {record['bytes_by']}")]
    layout = f"{record['seq_len']:,} tokens long, {record['stride']:,} apart"
    rows.append(("rows", f"{record['rows']:,} of {record['rows_of']:,}, {layout}"))
    buckets = record.get("buckets", {}).items()
    rows += [(f"val_bpb {name}", f"{bucket['val_bpb']:.4f}") for name, bucket in buckets if "val_bpb" in bucket]
    if "artifact_bytes" in record:
        rows.append(("artifact", f"{record['artifact_bytes']:,} bytes"))
    print_columns(rows)


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
    if as_json:
        print_json({"model": str(model.weights.path), "tasks": {name: score.record() for name, score in scores.items()}})
        return
    rows = []
    for name, score in scores.items():
        parts = []
        for metric, (value, error) in score.metrics.items():
            form = ".4g" if metric == "perplexity" else ".4f"
            parts.append(f"{metric} {value:{form}}{'' if error is None else f' +- {error:{form}}'}")
        rows.append((name, f"{', '.join(parts)} ({score.items:,} items)"))
    print_columns(rows)


def _self_test(model: LoadedModel, data: str | None, stride: int | None, seq_len: int | None, as_json: bool) -> None:
    """Check that a score of the model would be valid; a check that fails is an error."""
    with progress_bar("checking"):
        checks = model.self_test(data, stride=stride, seq_len=seq_len)
    if as_json:
        print_json({"model": str(model.weights.path), "checks": [asdict(check) for check in checks]})
    else:
        print_columns([(check.name, "passed" if check.passed else "FAILED", check.found) for check in checks])
    if failed := [check.name for check in checks if not check.passed]:
        raise RunError(f'a score of {model.weights.path} would not be valid: it fails "{failed[0]}"; look at its forward pass')


# ingot generate


def generate(
    path: OptionalModelPath = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="latest|best|DIR", help="Checkpoint of the run folder PATH, or a checkpoint instead of PATH."),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(metavar="RUN", help="Instead of PATH: the newest checkpoint of this run folder.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt; - reads stdin. Default: the start of a document.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the prompt from this text file.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option("--input", "--prompts-file", metavar="FILE", help="Read prompts from JSON lines: objects with a prompt."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the completions to this file as JSON lines.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", "--max-new-tokens", metavar="N", help="Tokens per completion. Default: 500, or 100 without PATH.", min=0
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Sampling temperature; 0 is the same as --greedy. Default: 0.8.", min=0)
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens; 0: all.", min=0)] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens whose probabilities sum to P.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Values above 1 make tokens that occurred before less likely.")
    ] = 1.0,
    samples: Annotated[
        int, typer.Option(metavar="N", help="Number of completions; each uses the next seed.", min=1, max=10**6)
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed; the same seed gives the same text.", min=0, max=2**62)
    ] = None,
    stop_at_end: Annotated[
        bool | None,
        typer.Option("--stop-at-end/--no-stop-at-end", help="Stop at the end of the document. Default: only for JSON lines."),
    ] = None,
    return_full_text: Annotated[
        bool, typer.Option("--return-full-text", help="JSON lines: put the prompt before the completion.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it is generated; for JSON lines, a line per piece of text.")
    ] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Keep keys and values instead of recomputing them.")] = True,
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue prompts with a trained model. Prints text, or JSON lines with --input, --output or a model not given as PATH."""
    from ingot.backends.sampling import DTYPES, GenerationOptions, Sampling
    from ingot.console.completions import DEFAULTS, DTYPE, generate_records, model_path, prompts_of, read_prompt

    prompt = read_prompt(prompt, prompt_file)
    base = GenerationOptions(500, Sampling.temperature, seed=Sampling.seed, stop_at_end=False) if path is not None else DEFAULTS
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is unknown; choose one of {', '.join(DTYPES)}")
    given: dict[str, Any] = {"max_new_tokens": tokens, "temperature": temperature}
    given |= {"top_k": top_k, "top_p": top_p, "seed": seed}
    options = replace(
        base,
        **{name: value for name, value in given.items() if value is not None},
        greedy=greedy,
        repetition_penalty=repetition_penalty,
        stop_at_end=(path is None or prompts_file is not None) if stop_at_end is None else stop_at_end,
        return_full_text=return_full_text,
        use_cache=cache,
    )
    as_text = path is not None and output_dir is None and prompts_file is None and output is None
    checked = replace(options, max_new_tokens=1) if as_text and tokens == 0 else options  # --tokens 0 prints the prompt alone
    if problems := [problem.replace(", or null", "").partition(" ") for problem in checked.problems()]:
        raise ConfigError("; ".join(f"--{name.replace('_', '-')} {problem}" for name, _, problem in problems))
    if path is not None and as_text:
        model = open_any(path, device, tokenizer, dtype, checkpoint or "latest")
        _print_texts(model, prompt or "", options, samples, stream, as_json)
        return
    if samples != 1:
        raise ConfigError("--samples is for plain text; repeat the prompt on several lines of --input")
    if path is not None and output_dir is not None:
        raise ConfigError("PATH and --output-dir both name a model; keep one")
    chosen = str(path) if path is not None else model_path(checkpoint, output_dir)
    if chosen is None:
        raise ConfigError("no model is named; give PATH, --checkpoint DIR or --output-dir RUN")
    prompts = prompts_of(prompt, prompts_file)
    which = checkpoint if path is not None and checkpoint is not None else "latest"
    model = open_any(Path(chosen), device, tokenizer, dtype if path is not None else dtype or DTYPE, which)
    generate_records(model, prompts, options, output, stream, warn)


def _print_texts(model: LoadedModel, prompt: str, options: GenerationOptions, samples: int, stream: bool, as_json: bool) -> None:
    """Print completions as they are generated, or all of them as JSON."""
    texts = []
    for number in range(samples):
        pieces = [prompt]
        completion = model.stream_batch([prompt], options.alone(number)) if options.max_new_tokens else ()
        if not as_json:
            print(for_reader(prompt), end="", flush=True)
        for _, piece in completion:
            pieces.append(piece)
            if not as_json:
                print(for_reader(piece), end="", flush=stream or sys.stdout.isatty())
        texts.append("".join(pieces))
        if not as_json:
            print("\n" + "-" * 15 if number + 1 < samples else "")
    if as_json:
        print_json({"model": str(model.weights.path), "prompt": prompt, "texts": texts})


# ingot serve

TOKEN_VARIABLE = "INGOT_SERVE_TOKEN"


def serve(
    path: ModelPath,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; one that other machines reach needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"Token that clients must send. Default: the value of {TOKEN_VARIABLE}.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Name of the model for clients. Default: the name of its folder.")
    ] = None,
    which: Which = "latest",
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
) -> None:
    """Serve a trained model with OpenAI's /v1/completions. Needs the extra `serve`."""
    try:
        from ingot.serve.app import make_app, serve_until_stopped
    except ImportError:
        raise ConfigError("ingot serve needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[serve]'") from None
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(host):
        raise ConfigError(f"--host {host} can be reached from other machines; give a --token, or leave --host out")
    listening = listen(host, port)  # before the model is loaded: a port in use is reported at once
    with progress_bar("loading"):
        model = open_any(path, device, tokenizer, dtype, which)
    name = _served_name(path, name)
    app = make_app(model, name, token)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
    print(f"serving {name} at {url} on {model.backend.device.name}; Ctrl-C ends it", flush=True)
    serve_until_stopped(app, listening)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens at an address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()  # another process could bind to the port until one of them listens
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port") from None
    return listening


def _served_name(path: Path, name: str | None) -> str:
    """Return the model's name for clients: as given, as its run folder, or as its file without the suffix; always as UTF-8."""
    resolved = path.resolve()
    folder = resolved.parent.parent if resolved.parent.name == "checkpoints" else resolved
    return shown(name or (resolved.stem if resolved.is_file() else folder.name), kept="")
