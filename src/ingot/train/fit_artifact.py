"""Quantise weights to a target file size by searching for the best step sizes of matrices and embedding tables.

Doubling a step size saves one bit per weight. For each of several step sizes for the embedding tables, a few size estimates are
therefore enough to find the smallest step size for the matrices that meets the limit. The pair of step sizes with the lowest
loss on training text is selected; selecting on validation text would overfit to the text that is scored later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.artifact.container import artifact_sizes
from ingot.artifact.quantise import BY_MODEL
from ingot.backends.base import Rounder, Rounding
from ingot.backends.open import open_inference
from ingot.config.schema import ArtifactSection, Config
from ingot.data.store.dataset import Dataset
from ingot.eval.evaluator import evaluator_of
from ingot.runtime.tensors import TensorRecord

K = 8.0  # value used for artifact.k=auto if there is no size limit
EMBEDDING_K = 5.0
EMBEDDING_KS = (8.0, 6.0, 5.0, 4.0)  # candidates for the clipping threshold of 8-bit embedding tables, in standard deviations
MIN_K = 6.0  # smallest clipping threshold in standard deviations; hardly any weight of a matrix exceeds it
LARGEST_STEP = 1.0  # largest step size, in standard deviations of a row; larger steps retain almost no information
TRIES = 5  # maximum number of attempts to bring the size to just below the limit
CLOSE = 0.001  # stop once at most this fraction of the size limit is unused
# Number of tokens of training text that are used: half for calibration, half for scoring.
GPU_TOKENS, CPU_TOKENS = 1 << 18, 1 << 14
BATCH_TOKENS = 1 << 14

Codes = dict[str, list[TensorRecord]]


@dataclass(frozen=True)
class Steps:
    """The quantisation settings of matrices and of embedding tables."""

    matrices: Rounding
    embeddings: Rounding

    def __str__(self) -> str:
        m, e = self.matrices, self.embeddings
        return f"matrices int{m.bits} with k {m.k:.2f}, embeddings int{e.bits} with k {e.k:.2f}"


def find_codes(
    config: Config,
    weights: Sequence[TensorRecord],
    facts: Mapping[str, Any],
    dataset: Dataset,
    limit: int | None,
    say: Callable[[str], None] = lambda message: None,
    stop: Callable[[], bool] = lambda: False,
) -> Codes:
    """Return the quantised matrices and embedding tables for the quantisers std and gptq, and {} for any other quantiser."""
    a = config.artifact
    if a.quantiser not in BY_MODEL:
        return {}
    model = open_inference(config, dataset.tokenizer.vocab_size)  # a second copy, so that the run's model is not modified
    model.load_weights({record.name: record for record in weights}, "the model")
    # Every other row of training text is used for calibration, the rest for scoring.
    length = config.data.seq_len
    reading = config.evaluation.model_copy(update={"micro_batch": max(1, BATCH_TOKENS // length)})
    evaluator = evaluator_of(config.model_copy(update={"evaluation": reading}), dataset, "train")
    rows = evaluator.rows(max(2, (CPU_TOKENS if model.device.kind == "cpu" else GPU_TOKENS) // length))
    scored = rows[1::2] if len(rows) > 1 else rows
    rounder = model.rounder(evaluator.batches(rows[::2]) if a.quantiser == "gptq" else [])
    if limit is None or a.k != "auto":
        k, embedding_k = (K if a.k == "auto" else a.k), (EMBEDDING_K if a.embedding_k == "auto" else a.embedding_k)
        steps = Steps(Rounding(a.bits, k), Rounding(a.embedding_bits, embedding_k))
        rounder.round(steps.matrices, steps.embeddings)
        say(f"rounded: {steps}")
        return rounder.codes()

    def size(codes: Codes) -> int:
        return next(artifact_sizes(weights, facts, a.quantiser, [a.codec], a.dtype, codes=codes))[1]

    return fit_codes(a, rounder, limit, size, lambda: evaluator.score(scored, model.score).bits_per_byte, say, stop)


def fit_codes(
    a: ArtifactSection,
    rounder: Rounder,
    limit: int,
    size: Callable[[Codes], int],
    bits_per_byte: Callable[[], float],
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> Codes:
    """Return the best-scoring codes for which the file has at most `limit` bytes, or the smallest codes if none fit."""

    def matrices(step: float) -> Rounding:
        """Return the Rounding for a step size in standard deviations, with enough bits (at least `a.bits`) to avoid clipping."""
        by_bits = [Rounding(bits, step * (2 ** (bits - 1) - 1)) for bits in range(a.bits, 9)]
        return next((rounding for rounding in by_bits if rounding.k >= MIN_K), Rounding(8, MIN_K))

    def moved(step: float, over: float) -> float:
        """Return a quantisation step size, within the useful range, that makes the matrices about `over` bytes smaller."""
        octave = rounder.estimate(matrices(step), False) - rounder.estimate(matrices(2 * step), False)
        step *= 2 ** max(-3.0, min(3.0, over / max(octave, 1.0)))
        return min(max(step, MIN_K / 127), LARGEST_STEP)

    scale = (2 ** (a.embedding_bits - 1) - 1) / 127
    tried = [k * scale for k in EMBEDDING_KS] if a.embedding_k == "auto" else [a.embedding_k]
    embeddings = [Rounding(a.embedding_bits, k) for k in tried]
    code_bytes = rounder.round(matrices(K / 31), embeddings[0])
    rest = size(rounder.codes()) - code_bytes  # size of the file without the codes, in bytes
    candidates = []
    for rounding in embeddings:  # pair each with the smallest step size for matrices that is estimated to fit
        step, matrix_bytes = K / 31, limit - rest - rounder.estimate(rounding, True)
        for _ in range(TRIES):
            step = moved(step, rounder.estimate(matrices(step), False) - matrix_bytes)
        candidates.append(Steps(matrices(step), rounding))

    def score(steps: Steps) -> float:
        if stop():
            return float("inf")
        estimate = rounder.round(steps.matrices, steps.embeddings) + rest
        bpb = bits_per_byte()
        say(f"{steps}: about {estimate:,.0f} bytes, {bpb:.4f} bits per byte of training text")
        # If a candidate exceeds the limit even with the largest step, return its size: it then ranks after all others.
        largest = steps.matrices.k / steps.matrices.most == LARGEST_STEP
        return estimate if largest and estimate > limit else bpb

    steps = candidates[0] if len(candidates) == 1 else min(candidates, key=score)
    # Refine the step size of the matrices until the actual file size is just below the limit.
    kept: tuple[Steps, Codes, int] | None = None
    for _ in range(TRIES):
        rounder.round(steps.matrices, steps.embeddings)
        codes = rounder.codes()
        file_bytes, step = size(codes), steps.matrices.k / steps.matrices.most
        left = limit - file_bytes
        if kept is None or (kept[2] <= file_bytes <= limit if kept[2] <= limit else file_bytes < kept[2]):
            kept = steps, codes, file_bytes
        next_step = moved(step, CLOSE / 2 * limit - left)
        if 0 <= left <= CLOSE * limit or next_step == step or stop():
            break
        steps = Steps(matrices(next_step), steps.embeddings)
    assert kept is not None
    say(f"chosen rounding: {kept[0]}: {kept[2]:,} of {limit:,} bytes")
    return kept[1]
