"""`gpt-simple`: its eight commands with the original's flags, and any key as `--section.key value`.

What a command needs is imported when it is called, so that `gpt-simple --help` and `status` answer at once and without torch.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter, Namespace
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import RUN_STATE, STOP_FLAG, Saved, saved_checkpoints
from ingot.backends.sampling import DTYPES, GenerationOptions
from ingot.compat.gpt_simple.config import PRESETS, advice, key_name, template
from ingot.console.entry import explained, stop_exit_code, warn
from ingot.console.output import Parser, print_json, split_overrides, write_file
from ingot.console.progress import duration, progress_bar
from ingot.errors import CheckpointError, ConfigError, RunError
from ingot.runs.folder import STOP
from ingot.runs.state import read_state
from ingot.runs.view import Run, RunStatus
from ingot.runtime.files import read_dict
from ingot.runtime.signals import listening_early

PROGRAM = "gpt-simple"
WITH_KEYS = ("train", "validate")  # commands that take any key
STOP_TIMEOUT_SECONDS = 600.0  # how long `stop` waits for the run to save and end
POLL_SECONDS = 0.5
STOP_FILES = (STOP, STOP_FLAG)  # files that ask a run to stop
HISTORY = 5  # number of newest checkpoints that `status` lists
STATUS_WORDS = {
    "running": "RUNNING (PID {pid} on {host})",
    "crashed": "CRASHED (PID {pid} on {host}, last heard {ago} ago)",
    "failed": "ERROR (PID {pid} on {host})",
    "completed": "COMPLETED",
    "stopped": "STOPPED",
    "halted": "HALTED (bucket exhausted; needs attention)",
}
Row = tuple[str, str]


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    trains = next((word for word in words if not word.startswith("-")), "") == "train"
    with explained(PROGRAM, key_name, advice, stopped=stop_exit_code(words)) as outcome, listening_early(trains):
        outcome.code = _call(words)
    return outcome.code


def _call(words: Sequence[str]) -> int:
    parser = make_parser()
    try:
        options, rest = parser.parse_known_args(words)
    except SystemExit as stopped:  # --help
        return int(stopped.code or 0)
    if options.command is None:
        parser.print_help()
        return 0
    say = (lambda line: None) if options.quiet else warn  # log lines go to stderr; -q leaves warnings and errors
    if options.command in WITH_KEYS:
        from ingot.compat.gpt_simple import training

        flags = Parser(add_help=False)
        COMMANDS[options.command][1](flags)
        names = [flag for action in flags._actions for flag in action.option_strings if flag.startswith("--")]
        overrides = split_overrides(rest, names)
        return (
            training.validate(options, overrides) if options.command == "validate" else training.train(options, overrides, words)
        )
    if rest:
        raise ConfigError(f"unexpected {rest[0]!r} on the command line; see {PROGRAM} {options.command} --help")
    COMMANDS[options.command][2](options, say)
    return 0


def init(options: Namespace, say: Callable[[str], None]) -> None:
    """Print or write a config file with every key."""
    text = template(options.preset)
    if options.output is None:
        print(text, end="")
    else:
        write_file(Path(options.output), text, force=True)
        say(f"Config written to {options.output}")


def tokenize(options: Namespace, say: Callable[[str], None]) -> None:
    """Turn the JSON lines of a folder into .bin/.idx pairs, one per file, and report each file."""
    from ingot.compat.gpt_simple.tokenize_jsonl import WindowRule
    from ingot.compat.gpt_simple.tokenize_jsonl import tokenize as tokenize_files
    from ingot.compat.gpt_simple.translate import tokenizer_name

    probability = options.overlap_probability if options.probabilistic_overlap else 1.0
    length, overlap = options.max_length, min(options.overlap_size, max(0, options.max_length // 2))
    if overlap < options.overlap_size and length > 0:  # the original starts windows at least half a window apart
        say(f"--overlap_size {options.overlap_size} is more than half of --max_length {length}: windows share {overlap} tokens")
    windows = WindowRule(length, overlap, probability, options.min_text_length)
    source, output = Path(options.input_dir), Path(options.output_dir)
    with progress_bar("tokenizing", unit="files") as progress:
        files = tokenize_files(source, output, tokenizer_name(options.tokenizer_path), windows, options.num_workers, progress)
    for file in files:
        skipped = file.short + file.bad_lines + file.empty
        say(f"{file.file}: {file.documents:,} documents, {file.windows:,} windows, {file.tokens:,} tokens, {skipped:,} skipped")
    if errors := [file.error for file in files if file.error]:
        raise RunError(f"{len(errors)} of {len(files)} files could not be tokenized: {'; '.join(errors)}")


def generate(options: Namespace, say: Callable[[str], None]) -> None:
    """Complete one prompt or those of a file: a line of JSON per completion, and nothing else on stdout."""
    from ingot.console.completions import generate_records, model_path, prompts_of

    generation = _generation_options(options)
    if problems := generation.problems():
        raise ConfigError("; ".join(problems))
    prompts = prompts_of(options.prompt, options.prompts_file)
    path = model_path(options.checkpoint, options.output_dir)
    assert path is not None  # the parser requires one of the two
    model = _load(Path(path), options.device, options.tokenizer, options.dtype)
    generate_records(model, prompts, generation, options.output, options.stream, say)


def batch_generate(options: Namespace, say: Callable[[str], None]) -> None:
    """Answer a file of requests, each of which may name its own model."""
    from ingot.console.completions import generate_requests, model_path

    generate_requests(
        options.input,
        options.output,
        model_path(options.checkpoint, options.output_dir),
        options.dtype,
        options.tokenizer,
        _generation_options(options),
        open_path=lambda path, tokenizer, dtype: _load(path, options.device, tokenizer, dtype),
        dry_run=options.dry_run,
        as_json=options.json,
        say=warn,
    )


def _generation_options(options: Namespace) -> GenerationOptions:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "greedy", "repetition_penalty", "seed", "return_full_text")
    return GenerationOptions(**{name: getattr(options, name) for name in names}, start_mark=False)


def _load(path: Path, device: str, tokenizer: str | None, dtype: str) -> Any:
    from ingot.api import load

    return load(path, device=device, tokenizer=tokenizer, dtype=dtype)


def status(options: Namespace, say: Callable[[str], None]) -> None:
    """Show the state of the run in a folder."""
    folder = Path(options.output_dir)
    if (state := _original_state(folder)) is not None:
        record, rows = state, _original_rows(state)
    elif read_state(folder) is None and (saved := saved_checkpoints(folder)):
        record, rows = {"status": "no run state", **saved[-1].state}, _saved_rows(saved)
    else:
        run = _open_run(options.output_dir)
        run_status = run.status()
        record = {"run": str(run.path), "status": run_status.status, **vars(run_status.state)}
        rows = _rows(run, run_status)
    if options.json:
        print_json(record)
        return
    for name, value in rows:
        if value:
            print(f"{name + ':':<12}{value}")


def stop(options: Namespace, say: Callable[[str], None]) -> None:
    """Ask the run in a folder to save and stop, and wait until it has; with --force, kill it."""
    if _original_state(Path(options.output_dir)) is not None:
        flag = Path(options.output_dir) / STOP_FLAG
        raise RunError(f"{options.output_dir} is trained by the original gpt-simple; stop it by creating {flag}")
    run = _open_run(options.output_dir)
    state = run.status().state
    try:
        if not options.force:
            run.stop()
        elif (now := run.status().status) != "running":
            raise RunError(f"{run.path} is not running: its status is {now}")
    except RunError as error:
        warn(str(error))
        return
    if options.force:
        warn(f"Sending SIGKILL to PID {state.pid}: what is not in its newest checkpoint is lost")
        run.signal(signal.SIGKILL)
        return
    say(f"{run.path} was asked at step {state.step} to save and stop; waiting for PID {state.pid} on {state.host}")
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while run.status().status == "running":
        if time.monotonic() > deadline:
            warn(f"the run has not ended after {STOP_TIMEOUT_SECONDS:.0f} s; --force kills it")
            return
        time.sleep(POLL_SECONDS)
    say(f"the run has ended: {run.status().status}")


def _open_run(folder: str) -> Run:
    try:
        return Run.open(folder)
    except CheckpointError:
        raise RunError(f"there is no run in {folder}; name its folder with --output_dir") from None


def _original_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a run that only the original gpt-simple has trained; None for any other folder."""
    return read_dict(folder / RUN_STATE) if read_state(folder) is None else None


