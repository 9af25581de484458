"""The most bytes that a real step on the CPU allocates at the same time; as a program, that of one of several ranks."""

import json
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ingot.backends.open import open_backend
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.train.step_plan import shapes


def allocated(config: Config, vocab_size: int, ranks: Ranks) -> int:
    """Return the peak of a step, without what is allocated before it: weights and optimizer state."""
    backend = open_backend(config, vocab_size, ranks)
    (plan,) = shapes(config)
    batch = backend.host_buffer((len(ranks.share(config.rows_per_step)), 2, config.data.seq_len))
    batch[:] = 1
    targets = config.rows_per_step * config.data.seq_len
    backend.tune([(plan, batch)], {})
    backend.step(batch, targets, plan).result()  # creates the optimizer state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backend.step(batch, targets, plan).result()
    backend.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    return max(accumulate(event["args"]["Bytes"] for event in events if event["name"] == "[memory]"))


if __name__ == "__main__":
    print(allocated(Config.model_validate_json(sys.argv[1]), int(sys.argv[2]), ranks_from_environment()))
