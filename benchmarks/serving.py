"""Tokens per second of many streams at once, by the engine of `ingot serve`; prints one table.

    python benchmarks/serving.py --device cuda                      124M parameters, 32 streams of 256 tokens
    python benchmarks/serving.py --device cpu --layers 2 --width 64 --heads 4 --tokens 20    a toy

The weights are random: what a token is does not change what it costs.
"""

from __future__ import annotations

import argparse
import queue
import time
from pathlib import Path

from ingot.backends.open import open_backend, open_inference
from ingot.config.loading import load_config
from ingot.data.tokenizers import GPT2Tokenizer
from ingot.generate.sampling import Sampling
from ingot.runtime.ranks import Ranks
from ingot.trained.model import LoadedModel
from ingot.trained.scoring import score_rows
from ingot.trained.serving import Engine, Piece, Text
from ingot.trained.weights import foreign_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 12, "heads": 12, "width": 768, "context": 1024, "streams": 32, "tokens": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--items", type=int, default=2000, help="rows of about 90 tokens that are scored, 20 of each at their end"
    )
    given = parser.parse_args()
    print(f"{'dtype':6} {'streams':>8} {'tokens':>7} {'seconds':>8} {'tokens/s':>9} {'rows scored/s':>14}")
    for dtype in ("fp32", "bf16"):
        model = opened(given, dtype)
        engine = Engine(model)
        for streams in (1, given.streams):
            serve(engine, given, streams, min(given.tokens, 8))  # compiles and records
            seconds = serve(engine, given, streams, given.tokens)
            rate = streams * given.tokens / seconds
            told = f"{dtype:6} {streams:8} {given.tokens:7} {seconds:8.2f} {rate:9,.0f}"
            print(f"{told} {score(model, given):14,.0f}" if streams > 1 else told, flush=True)
        engine.close()


def opened(given: argparse.Namespace, dtype: str) -> LoadedModel:
    """A model with its first weights, ready to write."""
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
    """The seconds that all streams took."""
    found: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    began = time.perf_counter()
    for stream in range(streams):
        prompt = [50256, *range(1000 + stream, 1016 + stream % 7)]
        engine.submit(Text(prompt, False, tokens, Sampling(temperature=1.0, seed=stream), found.put, stream=True))
    left = streams
    while left:
        left -= found.get().finish is not None
    return time.perf_counter() - began


def score(model: LoadedModel, given: argparse.Namespace) -> float:
    """Rows per second, of the size of HellaSwag's."""
    rows = [[(7 * row + place) % 50000 for place in range(min(80 + row % 20, given.context))] for row in range(given.items)]
    firsts = [max(1, len(row) - 20) for row in rows]
    score_rows(model.backend, rows[:64], firsts[:64])
    began = time.perf_counter()
    score_rows(model.backend, rows, firsts)
    return len(rows) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
