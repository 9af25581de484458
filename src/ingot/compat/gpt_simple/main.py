"""`gpt-simple`: its eight commands, with every flag as it is spelled there, and any key as `--section.key value`.

What a command needs is imported when it is called, so that `gpt-simple --help` and `status` answer at once and without torch.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ingot.backends.sampling import DTYPES
from ingot.compat.gpt_simple.log import Log
from ingot.compat.gpt_simple.names import advice, key_name
from ingot.console.entry import explained, stop_exit_code
from ingot.console.output import Parser, split_overrides
from ingot.errors import ConfigError
from ingot.runtime.signals import listening_early

PROGRAM = "gpt-simple"
DTYPES_THERE = ("fp32", "fp16", "bf16")
WITH_KEYS = ("train", "validate")  # commands that take any key
HOMES = {
    "batch-generate": "writing",
    "generate": "writing",
    "init": "template",
    "status": "following",
    "stop": "following",
    "tokenize": "tokenizing",
    "train": "training",
    "validate": "validating",
}  # the modules whose functions the commands are


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    trains = next((word for word in words if not word.startswith("-")), "") == "train"
    with explained(PROGRAM, key_name, advice, stopped=stop_exit_code(words)) as outcome, listening_early(trains):
        outcome.code = _call(words)
    return outcome.code


def _call(words: Sequence[str]) -> int:
    parser = make_parser()
    try:
        options, rest = parser.parse_known_args(words)
    except SystemExit as asked:  # --help
        return int(asked.code or 0)
    if options.command is None:
        parser.print_help()
        return 0
    log = Log(options.verbose, options.quiet)
    if options.command not in WITH_KEYS:
        if rest:
            raise ConfigError(f"unexpected {rest[0]!r} on the command line; see {PROGRAM} {options.command} --help")
        return _command(options.command)(options, log)
    overrides = split_overrides(rest, [name for name in _flags(options.command) if name.startswith("--")])
    return _command(options.command)(options, overrides, words, log)


def _command(name: str) -> Any:
    module = import_module(f"ingot.compat.gpt_simple.{HOMES[name]}")
    return getattr(module, name.replace("-", "_"))


def make_parser() -> Parser:
    """The parser of all commands."""
    wide = partial(HelpFormatter, max_help_position=36, width=110)
    parser = Parser(prog=PROGRAM, description="Pre-train a GPT from one YAML file.", formatter_class=wide)
    parser.add_argument("-v", "--verbose", action="store_true", help="say more")
    parser.add_argument("-q", "--quiet", action="store_true", help="say warnings and errors only")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (about, fill) in COMMANDS.items():
        epilog = "Any key of the config may be given as --section.key VALUE." if name in WITH_KEYS else None
        fill(commands.add_parser(name, help=about, description=f"{about}.", epilog=epilog, formatter_class=wide))
    return parser


def _flags(command: str) -> list[str]:
    """The flags of a command, which a mistyped word is compared with."""
    probe = Parser(add_help=False)
    COMMANDS[command][1](probe)
    return [flag for action in probe._actions for flag in action.option_strings]


def _train(parser: ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--force", action="store_true", help="delete the run in output_dir and start anew")
    parser.add_argument(
        "--skip-runtime-probe", action="store_true", help="taken and without effect: no step is tried before the run"
    )
    parser.add_argument("--nproc_per_node", type=_whole(1), default=1, metavar="N", help="ranks on this machine (1)")
    parser.add_argument("--nnodes", type=_whole(1), default=1, metavar="N", help="machines that train together (1)")
    parser.add_argument("--node_rank", type=int, default=0, metavar="K", help="which of them this is, from 0")
    parser.add_argument("--master_addr", default="127.0.0.1", metavar="HOST", help="address of machine 0 (127.0.0.1)")
    parser.add_argument("--master_port", type=int, metavar="PORT", help="port on machine 0 (29500; alone, a free one)")
    parser.add_argument(
        "--stop-exit-code",
        type=_whole(0, 255),
        default=0,
        metavar="N",
        help="exit code of a run that was stopped (0)",
    )


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number between two others."""

    def read(word: str) -> int:
        found = int(word) if word.removeprefix("-").isdecimal() else least - 1
        if found < least or (most is not None and found > most):
            upto = "or more" if most is None else f"to {most}"
            raise ArgumentTypeError(f"{word!r} is not a whole number of {least} {upto}")
        return found

    return read


