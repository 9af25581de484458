"""One of several ranks on the CPU: takes steps with each of the settings it is given and prints the losses, on the first rank."""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import torch

torch.compile = partial(torch.compile, backend="aot_eager")  # the graphs and their backward, without a minute of C++

from torch_kit import SEQ_LEN, SMALL, VOCABULARY, rows_of  # noqa: E402

from ingot.backends.open import open_backend  # noqa: E402
from ingot.config.schema import Config  # noqa: E402
from ingot.runtime.ranks import ranks_from_environment  # noqa: E402
from ingot.train.step_plan import Position, plan_step  # noqa: E402

ROWS, STEPS = 8, 2


def losses(document_mask: bool = False, **training: object) -> list[float]:
    torch._dynamo.reset()
    data = {"seq_len": SEQ_LEN, "document_mask": document_mask}
    own = {"max_steps": 10, "tokens_per_step": ROWS * SEQ_LEN, "device": "cpu", "precision": "fp32", "micro_batch": 2}
    config = Config(model=SMALL, data=data, optimizer={"schedule": "constant"}, training={**own, **training})
    ranks = ranks_from_environment()
    share = ranks.share(ROWS)

    def batch(step: int) -> np.ndarray:
        rows = rows_of(step, ROWS)
        if document_mask:
            documents = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32) // 5, (ROWS, 1, SEQ_LEN))
            rows = np.concatenate([rows, documents], axis=1)
        return rows[share.start : share.stop]

    backend = open_backend(config, VOCABULARY, ranks)
    plans = [plan_step(config, Position(step)) for step in range(STEPS)]
    backend.tune([(plans[0], batch(0))], {})
    return [backend.step(batch(step), ROWS * SEQ_LEN, plan).result().loss for step, plan in enumerate(plans)]


found = [losses(**settings) for settings in json.loads(sys.argv[1])]
if ranks_from_environment().first:
    print(json.dumps(found))
