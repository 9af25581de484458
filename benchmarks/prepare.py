"""Compare the speed of `ingot data prepare`, from text to tokens on disk, with other common methods.

Every tool gets the same file of JSON lines and runs as a separate process, whose start counts; tools alternate, and each row is
the median over the rounds. The plain loop reads a line, encodes it with the library and writes the ids. Peak memory is that of
the main process plus, for each child process, that of the largest child. The last rows use twice the text; memory must not grow.

    python benchmarks/prepare.py [--corpus FILE_OR_FOLDER ...] [--model FILE.model] [--megabytes 100] [--turns 3]

Without a corpus the text is the bundled Shakespeare, repeated; its small number of distinct words favours our tool.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from datetime import date
from importlib.resources import files
from itertools import cycle, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.prepare.pipeline import prepare
from ingot.data.prepare.workers import cpu_count
from ingot.data.text.text_files import find_files, read_documents
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
from ingot.data.tokenizers.tokenizer_base import byte_alphabet

BATCH = 1024  # documents per batch of golf's exporter; also the number of chunks that nanoGPT writes
VOCABULARY = 1024


# The tools: each writes OUTPUT from a file of JSON lines and returns the tokens it wrote.


def ours(tokenizer: str) -> Callable[[Path, Path], int]:
    """Return the tool that runs `ingot data prepare`."""

    def run(source: Path, output: Path) -> int:
        summary = prepare([source], output, tokenizer, val_documents=0)
        return sum(split.tokens for split in summary.splits.values())

    return run


def loop(encode: Callable[[str], Any], start: int) -> Callable[[Path, Path], int]:
    """Return a tool that reads, encodes and writes one line at a time."""

    def run(source: Path, output: Path) -> int:
        tokens = 0
        with output.open("wb") as file:
            for text in texts_of(source):
                ids = np.concatenate([np.array([start], np.uint16), np.asarray(encode(text), np.uint16)])
                file.write(ids.tobytes())
                tokens += len(ids)
        return tokens

    return run


def byte_ids(text: str) -> Any:
    return np.frombuffer(text.encode(), np.uint8) + np.uint16(4)


def sentencepiece_loop(model: str) -> Callable[[Path, Path], int]:
    import sentencepiece  # type: ignore[import-untyped]

    return loop(sentencepiece.SentencePieceProcessor(model_file=model).encode, 1)


def sentencepiece_batches(model: str) -> Callable[[Path, Path], int]:
    """Return golf's method: many documents per batch, encoded in the library's threads."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=model)

    def run(source: Path, output: Path) -> int:
        tokens, batch = 0, []
        with output.open("wb") as file:
            for text in [*texts_of(source), None]:
                batch += [] if text is None else [text]
                if len(batch) == BATCH or text is None:
                    for ids in processor.encode(batch, num_threads=cpu_count()):
                        file.write(array("H", [1, *ids]).tobytes())
                        tokens += len(ids) + 1
                    batch = []
        return tokens

    return run


def tiktoken_loop(_: str) -> Callable[[Path, Path], int]:
    return loop(GPT2Tokenizer()._encoding.encode_ordinary, 50256)


def one_by_one(tokenizer_json: str) -> Callable[[Path, Path], int]:
    """Return gpt-simple's method: `tokenizers`, one document at a time, ids streamed to disk."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_json)
    return loop(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 50256)


POOLED: Any = None  # the encoder in each process of the pool


def pool_start() -> None:
    global POOLED
    POOLED = GPT2Tokenizer()._encoding


def pool_encode(text: str) -> list[int]:
    return [*POOLED.encode_ordinary(text), 50256]


def pool_and_memmap(_: str) -> Callable[[Path, Path], int]:
    """Return nanoGPT's method: tiktoken in a process pool, all ids kept in memory, then written to a memory map in chunks."""

    def run(source: Path, output: Path) -> int:
        with get_context("spawn").Pool(cpu_count(), pool_start) as pool:
            documents = [np.array(ids, np.uint16) for ids in pool.imap(pool_encode, texts_of(source), chunksize=64)]
        total, filled = sum(map(len, documents)), 0
        target = np.memmap(output, np.uint16, "w+", shape=(total,))
        for part in range(BATCH):
            some = np.concatenate([np.empty(0, np.uint16), *documents[part::BATCH]])
            target[filled : filled + len(some)] = some
            filled += len(some)
        target.flush()
        return total

    return run


def texts_of(source: Path) -> Iterator[str]:
    with source.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


TOOLS: dict[str, dict[str, Callable[[str], Callable[[Path, Path], int]]]] = {
    "SentencePiece": {"ingot": ours, "plain loop": sentencepiece_loop, "batches, threads (golf)": sentencepiece_batches},
    "GPT-2": {
        "ingot": lambda _: ours("gpt2"),
        "plain loop (tiktoken)": tiktoken_loop,
        "one by one (gpt-simple)": one_by_one,
        "pool, memmap (nanoGPT)": pool_and_memmap,
    },
    "bytes": {"ingot": lambda _: ours("byte"), "plain loop": lambda _: loop(byte_ids, 1)},
}


# Input files


