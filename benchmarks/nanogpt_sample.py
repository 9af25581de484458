"""Compare the time of sample.py for its ten samples of 500 tokens with nanoGPT's method of sampling.

nanoGPT's method generates one sample after another, recomputes the whole context for every token under autocast, and draws with
torch.multinomial. Ours generates all samples as one batch with a KV cache and weights in the compute dtype; on a GPU each step is
replayed as a CUDA graph. Capturing the graph counts; loading and the first use of the device do not. The weights are random, so
the text is nonsense, but its cost is realistic.

    python benchmarks/nanogpt_sample.py                                       # 124M, on a GPU
    python benchmarks/nanogpt_sample.py --layers 4 --width 128 --heads 4 --block 256 --tokens 100 --samples 4 --device cpu
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.backends.open import find_device
from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import write_texts
from ingot.compat.nanogpt.gpt import GPT, GPTConfig

TEMPERATURE, TOP_K, START = 0.8, 200, 198  # sample.py's defaults; a newline in GPT-2's ids
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.no_grad()
def recompute(model: GPT, samples: int, tokens: int, dtype: torch.dtype) -> list[list[int]]:
    """Sample by nanoGPT's method: one sample at a time, the whole context recomputed for every token."""
    device = model.lm_head.weight.device
    found = []
    for _ in range(samples):
        text = torch.full((1, 1), START % model.config.vocab_size, device=device)
        for _ in range(tokens):
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                logits, _ = model(text[:, -model.config.block_size :])
            text = torch.cat([text, chosen(logits[:, -1].float() / TEMPERATURE)], dim=1)
        found.append(text[0, 1:].tolist())
    return found


def chosen(logits: Tensor) -> Tensor:
    least = logits.topk(min(TOP_K, logits.size(-1))).values[:, -1:]
    return torch.multinomial(F.softmax(logits.masked_fill(logits < least, -torch.inf), dim=-1), 1)


def ours(model: GPT, samples: int, tokens: int, at_once: int, record: bool) -> list[list[int]]:
    """Sample with our engine, up to `at_once` samples per batch."""
    found: list[list[int]] = []
    for first in range(0, samples, at_once):
        sampling = Sampling(TEMPERATURE, TOP_K, seed=1337 + first)
        start, rows = [START % model.config.vocab_size], min(at_once, samples - first)
        found += write_texts(model, start, rows, tokens, sampling, keep_half=True, record=record)
    return found


def seconds(write: Callable[[], list[list[int]]], samples: int, tokens: int) -> float:
    """Return the seconds until all samples are on the host."""
    began = time.perf_counter()
    found = write()
    taken = time.perf_counter() - began
    assert [len(text) for text in found] == [tokens] * samples
    return taken


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", type=torch.device)
    parser.add_argument("--dtype", default=None, choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    for name, default in (("layers", 12), ("heads", 12), ("width", 768), ("block", 1024), ("vocab", 50304)):
        parser.add_argument(f"--{name}", default=default, type=int)
    parser.add_argument("--samples", default=10, type=int)
    parser.add_argument("--tokens", default=500, type=int)
    parser.add_argument("--turns", default=3, type=int, help="repetitions of our method; nanoGPT's is run once")
    a = parser.parse_args()
    dtype = DTYPES[a.dtype or ("bfloat16" if a.device.type == "cuda" else "float32")]
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    with contextlib.redirect_stdout(io.StringIO()):
        shape = GPTConfig(a.block, a.vocab, a.layers, a.heads, a.width, bias=False)
        model, cast = (GPT(shape).to(a.device).eval() for _ in range(2))
    cast = cast.to(dtype)
    ways: dict[str, Callable[[int, int], list[list[int]]]] = {
        "nanoGPT's: one by one, all computed anew": lambda n, t: recompute(model, n, t, dtype),
        "one by one, with a cache": lambda n, t: ours(cast, n, t, 1, False),
        "side by side, with a cache": lambda n, t: ours(cast, n, t, n, False),
    }
    if a.device.type == "cuda":
        ways["sample.py: side by side, steps recorded"] = lambda n, t: ours(cast, n, t, n, True)
    millions = f"{model.get_num_params() / 1e6:.0f}M parameters, {str(dtype).removeprefix('torch.')}"
    device = find_device(str(a.device)).name
    print(f"{date.today()}, {device}, torch {torch.__version__}: {a.samples} x {a.tokens} tokens, {millions}\n")
    print("| way | seconds | tokens/s | times as fast |\n|---|---|---|---|", flush=True)
    slowest = 0.0
    for name, write in ways.items():
        write(a.samples, min(16, a.tokens))
        turns = [seconds(lambda w=write: w(a.samples, a.tokens), a.samples, a.tokens) for _ in range(a.turns if slowest else 1)]
        taken = statistics.median(turns)
        slowest = slowest or taken
        print(f"| {name} | {taken:.2f} | {a.samples * a.tokens / taken:,.0f} | {slowest / taken:.1f} |", flush=True)


if __name__ == "__main__":
    main()
