"""One rank of a sharded or replicated model on the CPU: trains every model it is given; the first rank prints the results."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.backends.open import open_backend
from ingot.backends.sampling import Sampling
from ingot.config.schema import Config
from ingot.runs.checkpoints import begin_checkpoint, load_checkpoint, save_checkpoint, save_part
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.step_plan import Position, plan_step

torch.set_num_threads(1)
VOCABULARY, SEQ_LEN, ROWS = 37, 16, 11  # not multiples of the number of ranks
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True},
    "llama": {"kv_heads": 1},
    "golf": {"kv_heads": 1, "embedding_dtype": "bf16"},
    "frontier": {"kv_heads": 1, "window": 5, "layers": 3},
}


def rows_of(step: int) -> np.ndarray:
    windows = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, SEQ_LEN + 1), dtype=np.int32)
    return np.stack([windows[:, :-1], windows[:, 1:]], axis=1)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Take `steps` steps from the checkpoint `load`, if given, and save to `save`; return losses and digests."""
    ranks = ranks_from_environment()
    model = {"family": case["family"], "layers": 2, "heads": 2, "width": 20, **FAMILIES[case["family"]]}
    optimizer = {"name": case["optimizer"], "schedule": "constant", "learning_rate": 3e-3, "clip_norm": 0.5, "ema_decay": 0.9}
    if case["optimizer"] == "muon":
        optimizer |= {"muon_beta2": 0.9, "muon_cautious": True, "muon_weight_decay": 0.1}
    training = {"max_steps": 100, "tokens_per_step": ROWS * SEQ_LEN, "device": "cpu", "precision": "fp32", "micro_batch": 2}
    training |= {"parallel": case.get("parallel", "auto")} | case.get("training", {})
    config = Config(model=model, data={"seq_len": SEQ_LEN}, optimizer=optimizer, training=training)
    share, first = ranks.share(ROWS), case.get("first", 0)
    plans = [plan_step(config, Position(step)) for step in range(first, first + case["steps"])]
    backend = open_backend(config, VOCABULARY, ranks)
    if "load" in case:
        backend.load(load_checkpoint(Path(case["load"])).tensors)
    backend.tune([(plan_step(config, Position()), rows_of(0)[share.start : share.stop])], {})
    norms, losses = [], []
    for plan in plans:
        result = backend.step(rows_of(plan.step)[share.start : share.stop], ROWS * SEQ_LEN, plan).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    if "save" in case:
        folder, last = Path(case["save"]), first + case["steps"]
        state = backend.snapshot()
        if ranks.first and backend.writers > 1:
            begin_checkpoint(folder, last)
        backend.maximum([0.0])
        if ranks.first:
            save_checkpoint(folder, last, state(), {}, writers=backend.writers)
        elif ranks.rank < backend.writers:
            save_part(folder, last, state, ranks.rank)
        backend.maximum([0.0])
    score = backend.total([backend.score(rows_of(1000)[share.start : share.stop])])[0]
    stream = backend.generate([[1, 2, 3]], Sampling(temperature=0.0))
    text = [next(stream)[0] for _ in range(20)]
    stream.close()
    shared = hashlib.sha256(b"".join(bytes(record.data) for record in backend.weights())).hexdigest()
    own = [bytes(backend.parallel.whole(p).detach().numpy().tobytes()) for p in backend.model.parameters()]
    digest = hashlib.sha256(b"".join(own)).hexdigest()
    equal = backend.maximum([float(backend.broadcast(digest) != digest)])[0] == 0
    return {"losses": losses, "norms": norms, "score": score, "text": text, "equal": equal, "weights": shared}


found = [train(case) for case in json.loads(sys.argv[1])]
if ranks_from_environment().first:
    print(json.dumps(found))
