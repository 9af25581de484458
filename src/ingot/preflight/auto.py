"""`--recipe auto`: choose vocabulary, model shape, batch, row length and epochs from a speed measurement and the data's size.

A budget of F floating-point operations trains N parameters on T tokens with F = 6 N T, and T of about 5 N is best. That gives
330,000 parameters for 90 seconds on two CPU cores and 51 million for 300 seconds on an H200, close to the best sizes measured.
The vocabulary grows with the model, unless the data or the user sets it: on a CPU, using tokens of three bytes instead of one
improved the score more than anything else. The choices replace values of the recipe, and the user's settings override them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.backends.open import find_device, measure_flops, open_backend
from ingot.config.fields import leaf_values
from ingot.config.loading import ResolvedConfig, Sources
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset, text_bytes
from ingot.data.tokenizers.by_name import BPE
from ingot.errors import ConfigError, DataError
from ingot.runs.folder import RunFolder
from ingot.runs.mirror import local_run
from ingot.runs.view import Run
from ingot.runtime.ranks import Ranks
from ingot.train.step_plan import shapes

RECIPE = "auto"
# In 22.5 s on two cores, 3 tokens per weight reached 2.324 bits per byte, 1 reached 2.352 and 11 reached 2.360: about 4 is best.
# After 300 s on an H200, the larger of two models of the recipe frontier was better; it had seen 6 tokens per weight.
TOKENS_PER_WEIGHT = 5.0
OPERATIONS = 6.0  # floating-point operations per token and weight, forward and backward
STEPS = 2500  # target number of steps: the demo takes 2,543 in 90 s on two cores, the frontier 2,900 in 300 s on an H200
SMALLEST = 2048  # minimum tokens per step: with 2,048, one core reached 2.499 bits per byte in 50 s; with 1,024, 2.540
# Maximum number of epochs: on 27 KB of text, a byte model reached 3.66, 3.36 and 3.39 bits per byte after 4, 8 and 16 epochs.
# With OF_LITTLE and steps of 512 tokens instead of 2,048, the byte model (of width 32) reached 3.27 bits per byte after 8 epochs.
MOST_PASSES = 8
READ_PER_WEIGHT = 20.0  # training tokens per weight when data is scarce: halving the width then saved 0.03 bits per byte
OF_LITTLE: dict[str, Any] = {"optimizer.muon_weight_decay": 1.0, "optimizer.weight_decay": 0.1}
SMALLEST_OF_LITTLE = 512  # minimum tokens per step with little data
GPU_UTILISATION = 0.33  # share of the matmul rate reached in training: 1.5 M tokens/s with 28 M weights on an H200 at 782 TFLOP/s
PROBE_SECONDS = 1.5  # without a GPU, training steps are timed for this long
# Best vocabulary for this many weights: in 22.5 s on two cores, 2,048 ids reached 2.37 bits per byte, 1,024 ids 2.42, bytes 2.55.
# The much larger models of the recipe frontier have 8,192 ids, hence a vocabulary that grows with the fourth root of the weights.
PROBED_IDS, FOR_WEIGHTS = 2048, 330_000
BYTES_PER_ID = 1000  # minimum bytes of text per id: tokens seen too rarely are not learned
# Settings for training a wide model on long rows for thousands of steps, as in golf/frontier; auto.yaml suits a small model.
ON_A_GPU: dict[str, Any] = {
    "model.pattern": "SSSSL", "model.softcap": 15.0, "model.tied": True, "model.embedding_std": None,
    "optimizer.embedding_learning_rate": 0.02, "optimizer.muon_weight_decay": 0.2, "optimizer.muon_momentum_warmup_steps": 200,
    "optimizer.floor": 0.05, "optimizer.ema_decay": 0.99,
}  # fmt: skip
CHOSEN = (
    *ON_A_GPU, "optimizer.weight_decay",
    "model.layers", "model.heads", "model.width", "data.tokenizer", "data.seq_len", "data.sampling", "evaluation.stride",
    "training.tokens_per_step", "training.max_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The facts on which the choices depend: the machine and its speed, the time budget, and the data."""

    device: str  # name of the device
    on_gpu: bool
    rate: float  # floating-point operations per second that training reaches
    seconds: float
    tokens: int  # number of tokens in the training text
    vocab_size: int
    has_documents: bool
    bytes: int  # size of the training text in bytes
    tokenizer: str | None = None  # the chosen tokenizer; None if the data already has one


