"""One arm from its first weight to its score.

The clock runs while the device trains. Compiling is done before by throw-away steps whose traces are removed, evaluation after;
neither costs the arm anything, and both run the graphs of training, so nothing is compiled for them alone.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frontier.arms import Arm
from frontier.data import Order, Tokens, split_rows, windows
from frontier.model import Frontier
from frontier.optimizer import Averages, Optimizer
from frontier.rounding import PLANS, input_moments, round_weights

IN_FLIGHT = 2  # steps that the host is ahead of the GPU: enough to keep it busy, few enough that the clock stays true
FIXED_BATCHES = 2  # of training text whose loss is reported
REPORTS = 5  # progress lines per arm
CALIBRATION_ROWS = 32  # of training text, by which GPTQ rounds

Batches = Sequence[tuple[Tensor, Tensor, Tensor]]


def run_arm(
    arm: Arm, train: Tokens, validation: Tokens, device: torch.device, say: Callable[[str], None], keep: Path | None = None
) -> dict[str, Any]:
    """Train and score; everything that is reported of an arm. The best weights go to the file `keep`, in 16 bits."""
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = Frontier(arm, train.vocabulary, device)
    params = [p for _, p in model.named_parameters()]
    optimizer = Optimizer(arm, model.named_parameters())
    order = Order(train, max(arm.rows), arm.order, arm.seed, device, arm.part)
    averages = Averages(params, arm.ema, arm.ema_every)
    with long_attention(arm, device):
        compile_seconds = prime(model, optimizer, arm, train.vocabulary)
        steps, seconds = learn(model, optimizer, order, averages, arm, say)
        scores = score_all(model, averages, arm, train, validation)
        if keep is not None:
            best = zip(model.named_parameters(), best_weights(model, averages, scores), strict=True)
            torch.save({name: weight.half().cpu() for (name, _), weight in best}, keep)
        rounded = score_rounded(model, averages, scores, arm, train, validation) if arm.score_rounded else []
    return {
        "weights": sum(p.numel() for p in params),
        "steps": steps,
        "train_seconds": round(seconds, 2),
        "tokens_per_second": round(steps * arm.tokens / seconds),
        "passes": round(order.passes, 3),
        "scores": scores,
        "rounded": rounded,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "compile_seconds": round(compile_seconds, 1),
        "all_seconds": round(time.perf_counter() - began, 1),
    }


@contextlib.contextmanager
def long_attention(arm: Arm, device: torch.device) -> Iterator[None]:
    """The kernel of layers that see the whole row: cuDNN's where it works, else flash attention."""
    if device.type != "cuda":
        yield
        return
    kernels = [SDPBackend.CUDNN_ATTENTION]
    try:
        with sdpa_kernel(kernels):
            q = torch.randn(1, arm.heads, 256, arm.head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kernels):
        yield


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def prime(model: Frontier, optimizer: Optimizer, arm: Arm, vocabulary: int) -> float:
    """Compile by two steps of random tokens for each row length, and undo them; the seconds it took."""
    began = time.perf_counter()
    before = [p.detach().clone() for _, p in model.named_parameters()]
    set_dropout(model, arm.dropout)
    for length in sorted(set(arm.rows)):
        tokens = torch.randint(vocabulary, (arm.tokens // length, length), device=model.device)
        for _ in range(2):
            model.losses(tokens, tokens).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step(0, 0.0)
    put(model, before)
    optimizer.forget()
    torch.manual_seed(arm.seed)
    synchronise(model.device)
    return time.perf_counter() - began


def learn(
    model: Frontier, optimizer: Optimizer, order: Order, averages: Averages, arm: Arm, say: Callable[[str], None]
) -> tuple[int, float]:
    """Train until the seconds are used up: the steps and the seconds they took."""
    cuda = model.device.type == "cuda"
    ahead = IN_FLIGHT if cuda else 0
    rows_per_step = arm.tokens // max(arm.rows)
    launched: deque[torch.cuda.Event] = deque()
    step, reports = 0, 1
    gc.collect()
    gc.disable()  # a collection in the middle of a step makes the GPU wait
    began = time.perf_counter()
    try:
        while True:
            elapsed = time.perf_counter() - began
            each = elapsed / step if step else 0.0
            now = elapsed + min(ahead, step) * each  # when the step that is launched next will begin
            if step and now + each / 2 >= arm.seconds:
                break
            progress = min(1.0, now / arm.seconds)
            length = arm.rows[min(int(progress * len(arm.rows)), len(arm.rows) - 1)]
            loss = model.losses(*split_rows(order.next(rows_per_step), length)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(step, progress)
            step += 1
            if progress >= arm.ema_from and (step % arm.ema_every == 0 or not averages.weights):
                averages.update()
            if progress >= reports / REPORTS:
                reports += 1
                if not math.isfinite(value := loss.item()):
                    raise FloatingPointError(f"the loss is {value} at step {step}")
                say(f"  {100 * progress:3.0f}% step {step:,} loss {value:.4f}")
            if cuda:
                launched.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                launched[-1].record()
                if len(launched) > ahead:
                    launched.popleft().synchronize()
        synchronise(model.device)
        return step, time.perf_counter() - began
    finally:
        gc.enable()


def set_dropout(model: Frontier, part: float) -> None:
    if model.dropout is not None:
        model.dropout.fill_(part)


@torch.no_grad()
def put(model: Frontier, weights: Sequence[Tensor]) -> None:
    """Let the model hold these weights."""
    torch._foreach_copy_([p for _, p in model.named_parameters()], list(weights))


def nats(model: Frontier, batches: Batches) -> float:
    """Summed loss of the targets that count. Gradients stay on: without them every graph would be compiled again."""
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for tokens, targets, counts in batches:
        total += (model.losses(tokens, targets).detach().double() * counts).sum()
    return float(total)


def score_all(model: Frontier, averages: Averages, arm: Arm, train: Tokens, validation: Tokens) -> dict[str, dict[str, float]]:
    """The live weights and each average: bits per byte of validation, nats per token there and on fixed rows of training text."""
    set_dropout(model, 0.0)
    length = arm.rows[-1]
    rows = arm.tokens // length
    whole = windows(validation, length, rows, model.device)
    seen = Tokens(train.ids[: FIXED_BATCHES * arm.tokens + 1], train.starts[:1], 0, train.vocabulary)
    fixed = windows(seen, length, rows, model.device)
    live = [p.detach().clone() for _, p in model.named_parameters()]
    scores = {}
    for name, weights in {"live": live, **{str(decay): weights for decay, weights in averages.weights.items()}}.items():
        put(model, weights)
        total = nats(model, whole)
        scores[name] = {
            "val_bpb": round(total / math.log(2) / validation.text_bytes, 5),
            "val_nats": round(total / (len(validation.ids) - 1), 4),
            "train_nats": round(nats(model, fixed) / (len(seen.ids) - 1), 4),
        }
    put(model, live)
    return scores


def best_weights(model: Frontier, averages: Averages, scores: dict[str, dict[str, float]]) -> list[Tensor]:
    """Those of the lowest score: an average, or the model's own as it was trained."""
    best = min(scores, key=lambda name: scores[name]["val_bpb"])
    return [p.detach().clone() for _, p in model.named_parameters()] if best == "live" else averages.weights[float(best)]


def score_rounded(
    model: Frontier, averages: Averages, scores: dict[str, dict[str, float]], arm: Arm, train: Tokens, validation: Tokens
) -> list[dict[str, float]]:
    """The best of the weights, rounded by each plan: bytes, bits per weight of the matrices, bits per byte."""
    live = [p.detach().clone() for _, p in model.named_parameters()]
    weights = best_weights(model, averages, scores)
    length = arm.rows[-1]
    whole = windows(validation, length, arm.tokens // length, model.device)
    put(model, weights)
    calibration = Tokens(train.ids[: CALIBRATION_ROWS * length + 1], train.starts[:1], 0, train.vocabulary)
    moments = input_moments(model, (tokens for tokens, *_ in windows(calibration, length, 1, model.device)))
    found = []
    for plan in PLANS:
        put(model, weights)
        began = time.perf_counter()
        size, bits = round_weights(model.named_parameters(), plan, moments)
        synchronise(model.device)
        seconds = time.perf_counter() - began
        bpb = nats(model, whole) / math.log(2) / validation.text_bytes
        told = {"bytes": size, "per_weight": round(bits, 3), "val_bpb": round(bpb, 5), "seconds": round(seconds, 2)}
        found.append({**plan._asdict(), **told})
    put(model, live)
    return found