def _config(parser: ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or JSON by its suffix")
    parser.add_argument("--allow-bucket-exhaustion", action="store_true", help="set data.allow_bucket_exhaustion")
    parser.add_argument("--allow-budget-mismatch", action="store_true", help="set data.allow_budget_mismatch")


def _status(parser: ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="./outputs", metavar="DIR", help="folder of the run (./outputs)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _stop(parser: ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="./outputs", metavar="DIR", help="folder of the run (./outputs)")
    parser.add_argument("--force", action="store_true", help="kill it; nothing is saved")


def _init(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of printing")
    parser.add_argument("--preset", choices=("small", "medium", "large"), help="size of the model: 124M, 360M or 1.3B")


def _validate(parser: ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that will train together (1)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _generate(parser: ArgumentParser) -> None:
    _model(parser, required=True)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="what to continue")
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="objects with a prompt, one per line of JSON")
    _drawing(parser, DTYPES_THERE)
    parser.add_argument("--stream", action="store_true", help="print a line for each piece as it is written, too")


def _batch_generate(parser: ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="requests, one per line of JSON")
    _model(parser, required=False)
    _drawing(parser, tuple(sorted(DTYPES)))
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be done, and open nothing")
    parser.add_argument("--json", action="store_true", help="print what would be done as JSON")


def _model(parser: ArgumentParser, required: bool) -> None:
    models = parser.add_mutually_exclusive_group(required=required)
    models.add_argument("--checkpoint", metavar="DIR", help="a checkpoint")
    models.add_argument("--output-dir", metavar="RUN", help="the newest checkpoint of a run")


def _drawing(parser: ArgumentParser, dtypes: Sequence[str]) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the lines of JSON there instead of printing them")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (the one beside the checkpoint)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="cuda, cpu or cuda:N (cuda if there is one, else cpu)")
    parser.add_argument("--dtype", default="bf16", choices=dtypes, help="number format of the weights (bf16)")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to write (100)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is the same as --greedy (0.8)")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="draw from the K likeliest tokens; 0: all (50)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="draw from the likeliest that sum to P (0.95)")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: what is written already is less likely (1.0)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same texts")
    parser.add_argument("--return-full-text", action="store_true", help="put the prompt before its text")


def _tokenize(parser: ArgumentParser) -> None:
    parser.add_argument("--input_dir", required=True, metavar="DIR", help="folder of .jsonl or .jsonl.gz files")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="where the pairs go, such as data/train/web")
    parser.add_argument("--tokenizer_path", default="gpt2", metavar="NAME", help="name or folder of the tokenizer (gpt2)")
    parser.add_argument("--max_length", type=int, default=3072, metavar="N", help="tokens in a window, its end mark too (3072)")
    parser.add_argument(
        "--overlap_size", type=int, default=256, metavar="N", help="tokens that windows share, at most half of one (256)"
    )
    parser.add_argument("--probabilistic_overlap", action="store_true", help="only some documents' windows overlap")
    parser.add_argument("--overlap_probability", type=float, default=0.7, metavar="P", help="how many of them (0.7)")
    parser.add_argument("--min_text_length", type=int, default=200, metavar="N", help="skip texts with fewer characters (200)")
    parser.add_argument("--num_workers", type=int, default=1, metavar="N", help="files at once (1)")


COMMANDS: dict[str, tuple[str, Any]] = {
    "train": ("Train a model, or go on with the run in output_dir", _train),
    "tokenize": ("Turn JSON lines into files of tokens", _tokenize),
    "validate": ("Check a run before it starts", _validate),
    "generate": ("Let a model continue prompts", _generate),
    "batch-generate": ("Let models answer a file of requests", _batch_generate),
    "init": ("Write a config file with every key explained", _init),
    "status": ("Show how a run is doing", _status),
    "stop": ("Ask a run to save and stop", _stop),
}
