"""The command line of `gpt-simple`: eight commands with the original flags; config keys are given as `--section.key value`.

Each command imports what it needs when it is called, so that `gpt-simple --help` and `status` start fast and without torch.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import HelpFormatter, Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import RUN_STATE, STOP_FLAG, saved_checkpoints
from ingot.backends.sampling import DTYPES, GenerationOptions
from ingot.compat.gpt_simple.config import PRESETS, advice, key_name, template
from ingot.console.entry import explained, stop_exit_code, warn
from ingot.console.output import Parser, print_json, split_overrides, write_file
from ingot.console.progress import duration, progress_bar
from ingot.errors import ConfigError, RunError
from ingot.runs.folder import STOP
from ingot.runs.state import read_state
from ingot.runs.view import Run
from ingot.runtime.files import read_dict, to_json, write_atomically
from ingot.runtime.processes import is_alive
from ingot.runtime.signals import listening_early

PROGRAM = "gpt-simple"
WITH_KEYS = ("train", "validate")  # commands that accept any key of the config
STOP_TIMEOUT_SECONDS = 600.0  # how long `stop` waits for the run to save and end
POLL_SECONDS = 0.5
HISTORY = 5  # number of recent checkpoints that `status` lists
STATUS_WORDS = {
    "failed": "ERROR", "halted": "HALTED (bucket exhausted; needs attention)", "no run state": "NO RUN STATE (checkpoint only)",
}  # fmt: skip
Say = Callable[[str], None]


def run(words: Sequence[str] | None = None) -> None:
    """Run the command line `words` and exit with its exit code."""
    sys.exit(main(words))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` and return its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    trains = next((word for word in words if not word.startswith("-")), "") == "train"
    with explained(PROGRAM, key_name, advice, stopped=stop_exit_code(words)) as outcome, listening_early(trains):
        parser = make_parser()
        try:
            options, rest = parser.parse_known_args(words)
        except SystemExit as stopped:  # raised by --help
            return int(stopped.code or 0)
        if options.command is None:
            parser.print_help()
        elif options.command in WITH_KEYS:
            from ingot.compat.gpt_simple import training

            flags = [f"--{name.replace('_', separator)}" for name in vars(options) for separator in "_-"]
            overrides, checks = split_overrides(rest, flags), options.command == "validate"
            outcome.code = training.validate(options, overrides) if checks else training.train(options, overrides, words)
        elif rest:
            raise ConfigError(f"unexpected {rest[0]!r} on the command line; see {PROGRAM} {options.command} --help")
        else:
            COMMANDS[options.command][1](options, (lambda line: None) if options.quiet else warn)  # log lines go to stderr
    return outcome.code


def init(options: Namespace, say: Say) -> None:
    """Print a config that contains every key, or write it to the file --output."""
    text = template(options.preset)
    if options.output is None:
        print(text, end="")
    else:
        write_file(Path(options.output), text, force=True)
        say(f"Config written to {options.output}")


def tokenize(options: Namespace, say: Say) -> None:
    """Tokenize each JSON lines file in a folder to a .bin/.idx pair, and print its counts."""
    from ingot.compat.gpt_simple.tokenize_jsonl import WindowRule
    from ingot.compat.gpt_simple.tokenize_jsonl import tokenize as tokenize_files
    from ingot.compat.gpt_simple.translate import tokenizer_name

    probability = options.overlap_probability if options.probabilistic_overlap else 1.0
    length, overlap = options.max_length, min(options.overlap_size, max(0, options.max_length // 2))
    if overlap < options.overlap_size and length > 0:  # as in gpt-simple, windows share at most half their tokens
        say(f"--overlap_size {options.overlap_size} is more than half of --max_length {length}: windows share {overlap} tokens")
    windows = WindowRule(length, overlap, probability, options.min_text_length)
    source, output = Path(options.input_dir), Path(options.output_dir)
    with progress_bar("tokenizing", unit="files") as progress:
        files = tokenize_files(source, output, tokenizer_name(options.tokenizer_path), windows, options.num_workers, progress)
    for file in files:
        counts = f"{file.documents:,} documents, {file.windows:,} windows, {file.tokens:,} tokens, {file.skipped:,} skipped"
        say(f"{file.file}: {counts}")
    if errors := [file.error for file in files if file.error]:
        raise RunError(f"{len(errors)} of {len(files)} files could not be tokenized: {'; '.join(errors)}")


def generate(options: Namespace, say: Say) -> None:
    """Complete one prompt or a file of prompts; write a JSON line for each completion to stdout or the file --output."""
    from ingot.api import load
    from ingot.console.completions import generate_records
    from ingot.inference.prompt_files import expand, read_prompts

    generation = _generation_options(options)
    if problems := generation.problems():
        raise ConfigError("; ".join(problems))
    prompts = [{"prompt": options.prompt}] if options.prompts_file is None else read_prompts(options.prompts_file)
    model = load(expand(options.model), device=options.device, tokenizer=options.tokenizer, dtype=options.dtype)
    generate_records(model, prompts, generation, options.output, options.stream, say)


def batch_generate(options: Namespace, say: Say) -> None:
    """Answer a file of requests, each of which may name its own model; check all requests before loading a model."""
    from ingot.api import load
    from ingot.console.completions import write_lines
    from ingot.inference.model import locate_weights
    from ingot.inference.prompt_files import Problems, answer_all, plan_loads, read_requests

    file = options.input
    try:
        requests = read_requests(file, options.model, options.dtype, options.tokenizer, _generation_options(options))
        loads = plan_loads(requests, lambda path: locate_weights(Path(path)))
    except Problems as error:
        for problem in error.problems:
            warn(problem)
        raise ConfigError(f"{file}: {len(error.problems)} problems, listed above; no model was loaded") from None
    for planned in loads:
        named = "" if planned.references == [str(planned.path)] else f", requested as {', '.join(planned.references)}"
        warn(f"{planned.path} as {planned.dtype}: {len(planned.requests)} prompts{named}")
    if options.dry_run:
        warn(f"{file}: {len(requests)} prompts for {len(loads)} models; no problems found, no model loaded")
        return

    answers = answer_all(
        requests, loads, lambda path, name, dtype: load(path, device=options.device, tokenizer=name, dtype=dtype), warn
    )
    write_lines(answers, options.output, warn)
    if failed := sum("error" in answer for answer in answers):
        warn(f"{failed} of {len(answers)} requests failed; their output lines contain the errors")


def _generation_options(options: Namespace) -> GenerationOptions:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "greedy", "repetition_penalty", "seed", "return_full_text")
    return GenerationOptions(**{name: getattr(options, name) for name in names}, start_mark=False)


def status(options: Namespace, say: Say) -> None:
    """Show the state of the run in a folder, trained by Ingot or by the original gpt-simple."""
    folder = Path(options.output_dir)
    state, saved = read_dict(folder / RUN_STATE) or {}, saved_checkpoints(folder)
    steps = {one.path: one.step for one in saved}
    if read_state(folder) is not None:  # trained by Ingot: its state.json is newer and names the host
        run = Run(folder)
        now = run.status()
        # `stop --force` writes "stopped" to gpt-simple's state file; Ingot's is written by the training process, which was killed
        killed = now.status == "crashed" and state.get("status") == "stopped"
        record = {"run": str(folder), **vars(now.state), "status": "stopped" if killed else now.status}
        names = {"step": "global_step", "tokens": "tokens_trained", "tokens_per_second": "tokens_per_sec"}
        state |= {names.get(name, name): value for name, value in record.items()}
        ours = {path: step for step, path in run.checkpoints().items() if step not in steps.values()}
        steps = dict(sorted((ours | steps).items(), key=lambda item: item[1]))
    elif state:
        record = dict(state)
        state["status"] = _original_status(state)
    elif saved:
        metrics = saved[-1].state.get("metrics")
        loss = metrics.get("loss") if isinstance(metrics, dict) else None
        record = {"status": "no run state", **saved[-1].state}
        state = {**record, "global_step": saved[-1].step, "loss": loss}
    else:
        raise RunError(f"there is no run in {folder}; set --output_dir to a run folder")
    if options.json:
        print_json(record)
        return
    word, step, most, tokens = (state.get(key) for key in ("status", "global_step", "max_steps", "tokens_trained"))
    shown = STATUS_WORDS.get(str(word), str(word).upper())
    if word in ("running", "crashed", "failed", "error"):
        shown += f" (PID {state.get('pid')}{' on ' + state['host'] if 'host' in state else ''})"
    asked = word == "running" and any((folder / name).exists() for name in (STOP, STOP_FLAG))
    rows = {
        "Status": shown,
        "Started": f"{state['started_at']} ({duration(_age(state['started_at']))} ago)" if state.get("started_at") else "",
        "Shutdown": "requested" if asked else "",
        "Progress": "" if step is None else f"{step} / {most} steps ({100 * step / most:.1f}%)" if most else f"{step} steps",
        "Loss": _number("{:.4f}", state.get("loss")),
        "LR": _number("{:.2e}", state.get("learning_rate")),
        "Throughput": _number("{:,.0f} tok/s", state.get("tokens_per_sec")),
        "Tokens": _number("{:,} trained", tokens),
        "Checkpoint": str(list(steps)[-1]) if steps else "",
        "History": ", ".join(f"{path.name}@{step}" for path, step in list(steps.items())[-HISTORY:]),
        "Error": state.get("error"),
    }
    for name, value in rows.items():
        if value:
            print(f"{name + ':':<12}{value}")


def _original_status(state: dict[str, Any]) -> Any:
    alive = state.get("status") != "running" or is_alive(int(state.get("pid") or 0), _age(state.get("updated_at")))
    return state.get("status") if alive else "crashed"


def _age(when: Any) -> float:
    """Return the age in seconds of a timestamp in a state file; 0 if it cannot be parsed."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _number(form: str, value: Any) -> str:
    return form.format(value) if isinstance(value, int | float) and value else ""


