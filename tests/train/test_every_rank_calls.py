"""What a backend may gather inside is called by every rank, in the same order and as often, and only the first rank writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from forks import forks, rank_variables
from tiny_runs import records

import ingot
from ingot.trained.tasks import read_items, score_tasks, task_rows

GATHERING = ("tune", "score", "score_rows", "generate", "snapshot", "weights", "step")

PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
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
import ingot.trained.scoring
ingot.trained.scoring.BATCH_TOKENS = 25  # of the task's rows few are scored at once, and of the last batch not all ranks have any
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
    "evaluation__tasks": "blimp",
}
TASK = [{"sentence_good": "abcde" * (i % 2) or "a", "sentence_bad": f"edcb{'a' * i}"} for i in range(7)]


def test_every_rank_makes_the_same_calls(data, tmp_path):
    count = 3
    out = tmp_path / "calls"
    out.mkdir()
    (tmp_path / "blimp").mkdir()
    (tmp_path / "blimp" / "made-up.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    program = PROGRAM.format(
        folder=str(Path(__file__).parent), names=GATHERING, settings={**SETTINGS, "evaluation__task_data": str(tmp_path)}
    )
    words = ["-c", program, str(data), str(tmp_path / "run"), str(out)]
    streams = (os.devnull, tmp_path / "said", tmp_path / "said")
    python = forks(str(Path(ingot.__file__).parents[1]))
    ranks = [python.start(words, tmp_path, {**os.environ, **one}, streams) for one in rank_variables(count)]
    assert [rank.wait(120) for rank in ranks] == [0] * count, (tmp_path / "said").read_text()
    calls = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]
    assert all(one == calls[0] for one in calls)
    assert {"score", "score_rows", "generate", "snapshot", "weights"} <= set(calls[0])
    model = ingot.load(tmp_path / "run", device="cpu")
    alone = score_tasks(task_rows(read_items(["blimp"], tmp_path), model.tokenizer, model.context, None), model.backend)
    assert records(tmp_path / "run", "evaluation")[-1]["tasks"]["blimp"] == alone["blimp"].record()