def _original_rows(state: dict[str, Any]) -> list[Row]:
    names = {
        "Status": "status",
        "Started": "started_at",
        "Progress": "global_step",
        "Loss": "loss",
        "Tokens": "tokens_trained",
        "Checkpoint": "latest_checkpoint",
    }
    rows = [(name, str(state[key])) for name, key in names.items() if state.get(key) is not None]
    note = ", as gpt-simple's own trainer last said" if state.get("status") == "running" else " (trained by gpt-simple)"
    return [(name, value.upper() + note if name == "Status" else value) for name, value in rows]


def _saved_rows(saved: list[Saved]) -> list[Row]:
    """Return the rows of a folder that has checkpoints and no state of a run."""
    newest = saved[-1]
    metrics, tokens = newest.state.get("metrics"), newest.state.get("tokens_trained")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    return [
        ("Status", "NO RUN STATE (checkpoint only)"),
        ("Progress", f"{newest.step} steps"),
        ("Loss", f"{loss:.4f}" if isinstance(loss, float) else ""),
        ("Tokens", f"{_short(tokens)} trained" if isinstance(tokens, int) else ""),
        *_checkpoint_rows({one.path: one.step for one in saved}),
    ]


def _rows(run: Run, now: RunStatus) -> list[Row]:
    s = now.state
    of = f" / {s.max_steps} steps ({100 * s.step / s.max_steps:.1f}%)" if s.max_steps else " steps"
    ago = duration(max(0.0, now.age_seconds))
    age = duration(max(0.0, time.time() - datetime.fromisoformat(s.started_at).timestamp()))
    rate = (read_dict(run.path / RUN_STATE) or {}).get("learning_rate")
    theirs = {one.path: one.step for one in saved_checkpoints(run.path)}  # our names for those that gpt-simple has no folder of
    steps = {path: step for step, path in run.checkpoints().items() if step not in theirs.values()} | theirs
    return [
        ("Status", STATUS_WORDS[now.status].format(pid=s.pid, host=s.host, ago=ago)),
        ("Started", f"{s.started_at} ({age} ago)"),
        ("Shutdown", "requested" if now.status == "running" and any((run.path / name).exists() for name in STOP_FILES) else ""),
        ("Progress", f"{s.step}{of}"),
        ("Loss", f"{s.loss:.4f}" if s.loss is not None else ""),
        ("LR", f"{rate:.2e}" if isinstance(rate, float) and rate else ""),
        ("Throughput", f"{s.tokens_per_second:,.0f} tok/s" if s.tokens_per_second else ""),
        ("Tokens", f"{_short(s.tokens)} trained" if s.tokens else ""),
        *_checkpoint_rows(dict(sorted(steps.items(), key=lambda item: item[1]))),
        ("Error", s.error or ""),
    ]


