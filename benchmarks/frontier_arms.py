"""Arms of the frontier in turns, in one process: what each candidate is worth on one GPU in 60 or 300 seconds.

The bench comes before the engine: an idea is a setting of frontier/arms.py and shows its sign here before it is built for resume,
ranks and export. Arms are written `base:key=value,key=value`; C is the small model, A the large one, both 300 s, C60 and A60 the
same for 60 s, and `seconds` and `seed` are settings like the others. A line of JSON per arm is appended to --results as soon as
it is known; an arm that fails leaves its error there and the next one begins. What the file has is not run again, so a command
that was cut short is simply repeated.

    python benchmarks/frontier_arms.py --corpus corpus --tokenizer fineweb_8192_bpe.model --cache tokens --results arms.jsonl \\
        --arm C60 --arm C60:value_residual=true --arm A:rate=0.7,seed=2

With --queue FILE arms are read from the lines of a file, also from those appended while it runs, until a line `end`. --toy runs
on a made-up text (bases `toy` and `toyA`) in seconds on a CPU. The score is the whole validation split in windows that do not
overlap, in bits per byte of the original text; every token but the very first is predicted once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import re
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from frontier.arms import Arm, parse_arm
from frontier.data import Tokens, load_corpus, toy_corpus
from frontier.train import run_arm

POLL_SECONDS = 0.5
OVERHEAD_SECONDS = 30.0  # of an arm besides its training: compiling a new kind of block, and scoring


def say(line: str) -> None:
    print(line, flush=True)


def queued(path: Path, deadline: float = math.inf) -> Iterator[str]:
    """The lines of a file that may still grow, until `end` or the deadline; one without a line break is not yet written."""
    read = 0
    while time.perf_counter() < deadline:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if read == len(lines) or not lines[read].endswith("\n"):
            time.sleep(POLL_SECONDS)
            continue
        line = lines[read].strip()
        read += 1
        if line == "end":
            return
        if line and not line.startswith("#"):
            yield line


def readable(name: str, result: dict[str, Any]) -> str:
    """One line of what an arm gave."""
    if "error" in result:
        return f"{name} | FAILED: {result['error']}"
    scores = result["scores"]
    best = min(scores, key=lambda kind: scores[kind]["val_bpb"])
    parts = [
        f"{name} | seed {result['arm']['seed']} | {result['weights'] / 1e6:.1f}M weights",
        f"{result['tokens_per_second'] / 1e6:.3f} M tokens/s | {result['steps']:,} steps in {result['train_seconds']} s",
        f"{result['passes']} passes | train {scores[best]['train_nats']:.4f} val {scores[best]['val_nats']:.4f} nats",
        " | ".join(f"{kind} {found['val_bpb']:.4f}" for kind, found in scores.items()),
        f"{result['peak_gib']} GiB | compile {result['compile_seconds']} s | all {result['all_seconds']} s",
    ]
    rounded = [
        f"int{r['bits']} k{r['k']:g}, embedding int{r['embedding_bits']} k{r['embedding_k']:g}{', GPTQ' if r['gptq'] else ''}: "
        f"{r['bytes'] / 1e6:.2f} MB at {r['per_weight']:.2f} bits {r['val_bpb']:.4f}"
        for r in result["rounded"]
    ]
    return " | ".join(parts) + ("".join(f"\n    {line}" for line in rounded))


def settings_of(arm: Arm) -> str:
    """What tells an arm from every other, however it was written."""
    return json.dumps(dataclasses.asdict(arm), sort_keys=True)


def finished(results: Path) -> set[str]:
    """The settings of arms that a results file has without an error."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
    return {json.dumps(line["arm"], sort_keys=True) for line in lines if "error" not in line}


def run_one(text: str, arm: Arm, corpus: tuple[Tokens, Tokens], device: torch.device, keep: Path | None) -> dict[str, Any]:
    """An arm's result, or its error: nothing that one arm does wrong may end the others."""
    result: dict[str, Any] = {"name": text, "at": datetime.now(UTC).isoformat(timespec="seconds"), "arm": dataclasses.asdict(arm)}
    say(f"{result['at']} {text}")
    try:
        file = keep / f"{re.sub('[^A-Za-z0-9.]+', '-', text)}-seed{arm.seed}.pt" if keep else None
        result |= run_arm(arm, *corpus, device, say, file)
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def run_all(arguments: argparse.Namespace, corpus: tuple[Tokens, Tokens], device: torch.device, began: float) -> None:
    """The arms of the command line, then those of the queue; a line of results for each that is run."""
    done = finished(arguments.results)
    for text in itertools.chain(arguments.arm, queued(arguments.queue, began + arguments.limit) if arguments.queue else ()):
        try:
            arm = parse_arm(text, seconds=arguments.seconds, seed=arguments.seed)
        except ValueError as error:
            say(f"{text} | REFUSED: {error}")
            continue
        if settings_of(arm) in done:
            say(f"{text} | in {arguments.results} already")
            continue
        left = arguments.limit - (time.perf_counter() - began)
        if left < arm.seconds + OVERHEAD_SECONDS:
            say(f"{text} | left out: {left:.0f} s are left and it needs {arm.seconds + OVERHEAD_SECONDS:.0f}")
            continue
        result = run_one(text, arm, corpus, device, arguments.keep)
        with arguments.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        if "error" not in result:
            done.add(settings_of(arm))
        say(readable(text, result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder with train-00, train-01 and val as .jsonl.xz")
    parser.add_argument("--tokenizer", type=Path, help="a SentencePiece model")
    parser.add_argument("--cache", type=Path, default=Path("frontier-tokens"), help="folder where tokens are kept")
    parser.add_argument("--results", type=Path, default=Path("frontier-arms.jsonl"), help="file that results are appended to")
    parser.add_argument("--arm", action="append", default=[], help="base:key=value,...; may be given often")
    parser.add_argument("--queue", type=Path, help="file with an arm per line, read until a line `end`")
    parser.add_argument("--seconds", type=float, help="of arms that do not say; else their base's")
    parser.add_argument("--seed", type=int, help="of arms that do not say; else 1")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds in all; an arm that would not end by then is left out"
    )
    parser.add_argument("--keep", type=Path, help="folder for the best weights of each arm, in 16 bits")
    parser.add_argument("--toy", action="store_true", help="a made-up text instead of a corpus")
    arguments = parser.parse_args()
    if not arguments.toy and not (arguments.corpus and arguments.tokenizer):
        parser.error("give --corpus and --tokenizer, or --toy")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    corpus = toy_corpus() if arguments.toy else load_corpus(arguments.corpus, arguments.tokenizer, arguments.cache)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 256  # one per kind of block and shape that the arms have in all
    torch._dynamo.config.accumulated_recompile_limit = 4096
    train, validation = corpus
    say(
        f"{len(train.ids):,} training tokens of {train.text_bytes:,} bytes, {len(validation.ids):,} validation tokens of "
        f"{validation.text_bytes:,} bytes, ready after {time.perf_counter() - began:.1f} s; torch {torch.__version__}, {device}"
    )
    run_all(arguments, corpus, device, began)


if __name__ == "__main__":
    main()
