"""What a backend may gather inside is called by every rank, in the same order and as often, and only the first rank writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GATHERING = ("tune", "score", "generate", "snapshot", "weights", "step")

PROGRAM = """
import json, sys
from pathlib import Path
from ingot.backends.torch.backend import TorchBackend
from tiny_runs import train_tiny

calls = []
for name in {names}:
    def watched(self, *given, name=name, method=getattr(TorchBackend, name)):
        calls.append(name)
        found = method(self, *given)
        if name in ("snapshot", "weights") and not self.ranks.first:
            assert not (found() if name == "snapshot" else found), "only the first rank holds what is written"
        return found
    setattr(TorchBackend, name, watched)
data, folder, out = map(Path, sys.argv[1:])
# 3 ranks share 5 rows a step and score 7 rows, 2 at a time: one rank has 3 of them and two batches, the others 2 and one.
train_tiny(data, folder, **{settings})
import os
(out / f"rank-{{os.environ['RANK']}}.json").write_text(json.dumps(calls))
"""
SETTINGS = {
    "training__max_steps": 6,
    "training__save_every": 2,
    "training__tokens_per_step": 5 * 16,
    "data__seq_len": 16,
    "evaluation__every": 3,
    "evaluation__rows": 7,
    "evaluation__micro_batch": 2,
    "evaluation__sample_tokens": 3,
    "training__priming_steps": 1,
}


def test_every_rank_makes_the_same_calls(data, tmp_path):
    count = 3
    out = tmp_path / "calls"
    out.mkdir()
    program = PROGRAM.format(names=GATHERING, settings=SETTINGS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--no-python"]
    command += [sys.executable, "-c", program, str(data), str(tmp_path / "run"), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    calls = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]
    assert all(one == calls[0] for one in calls)
    assert {"score", "generate", "snapshot", "weights"} <= set(calls[0])
