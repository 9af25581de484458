"""What a backend may gather inside is called by every rank, in the same order and as often, and only the first rank writes.

Where one rank ends, the others do.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forks import forks, rank_variables
from tiny_runs import records

import ingot
from ingot.inference.scoring import read_items, score_tasks, task_rows

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
import ingot.inference.scoring
ingot.inference.scoring.BATCH_TOKENS = 25  # few of the task's rows at once: not every rank has rows of the last batch
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


def codes_of(count: int, program: str, folder: Path, *words: object) -> list[int]:
    """The exit codes of so many ranks, of which nobody ends one when another fails."""
    streams = (os.devnull, folder / "said", folder / "said")
    python = forks(str(Path(ingot.__file__).parents[1]))
    given = ["-c", program, *map(str, words)]
    ranks = [python.start(given, folder, {**os.environ, **one}, streams) for one in rank_variables(count)]
    return [rank.wait(120) for rank in ranks]


def test_every_rank_makes_the_same_calls(data, tmp_path):
    count = 3
    out = tmp_path / "calls"
    out.mkdir()
    (tmp_path / "blimp").mkdir()
    (tmp_path / "blimp" / "made-up.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    program = PROGRAM.format(
        folder=str(Path(__file__).parent), names=GATHERING, settings={**SETTINGS, "evaluation__task_data": str(tmp_path)}
    )
    codes = codes_of(count, program, tmp_path, data, tmp_path / "run", out)
    assert codes == [0] * count, (tmp_path / "said").read_text()
    calls = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]
    assert all(one == calls[0] for one in calls)
    assert {"score", "score_rows", "generate", "snapshot", "weights"} <= set(calls[0])
    model = ingot.load(tmp_path / "run", device="cpu")
    alone = score_tasks(task_rows(read_items(["blimp"], tmp_path), model.tokenizer, model.context, None), model.backend)
    assert records(tmp_path / "run", "evaluation")[-1]["tasks"]["blimp"] == alone["blimp"].record()


# One of the ranks is killed when it is about to make a call for the third time.
LOSES_ONE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from ingot.backends.torch.backend import TorchBackend
from ingot.errors import IngotError
from tiny_runs import train_tiny

data, folder, name, gone = sys.argv[1:]
method, calls = getattr(TorchBackend, name), []

def watched(self, *given):
    calls.append(given)
    if len(calls) == 3 and os.environ["RANK"] == gone:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(self, *given)

setattr(TorchBackend, name, watched)
settings = {{"evaluation__every": 2, "evaluation__micro_batch": 2, "training__save_every": 1}}
try:
    train_tiny(Path(data), Path(folder), **settings, training__max_steps=6, training__resume="never")
except IngotError as error:
    print(type(error).__name__, error.exit_code)
"""


@pytest.mark.parametrize(("call", "gone"), [("step", 0), ("score", 1), ("snapshot", 0)])
def test_a_rank_that_is_killed_ends_the_others_whatever_they_are_doing(data, tmp_path, call, gone):
    program = LOSES_ONE.format(folder=str(Path(__file__).parent))
    codes = codes_of(2, program, tmp_path, data, tmp_path / "run", call, gone)
    assert codes[gone] == -signal.SIGKILL and codes[1 - gone] == 0
    assert "PeerLost 1\n" in (tmp_path / "said").read_text()


def test_what_only_the_first_rank_finds_wrong_ends_the_others_with_its_exit_code(data, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    program = LOSES_ONE.format(folder=str(Path(__file__).parent))
    assert codes_of(2, program, tmp_path, data, tmp_path / "run", "step", "none") == [0, 0]
    assert sorted((tmp_path / "said").read_text().splitlines()) == ["CheckpointError 4", "PeerLost 4"]