def stop(options: Namespace, say: Say) -> None:
    """Ask the run in a folder to save and stop and, if Ingot trains it, wait for it to end; with --force, kill it."""
    folder = Path(options.output_dir)
    ours, original = read_state(folder), read_dict(folder / RUN_STATE)
    if ours is None and original is None:
        raise RunError(f"there is no run in {folder}; set --output_dir to a run folder")
    run = Run(folder)
    if (now := run.status().status if ours is not None else _original_status(original or {})) != "running":
        warn(f"the run in {folder} is not running: its status is {now}")
        return
    if ours is None:
        if options.force:
            raise RunError(
                f"the original gpt-simple is training in {folder}; kill its process yourself (pid: see {folder / RUN_STATE})"
            )
        (folder / STOP_FLAG).touch()
        say(f"asked the original gpt-simple, which is training in {folder}, to save and stop")
        return
    if options.force:
        warn("Sending SIGKILL: progress since the newest checkpoint is lost")
        run.signal(signal.SIGKILL)
        killed = {**(read_dict(folder / RUN_STATE) or {}), "status": "stopped"}
        write_atomically(folder / RUN_STATE, to_json(killed, indent=2) + "\n")
        return
    run.stop()
    say(f"asked the run in {folder} to save and stop; waiting for it to end")
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while run.status().status == "running":
        if time.monotonic() > deadline:
            warn(f"the run has not ended after {STOP_TIMEOUT_SECONDS:.0f} s; use --force to kill it")
            return
        time.sleep(POLL_SECONDS)
    say(f"the run has ended: {run.status().status}")