def _wanted_weights(operations: float) -> float:
    return math.sqrt(operations / (OPERATIONS * TOKENS_PER_WEIGHT))  # the best model size for this budget


def choose_tokenizer(operations: float, text_bytes: int) -> str:
    """Return the name of the tokenizer to use for a budget of `operations` FLOPs and a training text of `text_bytes` bytes."""
    ids = PROBED_IDS * (_wanted_weights(operations) / FOR_WEIGHTS) ** 0.25
    most = 1 << int(math.log2(max(1, text_bytes // BYTES_PER_ID)))
    return "byte" if most < 512 else f"{BPE}{min(_power(ids), most)}"


def choose(facts: Facts, own: Mapping[str, int] | None = None) -> tuple[dict[str, Any], tuple[str, str, str]]:
    """Return settings for a machine, budget and text, given the user's settings `own`, and the reasons for the choices."""
    own = own or {}
    operations = facts.rate * facts.seconds
    wanted, enough = _wanted_weights(operations), facts.tokens * MOST_PASSES / READ_PER_WEIGHT
    width = own.get("model.width") or _width(min(wanted, enough), facts, own.get("model.heads", 1))
    layers = own.get("model.layers") or max(2, round(width / 48))
    weights = _weights(width, facts.vocab_size, layers)
    trained, most = operations / (OPERATIONS * weights), MOST_PASSES * facts.tokens
    few, trained = trained > most, min(trained, most)
    # On a CPU, 400 steps of 2,048 bytes reached 2.56 bits per byte with rows of 64 bytes, 2.62 with 128 and 2.68 with 256.
    seq_len = own.get("data.seq_len") or min(2048 if facts.on_gpu else 64, _power(facts.tokens / 8))
    batch = min(max(_power(trained / STEPS), SMALLEST_OF_LITTLE if few else SMALLEST), 262_144)
    batch = own.get("training.tokens_per_step") or math.ceil(batch / seq_len) * seq_len
    passes = trained / facts.tokens
    redrawn = passes > 1 and facts.has_documents
    settings: dict[str, Any] = {
        "model.layers": layers,
        "model.heads": _heads(width),
        "model.width": width,
        "data.seq_len": seq_len,
        "data.sampling": "redraw" if redrawn else "shuffle",
        "evaluation.stride": seq_len if facts.on_gpu else max(1, seq_len // 2),  # on a CPU, the short rows overlap by half
        "training.tokens_per_step": batch,
        "training.max_steps": max(1, int(trained / batch)) if few else None,
    }
    settings |= (ON_A_GPU if facts.on_gpu else {}) | (OF_LITTLE if few else {})
    settings |= {"data.tokenizer": facts.tokenizer} if facts.tokenizer else {}
    text = f"{facts.tokens:,} tokens"
    if facts.tokenizer is not None:
        learned = f"a BPE with {facts.vocab_size:,} ids" if facts.tokenizer != "byte" else "bytes: too little text to train a BPE"
        text = f"{facts.bytes:,} bytes are {text} ({learned})"
    order = "documents are reshuffled and cut into new rows each time" if redrawn else "rows are shuffled"
    little = (
        f"; more than {MOST_PASSES} passes over so little data lead to memorising, so the model has {weights:,} weights "
        f"instead of {wanted:,.0f}, weight decay is stronger, and the run ends before its {facts.seconds:g} s are over"
    )
    return settings, (
        f"model: {layers} layers x {width}, {weights:,} weights: {facts.device} trains at {facts.rate / 1e9:,.1f} GFLOP/s, "
        f"and {facts.seconds:g} s are best spent on about {TOKENS_PER_WEIGHT:g} tokens per weight",
        f"batch: {batch:,} tokens in rows of {seq_len:,}, so that about {trained / batch:,.0f} steps fit",
        f"data: {text}, read {passes:.1f} times; {order}" + (little if few else ""),
    )


def resolve_auto(sources: Sources, world_size: int, say: Callable[[str], None], fresh: bool = False) -> ResolvedConfig:
    """Return the config with the choices of `--recipe auto`. A resumed run keeps its earlier choices unless `fresh` is set."""
    above = sources.above_recipe()
    own = {name: value for name, value in above.items() if isinstance(value, int) and value > 0}
    # The recipe's optimizer groups match parameters of the frontier family only.
    groups: dict[str, Any] = {} if above.get("model.family", "frontier") == "frontier" else {"optimizer.groups": []}
    shape: dict[str, Any] = {}  # makes the recipe's model, whose speed is measured, fit the user's settings
    if "model.width" in own:
        shape["model.heads"] = _heads(own["model.width"])
    elif "model.heads" in own:
        shape["model.width"] = 32 * own["model.heads"]
    if "data.seq_len" in own:
        shape["training.tokens_per_step"] = math.ceil(SMALLEST / own["data.seq_len"]) * own["data.seq_len"]
    before = sources.load(shape | groups)
    if world_size > 1:
        raise ConfigError("--recipe auto supports only one rank; start a run with one rank and pass its config.yaml as --config")
    if before.config.budget.seconds is None:
        raise ConfigError("--recipe auto needs a time budget, but budget.seconds is null; set it to a number")
    output_dir = before.config.training.output_dir
    if not fresh and output_dir is not None and RunFolder(folder := local_run(output_dir)).config_path.is_file():
        kept = {".".join(path): value for path, value in leaf_values(Run.open(folder).config)}
        # Keep the choices made when the run began.
        return sources.load({name: kept[name] for name in CHOSEN if name in kept} | groups)
    settings, reasons = choose(_facts(before.config), own)
    resolved = sources.load(settings | groups)
    for line in reasons:
        say(line)
    if changed := [name for name in settings if RECIPE not in resolved.origins.get(name, RECIPE)]:
        say(f"overridden by your settings: {', '.join(changed)}")
    return resolved


def _facts(config: Config) -> Facts:
    data, device, seconds = config.data, find_device(config.training.device), float(config.budget.seconds or 0)
    size, chosen = text_bytes(data.path) if data.tokenizer is None else None, None
    dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens) if size is None else None
    on_gpu = device.kind not in ("cpu", "mlx")
    if on_gpu:
        name, rate = device.name, GPU_UTILISATION * measure_flops(device)
    else:  # measure the speed by timing training steps of the recipe's model
        vocab_size = dataset.tokenizer.vocab_size if dataset else PROBED_IDS
        with closing(open_backend(config, vocab_size, Ranks())) as backend:  # closed so that its threads end
            plan = shapes(config)[0]
            batch = backend.host_buffer((plan.rows, 2, plan.seq_len))
            batch[:] = np.arange(batch.size, dtype=np.int32).reshape(batch.shape) % vocab_size
            backend.tune([(plan, batch)], {})
            backend.step(batch, batch[:, 1].size, plan).result()  # not timed, because it allocates memory
            steps, began = 0, time.perf_counter()
            while time.perf_counter() - began < PROBE_SECONDS or steps < 3:
                backend.step(batch, batch[:, 1].size, plan).result()
                steps += 1
            tokens_per_second = steps * batch[:, 1].size / (time.perf_counter() - began)
        model: Any = config.model
        weights = _weights(model.width, vocab_size, model.layers) if model.family == "frontier" else backend.parameters
        name, rate = backend.device.name, tokens_per_second * OPERATIONS * weights
    if dataset is None:
        chosen = choose_tokenizer(rate * seconds, size or 0)
        dataset = open_dataset(data.path, chosen)
    split = dataset.split("train")
    try:
        documents = len(split.document_starts()) > 2
    except DataError:  # the data does not record document starts
        documents = False
    return Facts(name, on_gpu, rate, seconds, split.tokens, dataset.tokenizer.vocab_size, documents, split.bytes, chosen)


def _width(weights: float, facts: Facts, heads: int) -> int:
    """Return the width, a multiple of `heads` and of 32 (128 on GPUs), that brings the model closest to `weights` weights."""
    usual = range(128, 2049, 128) if facts.on_gpu else range(32, 513, 32)
    widths = [width for width in usual if width % (2 * heads) == 0] or [32 * heads]
    return min(widths, key=lambda width: abs(math.log(_weights(width, facts.vocab_size) / max(1.0, weights))))


def _heads(width: int) -> int:
    """Return a number of heads that divides `width`, with about 128 channels per head, or 32 if the width is below 256."""
    wanted = width / (128 if width >= 256 else 32)
    counts = [count for count in range(1, width // 2 + 1) if width % (2 * count) == 0] or [1]
    return min(counts, key=lambda count: abs(count - wanted))


def _weights(width: int, vocab_size: int, layers: int | None = None) -> int:
    """Return the number of weights used in matrix products: in the blocks and the output head, but not in embeddings."""
    return 12 * (layers or max(2, round(width / 48))) * width * width + vocab_size * width


def _power(number: float) -> int:
    """Return the power of two nearest to a number, at least 16."""
    return 1 << max(4, round(math.log2(max(1.0, number))))
