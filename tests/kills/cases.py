"""One case: settings, ranks, and the moments at which its sessions are killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 12
TINY: dict[str, Any] = {
    "model.layers": 1, "model.heads": 2, "model.width": 16, "data.seq_len": 16, "optimizer.learning_rate": 0.01,
    "training.max_steps": STEPS, "training.tokens_per_step": 80, "training.save_every": 2, "training.keep_last": 2,
    "training.device": "cpu", "training.output_dir": "run", "tracking.log_every": 1, "tracking.heartbeat_seconds": 0.2,
    "evaluation.every": 3, "evaluation.rows": 9, "evaluation.micro_batch": 2, "evaluation.sample_tokens": 12,
    "artifact.quantiser": "int8", "artifact.codec": "zlib", "artifact.score": False,
}  # fmt: skip
STAGES = [{"steps": 4, "seq_len": 8}, {"steps": 4, "tokens_per_step": 160}, {"steps": 4}]
PHASES = [{"tokens": 400, "mix": {"web": 1, "books": 2}}, {"tokens": 1, "mix": {"web": 1, "books": 1}}]

# What is trained: every family, packing, an average of the weights, dropout, stages, buckets and the scoring of an artifact.
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"optimizer.name": "adamw", "data.sampling": "random", "model.dropout": 0.2},
    "llama-packed": {"model.family": "llama", "model.kv_heads": 1, "data.sampling": "pack", "data.document_mask": True},
    "golf-averaged": {"model.family": "golf", "model.kv_heads": 1, "data.sampling": "stream", "optimizer.ema_decay": 0.9},
    "scored": {"artifact.score": True, "training.save_every": 5},
    "muon-averaged": {
        "optimizer.name": "muon",
        "optimizer.ema_decay": 0.8,
        "training.micro_batch": 2,
        "evaluation.at_start": True,
    },
    "frontier": {
        "model.family": "frontier",
        "model.kv_heads": 1,
        "model.window": 5,
        "optimizer.name": "muon",
        "optimizer.muon_beta2": 0.9,
        "optimizer.muon_cautious": True,
        "optimizer.muon_weight_decay": 0.1,
    },
    "stages": {"training.stages": STAGES, "training.priming_steps": 1, "training.keep_last": None},
    "buckets": {"data.path": "../buckets", "data.tokenizer": "byte", "data.sampling": "pack", "data.phases": PHASES},
    "llama-averaged": {"model.family": "llama", "model.kv_heads": 2, "optimizer.ema_decay": 0.9, "evaluation.every": 1},
}
SCORED = "scored"
TOPOLOGIES = ((1, "auto"), (3, "ddp"), (1, "auto"), (3, "fsdp"), (4, "hsdp"))

# What a run says it waits for before it is killed, and how often it can say that; None: nothing in particular.
WORDS: dict[str | None, int] = {None: 1, "evaluating": 12, "sampling": 3, "step": STEPS, "saving": 1, "exporting": 1, "saved": 5}
OPERATIONS = 60  # on files, after which a kill comes; a save is about 25


@dataclass(frozen=True)
class Moment:
    """When a process is ended, and by which signal."""

    signal: signal.Signals = signal.SIGKILL
    words: str | None = None  # what the run says first,
    times: int = 1  # so many times
    operations: int = 0  # and on how many files it works after that; or
    seconds: float | None = None  # how long after its start
    rank: int = 0
    all_at_once: bool = False  # whether the machine is lost, or the other ranks are asked to end, as the launcher does


@dataclass(frozen=True)
class Case:
    """A run and what happens to it."""

    number: int
    name: str
    ranks: int
    parallel: str
    moments: list[Moment] = field(default_factory=list)

    @property
    def settings(self) -> Mapping[str, Any]:
        """By dotted names; paths are seen from the folder of the case."""
        return {**TINY, "data.path": "../data", "training.parallel": self.parallel, **SETTINGS[self.name]}


def make_case(seed: int, number: int) -> Case:
    """The case of a number; settings and ranks go round, so that a few cases have all of them."""
    draw = random.Random(f"{seed} {number}")
    ranks, parallel = TOPOLOGIES[number % len(TOPOLOGIES)]
    name = list(SETTINGS)[number % len(SETTINGS)]
    if name == SCORED:
        moments = [Moment(words="scoring the artifact", operations=0), _moment(draw, ranks)]
    else:
        moments = [_moment(draw, ranks) for _ in range(draw.randint(1, 3))]
    return Case(number, name, ranks, parallel, moments)


def _moment(draw: random.Random, ranks: int) -> Moment:
    number = signal.SIGTERM if draw.random() < 0.15 else signal.SIGKILL
    rank, all_at_once = draw.randrange(ranks), draw.random() < 0.5
    if rank or draw.random() < 0.25:  # other ranks than the first say nothing
        return Moment(number, seconds=draw.uniform(0.02, 0.4) * (2 if ranks > 1 else 1), rank=rank, all_at_once=all_at_once)
    words = draw.choice(list(WORDS))
    operations = draw.randrange(OPERATIONS) if words is None or draw.random() < 0.7 else 0
    return Moment(number, words, draw.randint(1, WORDS[words]), operations, all_at_once=all_at_once)
