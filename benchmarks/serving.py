"""Measure the throughput of the engine of `ingot serve` with many concurrent streams, and how fast it scores texts.

    python benchmarks/serving.py --device cuda                      124M parameters, 32 streams of 256 tokens
    python benchmarks/serving.py --device cuda --task-data eval     and the 10,042 items of HellaSwag from a folder
    python benchmarks/serving.py --device cpu --layers 2 --width 64 --heads 4 --tokens 20 --items 64    a toy

The weights are random, because the cost of a token does not depend on its value.
"""

from __future__ import annotations

import argparse
import queue
import time
from pathlib import Path

from ingot.backends.open import open_backend, open_inference
from ingot.backends.sampling import Sampling
from ingot.config.loading import load_config
from ingot.data.tokenizers import GPT2Tokenizer
from ingot.inference.batching import Chunk, Completion, Engine
from ingot.inference.model import LoadedModel, foreign_weights
from ingot.inference.scoring import read_items, score_rows, score_tasks, task_rows
from ingot.runtime.ranks import Ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 12, "heads": 12, "width": 768, "context": 1024, "streams": 32, "tokens": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--items", type=int, default=2000, help="rows of about 90 tokens to score; the last 20 tokens of each are scored"
    )
    parser.add_argument("--task-data", type=Path, help="folder with HellaSwag's items, as for `ingot eval --task-data`")
    given = parser.parse_args()
    print(f"{'dtype':6} {'streams':>8} {'tokens':>7} {'seconds':>8} {'tokens/s':>9} {'rows scored/s':>14} {'prompts/s':>10}")
    for dtype in ("fp32", "bf16"):
        model = opened(given, dtype)
        engine = Engine(model)
        for streams in (1, given.streams):
            serve(engine, given, streams, min(given.tokens, 8))  # warm-up: compiles and captures CUDA graphs
            seconds = serve(engine, given, streams, given.tokens)
            rate = streams * given.tokens / seconds
            told = f"{dtype:6} {streams:8} {given.tokens:7} {seconds:8.2f} {rate:9,.0f}"
            if streams > 1:
                told += f" {score(model, given):14,.0f} {score_prompts(engine, given):10,.0f}"
            print(told, flush=True)
        engine.close()
        if given.task_data is not None:
            hellaswag(model, given.task_data)


def opened(given: argparse.Namespace, dtype: str) -> LoadedModel:
    """Return a randomly initialised model, ready to generate."""
    shape = {"layers": given.layers, "heads": given.heads, "width": given.width, "context": given.context, "vocab_size": 50304}
    sections = {
        "model": {"family": "gpt2", **shape},
        "data": {"seq_len": given.context},
        "training": {"device": given.device, "max_steps": 1, "tokens_per_step": given.context},
    }
    config = load_config(python=sections, environment={}).config
    drawn = open_backend(config, 50257, Ranks()).weights()
    backend = open_inference(config, 50257)
    backend.load_weights({record.name: record for record in drawn}, "random weights")
    weights = foreign_weights(Path("random"), [], {"family": "gpt2", **shape}, GPT2Tokenizer())
    return LoadedModel(weights, GPT2Tokenizer(), backend).cast(dtype)


def serve(engine: Engine, given: argparse.Namespace, streams: int, tokens: int) -> float:
    """Generate with concurrent streams and return the seconds until all are done."""
    found: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    began = time.perf_counter()
    for stream in range(streams):
        prompt = [50256, *range(1000 + stream, 1016 + stream % 7)]
        engine.submit(Completion(prompt, False, tokens, Sampling(temperature=1.0, seed=stream), found.put, stream=True))
    left = streams
    while left:
        left -= found.get().finish is not None
    return time.perf_counter() - began


def rows_of(given: argparse.Namespace) -> list[list[int]]:
    """Return token rows of about the length of HellaSwag's."""
    return [[(7 * row + place) % 50000 for place in range(min(80 + row % 20, given.context))] for row in range(given.items)]


def score_prompts(engine: Engine, given: argparse.Namespace) -> float:
    """Return the prompts scored per second, 64 per request, with echo, logprobs and one new token, as lm-eval requests them."""
    found: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    rows = rows_of(given)
    began = time.perf_counter()
    for request in (rows[begin : begin + 64] for begin in range(0, len(rows), 64)):
        for row in request:
            engine.submit(Completion(row, False, 1, Sampling(temperature=0.0), found.put, logprobs=1, echo=True))
        for _ in request:
            if (piece := found.get()).error is not None:
                raise piece.error
    return len(rows) / (time.perf_counter() - began)


def hellaswag(model: LoadedModel, folder: Path) -> None:
    """Print the seconds that `ingot eval --tasks hellaswag` takes with a loaded model."""
    began = time.perf_counter()
    tasks = task_rows(read_items(["hellaswag"], folder), model.tokenizer, model.context, None)
    read = time.perf_counter() - began
    [score] = score_tasks(tasks, model.backend).values()
    whole = time.perf_counter() - began
    print(
        f"HellaSwag, {score.items:,} items, {len(tasks.rows):,} rows: read in {read:.1f} s, scored after {whole:.1f} s",
        flush=True,
    )


def score(model: LoadedModel, given: argparse.Namespace) -> float:
    """Return the rows scored per second, for rows of about the length of HellaSwag's."""
    rows = rows_of(given)
    firsts = [max(1, len(row) - 20) for row in rows]
    score_rows(model.backend, rows[:64], firsts[:64])
    began = time.perf_counter()
    score_rows(model.backend, rows, firsts)
    return len(rows) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