def make_parser() -> Parser:
    """Build the argument parser with all commands."""
    wide = partial(HelpFormatter, max_help_position=36, width=110)
    parser = Parser(prog=PROGRAM, description="Pre-train a GPT as configured in one YAML file.", formatter_class=wide)
    parser.add_argument("-v", "--verbose", action="store_true", help="also print what the run is waiting for")
    parser.add_argument("-q", "--quiet", action="store_true", help="print warnings and errors only")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    parsers: dict[str, Parser] = {}
    for name, (about, _) in COMMANDS.items():
        epilog = "Any key of the config may be given as --section.key VALUE." if name in WITH_KEYS else None
        command = commands.add_parser(name, help=about, description=f"{about}.", epilog=epilog, formatter_class=wide)
        parsers[name] = command
        if name in WITH_KEYS:
            command.add_argument("--config", required=True, metavar="FILE", help="YAML file, or JSON if it ends in .json")
            command.add_argument("--allow-bucket-exhaustion", action="store_true", help="set data.allow_bucket_exhaustion=true")
            command.add_argument("--allow-budget-mismatch", action="store_true", help="set data.allow_budget_mismatch=true")
        elif name in ("status", "stop"):
            command.add_argument("--output_dir", default="./outputs", metavar="DIR", help="run folder (default: ./outputs)")
        elif name in ("generate", "batch-generate"):
            models = command.add_mutually_exclusive_group(required=name == "generate")
            models.add_argument("--checkpoint", dest="model", metavar="DIR", help="checkpoint to load")
            models.add_argument("--output-dir", dest="model", metavar="RUN", help="run folder whose newest checkpoint is loaded")
            if name == "generate":
                prompts = command.add_mutually_exclusive_group(required=True)
                prompts.add_argument("--prompt", metavar="TEXT", help="prompt to complete")
                prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="JSON Lines file with one prompt per line")
            add = command.add_argument
            add("--output", type=Path, metavar="FILE", help="write the completions to a file instead of printing them")
            add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the checkpoint's tokenizer)")
            add("--device", default="auto", metavar="NAME", help="cuda, cpu or cuda:N (default: cuda if available, else cpu)")
            add("--dtype", default="bf16", choices=sorted(DTYPES), help="dtype of the weights (default: bf16)")
            add("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to generate (default: 100)")
            add(
                "--temperature",
                type=float,
                default=0.8,
                metavar="X",
                help="sampling temperature (default: 0.8); 0 is the same as --greedy",
            )
            add("--top-k", type=int, default=50, metavar="K", help="sample from the K most likely tokens (default: 50; 0: all)")
            add("--top-p", type=float, default=0.95, metavar="P", help="nucleus (top-p) sampling threshold (default: 0.95)")
            add("--greedy", action="store_true", help="always take the most likely token")
            add("--repetition-penalty", type=float, default=1.0, metavar="X", help="values > 1 reduce repetition (default: 1.0)")
            add("--seed", type=int, metavar="N", help="sampling seed; the same seed gives the same completions")
            add("--return-full-text", action="store_true", help="prepend the prompt to its completion")

    add = parsers["train"].add_argument
    add("--force", action="store_true", help="delete the run in output_dir and start a new one")
    add("--skip-runtime-probe", action="store_true", help="accepted, but has no effect: no trial step is run")
    add("--nproc_per_node", type=int, default=1, metavar="N", help="number of ranks on this machine (default: 1)")
    add("--nnodes", type=int, default=1, metavar="N", help="number of machines that train together (default: 1)")
    add("--node_rank", type=int, default=0, metavar="K", help="index of this machine, from 0 (default: 0)")
    add("--master_addr", default="127.0.0.1", metavar="HOST", help="address of machine 0 (default: 127.0.0.1)")
    add("--master_port", type=int, metavar="PORT", help="port of machine 0 (default: 29500; with one machine, any free port)")
    add("--stop-exit-code", type=int, default=0, choices=range(256), metavar="N", help="exit code of a stopped run (default: 0)")

    add = parsers["validate"].add_argument
    add("--world-size", type=int, default=1, metavar="N", help="number of ranks that will train together (default: 1)")
    add("--strict", action="store_true", help="exit with code 1 even if there are only warnings")
    add("--json", action="store_true", help="print JSON")

    parsers["status"].add_argument("--json", action="store_true", help="print JSON")
    parsers["stop"].add_argument("--force", action="store_true", help="kill the run; nothing is saved")
    parsers["init"].add_argument("-o", "--output", metavar="FILE", help="write the config to a file instead of printing it")
    parsers["init"].add_argument("--preset", choices=tuple(PRESETS), help="model size: 124M, 360M or 1.3B parameters")
    parsers["generate"].add_argument("--stream", action="store_true", help="also print a line for each token as it is generated")

    add = parsers["batch-generate"].add_argument
    add("--input", type=Path, required=True, metavar="FILE", help="JSON Lines file with one request per line")
    add("--dry-run", action="store_true", help="check all requests and print which models would answer them, without loading any")

    add = parsers["tokenize"].add_argument
    add("--input_dir", required=True, metavar="DIR", help="input folder with .jsonl or .jsonl.gz files")
    add("--output_dir", required=True, metavar="DIR", help="output folder for the .bin/.idx pairs, such as data/train/web")
    add("--tokenizer_path", default="gpt2", metavar="NAME", help="name or folder of the tokenizer (default: gpt2)")
    add("--max_length", type=int, default=3072, metavar="N", help="tokens per window, including end of document (default: 3072)")
    add("--overlap_size", type=int, default=256, metavar="N", help="overlap in tokens, at most half a window (default: 256)")
    add("--probabilistic_overlap", action="store_true", help="let windows overlap only in a random subset of the documents")
    add("--overlap_probability", type=float, default=0.7, metavar="P", help="probability of overlap per document (default: 0.7)")
    add("--min_text_length", type=int, default=200, metavar="N", help="skip texts with fewer characters than this (default: 200)")
    add("--num_workers", type=int, default=1, metavar="N", help="number of files to process in parallel (default: 1)")
    return parser


COMMANDS: dict[str, tuple[str, Any]] = {
    "train": ("Train a model, or resume the run in output_dir", None),
    "tokenize": ("Tokenize JSON lines to .bin/.idx pairs", tokenize),
    "validate": ("Check a run before it starts", None),
    "generate": ("Complete prompts with a model", generate),
    "batch-generate": ("Answer a file of requests with one or more models", batch_generate),
    "init": ("Write a config file with every key explained", init),
    "status": ("Show the state of a run", status),
    "stop": ("Ask a run to save and stop", stop),
}