def _checkpoint_rows(steps: dict[Path, int]) -> list[Row]:
    """Return the rows of the newest checkpoint and of the last few, oldest first."""
    history = ", ".join(f"{path.name}@{step}" for path, step in list(steps.items())[-HISTORY:])
    return [("Checkpoint", str(list(steps)[-1])), ("History", history)] if steps else []


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def make_parser() -> Parser:
    """Build the parser of all commands."""
    wide = partial(HelpFormatter, max_help_position=36, width=110)
    parser = Parser(prog=PROGRAM, description="Pre-train a GPT from one YAML file.", formatter_class=wide)
    parser.add_argument("-v", "--verbose", action="store_true", help="also print what the run is waiting for")
    parser.add_argument("-q", "--quiet", action="store_true", help="print warnings and errors only")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (about, fill, _) in COMMANDS.items():
        epilog = "Any key of the config may be given as --section.key VALUE." if name in WITH_KEYS else None
        fill(commands.add_parser(name, help=about, description=f"{about}.", epilog=epilog, formatter_class=wide))
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of a flag whose value is a whole number in a range."""

    def read(word: str) -> int:
        number = int(word) if word.removeprefix("-").isdecimal() else least - 1
        if number < least or (most is not None and number > most):
            upto = "or more" if most is None else f"to {most}"
            raise ArgumentTypeError(f"{word!r} is not a whole number of {least} {upto}")
        return number

    return read


def _config_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or JSON by its suffix")
    parser.add_argument("--allow-bucket-exhaustion", action="store_true", help="set data.allow_bucket_exhaustion")
    parser.add_argument("--allow-budget-mismatch", action="store_true", help="set data.allow_budget_mismatch")


def _train_flags(parser: ArgumentParser) -> None:
    _config_flags(parser)
    add = parser.add_argument
    add("--force", action="store_true", help="delete the run in output_dir and start a new one")
    add("--skip-runtime-probe", action="store_true", help="accepted, and has no effect: there is no trial step")
    add("--nproc_per_node", type=_whole(1), default=1, metavar="N", help="ranks on this machine (1)")
    add("--nnodes", type=_whole(1), default=1, metavar="N", help="machines that train together (1)")
    add("--node_rank", type=int, default=0, metavar="K", help="rank of this machine, from 0")
    add("--master_addr", default="127.0.0.1", metavar="HOST", help="address of machine 0 (127.0.0.1)")
    add("--master_port", type=int, metavar="PORT", help="port on machine 0 (29500; on one machine, a free one)")
    add("--stop-exit-code", type=_whole(0, 255), default=0, metavar="N", help="exit code of a run that was stopped (0)")


def _validate_flags(parser: ArgumentParser) -> None:
    _config_flags(parser)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that will train together (1)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _status_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="./outputs", metavar="DIR", help="run folder (./outputs)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _stop_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="./outputs", metavar="DIR", help="run folder (./outputs)")
    parser.add_argument("--force", action="store_true", help="kill the run; nothing is saved")


def _init_flags(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of printing")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="size of the model: 124M, 360M or 1.3B")


def _generate_flags(parser: ArgumentParser) -> None:
    _model_flags(parser, required=True)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="prompt to complete")
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="JSON lines, each an object with a prompt")
    _sampling_flags(parser, ("fp32", "fp16", "bf16"))
    parser.add_argument("--stream", action="store_true", help="also print a line for each token as it is generated")


def _batch_generate_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="requests, one per line of JSON")
    _model_flags(parser, required=False)
    _sampling_flags(parser, tuple(sorted(DTYPES)))
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and open no model")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _model_flags(parser: ArgumentParser, required: bool) -> None:
    models = parser.add_mutually_exclusive_group(required=required)
    models.add_argument("--checkpoint", metavar="DIR", help="a checkpoint")
    models.add_argument("--output-dir", metavar="RUN", help="the newest checkpoint of a run")


def _sampling_flags(parser: ArgumentParser, dtypes: Sequence[str]) -> None:
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write the JSON lines to a file instead of printing them")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (the one beside the checkpoint)")
    add("--device", default="auto", metavar="NAME", help="cuda, cpu or cuda:N (cuda if there is one, else cpu)")
    add("--dtype", default="bf16", choices=dtypes, help="dtype of the weights (bf16)")
    add("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to generate (100)")
    add("--temperature", type=float, default=0.8, metavar="X", help="sampling temperature; 0 is the same as --greedy (0.8)")
    add("--top-k", type=int, default=50, metavar="K", help="sample from the K most likely tokens; 0: from all (50)")
    add("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling: total probability of the candidates (0.95)")
    add("--greedy", action="store_true", help="always take the most likely token")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: generated tokens become less likely (1.0)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same completions")
    add("--return-full-text", action="store_true", help="put the prompt in front of its completion")


def _tokenize_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--input_dir", required=True, metavar="DIR", help="folder of .jsonl or .jsonl.gz files")
    add("--output_dir", required=True, metavar="DIR", help="where the pairs go, such as data/train/web")
    add("--tokenizer_path", default="gpt2", metavar="NAME", help="name or folder of the tokenizer (gpt2)")
    add("--max_length", type=int, default=3072, metavar="N", help="tokens per window, with its end-of-document token (3072)")
    add("--overlap_size", type=int, default=256, metavar="N", help="tokens that windows share, at most half of one (256)")
    add("--probabilistic_overlap", action="store_true", help="overlap the windows of only some documents")
    add("--overlap_probability", type=float, default=0.7, metavar="P", help="probability that a document's windows overlap (0.7)")
    add("--min_text_length", type=int, default=200, metavar="N", help="skip texts with fewer characters (200)")
    add("--num_workers", type=int, default=1, metavar="N", help="files processed in parallel (1)")


COMMANDS: dict[str, tuple[str, Callable[[ArgumentParser], None], Any]] = {
    "train": ("Train a model, or resume the run in output_dir", _train_flags, None),
    "tokenize": ("Turn JSON lines into token files", _tokenize_flags, tokenize),
    "validate": ("Check a run before it starts", _validate_flags, None),
    "generate": ("Complete prompts with a model", _generate_flags, generate),
    "batch-generate": ("Answer a file of requests with one or more models", _batch_generate_flags, batch_generate),
    "init": ("Write a config file with every key explained", _init_flags, init),
    "status": ("Show the state of a run", _status_flags, status),
    "stop": ("Ask a run to save and stop", _stop_flags, stop),
}