def write_text(corpus: list[Path], target: Path, megabytes: float) -> int:
    """Write documents as JSON lines until the text has the requested size; return its bytes."""
    if corpus:
        texts = read_documents(find_files(corpus)[0], "text")
    else:
        packed = (files("ingot.data") / "samples/shakespeare.jsonl.xz").read_bytes()
        texts = cycle([json.loads(line)["text"] for line in lzma.decompress(packed).splitlines()])
    size = 0
    with target.open("w", encoding="utf-8") as file:
        for text in texts:
            if size >= 1e6 * megabytes:
                break
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(text.encode())
    return size


def write_gpt2_json(target: Path) -> None:
    """Write GPT-2's vocabulary as a tokenizer.json; each merge is found by encoding a token with only the earlier merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = GPT2Tokenizer()._pieces
    ranks = {piece: rank for rank, piece in enumerate(pieces) if piece is not None}
    spelled = {byte: character for character, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    tokenizer: Any = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(target))


def make(arguments: argparse.Namespace) -> None:
    """Write the input files that the tools need."""
    once, twice = arguments.make / "text.jsonl", arguments.make / "twice.jsonl"
    size = write_text(arguments.corpus, once, arguments.megabytes)
    (arguments.make / "size").write_text(str(size))
    with twice.open("wb") as target:
        for _ in range(2):
            with once.open("rb") as source:
                shutil.copyfileobj(source, target)
    if not arguments.model and "SentencePiece" in arguments.kinds:
        train_tokenizer([once], arguments.make / "trained.model", "sentencepiece", VOCABULARY, documents=2000)
    write_gpt2_json(arguments.make / "gpt2.json")


# Timed runs


def run_tool(kind: str, tool: str, argument: str, source: Path, output: Path) -> None:
    """Run one tool in this process and print its tokens and peak memory as JSON."""
    tokens = TOOLS[kind][tool](argument)(source, output)
    peak, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    if sys.platform == "linux":  # on Linux ru_maxrss includes the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0])
    processes = cpu_count() if child else 0
    print(json.dumps({"tokens": tokens, "peak_mb": (peak + processes * child) / (1024 if sys.platform == "linux" else 1 << 20)}))


def turn(kind: str, tool: str, argument: str, source: Path, folder: Path) -> dict[str, float]:
    output = folder / "output"
    began = time.perf_counter()
    command = [sys.executable, __file__, "--tool", kind, tool, argument, str(source), str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(output, ignore_errors=True)
    output.unlink(missing_ok=True)
    return {**json.loads(done.stdout), "seconds": seconds}


def processor() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("Model name"))
    except (OSError, subprocess.CalledProcessError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", type=Path, default=[])
    parser.add_argument("--model", type=Path, help="a SentencePiece model (default: train one of 1,024 pieces)")
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tool", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments)
        return
    if arguments.tool:
        kind, tool, argument, source, output = arguments.tool
        run_tool(kind, tool, argument, Path(source), Path(output))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        once, twice, model, gpt2 = (folder / file for file in ("text.jsonl", "twice.jsonl", "trained.model", "gpt2.json"))
        # In a separate process: on Linux a child's ru_maxrss includes the peak of the process that started it.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make", name], check=True)
        size = int((folder / "size").read_text())
        given = {"SentencePiece": str(arguments.model or model), "GPT-2": str(gpt2), "bytes": ""}
        lanes = [(kind, tool, once) for kind in arguments.kinds for tool in TOOLS[kind]]
        lanes += [(kind, "ingot", twice) for kind in arguments.kinds]
        turns: dict[tuple[str, str, Path], list[dict[str, float]]] = {lane: [] for lane in lanes}
        for _ in range(arguments.turns):
            for lane in lanes:
                turns[lane].append(turn(lane[0], lane[1], given[lane[0]], lane[2], folder))
                print(f"{lane[0]}, {lane[1]}: {turns[lane][-1]}", file=sys.stderr)
    print_table(turns, once, size)


def print_table(turns: dict[tuple[str, str, Path], list[dict[str, float]]], once: Path, size: int) -> None:
    load = os.getloadavg()[2]
    print(f"{date.today()}, {cpu_count()} cores of {processor()} ({platform.machine()}), load of 15 minutes {load:.1f}")
    print(f"python {' '.join(sys.argv)}: {size / 1e6:.1f} MB of text\n")
    print("| tokenizer | tool | MB/s | of the plain loop | peak MB |\n|---|---|---|---|---|")
    speeds = {lane: statistics.median(one["seconds"] for one in found) for lane, found in turns.items()}
    for (kind, tool, source), found in turns.items():
        count = 1 if source == once else 2
        plain = next(seconds for (k, t, s), seconds in speeds.items() if k == kind and t.startswith("plain"))
        seconds = speeds[kind, tool, source]
        peak = max(one["peak_mb"] for one in found)
        name = tool if count == 1 else f"{tool}, twice the text"
        print(f"| {kind} | {name} | {count * size / 1e6 / seconds:.1f} | {count * plain / seconds:.2f} | {peak:,.0f} |")
    for kind in {lane[0] for lane in turns}:
        counts = {one["tokens"] for lane, found in turns.items() if lane[0] == kind and lane[2] == once for one in found}
        if len(counts) > 1:
            print(f"\nthe tools disagree about the tokens of {kind}: {sorted(counts)}")


if __name__ == "__main__":
    main()
